"""Merging partial results, and carrying a gradient through the merge."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import assert_close, check_backward, check_forward
from tests.backends import Backend
from tests.cases import DTYPES

Random = np.random.Generator
LEN_Q, LEN_K, HEADS, WIDTH = 37, 130, 3, 20
CUTS = (0, 3, 70, 130)


def _problem(rng: Random, dtype: str = "float32") -> list[np.ndarray]:
    """q, k, v, dout whose parts differ in weight and in the mean of their values."""
    shapes = (LEN_Q, LEN_K, LEN_K, LEN_Q)
    q, k, v, dout = (rng.standard_normal((2, length, HEADS, WIDTH)) for length in shapes)
    k += np.linspace(-1, 1, LEN_K)[:, None, None]
    v += np.linspace(-3, 3, LEN_K)[:, None, None]
    return [array.astype(DTYPES[dtype]) for array in (q, k, v, dout)]


def _parts(
    backend: Backend, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any
) -> tuple[list[Any], list[Any]]:
    states = [cf.attn_fwd(*map(backend.put, (q, k[:, a:b], v[:, a:b])), **options) for a, b in itertools.pairwise(CUTS)]
    return [state.out for state in states], [state.lse for state in states]


def _states(rng: Random, count: int = 3) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """States with and without keys; what those without hold is NaN, and the first rows have no keys anywhere."""
    outs = [rng.standard_normal((2, LEN_Q, HEADS, WIDTH)).astype(np.float32) for _ in range(count)]
    lses = [(4 * rng.standard_normal((2, HEADS, LEN_Q))).astype(np.float32) for _ in range(count)]
    for out, lse in zip(outs, lses, strict=True):
        lse[rng.random(lse.shape) < 0.3] = -np.inf
        lse[:, :, :2] = -np.inf
        out[np.isneginf(lse).swapaxes(1, 2)] = np.nan
    return outs, lses


def _expected(outs: list[Any], lses: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The contract's two lines, in float64."""
    stacked = np.stack([lse.astype(np.float64) for lse in lses])
    lse = np.logaddexp.reduce(stacked)
    with np.errstate(invalid="ignore"):
        weights = np.where(np.isneginf(stacked), 0, np.exp(stacked - lse)).swapaxes(2, 3)[..., None]
    values = np.where(weights == 0, 0, np.stack([out.astype(np.float64) for out in outs]))
    return (weights * values).sum(axis=0), lse


def _judge(out: np.ndarray, lse: np.ndarray, expected: np.ndarray, expected_lse: np.ndarray, dtype: str) -> None:
    """The weight exp(lse_s − lse) has a relative rounding error of |lse| units."""
    levels = 1 + np.abs(expected_lse[np.isfinite(expected_lse)]).max()
    terms = float(levels * np.abs(expected).max())
    assert_close(out, expected, expected.astype(dtype), dtype=dtype, terms=terms, name="out")
    assert_close(lse, expected_lse, expected_lse.astype(dtype), dtype=dtype, terms=float(levels), name="lse")


def _get(backend: Backend, arrays: Any) -> tuple[np.ndarray, ...]:
    return tuple(backend.get(array) for array in arrays)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_merge_is_the_attention_over_all_keys(backend: Backend, layout: str, rng: Random) -> None:
    q, k, v, _ = _problem(rng)
    outs, lses = _parts(backend, q, k, v)
    if layout == "bhsd":
        outs = [backend.put(backend.get(out).swapaxes(1, 2)) for out in outs]
    out, lse = _get(backend, cf.merge_states(outs, lses, layout=layout))
    check_forward(out if layout == "bshd" else out.swapaxes(1, 2), lse, q, k, v, name="merged")


def test_an_lse_in_base_two_would_be_seen(backend: Backend, rng: Random) -> None:
    q, k, v, _ = _problem(rng)
    outs, lses = _parts(backend, q, k, v)
    log2 = [lse * np.float32(1 / math.log(2)) for lse in lses]
    out, lse = _get(backend, cf.merge_states(outs, log2))
    with pytest.raises(AssertionError, match="error above"):
        check_forward(out, lse, q, k, v, name="base 2")
    repaired = [cf.lse_from_log2(lse) for lse in log2]
    check_forward(*_get(backend, cf.merge_states(outs, repaired)), q, k, v, name="base 2, converted")


