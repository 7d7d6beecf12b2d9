"""Plans without a GPU: what is chosen, what is refused and in which words, and what a caller's own plan may change."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash._cuda import tiles
from cupyflash._cuda.constants import HEAD_DIMS, BwdGeneric, FwdGeneric, FwdSm90
from cupyflash._cuda.device import KNOWN, Device
from cupyflash._cuda.plan import backward as plan_backward
from cupyflash._cuda.plan import forward as plan_forward
from cupyflash._cuda.plan import head_dim_tile, named, validate
from cupyflash._cuda.tiles import Room
from cupyflash._spec import Features, Mask, Spec
from tests.binaries import DTYPES, is_held, plans, spec

GPUS = list(KNOWN.values())


@pytest.mark.parametrize("device", GPUS, ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("dim", [1, 7, 32, 33, 40, 64, 72, 80, 96, 127, 128, 129, 192, 193, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_dim_has_a_plan_that_fits(device: Device, dim: int, dtype: str) -> None:
    for asked in (spec(dtype, dim), spec(dtype, dim, 256), spec(dtype, 256, dim)):
        if not is_held(asked, device):
            continue
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


@pytest.mark.parametrize("name", ["FWD", "BWD", "DQ", "DBIAS"])
def test_every_head_dim_tile_has_rows(name: str) -> None:
    table = getattr(tiles, name)
    assert set(table) == {2, 4, 8}
    for rows in table.values():
        assert tuple(rows) == HEAD_DIMS
        assert all(rows.values())


REFUSED = {
    "head dim": (spec(dim=257, dim_v=64), "`q` has head_dim 257; 1 to 256 are accepted"),
    "value head dim": (spec(dim=64, dim_v=320), "`v` has head_dim 320; 1 to 256 are accepted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_serves_is_refused_with_what_can(name: str) -> None:
    asked, word = REFUSED[name]
    with pytest.raises(cf.UnsupportedError, match=word) as refused:
        plan_forward(asked, KNOWN[90])
    assert "NumPy" in str(refused.value)


def test_deterministic_gives_dq_its_own_kernel_and_no_sums() -> None:
    plain, ordered = (plan_backward(spec(deterministic=value), KNOWN[80]) for value in (False, True))
    assert isinstance(plain.main.constants, BwdGeneric) and isinstance(ordered.main.constants, BwdGeneric)
    assert plain.dq is None
    assert plain.main.constants.sums_dq
    assert ordered.dq is not None
    assert not ordered.main.constants.sums_dq


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size_class", ["short", "few keys", "normal"])
def test_hopper_sums_dq_in_order_if_asked_to_and_stores_it_where_keys_are_few(
    dim: int, deterministic: bool, size_class: str
) -> None:
    asked = spec(dim=dim, size_class=size_class, deterministic=deterministic)
    plan = plan_backward(asked, KNOWN[90])
    assert plan.dq is None and plan.sums_dq
    assert plan.has_sums == (size_class != "short")
    assert plan.takes_turns == (deterministic or size_class == "short")
    assert not plan_backward(asked, KNOWN[80]).takes_turns


@pytest.mark.parametrize("arch", sorted(KNOWN))
@pytest.mark.parametrize("size_class", tiles.FWD_FEW)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("paged", [False, True])
def test_few_queries_are_packed_by_heads_and_their_keys_split(
    arch: int, size_class: str, dtype: str, paged: bool
) -> None:
    for dim, features in ((128, Features(softcap=True)), (64, Features(alibi=True)), (64, Features(dropout=True))):
        plan = plan_forward(spec(dtype, dim, features=features, size_class=size_class, paged=paged), KNOWN[arch])
        c = plan.constants
        assert c.is_split
        if arch == 90 and size_class.startswith("few tiles") and dtype == "bfloat16" and not paged:
            assert isinstance(c, FwdSm90)
            assert c.packs_heads == (size_class == "few tiles, packed" and not features.differ_by_head)
        else:
            assert isinstance(c, FwdGeneric) and c.is_paged == paged
            assert c.packs_heads != features.differ_by_head
        assert plan.combine is not None and str(plan.combine) in str(plan)


@pytest.mark.parametrize(
    ("batch", "len_k", "group", "size_class"),
    [
        (1, 8192, 4, "16 rows, in groups"),
        (1, 8192, 32, "32 rows, in groups"),
        (16, 100, 4, "16 rows, in groups"),
        (17, 1024, 4, "16 rows"),
        (17, 1024, 32, "32 rows"),
        (32, 1024, 4, "16 rows, in groups"),
        (34, 8192, 4, "16 rows"),
        (64, 1024, 4, "16 rows"),
        (64, 8192, 4, "16 rows, in groups"),
        (64, 8192, 64, "64 rows"),
        (100, 1024, 4, "16 rows, many times"),
    ],
)
def test_few_queries_are_of_a_class_by_how_many_heads_and_keys_there_are(
    batch: int, len_k: int, group: int, size_class: str
) -> None:
    q, k = (np.empty((batch, rows, heads, 8), np.float16) for rows, heads in ((1, 8 * group), (len_k, 8)))

    def judged(**options: Any) -> Spec:
        return cf.Attention(**options).prepare(q, k, k).checked.judged.spec

    assert judged().size_class == size_class
    alone = judged(split_len=100).size_class  # so that a row's bits do not depend on others
    assert alone == {4: "16 rows", 32: "32 rows", 64: "64 rows"}[group]


def test_groups_of_warps_are_a_blocks_second_axis() -> None:
    asked = spec("bfloat16", 128, size_class="16 rows, in groups")
    plan = plan_forward(asked, KNOWN[90])
    one = replace(plan.constants, key_groups=1)
    assert plan.block == (32, 4) and plan.threads == 128 and plan.smem_bytes == 4 * one.smem_bytes
    small = plan_forward(asked, KNOWN[86])  # whose multiprocessors have no room for them
    assert small.block == (32, 1) and small.constants == replace(one, blocks_per_sm=6)
    for groups in (0, 33):
        with pytest.raises(ValueError, match="tiles that its warps cannot share"):
            validate(replace(plan, constants=replace(plan.constants, key_groups=groups)), plan, KNOWN[90])
    for dim, sizes in (
        (32, {"warps": 2, "key_groups": 16, "key_tile": 32}),  # barriers
        (128, {"warps": 2, "key_groups": 2, "key_tile": 16}),  # room for what a group has found
    ):
        crowded = plan_forward(spec("bfloat16", dim, size_class="32 rows, in groups"), KNOWN[90])
        with pytest.raises(ValueError, match="tiles that its warps cannot share"):
            validate(replace(crowded, constants=replace(crowded.constants, **sizes)), crowded, KNOWN[90])
    whole = plan_forward(spec("bfloat16", 128, has_boxes=False), KNOWN[90])
    with pytest.raises(ValueError, match="tiles that its warps cannot share"):
        validate(replace(whole, constants=replace(whole.constants, key_groups=2)), whole, KNOWN[90])


def test_hopper_takes_its_own_forward_unless_keys_are_split_or_in_pages() -> None:
    asked = spec("bfloat16", 128)
    plain, split, paged = (
        plan_forward(replace(asked, **change), KNOWN[90]) for change in ({}, {"split": True}, {"paged": True})
    )
    assert plain.kernel == "fwd_sm90" and plain.combine is None
    assert split.kernel == "fwd_generic" and split.combine is not None and "keys are split" in split.why
    assert paged.kernel == "fwd_generic" and paged.combine is None and "keys lie in pages" in paged.why


def test_only_a_bias_has_a_kernel_for_its_gradient() -> None:
    biased = spec(features=Features(bias=True), bias_dtype="float16", dbias_dtype="float32")
    plan = plan_backward(biased, KNOWN[90]).dbias
    assert plan is not None
    assert (plan.constants.bias_element, plan.constants.grad_element) == ("float16", "float32")
    assert plan_backward(spec(), KNOWN[90]).dbias is None
    unwanted = plan_backward(spec(features=Features(bias=True), bias_dtype="float16"), KNOWN[90])
    assert unwanted.dbias is None
    assert "dbias" not in unwanted.main.why


def test_a_device_too_small_is_named_with_what_it_has() -> None:
    wide = spec("float64", 256)
    plan_backward(wide, KNOWN[90])
    with pytest.raises(cf.UnsupportedError, match=r"`q` is float64.*256.*sm_86.*101376.*NumPy"):
        plan_backward(wide, KNOWN[86])


def test_a_caller_may_change_tiles_and_nothing_else() -> None:
    chosen = plan_forward(spec(), KNOWN[90])
    other = replace(chosen, constants=replace(chosen.constants, key_tile=64))
    assert validate(other, chosen, KNOWN[90]) is other
    for wrong in (
        replace(chosen, constants=replace(chosen.constants, is_masked=True)),
        replace(chosen, constants=replace(chosen.constants, element="float16")),
        replace(chosen, arch=80),
    ):
        with pytest.raises(ValueError, match="plan"):
            validate(wrong, chosen, KNOWN[90])
    with pytest.raises(TypeError, match="BackwardPlan"):
        validate(plan_backward(spec(), KNOWN[90]), chosen, KNOWN[90])
    with pytest.raises(TypeError, match="str"):
        validate("fwd_generic", chosen, KNOWN[90])


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hoppers_backward_needs_two_stages(dim: int) -> None:
    chosen = plan_backward(spec(dim=dim, deterministic=True), KNOWN[90])
    for which in ("main",) if chosen.dq is None else ("main", "dq"):
        plan = getattr(chosen, which)
        single = chosen._replace(**{which: replace(plan, constants=replace(plan.constants, stages=1))})
        with pytest.raises(ValueError, match="stages=1"):
            validate(single, chosen, KNOWN[90])


def test_a_negative_scale_is_a_switch_only_where_scores_stay_raw() -> None:
    raw = plan_forward(spec(features=Features(negative_scale=True)), KNOWN[90])
    capped = plan_forward(spec(features=Features(negative_scale=True, softcap=True)), KNOWN[90])
    assert raw.constants.is_scale_negative and not capped.constants.is_scale_negative


@pytest.mark.parametrize(("align", "copies"), [(16, 16), (8, 4), (4, 4), (2, 2)])
def test_rows_are_copied_as_wide_as_they_are_aligned(align: int, copies: int) -> None:
    assert plan_forward(spec(align=align), KNOWN[90]).constants.copy_bytes == copies


SM90_SHAPES = ((40, 40), (64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
SM90_REQUESTS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal, top-left or not, and windows": {"mask": Mask.BAND},
    "softcap": {"features": Features(softcap=True)},
    "ALiBi": {"features": Features(alibi=True)},
    "bias": {"features": Features(bias=True), "bias_dtype": "bfloat16"},
    "everything but dropout": {
        "features": Features(softcap=True, alibi=True, bias=True, negative_scale=True),
        "bias_dtype": "float32",
        "mask": Mask.BAND,
    },
    "packed sequences": {"packed": True},
    "8 query heads a KV head": {"heads_q": 16, "heads_kv": 2},
    "float32 out": {"out_dtype": "float32"},
    "dropout": {"features": Features(dropout=True)},
}


@pytest.mark.parametrize("dims", SM90_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("request_name", SM90_REQUESTS)
def test_hopper_has_its_own_forward(request_name: str, dtype: str, dims: tuple[int, int]) -> None:
    """A sink, live lengths and positions are no part of a Spec: they change no binary."""
    asked = spec(dtype, *dims, **SM90_REQUESTS[request_name])
    plan = plan_forward(asked, KNOWN[90])
    assert plan.kernel == "fwd_sm90" and plan.target == "sm_90a"
    assert plan.constants.head_dim >= dims[0] and plan.constants.head_dim_v >= dims[1]
    for device in GPUS:
        if device.arch != 90:
            other = plan_forward(asked, device)
            assert other.kernel == "fwd_generic" and "sm90" not in other.why


CROWDED = Features(softcap=True, bias=True, dropout=True)


def test_a_bias_of_hoppers_backward_has_its_gradient_from_another_kernel() -> None:
    """Which the plan says; and at D 128 everything goes together."""
    for features in (Features(bias=True), CROWDED):
        asked = spec(dim=128, features=features, bias_dtype="float32", dbias_dtype="float32")
        plan = plan_backward(asked, KNOWN[90])
        assert plan.main.kernel == "bwd_sm90" and "dbias is bwd_dbias_generic's" in plan.main.why
        assert plan.dbias is not None and plan.dbias.kernel == "bwd_dbias_generic"


@pytest.mark.parametrize(
    "dims",
    [(8, 8), (40, 40), (64, 64), (96, 96), (128, 128), (128, 64), (192, 128), (192, 192), (64, 256), (256, 256)],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": Mask.BAND},
        {"features": Features(negative_scale=True)},
        {"packed": True},
        {"heads_q": 16, "heads_kv": 2},
        {"grad_dtype": "float32", "accumulate": True},
        {"out_dtype": "float32", "dout_dtype": "float32"},
        {"deterministic": True},
        {"deterministic": True, "mask": Mask.BAND, "features": Features(negative_scale=True)},
    ],
    ids=str,
)
def test_hopper_has_its_own_backward(changes: dict[str, Any], dtype: str, dims: tuple[int, int]) -> None:
    asked = spec(dtype, *dims, **changes)
    plan = plan_backward(asked, KNOWN[90])
    main, dq = plan.main, plan.dq
    assert main.kernel == ("bwd_sm90" if max(dims) <= 128 else "bwd_dkv_sm90") and main.target == "sm_90a"
    if max(dims) <= 128:
        assert main.constants.head_dim == main.constants.head_dim_v == (64 if max(dims) <= 64 else 128)
    if max(dims) > 128:
        assert dq is not None and dq.kernel == "bwd_dq_sm90" and dq.target == "sm_90a"
        assert dims[0] <= dq.constants.head_dim < dims[0] + 64 and dims[1] <= dq.constants.head_dim_v < dims[1] + 64
    else:
        assert dq is None and plan.takes_turns == asked.deterministic
    for device in GPUS:
        if device.arch != 90:
            assert plan_backward(asked, device).main.kernel == "bwd_generic"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(40, 40), (64, 64), (96, 96), (128, 128), (64, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "features",
    [
        Features(softcap=True),
        Features(alibi=True),
        Features(dropout=True),
        Features(bias=True),
        Features(softcap=True, alibi=True, dropout=True),
        Features(alibi=True, bias=True, dropout=True),
        Features(softcap=True, bias=True, dropout=True),
    ],
    ids=str,
)
def test_hopper_changes_scores_in_its_own_backward(
    features: Features, dims: tuple[int, int], deterministic: bool
) -> None:
    bias = "bfloat16" if features.bias else None
    asked = spec("bfloat16", *dims, features=features, bias_dtype=bias, dbias_dtype=bias, deterministic=deterministic)
    plan = plan_backward(asked, KNOWN[90])
    assert plan.main.constants.has_dropout == features.dropout
    if max(dims) <= 128:
        assert plan.main.kernel == "bwd_sm90" and plan.dq is None and plan.takes_turns == deterministic
    else:
        assert plan.main.kernel == "bwd_dkv_sm90" and plan.dq is not None and plan.dq.kernel == "bwd_dq_sm90"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (spec("float32"), "not float32"),
        (spec(align=8), "aligned to 8 bytes"),
        (spec(has_boxes=False), "negative stride"),
    ],
)
def test_the_generic_backward_says_why_it_is_not_hoppers(asked: Spec, reason: str) -> None:
    plan = plan_backward(asked, KNOWN[90]).main
    assert plan.kernel == "bwd_generic" and "not bwd_sm90" in plan.why and reason in plan.why


@pytest.mark.parametrize(
    ("size_class", "mask", "dim", "rows"),
    [
        ("normal", Mask.BAND, 64, 192),
        ("few keys", Mask.BAND, 64, 128),
        ("few keys", Mask.NONE, 64, 128),
        ("normal", Mask.NONE, 64, 192),
        ("few keys", Mask.BAND, 128, 128),
    ],
)
def test_few_keys_have_a_tile_of_two_consumers(size_class: str, mask: Mask, dim: int, rows: int) -> None:
    plan = plan_forward(spec(dim=dim, mask=mask, size_class=size_class), KNOWN[90])
    assert plan.constants.query_tile == rows
    assert ("of few keys" in plan.why) == (dim <= 64 and rows == 128)
    assert "row 0 of the tile table" in plan.why


@pytest.mark.parametrize(
    ("changes", "dtype", "is_bounded"),
    [
        ({"small_softcap": True}, "bfloat16", True),
        ({"small_softcap": True, "dropout": True}, "bfloat16", True),
        ({"small_softcap": False}, "bfloat16", False),
        ({"small_softcap": True}, "float16", False),  # whose exponents do not reach as far
        ({"small_softcap": True, "alibi": True}, "bfloat16", False),
        ({"small_softcap": True, "bias": True}, "bfloat16", False),
    ],
)
def test_only_a_small_softcap_bounds_scores(changes: dict[str, bool], dtype: str, is_bounded: bool) -> None:
    asked = spec(dtype, features=Features(softcap=True, **changes), bias_dtype="float32" if "bias" in changes else None)
    plan: Any = plan_forward(asked, KNOWN[90])
    assert plan.constants.is_bounded == is_bounded


@pytest.mark.parametrize(
    ("features", "room"),
    [
        (Features(), Room.RAW),
        (Features(negative_scale=True), Room.ONE),
        (Features(softcap=True), Room.ONE),
        (Features(softcap=True, alibi=True), Room.ALIBI),
        (Features(bias=True), Room.MORE),
        (Features(dropout=True), Room.MORE),
        (Features(dropout=True, negative_scale=True), Room.ANY),
        (Features(bias=True, alibi=True), Room.ANY),
        (Features(bias=True, dropout=True), Room.ANY),
    ],
)
def test_a_tile_has_room_for_what_is_asked(features: Features, room: Room) -> None:
    """The first row of the table that has it."""
    asked = spec(dim=128, features=features, bias_dtype="bfloat16" if features.bias else None)
    first = next(tile for tile in tiles.FWD_SM90[128] if tile.room >= room)
    assert plan_forward(asked, KNOWN[90]).constants.key_tile == first.key_tile


def test_a_kernel_may_be_named() -> None:
    hopper = plan_forward(spec(), KNOWN[90])
    assert named("fwd_sm90", spec(), KNOWN[90], is_backward=False) == hopper
    generic: Any = named("fwd_generic", spec(), KNOWN[90], is_backward=False)
    assert generic.kernel == "fwd_generic"
    best: Any = named("bwd_sm90", spec(), KNOWN[90], is_backward=True)
    assert best == plan_backward(spec(), KNOWN[90])
    other: Any = named("bwd_generic", spec(), KNOWN[90], is_backward=True)
    assert other.main.kernel == "bwd_generic" and other == best._replace(main=other.main)
    for asked in (
        spec(dim=256),
        spec(deterministic=True),
    ):  # with a kernel for dq, whose own kind goes with the main one
        wide: Any = named("bwd_generic", asked, KNOWN[90], is_backward=True)
        assert wide.main.kernel == "bwd_generic"
        assert wide.dq.kernel == "bwd_dq_generic" if asked.deterministic else wide.dq is None
    for name, device, backward, accepted in (
        ("fwd_sm90", KNOWN[80], False, "'fwd_generic' is"),
        ("bwd_generic", KNOWN[90], False, "'fwd_generic' or 'fwd_sm90' is"),
        ("fastest", KNOWN[90], True, "'bwd_generic' or 'bwd_sm90' is"),
        ("bwd_sm90", KNOWN[80], True, "'bwd_generic' is"),
    ):
        with pytest.raises(ValueError, match=f"`plan` is '{name}'; {accepted} accepted"):
            named(name, spec(), device, is_backward=backward)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (spec("float32"), "wgmma multiplies 16-bit types, not float32"),
        (spec(align=8), "aligned to 8 bytes"),
        (spec(has_boxes=False), "negative stride"),
    ],
)
def test_the_generic_forward_says_why_it_is_not_hoppers(asked: Spec, reason: str) -> None:
    plan = plan_forward(asked, KNOWN[90])
    assert plan.kernel == "fwd_generic" and "not fwd_sm90" in plan.why and reason in str(plan)


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


def test_the_documents_show_a_plan_as_it_is() -> None:
    """The constants of docs/architecture.md, whose lines are broken there, and what it says of shared memory."""
    text = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text("utf-8")
    shown = text.split("```text\n")[1].split("```")[0]
    plan = plan_backward(spec("bfloat16", 128, mask=Mask.BAND), KNOWN[90]).main
    assert shown.split() == str(plan).split()
