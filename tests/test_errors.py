"""Every argument that can be wrong, wrong in every way, is refused before anything is written, by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash as cf
from cupyflash._overlap import are_apart, is_injective
from cupyflash._spec import View

POISON = -77.0
OUTPUTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink", "k_pages", "v_pages")
B, NQ, NK, HQ, HKV, D, DV = 2, 5, 7, 4, 2, 8, 6
PAGES, PAGE_SIZE, MAX_PAGES = 6, 4, 2


# Calls that are right.


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng().standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def poisoned(*shape: int) -> np.ndarray:
    return np.full(shape, POISON, np.float32)


def dense_forward() -> dict[str, Any]:
    return {
        "q": floats(B, NQ, HQ, D),
        "k": floats(B, NK, HKV, D),
        "v": floats(B, NK, HKV, DV),
        "bias": floats(B, HQ, NQ, NK),
        "alibi_slopes": floats(B, HQ),
        "sink": floats(HQ),
        "seqused_k": ints(3, 7),
        "q_start": ints(0, 1),
        "k_start": ints(1, 0),
        "seed": np.array([3]),
        "offset": np.array([1]),
        "out": poisoned(B, NQ, HQ, DV),
        "lse": poisoned(B, HQ, NQ),
        "workspace": np.zeros(64, np.uint8),
    }


def packed_forward() -> dict[str, Any]:
    return {
        "q": floats(NQ, HQ, D),
        "k": floats(NK, HKV, D),
        "v": floats(NK, HKV, DV),
        "layout": "thd",
        "cu_seqlens_q": ints(0, 2, 5),
        "cu_seqlens_k": ints(0, 4, 7),
        "seqused_k": ints(3, 3),
        "out": poisoned(NQ, HQ, DV),
        "lse": poisoned(HQ, NQ),
    }


def paged_forward() -> dict[str, Any]:
    return {
        "q": floats(B, NQ, HQ, D),
        "k": floats(PAGES, PAGE_SIZE, HKV, D),
        "v": floats(PAGES, PAGE_SIZE, HKV, DV),
        "seqused_k": ints(3, 7),
        "block_table": np.array([[4, 99], [0, 5]], np.int32),  # row 0 lives in one page; its second entry is dead
        "out": poisoned(B, NQ, HQ, DV),
        "lse": poisoned(B, HQ, NQ),
    }


def dense_backward() -> dict[str, Any]:
    call = dense_forward()
    call["out"], call["lse"] = floats(B, NQ, HQ, DV), floats(B, HQ, NQ) + 9
    call |= {"dout": floats(B, NQ, HQ, DV), "dlse": floats(B, HQ, NQ)}
    gradients = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsink": "sink"}
    return call | {name: poisoned(*call[source].shape) for name, source in gradients.items()}


def packed_backward() -> dict[str, Any]:
    call = packed_forward()
    call["out"], call["lse"] = floats(NQ, HQ, DV), floats(HQ, NQ) + 9
    call |= {"dout": floats(NQ, HQ, DV), "delta": floats(HQ, NQ)}
    return call | {name: poisoned(*call[source].shape) for name, source in {"dq": "q", "dk": "k", "dv": "v"}.items()}


def preprocess() -> dict[str, Any]:
    return {"out": floats(B, NQ, HQ, DV), "dout": floats(B, NQ, HQ, DV), "dlse": floats(B, HQ, NQ)}


def merge() -> dict[str, Any]:
    return {
        "outs": floats(3, B, NQ, HQ, DV),
        "lses": floats(3, B, HQ, NQ),
        "out": poisoned(B, NQ, HQ, DV),
        "lse": poisoned(B, HQ, NQ),
    }


def merge_backward() -> dict[str, Any]:
    call = {name: floats(*array.shape) for name, array in merge().items()}
    return call | {"dout": floats(B, NQ, HQ, DV), "dlse": floats(B, HQ, NQ)}


def append() -> dict[str, Any]:
    return {
        "k_pages": poisoned(PAGES, PAGE_SIZE, HKV, D),
        "v_pages": poisoned(PAGES, PAGE_SIZE, HKV, DV),
        "k": floats(B, 3, HKV, D),
        "v": floats(B, 3, HKV, DV),
        "block_table": np.array([[4, 99], [0, 5]], np.int32),
        "seqused_k": ints(3, 7),
    }


def packed_append() -> dict[str, Any]:
    new = {"k": floats(5, HKV, D), "v": floats(5, HKV, DV), "cu_seqlens_k": ints(0, 1, 5)}
    return append() | new | {"layout": "thd"}


FUNCTIONS: dict[Callable[[], dict[str, Any]], Callable[..., Any]] = {
    dense_forward: cf.attn_fwd,
    packed_forward: cf.attn_fwd,
    paged_forward: cf.attn_fwd,
    dense_backward: cf.attn_bwd,
    packed_backward: cf.attn_bwd,
    preprocess: cf.attn_bwd_preprocess,
    merge: cf.merge_states,
    merge_backward: cf.merge_states_bwd,
    append: cf.kv_append,
    packed_append: cf.kv_append,
}
by_call = pytest.mark.parametrize("base", FUNCTIONS, ids=lambda base: base.__name__)


def refused(base: Callable[[], dict[str, Any]], changes: dict[str, Any], error: type[Exception]) -> str:
    """The message; nothing that the caller passed has changed by then."""
    call = base() | changes
    before = {name: value.tobytes() for name, value in call.items() if isinstance(value, np.ndarray)}
    with pytest.raises(error) as caught:
        FUNCTIONS[base](**call)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {caught.value}"
    for name, content in before.items():
        assert call[name].tobytes() == content, f"{name} was written"
    message = str(caught.value)
    assert re.match(r"(\w+)(\.\w+)?: ", message), message
    assert re.search("accept|must|need|here it is", message), f"does not say what is accepted: {message}"
    return message


@by_call
def test_the_calls_below_are_right_until_they_are_changed(base: Callable[[], dict[str, Any]]) -> None:
    FUNCTIONS[base](**base())


# Every array, wrong in every general way.


def arrays_of(base: Callable[[], dict[str, Any]]) -> list[str]:
    return [name for name, value in base().items() if isinstance(value, np.ndarray)]


ARRAYS = [(base, name) for base in FUNCTIONS for name in arrays_of(base)]
WRITTEN = [(base, name) for base, name in ARRAYS if name in OUTPUTS and np.all(base()[name] == POISON)]


def arrays(cases: list[tuple[Callable[[], dict[str, Any]], str]], *, but: tuple[str, ...] = ()) -> Any:
    chosen = [(base, name) for base, name in cases if name not in but]
    ids = [f"{base.__name__}-{name}" for base, name in chosen]
    return pytest.mark.parametrize(("base", "name"), chosen, ids=ids)


by_array = arrays(ARRAYS)


class Elsewhere:
    """An array whose library says that it lives on GPU 3."""

    def __init__(self, array: np.ndarray) -> None:
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("read before its device was looked at")


@by_array
@pytest.mark.parametrize("value", ["text", 1.5, True, {"a": 1}, np.float32(2)], ids=repr)
def test_what_is_no_array_is_refused(base: Callable[[], dict[str, Any]], name: str, value: Any) -> None:
    assert f"`{name}" in refused(base, {name: value}, TypeError)


@by_array
def test_a_masked_array_is_refused(base: Callable[[], dict[str, Any]], name: str) -> None:
    message = refused(base, {name: np.ma.masked_array(base()[name])}, TypeError)
    assert f"`{name}" in message
    assert "mask" in message


@by_array
@pytest.mark.parametrize("dtype", ["int16", "bool", "complex64", "object", ">f4", ">i8"])
def test_foreign_dtypes_are_refused(base: Callable[[], dict[str, Any]], name: str, dtype: str) -> None:
    message = refused(base, {name: base()[name].astype(dtype)}, TypeError)
    assert f"`{name}" in message
    assert (dtype if dtype[0] == ">" else np.dtype(dtype).name) in message


@arrays(ARRAYS, but=("seed", "offset"))
def test_one_axis_more_is_refused(base: Callable[[], dict[str, Any]], name: str) -> None:
    assert f"`{name}" in refused(base, {name: np.stack([base()[name]] * 2)}, ValueError)


@arrays(ARRAYS, but=("seed", "offset", "bias", "alibi_slopes", "outs", "lses"))
def test_one_axis_less_is_refused(base: Callable[[], dict[str, Any]], name: str) -> None:
    assert f"`{name}`" in refused(base, {name: np.asarray(base()[name][0])}, ValueError)


EXTENTS = [
    (base, name, axis)
    for base, name in ARRAYS
    for axis in range(base()[name].ndim)
    if name != "workspace" and (name, axis) not in {("block_table", 1), ("outs", 0), ("lses", 0)}
]


@pytest.mark.parametrize(
    ("base", "name", "axis"), EXTENTS, ids=[f"{base.__name__}-{name}-{axis}" for base, name, axis in EXTENTS]
)
def test_an_extent_that_fits_no_other_array_is_refused(
    base: Callable[[], dict[str, Any]], name: str, axis: int
) -> None:
    array = base()[name]
    longer = np.concatenate([array, array.take([-1], axis)], axis)
    message = refused(base, {name: longer}, ValueError)
    assert f"`{name}" in message or re.search(rf"\b{name} \[", message), message
    assert str(longer.shape[axis]) in message


@by_array
def test_another_library_or_device_is_refused_and_both_are_named(base: Callable[[], dict[str, Any]], name: str) -> None:
    message = refused(base, {name: Elsewhere(base()[name])}, TypeError)
    assert f"`{name}" in message
    assert "cuda:3" in message
    assert "numpy" in message


@by_array
def test_another_device_of_the_same_library_is_refused(base: Callable[[], dict[str, Any]], name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: no second device without it")
    call = {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in base().items()}
    call[name] = call[name].to("meta")
    with pytest.raises(TypeError, match=f"`{name}") as caught:
        FUNCTIONS[base](**call)
    assert "meta" in str(caught.value)
    assert "cpu" in str(caught.value)


@by_array
def test_only_outputs_must_be_writable(base: Callable[[], dict[str, Any]], name: str) -> None:
    array = base()[name]
    array.flags.writeable = False
    if (base, name) in WRITTEN or name == "workspace":
        assert "read-only" in refused(base, {name: array}, ValueError)
    else:
        FUNCTIONS[base](**(base() | {name: array}))


@arrays(WRITTEN)
def test_outputs_need_a_unit_last_stride_and_elements_apart(base: Callable[[], dict[str, Any]], name: str) -> None:
    array = base()[name]
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), POISON, np.float32)
    assert f"`{name}` has stride 2" in refused(base, {name: wide[..., ::2]}, ValueError)
    if array.ndim > 1:
        shared = np.lib.stride_tricks.as_strided(array, array.shape, (0, *array.strides[1:]))
        assert f"`{name}`" in refused(base, {name: shared}, ValueError)


# Plain arguments.

Row = tuple[Callable[[], dict[str, Any]], str, Any, type[Exception], tuple[str, ...]]

BOTH_DIRECTIONS: list[Row] = [
    (base, name, value, error, needles)
    for base in (dense_forward, dense_backward)
    for name, value, error, needles in [
        ("layout", "sbhd", ValueError, ("'sbhd'", "'bshd'", "'thd'")),
        ("layout", None, ValueError, ("None",)),
        ("scale", math.nan, ValueError, ("nan", "finite")),
        ("scale", math.inf, ValueError, ("inf", "finite")),
        ("scale", 10**400, ValueError, ("finite",)),
        ("scale", "1", TypeError, ("'1'",)),
        ("scale", True, TypeError, ("True",)),
        ("scale", np.ones(1), TypeError, ("finite number",)),
        ("causal", "diagonal", ValueError, ("'diagonal'", "'bottom-right'", "'top-left'")),
        ("causal", 1, ValueError, ("1", "True")),
        ("causal", None, ValueError, ("None",)),
        ("window", 3, ValueError, ("3", "pair")),
        ("window", (1,), ValueError, ("(1,)", "pair")),
        ("window", (1, 2, 3), ValueError, ("pair",)),
        ("window", (-2, 0), ValueError, ("-2", "-1")),
        ("window", (0, -7), ValueError, ("-7", "-1")),
        ("window", (1.0, 0), TypeError, ("1.0",)),
        ("window", (True, 0), TypeError, ("True",)),
        ("window", "ab", ValueError, ("'ab'",)),
        ("softcap", -1.0, ValueError, ("-1.0", "positive")),
        ("softcap", math.nan, ValueError, ("nan",)),
        ("softcap", math.inf, ValueError, ("inf",)),
        ("softcap", "x", TypeError, ("'x'",)),
        ("softcap", False, TypeError, ("False",)),
        ("dropout_p", -0.1, ValueError, ("-0.1", "[0, 1)")),
        ("dropout_p", 1.0, ValueError, ("1.0", "[0, 1)")),
        ("dropout_p", math.nan, ValueError, ("nan",)),
        ("dropout_p", None, TypeError, ("None",)),
        ("dropout_p", True, TypeError, ("True",)),
        ("deterministic", 1, TypeError, ("1",)),
        ("deterministic", None, TypeError, ("None",)),
        ("allow_tf32", "no", TypeError, ("'no'",)),
        ("out_dtype", "int8", TypeError, ("'int8'", "bfloat16")),
        ("out_dtype", "half", TypeError, ("'half'",)),
        ("out_dtype", np.dtype(">f4"), TypeError, (">f4",)),
        ("out_dtype", np.int32, TypeError, ("int32",)),
        ("out_dtype", 4, TypeError, ("4",)),
        ("grad_dtype", "complex64", TypeError, ("'complex64'", "float32")),
        ("grad_dtype", float, TypeError, ("float",)),
        ("num_splits", -1, ValueError, ("-1", "at least 0")),
        ("num_splits", 2.0, TypeError, ("2.0",)),
        ("num_splits", True, TypeError, ("True",)),
        ("split_len", 0, ValueError, ("0", "at least 1")),
        ("split_len", 1.5, TypeError, ("1.5",)),
        ("max_seqlen_q", -1, ValueError, ("-1", "at least 0")),
        ("max_seqlen_k", 3.0, TypeError, ("3.0",)),
        ("max_seqlen_k", True, TypeError, ("True",)),
        ("q_start", 0.5, TypeError, ("0.5", "int32 array")),
        ("q_start", True, TypeError, ("True",)),
        ("q_start", [0, 1], TypeError, ("[0, 1]", "int32 array")),
        ("q_start", 2**63, ValueError, (str(2**63),)),
        ("k_start", None, TypeError, ("None", "int32 array")),
        ("k_start", -(2**63), ValueError, (str(2**63),)),
        ("seed", -1, ValueError, ("-1", "2**64")),
        ("seed", 2**64, ValueError, (str(2**64), "2**64")),
        ("seed", 1.0, TypeError, ("1.0",)),
        ("seed", np.array([-1]), ValueError, ("-1", "2**64")),
        ("offset", -1, ValueError, ("-1", "2**32")),
        ("offset", 2**32, ValueError, (str(2**32), "2**32")),
        ("offset", None, TypeError, ("None",)),
        ("offset", np.array([2**32]), ValueError, (str(2**32), "2**32")),
        ("seqused_k", ints(3, 8), ValueError, ("8", "index 1", "7")),
        ("seqused_k", ints(-1, 7), ValueError, ("-1", "index 0")),
        ("bias", floats(3, 1), ValueError, ("[3, 1]", "[2, 4, 5, 7]")),
        ("bias", floats(1, 1, 1, 1, 1), ValueError, ("[1, 1, 1, 1, 1]",)),
        ("alibi_slopes", floats(3), ValueError, ("3", "4")),
        ("sink", floats(2), ValueError, ("2", "4")),
        ("sink", np.zeros(HQ), TypeError, ("float64", "float32")),
        ("alibi_slopes", np.zeros(HQ, ml_dtypes.bfloat16), TypeError, ("bfloat16", "float32")),
        ("check", 1, TypeError, ("1",)),
        ("plan", "fast", TypeError, ("plan",)),
        ("cu_seqlens_q", ints(0, 5, 10), ValueError, ("'thd'", "'bshd'")),
        ("cu_seqlens_k", ints(0, 7, 14), ValueError, ("'thd'", "'bshd'")),
        ("q", None, TypeError, ("None",)),
        ("k", None, TypeError, ("None",)),
        ("v", None, TypeError, ("None",)),
        ("k", [[1.0]], TypeError, ("list",)),
    ]
]
ONE_DIRECTION: list[Row] = [
    (dense_backward, "out", None, TypeError, ("None", "`delta`")),
    (dense_backward, "lse", None, TypeError, ("None",)),
    (dense_backward, "dout", None, TypeError, ("None",)),
    (dense_backward, "accumulate", 1, TypeError, ("1",)),
    (dense_backward, "lse", np.zeros((B, HQ, NQ), np.float16), TypeError, ("float16", "float32")),
    (dense_backward, "dlse", np.zeros((B, HQ, NQ)), TypeError, ("float64", "float32")),
    (dense_backward, "dout", np.zeros((B, NQ, HQ, DV), np.float16), TypeError, ("float16", "float32")),
    (dense_backward, "dq", np.zeros((B, NQ, HQ, D), np.float16), TypeError, ("float16", "float32")),
    (dense_backward, "dsink", np.zeros(HQ), TypeError, ("float64", "float32")),
    (packed_forward, "bias", floats(1, 1), ValueError, ("'thd'",)),
    (packed_forward, "cu_seqlens_q", None, ValueError, ("None", "'thd'")),
    (packed_forward, "cu_seqlens_k", None, ValueError, ("None", "'thd'")),
    (packed_forward, "cu_seqlens_q", ints(1, 2, 5), ValueError, ("starts at 1",)),
    (packed_forward, "cu_seqlens_q", ints(0, 3, 2), ValueError, ("3", "2", "index 2")),
    (packed_forward, "cu_seqlens_k", ints(0, 4, 8), ValueError, ("8", "7")),
    (packed_forward, "cu_seqlens_k", ints(0, -1, 7), ValueError, ("-1", "index 1")),
    (packed_forward, "cu_seqlens_q", ints(), ValueError, ("B+1",)),
    (packed_forward, "seqused_k", ints(4, 4), ValueError, ("4", "index 1", "3")),
    (packed_forward, "q_start", ints(0, 0, 0), ValueError, ("3", "2")),
    (packed_backward, "cu_seqlens_k", ints(0, 5, 4), ValueError, ("5", "4", "index 2")),
    (packed_backward, "dlse", floats(HQ, NQ), ValueError, ("`delta`",)),
    (paged_forward, "seqused_k", None, ValueError, ("None", "`block_table`")),
    (paged_forward, "seqused_k", ints(3, 9), ValueError, ("9", "8", "index 1")),
    (paged_forward, "block_table", np.array([[4, 0], [0, 6]], np.int32), ValueError, ("6", "[1, 1]", "5")),
    (paged_forward, "block_table", np.array([[-1, 0], [0, 5]], np.int32), ValueError, ("-1", "[0, 0]")),
    (paged_forward, "cu_seqlens_k", ints(0, 7, 14), ValueError, ("'thd'",)),
    (preprocess, "layout", "hsd", ValueError, ("'hsd'",)),
    (preprocess, "out", None, TypeError, ("None",)),
    (preprocess, "dout", None, TypeError, ("None",)),
    (preprocess, "dlse", np.zeros((B, HQ, NQ)), TypeError, ("float64", "float32")),
    (merge, "layout", "hsd", ValueError, ("'hsd'",)),
    (merge, "outs", None, TypeError, ("None",)),
    (merge, "lses", None, TypeError, ("None",)),
    (merge, "outs", [], ValueError, ("at least one",)),
    (merge, "out_dtype", "int8", TypeError, ("'int8'",)),
    (merge, "outs", floats(2, B, NQ, HQ, DV), ValueError, ("2", "3")),
    (merge, "lses", np.zeros((3, B, HQ, NQ), ml_dtypes.bfloat16), TypeError, ("bfloat16", "float32")),
    (merge_backward, "out", None, TypeError, ("None",)),
    (merge_backward, "lse", None, TypeError, ("None",)),
    (merge_backward, "dout", None, TypeError, ("None",)),
    *((append, name, None, TypeError, ("None",)) for name in append()),
    (append, "layout", "hsd", ValueError, ("'hsd'",)),
    (append, "check", 1, TypeError, ("1", "True")),
    (append, "cu_seqlens_k", ints(0, 3, 6), ValueError, ("'thd'", "'bshd'")),
    (append, "k", np.zeros((B, 3, HKV, D), np.float16), TypeError, ("float16", "float32", "`k_pages`")),
    (append, "seqused_k", ints(2, 7), ValueError, ("2", "index 0", "at least 3")),
    (append, "seqused_k", ints(3, 9), ValueError, ("9", "index 1", "0 to 8")),
    (append, "block_table", np.array([[4, 0], [0, 6]], np.int32), ValueError, ("6", "[1, 1]", "0 to 5")),
    (append, "block_table", np.array([[-1, 0], [0, 5]], np.int32), ValueError, ("-1", "[0, 0]")),
    (packed_append, "cu_seqlens_k", None, ValueError, ("None", "'thd'")),
    (packed_append, "cu_seqlens_k", ints(1, 1, 5), ValueError, ("starts at 1",)),
    (packed_append, "cu_seqlens_k", ints(0, 6, 5), ValueError, ("6", "5", "index 2")),
    (packed_append, "cu_seqlens_k", ints(0, 1, 6), ValueError, ("ends at 6", "5")),
]


BAD_VALUES = BOTH_DIRECTIONS + ONE_DIRECTION


@pytest.mark.parametrize(
    ("base", "name", "value", "error", "needles"),
    BAD_VALUES,
    ids=[f"{base.__name__}-{name}-{index}" for index, (base, name, *_) in enumerate(BAD_VALUES)],
)
def test_bad_values_are_refused_by_name_and_number(
    base: Callable[[], dict[str, Any]], name: str, value: Any, error: type[Exception], needles: tuple[str, ...]
) -> None:
    message = refused(base, {name: value}, error)
    assert f"`{name}" in message, message
    for needle in needles:
        assert needle in message, f"{needle!r} is not in: {message}"


# Arguments in company.

TOGETHER: list[tuple[str, Callable[[], dict[str, Any]], dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ("6 heads over 4", dense_forward, {"q": floats(B, NQ, 6, D), "k": floats(B, NK, 4, D), "v": floats(B, NK, 4, DV),
     "out": None, "lse": None, "bias": None, "alibi_slopes": None, "sink": None}, ValueError, ("`k`", "`q`", "4", "6")),
    ("2 heads over 4", packed_forward, {"q": floats(NQ, 2, D), "k": floats(NK, 4, D), "v": floats(NK, 4, DV),
     "out": None, "lse": None}, ValueError, ("`k`", "`q`", "multiple", "4", "2")),
    ("no kv heads", packed_forward, {"k": floats(NK, 0, D), "v": floats(NK, 0, DV)}, ValueError, ("`k`", "Hkv", "0")),
    ("no query heads", packed_forward, {"q": floats(NQ, 0, D), "out": None, "lse": None}, ValueError,
     ("`q`", "Hq", "0")),
    ("no head_dim", packed_forward, {"q": floats(NQ, HQ, 0), "k": floats(NK, HKV, 0)}, ValueError, ("`q`", "D", "0")),
    ("no value head_dim", packed_forward, {"v": floats(NK, HKV, 0), "out": None}, ValueError, ("`v`", "Dv", "0")),
    ("both splits", dense_forward, {"num_splits": 2, "split_len": 8}, ValueError,
     ("`split_len`", "`num_splits`", "2", "8")),
    ("dropout without a seed", dense_forward, {"dropout_p": 0.5, "seed": None}, ValueError, ("`seed`", "0.5")),
    ("dropout without a seed, backward", dense_backward, {"dropout_p": 0.5, "seed": None}, ValueError,
     ("`seed`", "0.5")),
    ("delta beside dlse", dense_backward, {"delta": floats(B, HQ, NQ)}, ValueError, ("`dlse`", "`delta`")),
    ("accumulate without dk", dense_backward, {"accumulate": True, "dk": None}, ValueError, ("`dk`", "accumulate")),
    ("accumulate without dbias", dense_backward, {"accumulate": True, "dbias": None}, ValueError, ("`dbias`",)),
    ("accumulate without dsink", dense_backward, {"accumulate": True, "dsink": None}, ValueError, ("`dsink`",)),
    ("dbias that is not wanted", dense_backward, {"bias_grad": False}, ValueError, ("`dbias`", "bias_grad=False")),
    ("dbias without bias", dense_backward, {"bias": None}, ValueError, ("`bias`", "`dbias`")),
    ("dsink without sink", dense_backward, {"sink": None}, ValueError, ("`sink`", "`dsink`")),
    ("grad_dtype against dq", dense_backward, {"grad_dtype": "float64"}, TypeError, ("`dq`", "float32", "float64")),
    ("out_dtype against out", dense_forward, {"out_dtype": "float16"}, TypeError, ("`out`", "float32", "float16")),
    ("thd without its offsets", dense_forward, {"layout": "thd"}, ValueError, ("`cu_seqlens_q`", "'thd'")),
    ("appending to pages of no keys", append,
     {"k_pages": floats(PAGES, 0, HKV, D), "v_pages": floats(PAGES, 0, HKV, DV)}, ValueError,
     ("`k_pages`", "page_size", "0")),
    ("appending rows of nothing", append, {"k_pages": floats(PAGES, PAGE_SIZE, HKV, 0), "k": floats(B, 3, HKV, 0)},
     ValueError, ("`k_pages`", "D", "0")),
    ("pages of no keys", paged_forward, {"k": floats(PAGES, 0, HKV, D), "v": floats(PAGES, 0, HKV, DV)}, ValueError,
     ("`k`", "page_size", "0")),
    ("offsets of keys beside pages", paged_forward, {"q": floats(NQ, HQ, D), "layout": "thd", "out": None, "lse": None,
     "cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 4, 7)}, ValueError, ("`cu_seqlens_k`", "`block_table`")),
    ("k of another dtype", dense_forward, {"k": np.zeros((B, NK, HKV, D), np.float16)}, TypeError,
     ("`k`", "float16", "float32", "`q`")),
]  # fmt: skip


@pytest.mark.parametrize(("what", "base", "changes", "error", "needles"), TOGETHER, ids=[row[0] for row in TOGETHER])
def test_arguments_that_do_not_go_together_are_refused(
    what: str,
    base: Callable[[], dict[str, Any]],
    changes: dict[str, Any],
    error: type[Exception],
    needles: tuple[str, ...],
) -> None:
    message = refused(base, changes, error)
    for needle in needles:
        assert needle in message, f"{needle!r} is not in: {message}"


def test_accumulation_in_half_precision_is_refused() -> None:
    call = packed_backward()
    for name in ("q", "k", "v", "out", "dout"):
        call[name] = call[name].astype(np.float16)
    for name in ("dq", "dk", "dv"):
        call[name] = np.full(call[name].shape, POISON, np.float16)
    with pytest.raises(TypeError, match="`dq` is float16") as caught:
        cf.attn_bwd(**call, accumulate=True)
    assert "float32 or float64" in str(caught.value)
    assert np.all(call["dq"] == np.float16(POISON))


# Overlapping.


@arrays([(base, name) for base, name in WRITTEN if base in (dense_forward, dense_backward, append)])
def test_an_output_that_overlaps_another_array_is_refused_by_both_names(
    base: Callable[[], dict[str, Any]], name: str
) -> None:
    call = base()
    for other in set(arrays_of(base)) - {name}:
        memory = np.zeros(4096, np.uint8)
        changes = {
            key: memory.view(call[key].dtype)[: call[key].size].reshape(call[key].shape) for key in (name, other)
        }
        message = refused(base, changes, ValueError)
        assert f"`{name}`" in message
        assert f"`{other}`" in message


@pytest.mark.parametrize(("shape", "at"), [((B, NQ, 3, HQ, D), 2), ((B, 3, NQ, HQ, D), 1), ((3, B, NQ, HQ, D), 0)])
def test_gradients_may_be_slices_of_one_packed_buffer(shape: tuple[int, ...], at: int) -> None:
    q, k, v, dout = (floats(B, NQ, HQ, D) for _ in range(4))
    out, lse = cf.attn_fwd(q, k, v)
    packed = poisoned(*shape)
    slices: dict[str, Any] = {
        name: packed[(slice(None),) * at + (index,)] for index, name in enumerate(("dq", "dk", "dv"))
    }
    got = cf.attn_bwd(q, k, v, out, lse, dout, **slices)
    assert all(result is given for result, given in zip(got, slices.values(), strict=True))
    for result, plain in zip(got, cf.attn_bwd(q, k, v, out, lse, dout), strict=True):
        assert np.array_equal(result, plain)
    with pytest.raises(ValueError, match="`dq` overlaps `dk`"):
        cf.attn_bwd(q, k, v, out, lse, dout, **(slices | {"dk": slices["dq"][:, ::-1]}))


def test_disjointness_is_never_claimed_wrongly() -> None:
    rng = np.random.default_rng()
    claims = 0
    for _ in range(3000):
        memory = np.zeros(240, np.float32)
        views = []
        for _ in range(2):
            rank = int(rng.integers(1, 4))
            shape = tuple(int(extent) for extent in rng.integers(1, 5, rank))
            strides = tuple(int(step) for step in rng.integers(-20, 21, rank))
            start = 120 + int(rng.integers(-30, 30))
            array = np.lib.stride_tricks.as_strided(memory[start:], shape, tuple(4 * step for step in strides))
            views.append(View(array.__array_interface__["data"][0], shape, strides, "float32", array))
        apart = are_apart(*views)
        claims += apart
        assert not (apart and np.shares_memory(views[0].array, views[1].array))
        if is_injective(views[0]):
            addresses = sum(np.ix_(*(np.arange(n) * s for n, s in zip(views[0].shape, views[0].strides, strict=True))))
            assert np.unique(addresses).size == math.prod(views[0].shape)
    assert claims > 300


# What is accepted.


@pytest.mark.parametrize(
    "empty", [{"q": (0, NQ, HQ, D), "k": (0, NK, HKV, D)}, {"q": (B, 0, HQ, D), "k": (B, NK, HKV, D)}]
)
def test_outputs_without_elements_may_have_any_strides(empty: dict[str, tuple[int, ...]]) -> None:
    q, k = floats(*empty["q"]), floats(*empty["k"])
    out = np.lib.stride_tricks.as_strided(np.empty(1, np.float32), q.shape, (0, 0, 0, 0))
    assert cf.attn_fwd(q, k, k, out=out).out is out


def test_numpy_integers_are_ints_and_lists_are_pairs() -> None:
    attn = cf.Attention(window=[np.int64(3), -1], num_splits=np.int32(2), scale=np.float32(0.5), causal=np.bool_(True))  # type: ignore[arg-type]
    assert attn == cf.Attention(window=(3, None), num_splits=2, scale=0.5, causal=True)
    assert type(attn.num_splits) is int
    assert type(attn.scale) is float
    assert attn.causal is True


def test_spellings_of_nothing_are_equal() -> None:
    assert cf.Attention(softcap=0, window=(None, -1), causal="bottom-right") == cf.Attention(causal=True)


@pytest.mark.parametrize("spelling", ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)], ids=repr)
def test_dtypes_are_spelled_as_strings_or_numpy_dtypes(spelling: Any) -> None:
    assert cf.Attention(out_dtype=spelling, grad_dtype=spelling).out_dtype == "bfloat16"


def test_a_seed_without_dropout_has_no_effect() -> None:
    call: dict[str, Any] = {name: dense_forward()[name] for name in ("q", "k", "v")}
    assert np.array_equal(cf.attn_fwd(**call, seed=5).out, cf.attn_fwd(**call).out)


def test_hints_change_no_result() -> None:
    call = packed_forward()
    cf.attn_fwd(**call)
    for hint in (0, 1, 4, 10**9):
        hinted = call | {"out": None, "lse": None, "max_seqlen_q": hint, "max_seqlen_k": hint}
        assert np.array_equal(cf.attn_fwd(**hinted).out, call["out"])


def test_a_window_larger_than_any_key_is_unbounded() -> None:
    call: dict[str, Any] = {name: dense_forward()[name] for name in ("q", "k", "v")}
    wide = cf.attn_fwd(**call, window=(2**63, 2**70)).out
    assert np.array_equal(wide, cf.attn_fwd(**call).out)


def test_a_workspace_may_be_longer_than_needed() -> None:
    call = dense_forward()
    size = cf.Attention().workspace_size(call["q"], call["k"], call["v"])
    cf.attn_fwd(call["q"], call["k"], call["v"], workspace=np.zeros(size + 3, np.uint8))


def test_planning_refuses_what_the_other_direction_has() -> None:
    call = dense_backward()
    with pytest.raises(ValueError, match="`dout` is given"):
        cf.Attention().plan(call["q"], call["k"], call["v"], dout=call["dout"])
    with pytest.raises(ValueError, match="`block_table` is given"):
        cf.Attention().workspace_size(call["q"], call["k"], call["v"], backward=True, block_table=ints(1))