@pytest.mark.parametrize("count", [1, 2, 5, 75])  # a launch on a GPU takes 24
def test_states_without_keys_are_not_read(backend: Backend, count: int, rng: Random) -> None:
    outs, lses = _states(rng, count)
    out, lse = _get(backend, cf.merge_states(list(map(backend.put, outs)), list(map(backend.put, lses))))
    expected, expected_lse = _expected(outs, lses)
    _judge(out, lse, expected, expected_lse, "float32")
    empty = out[:, :2]
    assert empty.tobytes() == bytes(empty.nbytes)
    assert np.isneginf(lse[:, :, :2]).all()


@pytest.mark.parametrize("values", [(-500, 500), (500, -500), (200, -200), (-300, 100, 0, 400, -1), (1e30, -1e30)])
def test_far_apart_states_stay_finite(backend: Backend, values: tuple[float, ...], rng: Random) -> None:
    outs = [rng.standard_normal((1, 2, 3, 8)).astype(np.float32) for _ in values]
    lses = [np.full((1, 3, 2), value, np.float32) for value in values]
    out, lse = _get(backend, cf.merge_states(list(map(backend.put, outs)), list(map(backend.put, lses))))
    winner = int(np.argmax(values))
    np.testing.assert_array_equal(out, outs[winner])
    np.testing.assert_array_equal(lse, lses[winner])


def test_stacked_strided_and_packed_states_give_the_same_bits(backend: Backend, rng: Random) -> None:
    outs, lses = _states(rng)
    listed = _get(backend, cf.merge_states(list(map(backend.put, outs)), list(map(backend.put, lses))))
    forms: list[tuple[Any, Any]] = [
        (backend.put(np.stack(outs)), backend.put(np.stack(lses))),
        (backend.put(np.stack(outs), "gaps"), tuple(backend.put(lse, "reversed") for lse in lses)),
        ([backend.put(out, "transposed") for out in outs], [backend.put(lse, "transposed") for lse in lses]),
    ]
    for form in forms:
        for left, right in zip(listed, _get(backend, cf.merge_states(*form)), strict=True):
            assert left.tobytes() == right.tobytes()
    packed = cf.merge_states([backend.put(out[1]) for out in outs], [backend.put(lse[1]) for lse in lses])
    for left, right in zip((listed[0][1], listed[1][1]), _get(backend, packed), strict=True):
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize(("own", "count"), [(0, 3), (2, 3), (55, 60)])
def test_a_running_merge_in_place(backend: Backend, own: int, count: int, rng: Random) -> None:
    outs, lses = (list(map(backend.put, arrays)) for arrays in _states(rng, count))
    fresh = _get(backend, cf.merge_states(outs, lses))
    result = cf.merge_states(outs, lses, out=outs[own], lse=lses[own])
    assert result.out is outs[own]
    assert result.lse is lses[own]
    for left, right in zip(fresh, _get(backend, result), strict=True):
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize(
    ("dtypes", "out_dtype", "expected"),
    [
        (("bfloat16", "bfloat16"), None, "bfloat16"),
        (("float16", "bfloat16"), None, "float32"),
        (("float16", "float16"), "float32", "float32"),
        (("float32", "float16"), "bfloat16", "bfloat16"),
    ],
)
def test_dtypes_of_a_merge(
    backend: Backend, dtypes: tuple[str, ...], out_dtype: str | None, expected: str, rng: Random
) -> None:
    outs, lses = _states(rng, 2)
    outs = [out.astype(DTYPES[dtype]) for out, dtype in zip(outs, dtypes, strict=True)]
    out, lse = _get(
        backend, cf.merge_states(list(map(backend.put, outs)), list(map(backend.put, lses)), out_dtype=out_dtype)
    )
    value, _ = _expected(outs, lses)
    assert_close(out, value, value.astype(DTYPES[expected]), dtype=DTYPES[expected], name="out")
    assert lse.dtype == np.float32


