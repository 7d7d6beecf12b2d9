"""The reference judges everything, so it is itself judged: by hand-worked cases, finite differences and an identity."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash._philox import keep_mask, philox4x32
from cupyflash.testing import (
    DELTA_TOLERANCE,
    DIFFERENCE_STEP,
    DIFFERENCE_TOLERANCE,
    assert_close,
    flops,
    reference,
    reference_bwd,
)
from tests.cases import DTYPES

Random = np.random.Generator
LN2, LN3, LN4, LN8 = (math.log(n) for n in (2, 3, 4, 8))


# ------------------------------------------------------------------------------------------------ by hand


def _column(*values: float) -> np.ndarray:
    """[1, N, 1, 1]"""
    return np.array(values, np.float64)[None, :, None, None]


ONE_QUERY = {"q": _column(1), "k": _column(0, LN3), "v": _column(4, 8), "scale": 1.0}  # P = 1/4, 3/4


def test_one_query_two_keys() -> None:
    out, lse = reference(**ONE_QUERY)
    np.testing.assert_array_max_ulp(out.item(), 7.0, 4)
    np.testing.assert_array_max_ulp(lse.item(), LN4, 4)
    grads = reference_bwd(**ONE_QUERY, dout=_column(1))
    expected = {"dq": [0.75 * LN3], "dk": [-0.75, 0.75], "dv": [0.25, 0.75]}
    for name, values in expected.items():
        np.testing.assert_allclose(grads[name].ravel(), values, rtol=DELTA_TOLERANCE)


def test_the_gradient_of_lse_is_p() -> None:
    grads = reference_bwd(**ONE_QUERY, dout=_column(0), dlse=np.full((1, 1, 1), 2.0))
    np.testing.assert_allclose(grads["dk"].ravel(), [0.5, 1.5], rtol=DELTA_TOLERANCE)
    assert not grads["dv"].any()


def test_a_sink_takes_its_share() -> None:
    """exp(sink) = 4 beside 1 + 3: half of the weight."""
    sink = np.array([LN4])
    out, lse = reference(**ONE_QUERY, sink=sink)
    np.testing.assert_allclose([out.item(), lse.item()], [3.5, LN8], rtol=DELTA_TOLERANCE)
    grads = reference_bwd(**ONE_QUERY, sink=sink, dout=_column(1), dlse=np.full((1, 1, 1), 0.5))
    np.testing.assert_allclose(grads["dsink"], [-0.5 * (3.5 - 0.5)], rtol=DELTA_TOLERANCE)


def test_softcap_alibi_bias_and_scale_in_their_order() -> None:
    """x = 2 tanh(3 · 1 / 2) − 0.5 · |5 − r| + bias."""
    bias = np.array([0.25, -1.0])
    options: dict[str, Any] = {"scale": 3.0, "softcap": 2.0, "alibi_slopes": np.array([0.5]), "bias": bias}
    _, lse = reference(_column(1), _column(1, 1), _column(0, 0), q_start=5, k_start=2, **options)
    capped = 2 * math.tanh(1.5)
    expected = math.log(math.exp(capped - 1.5 + 0.25) + math.exp(capped - 1.0 - 1.0))
    np.testing.assert_allclose(lse.item(), expected, rtol=DELTA_TOLERANCE)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"causal": True}, ["110", "111"]),
        ({"causal": "bottom-right"}, ["110", "111"]),
        ({"causal": "top-left"}, ["100", "110"]),
        ({"window": (1, 0)}, ["110", "011"]),
        ({"window": (0, -1)}, ["011", "001"]),
        ({"window": (None, 0), "q_start": 0}, ["100", "110"]),
        ({"window": (0, 1), "causal": True}, ["010", "001"]),
        ({"causal": True, "k_start": 2}, ["000", "100"]),
        ({"causal": True, "seqused_k": np.array([1])}, ["000", "100"]),
        ({"bias": np.array([0, -np.inf, 0])}, ["101", "101"]),
    ],
)
def test_masks_are_drawn_as_the_contract_says(options: dict[str, Any], seen: list[str]) -> None:
    """Two queries, three keys with one-hot values: what a row sees is where its output is positive."""
    v = np.eye(3)[None, :, None, :]
    out, lse = reference(_column(0, 0), _column(0, 0, 0), v, **options)
    rows = ["".join(str(int(weight > 0)) for weight in row) for row in out[0, :, 0]]
    assert rows == seen
    for row, value in zip(seen, lse[0, 0], strict=True):
        count = row.count("1")
        assert value == (math.log(count) if count else -math.inf)


def test_grouped_heads_read_consecutive_queries_and_sum_their_gradients() -> None:
    q = np.zeros((1, 1, 4, 1))
    v = np.array([10.0, 20.0]).reshape(1, 1, 2, 1)
    out, _ = reference(q, np.zeros((1, 1, 2, 1)), v)
    assert out.ravel().tolist() == [10, 10, 20, 20]
    dout = np.array([1.0, 2, 3, 4]).reshape(1, 1, 4, 1)
    assert reference_bwd(q, np.zeros((1, 1, 2, 1)), v, dout)["dv"].ravel().tolist() == [3, 7]


def test_layouts_hold_the_same_numbers(rng: Random) -> None:
    q, k, v, dout = (rng.standard_normal((2, 5, 4, 3)) for _ in range(4))
    out, lse = reference(q, k, v, causal=True)
    swapped, swapped_lse = reference(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=True, layout="bhsd")
    offsets = {name: np.array([0, 5, 10]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    flat, flat_lse = reference(*(x.reshape(10, 4, 3) for x in (q, k, v)), causal=True, layout="thd", **offsets)
    np.testing.assert_array_equal(out, swapped.swapaxes(1, 2))
    np.testing.assert_array_equal(lse, swapped_lse)
    np.testing.assert_array_equal(out.reshape(10, 4, 3), flat)
    np.testing.assert_array_equal(lse, flat_lse.reshape(4, 2, 5).swapaxes(0, 1))
    packed = (x.reshape(10, 4, 3) for x in (q, k, v, dout))
    grads = reference_bwd(q, k, v, dout, causal=True)
    flat_grads = reference_bwd(*packed, causal=True, layout="thd", **offsets)
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad.reshape(10, 4, 3), flat_grads[name])


# ------------------------------------------------------------------------------------------------ by differences

PROBLEMS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "softcap": 1.2, "sink": True},
    {"window": (3, 2), "alibi": True, "bias": (2, 13, 8)},
    {"causal": "top-left", "bias": (8,), "sink": True, "scale": -0.4},
    {"dropout_p": 0.3, "seed": 17, "softcap": 2.0, "bias": (13, 1)},
]


def _problem(case: dict[str, Any], rng: Random) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Differentiable arrays of a 13 x 8 problem with two heads in a group, and the other options."""
    options = dict(case)
    arrays = {"q": rng.standard_normal((1, 13, 2, 3))}
    arrays |= {name: rng.standard_normal((1, 8, 1, 3)) for name in ("k", "v")}
    if options.pop("sink", False):
        arrays["sink"] = rng.standard_normal(2)
    if "bias" in options:
        arrays["bias"] = rng.standard_normal(options.pop("bias"))
    if options.pop("alibi", False):
        options["alibi_slopes"] = rng.random(2)
    return arrays, options


