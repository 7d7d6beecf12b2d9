"""Which calls share a binary, and which must not: NumPy arrays through the public checks, planned for a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash as cf
from cupyflash import _cpu
from cupyflash._cuda import source
from cupyflash._cuda.device import KNOWN
from cupyflash._cuda.plan import backward as plan_backward
from cupyflash._cuda.plan import forward as plan_forward
from cupyflash._spec import Call, Spec
from tests.binaries import cover

SLOPES = np.ones(4, np.float32)


def _binaries(
    options: dict[str, Any], arguments: dict[str, Any], lengths: tuple[int, int] = (70, 390), **shape: Any
) -> list[Any]:
    """The binaries of a forward and a backward that a GPU would run for these arrays."""
    dtype, dim, dim_v = shape.get("dtype", ml_dtypes.bfloat16), shape.get("dim", 64), shape.get("dim_v", 64)
    batch, heads = shape.get("batch", 2), shape.get("heads", (4, 2))
    q = np.zeros((batch, lengths[0], heads[0], dim), dtype)
    k = np.zeros((batch, lengths[1], heads[1], dim), dtype)
    v = np.zeros((batch, lengths[1], heads[1], dim_v), dtype)
    found: list[Any] = []

    def plan_for_a_gpu(spec: Spec, call: Call, *, backward: bool, override: object = None) -> None:
        spec = replace(spec, align=16)  # NumPy aligns as it likes
        plans = plan_backward(spec, KNOWN[90]) if backward else (plan_forward(spec, KNOWN[90]),)
        found.extend(plan.binary for plan in plans if plan is not None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cpu, "plan", plan_for_a_gpu)
        for backward in (False, True):
            cf.Attention(**options).plan(q, k, v, backward, **arguments)
    return found


SAME: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "another length": ({}, {}, {"lengths": (71, 533)}),
    "another batch": ({}, {}, {"batch": 7}),
    "other heads": ({}, {}, {"heads": (8, 1)}),
    "another scale": ({"scale": 0.3}, {}, {}),
    "scale zero": ({"scale": 0.0}, {}, {}),
    "a sink": ({}, {"sink": SLOPES}, {}),
    "live lengths": ({}, {"seqused_k": np.array([3, 4], np.int32)}, {}),
    "a head dim of the same tile": ({}, {}, {"dim": 40, "dim_v": 48}),
}
OTHER: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {}, {}),
    "softcap": ({"softcap": 3.0}, {}, {}),
    "alibi": ({}, {"alibi_slopes": SLOPES}, {}),
    "a negative scale": ({"scale": -0.3}, {}, {}),
    "another dtype": ({}, {}, {"dtype": np.float16}),
    "a head dim of another tile": ({}, {}, {"dim": 65}),
    "a value head dim of another tile": ({}, {}, {"dim_v": 65}),
}
MASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top-left": ({"causal": "top-left"}, {}),
    "window": ({"window": (3, 1)}, {}),
    "another window": ({"window": (None, 70)}, {}),
    "positions": ({"causal": True}, {"q_start": 9, "k_start": np.array([1, 2], np.int32)}),
}


@pytest.mark.parametrize("name", SAME)
def test_values_and_lengths_compile_nothing_new(name: str) -> None:
    options, arguments, shape = SAME[name]
    assert _binaries(options, arguments, **shape) == _binaries({}, {})


@pytest.mark.parametrize("lengths", [(1, 534), (1, 131_072), (8, 9000)])
def test_a_decode_loop_compiles_once(lengths: tuple[int, int]) -> None:
    assert _binaries({}, {}, lengths)[:1] == _binaries({}, {}, (1, 533))[:1] != _binaries({}, {}, (17, 533))[:1]


def test_few_keys_have_a_main_kernel_of_their_own_backward() -> None:
    few, many = _binaries({}, {}, (70, 256)), _binaries({}, {}, (70, 257))
    assert [mine != other for mine, other in zip(few, many, strict=True)] == [False, False, True, False]


@pytest.mark.parametrize("name", OTHER)
def test_what_changes_the_code_is_another_binary(name: str) -> None:
    options, arguments, shape = OTHER[name]
    plain, changed = _binaries({}, {}), _binaries(options, arguments, **shape)
    main = [binary for binary in changed if binary[0].endswith(("generic", "sm90"))]
    assert main and not set(main) & set(plain)


@pytest.mark.parametrize("name", MASKED)
def test_all_masks_share_one_binary(name: str) -> None:
    options, arguments = MASKED[name]
    assert _binaries(options, arguments) == _binaries({"causal": True}, {})


def test_different_binaries_have_different_texts() -> None:
    """CuPy's own cache is keyed on the text, so nothing that tells two binaries apart may be missing from it."""
    plans = cover(KNOWN[90])
    assert len({(plan.kernel, source.compose(plan.constants)) for plan in plans.values()}) == len(plans)