def test_float64_anywhere_is_computed_in_float64(rng: Random) -> None:
    outs, lses = ([array.astype(np.float64) for array in arrays] for arrays in _states(rng))
    _judge(*cf.merge_states(outs, lses), *_expected(outs, lses), "float64")
    lses[1] = lses[1].astype(np.float32)
    assert cf.merge_states(outs, lses).lse.dtype == np.float64


def test_a_sink_is_a_state_of_value_zero(backend: Backend, rng: Random) -> None:
    q, k, v, _ = _problem(rng)
    sink = rng.standard_normal(HEADS).astype(np.float32)
    out, lse = cf.attn_fwd(*map(backend.put, (q, k, v)))
    zero = backend.put(np.zeros((2, LEN_Q, HEADS, WIDTH), np.float32))
    level = backend.put(np.repeat(np.tile(sink, (2, 1))[..., None], LEN_Q, axis=-1))
    merged = _get(backend, cf.merge_states([out, zero], [lse, level]))
    check_forward(*merged, q, k, v, sink=sink, name="sink")


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_through_a_merge_is_the_flat_gradient(backend: Backend, causal: bool, rng: Random) -> None:
    q, k, v, dout = _problem(rng)
    start = LEN_K - LEN_Q
    parts = list(itertools.pairwise(CUTS))
    options = [{"causal": causal, "q_start": start, "k_start": a} for a, _ in parts]
    arrays = [tuple(map(backend.put, (q, k[:, a:b], v[:, a:b]))) for a, b in parts]
    states = [cf.attn_fwd(*array, **option) for array, option in zip(arrays, options, strict=True)]
    outs, lses = [state.out for state in states], [state.lse for state in states]
    out, lse = cf.merge_states(outs, lses)
    dlse = rng.standard_normal(lse.shape).astype(np.float32)
    douts, dlses = cf.merge_states_bwd(outs, lses, out, lse, backend.put(dout), backend.put(dlse))
    assert type(douts) is type(dlses) is list
    grads = [
        _get(backend, cf.attn_bwd(*array, *state, d, dlse=dl, **option))
        for array, state, d, dl, option in zip(arrays, states, douts, dlses, options, strict=True)
    ]
    whole = (
        sum(part[0] for part in grads),
        np.concatenate([part[1] for part in grads], axis=1),
        np.concatenate([part[2] for part in grads], axis=1),
    )
    check_backward(
        whole, q, k, v, dout, causal=causal, out=backend.get(out), lse=backend.get(lse), dlse=dlse, name="merge"
    )


def test_states_without_keys_get_no_gradient(backend: Backend, rng: Random) -> None:
    outs, lses = _states(rng)
    put_outs, put_lses = list(map(backend.put, outs)), list(map(backend.put, lses))
    out, lse = cf.merge_states(put_outs, put_lses)
    nowhere = np.isneginf(backend.get(lse))
    dout = rng.standard_normal(out.shape).astype(np.float32)
    dout[nowhere.swapaxes(1, 2)] = np.nan
    dlse = np.where(nowhere, -np.inf, 1).astype(np.float32)
    douts, dlses = cf.merge_states_bwd(put_outs, put_lses, out, lse, backend.put(dout), backend.put(dlse))
    for state_lse, dpart, dpart_lse in zip(lses, _get(backend, douts), _get(backend, dlses), strict=True):
        empty = np.isneginf(state_lse)
        assert not dpart[empty.swapaxes(1, 2)].any()
        assert not dpart_lse[empty].any()
        assert np.isfinite(dpart).all()
        assert np.isfinite(dpart_lse).all()


def test_gradients_come_in_the_form_of_the_states(backend: Backend, rng: Random) -> None:
    outs, lses = _states(rng, 2)
    stacked = backend.put(np.stack(outs).astype(np.float16)), backend.put(np.stack(lses))
    listed = tuple(stacked[0]), list(stacked[1])
    out, lse = cf.merge_states(*stacked)
    dout = backend.put(rng.standard_normal(out.shape).astype(np.float32))
    together = cf.merge_states_bwd(*stacked, out, lse, dout)
    apart = cf.merge_states_bwd(*listed, out, lse, dout)
    assert [type(part) for part in apart] == [tuple, list]
    for one, several, like in zip(together, apart, stacked, strict=True):
        assert one.shape == like.shape
        assert one.dtype == like.dtype
        for i, part in enumerate(several):
            assert backend.get(one[i]).tobytes() == backend.get(part).tobytes()