@pytest.mark.parametrize("seed", range(20))
def test_gradients_are_central_differences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays, options = _problem(PROBLEMS[seed % len(PROBLEMS)], rng)
    dout, dlse = rng.standard_normal((1, 13, 2, 3)), rng.standard_normal((1, 2, 13))

    def loss() -> float:
        out, lse = reference(**arrays, **options)
        return float((out * dout).sum() + np.where(np.isneginf(lse), 0, lse * dlse).sum())

    grads = reference_bwd(**arrays, dout=dout, dlse=dlse, **options)
    assert set(grads) == {f"d{name}" for name in arrays}
    for name, array in arrays.items():
        worst = np.abs(grads[f"d{name}"] - _differences(loss, array)).max()
        assert worst <= DIFFERENCE_TOLERANCE, f"d{name}: {worst}"


def _differences(loss: Callable[[], float], array: np.ndarray) -> np.ndarray:
    result = np.empty_like(array)
    for at in np.ndindex(array.shape):
        kept = array[at]
        values = []
        for step in (DIFFERENCE_STEP, -DIFFERENCE_STEP):
            array[at] = kept + step
            values.append(loss())
        array[at] = kept
        result[at] = (values[0] - values[1]) / (2 * DIFFERENCE_STEP)
    return result


@pytest.mark.parametrize("seed", range(20))
def test_delta_is_also_the_row_sum_of_p_and_dp(seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, dout = (rng.standard_normal((13, 3)) for _ in range(2))
    k, v = (rng.standard_normal((8, 3)) for _ in range(2))
    out, lse = reference(*(x[None, :, None] for x in (q, k, v)), scale=0.5)
    p = np.exp(0.5 * q @ k.T - lse[0, 0][:, None])
    delta, other = (dout * out[0, :, 0]).sum(axis=1), (p * (dout @ v.T)).sum(axis=1)
    assert np.abs(delta - other).max() <= DELTA_TOLERANCE


def test_rows_without_keys_have_no_gradient_and_do_no_harm(rng: Random) -> None:
    arrays, _ = _problem({"sink": True}, rng)
    arrays["sink"][0] = -np.inf
    out, lse = reference(**arrays, causal=True)
    assert np.isneginf(lse[0, 0, :5]).all()
    assert (lse[0, 1, :5] == arrays["sink"][1]).all()
    dout = rng.standard_normal(out.shape)
    dout[:, :5, 0] = np.nan
    grads = reference_bwd(**arrays, dout=dout, dlse=2 * lse, causal=True)
    assert not grads["dq"][:, :5].any()
    for grad in grads.values():
        assert np.isfinite(grad).all()
    assert grads["dsink"][0] == 0


# ------------------------------------------------------------------------------------------------ the mask of dropout


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(counter: tuple[int, ...], key: int, words: str) -> None:
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
    assert " ".join(f"{int(word[0]):08x}" for word in philox4x32((c0, c1, c2, c3), key)) == words


@pytest.mark.parametrize(("q_start", "k_start"), [(0, 0), (5, 1000), (-7, 2**32 - 9), (2**33 + 3, -(2**31))])
def test_the_keep_mask_is_the_contracts_formula_entry_by_entry(q_start: int, k_start: int) -> None:
    seed, offset, p, stream = 2**63 + 12345, 2**32 - 2, 0.37, 11
    rows, cols = np.arange(q_start, q_start + 19), np.arange(k_start, k_start + 21)
    mask = keep_mask(np.array([stream]), rows, cols, dropout_p=p, seed=seed, offset=offset)
    assert mask.shape == (1, 19, 21)
    for (i, row), (j, col) in itertools.product(enumerate(rows.tolist()), enumerate(cols.tolist())):
        P, R = row % 2**32, col % 2**32
        counter = ((P // 16) * 8 + P % 8, (R // 16) * 8 + R % 8, stream, offset)
        c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
        word = philox4x32((c0, c1, c2, c3), seed)[2 * ((P % 16) // 8) + (R % 16) // 8]
        assert mask[0, i, j] == (int(word[0]) >= math.floor(p * 2**32 + 0.5))


def test_the_keep_mask_keeps_its_share() -> None:
    mask = keep_mask(np.arange(8), np.arange(128), np.arange(128), dropout_p=0.25, seed=1, offset=0)
    assert abs(mask.mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / mask.size)


# ------------------------------------------------------------------------------------------------ the judge


def _wrong(change: Callable[[np.ndarray], np.ndarray], dtype: Any = np.float32) -> Callable[[], None]:
    expected = np.arange(1.0, 25.0).reshape(2, 3, 4)
    plain = expected * (1 + np.finfo(np.float32).eps)
    return lambda: assert_close(change(expected.astype(dtype)), expected, plain, dtype="float32", name="x")


def _put(array: np.ndarray, value: float) -> np.ndarray:
    array[1, 2, 3] = value
    return array


@pytest.mark.parametrize(
    ("judged", "complaint"),
    [
        (_wrong(lambda x: x[:1]), r"shape \(1, 3, 4\)"),
        (_wrong(lambda x: x, np.float64), "dtype float64"),
        (_wrong(lambda x: _put(x, np.nan)), r"NaN in the wrong place.*\(1, 2, 3\).*1 of 24"),
        (_wrong(lambda x: _put(x, np.inf)), r"\+inf in the wrong place.*\(1, 2, 3\)"),
        (_wrong(lambda x: _put(x, 24.01)), r"error above.*\(1, 2, 3\).*24.01.*expected.*24.0.*1 of 24"),
        (_wrong(lambda x: x[::-1]), "error above.*24 of 24"),
    ],
)
def test_the_judge_sees_what_is_wrong(judged: Callable[[], None], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        judged()


def test_the_judge_sees_a_turned_tensor_below_a_loose_maximum(rng: Random) -> None:
    """One bad element of the peer loosens the maximum; the rest turned by as much is still seen."""
    expected = rng.standard_normal(10_000)
    plain = expected.copy()
    plain[0] += 1e-2
    with pytest.raises(AssertionError, match="angle"):
        assert_close(expected + 1e-2 * rng.choice([-1, 1], 10_000), expected, plain)
    assert_close(expected, expected, plain)


@pytest.mark.parametrize(("len_q", "len_k"), [(7, 7), (5, 9), (9, 5), (1, 4), (3, 0)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top-left"}, {"window": (2, 1)}])
def test_flops_count_visible_pairs(len_q: int, len_k: int, options: dict[str, Any]) -> None:
    v = np.eye(max(len_k, 1))[None, :len_k, None, :]
    weights, _ = reference(np.zeros((1, len_q, 1, 1)), np.zeros((1, len_k, 1, 1)), v, **options)
    pairs = int((weights > 0).sum())
    sizes: dict[str, Any] = {"batch": 3, "len_q": len_q, "len_k": len_k, "heads_q": 2, "head_dim": 8, "head_dim_v": 5}
    assert flops(**sizes, **options) == 3 * 2 * pairs * 2 * (8 + 5)
    assert flops(**sizes, **options, backward=True) == 3 * 2 * pairs * 2 * (3 * 8 + 2 * 5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_see_dout_in_the_dtype_of_q_and_delta_as_it_comes(dtype: str, rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((1, 9, 2, 8)).astype(DTYPES[dtype]) for _ in range(3))
    dout = rng.standard_normal(q.shape).astype(np.float32)
    full, rounded = (reference_bwd(q, k, v, x) for x in (dout, dout.astype(q.dtype)))
    np.testing.assert_array_equal(full["dv"], rounded["dv"])
    assert (full["dq"] != rounded["dq"]).any()


def test_numbers_below_the_normal_ones_may_each_be_off_by_their_distance(rng: np.random.Generator) -> None:
    """It is the same for all of them, and so turns the whole tensor of many small ones. Wrong signs are seen."""
    expected = 4e-8 * rng.standard_normal(10_000)  # float16 lies 6e-8 apart here
    stored = expected.astype(np.float16)
    assert_close(stored, expected, expected)
    larger = 20 * expected
    with pytest.raises(AssertionError):
        assert_close((-larger).astype(np.float16), larger, larger)
