"""Plans without a GPU: what is chosen, what is refused and in which words, and what a caller's own plan may change."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

import cupyflash as cf
from cupyflash._cuda import tiles
from cupyflash._cuda.constants import HEAD_DIMS
from cupyflash._cuda.device import KNOWN, Device
from cupyflash._cuda.plan import BackwardPlan, head_dim_tile, validate
from cupyflash._cuda.plan import backward as plan_backward
from cupyflash._cuda.plan import forward as plan_forward
from cupyflash._spec import Features, Mask
from tests.binaries import DTYPES, plans, spec

GPUS = list(KNOWN.values())


@pytest.mark.parametrize("device", GPUS, ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("dim", [1, 7, 32, 33, 40, 64, 72, 80, 96, 127, 128, 129, 192, 193, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_dim_has_a_plan_that_fits(device: Device, dim: int, dtype: str) -> None:
    for asked in (spec(dtype, dim), spec(dtype, dim, 256), spec(dtype, 256, dim)):
        for plan in plans(asked, device):
            assert plan.smem_bytes <= device.smem_bytes
            assert 32 <= plan.threads <= 1024
            assert plan.kernel in str(plan) and f"sm_{device.arch}" in str(plan) and plan.why in str(plan)


def test_a_head_dim_spends_the_next_tile() -> None:
    assert [head_dim_tile(dim) for dim in (1, 32, 33, 40, 72, 80, 97, 129, 256)] == [
        32,
        32,
        64,
        64,
        96,
        96,
        128,
        192,
        256,
    ]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["FWD_16BIT", "FWD_32BIT", "BWD_16BIT", "BWD_32BIT"])
def test_every_head_dim_tile_has_rows_in_order_of_memory(name: str, direction: str) -> None:
    """The first row that fits is taken, so a later row must need less, and the last must fit the smallest device."""
    table = getattr(tiles, name)
    assert tuple(table) == HEAD_DIMS
    if not name.startswith(direction[0].upper() + "W"):
        return
    smallest = min(GPUS, key=lambda device: device.smem_bytes)
    for dim, rows in table.items():
        asked = spec("bfloat16" if "16" in name else "float32", dim)
        choose = plan_forward if direction == "forward" else plan_backward
        needs = []
        for budget in (smallest, *GPUS):
            chosen = choose(asked, budget)
            main = chosen.main if isinstance(chosen, BackwardPlan) else chosen
            needs.append((budget.smem_bytes, main.smem_bytes))
        assert all(need <= budget for budget, need in needs), (dim, rows, needs)


REFUSED = {
    "float64": (spec("float64", out_dtype="float64"), "float64"),
    "bias": (spec(features=Features(bias=True)), "bias"),
    "dropout": (spec(features=Features(dropout=True)), "dropout_p"),
    "pages": (spec(paged=True), "block_table"),
    "splits": (spec(split=True), "num_splits"),
    "head dim": (spec(dim=257, dim_v=64), "257"),
    "value head dim": (spec(dim=64, dim_v=320), "320"),
    "float64 out": (spec(out_dtype="float64"), "float64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_serves_is_refused_with_what_can(name: str) -> None:
    asked, word = REFUSED[name]
    with pytest.raises(cf.UnsupportedError, match=word) as refused:
        plan_forward(asked, KNOWN[90])
    assert "NumPy" in str(refused.value) or "float32" in str(refused.value)


def test_deterministic_is_refused_for_a_backward_alone() -> None:
    asked = spec(deterministic=True)
    plan_forward(asked, KNOWN[90])
    with pytest.raises(cf.UnsupportedError, match="deterministic"):
        plan_backward(asked, KNOWN[90])


def test_gradients_are_stored_in_known_types() -> None:
    with pytest.raises(cf.UnsupportedError, match="float64"):
        plan_backward(spec(grad_dtype="float64"), KNOWN[90])


def test_a_caller_may_change_tiles_and_nothing_else() -> None:
    chosen = plan_forward(spec(), KNOWN[90])
    other = replace(chosen, constants=replace(chosen.constants, key_tile=64))
    assert validate(other, chosen) is other
    for wrong in (
        replace(chosen, constants=replace(chosen.constants, is_masked=True)),
        replace(chosen, constants=replace(chosen.constants, element="float16")),
        replace(chosen, arch=80),
    ):
        with pytest.raises(ValueError, match="plan"):
            validate(wrong, chosen)
    with pytest.raises(TypeError, match="BackwardPlan"):
        validate(plan_backward(spec(), KNOWN[90]), chosen)
    with pytest.raises(TypeError, match="str"):
        validate("fwd_generic", chosen)


def test_a_negative_scale_is_a_switch_only_where_scores_stay_raw() -> None:
    raw = plan_forward(spec(features=Features(negative_scale=True)), KNOWN[90])
    capped = plan_forward(spec(features=Features(negative_scale=True, softcap=True)), KNOWN[90])
    assert raw.constants.is_scale_negative and not capped.constants.is_scale_negative


@pytest.mark.parametrize(("align", "copies"), [(16, 16), (8, 4), (4, 4), (2, 2)])
def test_rows_are_copied_as_wide_as_they_are_aligned(align: int, copies: int) -> None:
    assert plan_forward(spec(align=align), KNOWN[90]).constants.copy_bytes == copies


def test_masks_are_one_kind() -> None:
    assert not plan_forward(spec(), KNOWN[90]).constants.is_masked
    assert plan_forward(spec(mask=Mask.BAND), KNOWN[90]).constants.is_masked


def test_plans_are_found_again() -> None:
    """Once a Spec and a device, not once a call."""
    assert plan_forward(spec(), KNOWN[90]) is plan_forward(spec(), KNOWN[90])


def test_plans_print_every_constant() -> None:
    for plan in plans(spec(mask=Mask.BAND), KNOWN[80]):
        for field in fields(plan.constants):
            assert f"{field.name}={getattr(plan.constants, field.name)}" in str(plan)