# ------------------------------------------------------------------------------------------------ refusals


def _bad_merges() -> dict[str, tuple[type[Exception], str, dict[str, Any]]]:
    out, lse = np.zeros((2, 5, 3, 4), np.float32), np.zeros((2, 3, 5), np.float32)
    outs, lses = [out, out + 1], [lse, lse + 1]
    shared = np.zeros((3, 5, 3, 4), np.float32)
    frozen = np.zeros_like(out)
    frozen.flags.writeable = False
    return {
        "nothing": (ValueError, "`outs` is empty", {"outs": [], "lses": []}),
        "None": (TypeError, "`lses` is None", {"outs": outs, "lses": None}),
        "a number among the states": (TypeError, r"`outs\[1\]` is of type float", {"outs": [out, 1.0], "lses": lses}),
        "fewer lses": (ValueError, "`lses` holds 1 states and `outs` 2", {"outs": outs, "lses": lses[:1]}),
        "other length": (ValueError, r"`lses\[1\]` has 4 in axis 2", {"outs": outs, "lses": [lse, lse[..., :4]]}),
        "other rank": (ValueError, r"`outs\[1\]` has 3 axes", {"outs": [out, out[0]], "lses": lses}),
        "lse in 16 bits": (TypeError, r"`lses\[0\]` is float16", {"outs": outs, "lses": [lse.astype("f2"), lse]}),
        "integers": (TypeError, r"`outs\[0\]` is int64", {"outs": [out.astype("i8"), out], "lses": lses}),
        "layout": (ValueError, "`layout` is 'sbhd'", {"outs": outs, "lses": lses, "layout": "sbhd"}),
        "out_dtype": (TypeError, "`out_dtype` is 'int8'", {"outs": outs, "lses": lses, "out_dtype": "int8"}),
        "shape of out": (ValueError, "`out` has 4 in axis 1", {"outs": outs, "lses": lses, "out": out[:, :4].copy()}),
        "dtype of out": (TypeError, "`out` is float64", {"outs": outs, "lses": lses, "out": out.astype("f8")}),
        "read-only out": (ValueError, "`out` is read-only", {"outs": outs, "lses": lses, "out": frozen}),
        "out across a state": (
            ValueError,
            r"`out` overlaps `outs\[0\]`",
            {"outs": [shared[:2], out], "lses": lses, "out": shared[1:]},
        ),
        "stride of out": (
            ValueError,
            "`out` has stride 2",
            {"outs": outs, "lses": lses, "out": np.zeros((2, 5, 3, 8), np.float32)[..., ::2]},
        ),
    }


@pytest.mark.parametrize("name", _bad_merges())
def test_a_bad_merge_is_refused_by_name(name: str) -> None:
    error, message, arguments = _bad_merges()[name]
    given = [array for value in arguments.values() if isinstance(value, list) for array in value]
    before = [np.copy(array) for array in given]
    with pytest.raises(error, match=message):
        cf.merge_states(**arguments)
    for array, kept in zip(given, before, strict=True):
        np.testing.assert_array_equal(array, kept)


@pytest.mark.parametrize("missing", ["out", "lse", "dout"])
def test_a_gradient_needs_what_the_merge_gave(missing: str) -> None:
    out, lse = np.zeros((2, 5, 3, 4), np.float32), np.zeros((2, 3, 5), np.float32)
    arguments: dict[str, Any] = {"out": out, "lse": lse, "dout": out}
    arguments[missing] = None
    with pytest.raises(TypeError, match=f"merge_states_bwd: `{missing}` is None"):
        cf.merge_states_bwd([out], [lse], **arguments)


@pytest.mark.parametrize("name", ["outs[0]", "lses[1]"])
def test_a_missing_state_is_named(name: str) -> None:
    outs, lses = [np.ones((1, 2, 1, 4))] * 2, [np.zeros((1, 1, 2))] * 2
    given = {"outs": outs, "lses": lses}
    family, index = name[:4], int(name[5])
    given[family] = [None if i == index else array for i, array in enumerate(given[family])]
    with pytest.raises(TypeError, match=re.escape(name)):
        cf.merge_states(**given)
