"""The forward against the reference, and what the contract says of it exactly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import check_forward
from tests.backends import Backend, NumpyBackend
from tests.cases import CASES, DTYPES, PAIRS, PRODUCT_PARTS, Case, assert_forward, make, parameters, product

Random = np.random.Generator


@pytest.mark.parametrize(("case", "dtype"), parameters(CASES + PAIRS))
def test_forward_is_as_close_to_the_reference_as_plain_operations(
    backend: Backend, case: Case, dtype: str, rng: Random
) -> None:
    assert_forward(backend, make(case, dtype, rng))


@pytest.mark.slow
@pytest.mark.parametrize("part", PRODUCT_PARTS)
def test_forward_over_the_product_of_all_features(backend: Backend, part: int, rng: Random) -> None:
    for case in product(part):
        assert_forward(backend, make(case, "float32", rng))


def _qkv(rng: Random, *, batch: int = 1, len_q: int = 70, len_k: int = 90, heads: int = 2, width: int = 32) -> Any:
    shapes = (batch, len_q, heads, width), (batch, len_k, heads, width), (batch, len_k, heads, width)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def _run(backend: Backend, *arrays: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    options = {name: backend.put(value) for name, value in options.items()}
    out, lse = cf.attn_fwd(*(backend.put(array) for array in arrays), **options)
    return backend.get(out), backend.get(lse)


def _assert_same_bits(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> None:
    for left, right in zip(a, b, strict=True):
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()


def test_outputs_are_new_contiguous_arrays_with_the_bits_that_given_ones_get(backend: Backend, rng: Random) -> None:
    q, k, v = (backend.put(array) for array in _qkv(rng))
    made = cf.attn_fwd(q, k, v, causal=True)
    given = backend.poisoned(made.out.shape, np.float32), backend.poisoned(made.lse.shape, np.float32)
    cf.attn_fwd(q, k, v, causal=True, out=given[0], lse=given[1])
    for array in made:
        assert array.flags.c_contiguous
    _assert_same_bits(tuple(map(backend.get, made)), tuple(map(backend.get, given)))


@pytest.mark.parametrize("memory", ["gaps", "every second", "reversed", "transposed"])
def test_strides_change_no_bit(backend: Backend, memory: str, rng: Random) -> None:
    arrays = _qkv(rng)
    plain = cf.attn_fwd(*(backend.put(array) for array in arrays), causal=True)
    moved = cf.attn_fwd(*(backend.put(array, memory) for array in arrays), causal=True)
    _assert_same_bits(tuple(map(backend.get, plain)), tuple(map(backend.get, moved)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_without_keys_are_bitwise_zero_and_minus_infinity(backend: Backend, dtype: str, rng: Random) -> None:
    q, k, v = (array.astype(DTYPES[dtype]) for array in _qkv(rng, len_q=130, len_k=70))
    out, lse = _run(backend, q, k, v, causal=True)
    empty = out[:, :60]
    assert empty.tobytes() == bytes(empty.nbytes)
    assert np.isneginf(lse[:, :, :60]).all()
    assert np.isfinite(lse[:, :, 60:]).all()


@pytest.mark.parametrize("len_k", [1, 7, 64, 100, 257])
def test_lse_is_a_natural_logarithm(backend: Backend, len_k: int, rng: Random) -> None:
    q, k, v = _qkv(rng, len_k=len_k)
    _, lse = _run(backend, np.zeros_like(q), k, v)
    expected = np.full(lse.shape, math.log(len_k))
    np.testing.assert_array_max_ulp(lse, expected.astype(np.float32), maxulp=2)


def test_one_key_is_copied(backend: Backend, rng: Random) -> None:
    """Beyond 65,535 rows of a batch, which is where a grid's second axis ends."""
    q, k, v = _qkv(rng, batch=65_537, len_q=1, len_k=1, heads=1, width=4)
    out, lse = _run(backend, q, k, v, scale=1.0)
    np.testing.assert_array_max_ulp(out, v, maxulp=1)  # of float32, whose last bit three TF32 products may lack
    assert (lse[:, 0, 0] != 0).mean() > 0.9


@pytest.mark.parametrize(
    ("window", "visible"),
    [
        ((0, 0), lambda distance: distance == 0),
        ((1, 0), lambda distance: (distance == 0) | (distance == -1)),
        ((None, 2), lambda distance: distance <= 2),
        ((3, -1), lambda distance: distance >= -3),
    ],
)
def test_window_edges_are_where_the_contract_puts_them(
    backend: Backend, window: Any, visible: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Equal scores and one-hot values: out is the visible set, divided by its size."""
    length = 9
    q = np.zeros((1, length, 1, length), np.float32)
    v = np.eye(length, dtype=np.float32)[None, :, None, :]
    out, _ = _run(backend, q, q, v, window=window)
    seen = visible(np.arange(length)[None, :] - np.arange(length)[:, None])
    assert ((out[0, :, 0] > 0) == seen).all()


@pytest.mark.parametrize("root", [2.0**7, 2.0**15])
def test_large_scores_stay_finite(backend: Backend, root: float, rng: Random) -> None:
    """Scores up to 1e11; powers of two, so that equal scores are equal in any order of summation."""
    q, k, v = _qkv(rng, len_q=129, len_k=130)
    out, lse = _run(backend, q * np.float32(root), k * np.float32(root), v, causal=True)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    q, k = np.full_like(q, root), np.full_like(k, root)
    out, lse = _run(backend, q, k, v, scale=1.0)
    assert (lse >= 32 * root**2).all()
    uniform, _ = _run(backend, np.zeros_like(q), k, v)
    _assert_same_bits((out,), (uniform,))


def test_hints_of_length_change_nothing(backend: Backend, rng: Random) -> None:
    """A GPU may take another kernel for them, which sums in another order."""
    q, k, v = (array[0] for array in _qkv(rng))
    offsets = {
        "cu_seqlens_q": np.array([0, 40, 70], np.int32),
        "cu_seqlens_k": np.array([0, 1, 90], np.int32),
    }
    plain = _run(backend, q, k, v, layout="thd", causal=True, **offsets)
    for hint in (0, 1, 40, 10_000):
        hinted = _run(backend, q, k, v, layout="thd", causal=True, max_seqlen_q=hint, max_seqlen_k=hint, **offsets)
        check_forward(*hinted, q, k, v, name=f"hint {hint}", layout="thd", causal=True, **offsets)
        if backend.name == "numpy":
            _assert_same_bits(plain, hinted)


# ------------------------------------------------------------------------------------------------ containment


def test_nothing_comes_from_keys_beyond_seqused_k(backend: Backend, rng: Random) -> None:
    q, k, v = _qkv(rng, batch=3)
    used = np.array([0, 17, 90], np.int32)
    clean = _run(backend, q, k, v, seqused_k=used, causal=True)
    for row, live in enumerate(used):
        k[row, live:], v[row, live:] = np.nan, np.inf
    _assert_same_bits(clean, _run(backend, q, k, v, seqused_k=used, causal=True))


def test_nan_stays_in_its_sequence_its_row_and_its_kv_head(backend: Backend, rng: Random) -> None:
    q, k, v = _qkv(rng, batch=2)
    clean = _run(backend, q, k, v)
    k[0, 3, 1], v[0, 5, 1] = np.nan, np.inf
    out, lse = _run(backend, q, k, v)
    assert np.isnan(out[0, :, 1]).all()
    assert np.isnan(lse[0, 1]).all()
    out[0, :, 1], lse[0, 1] = clean[0][0, :, 1], clean[1][0, 1]
    _assert_same_bits(clean, (out, lse))

    q, k, v = (array[0] for array in _qkv(rng))
    offsets = {
        "cu_seqlens_q": np.array([0, 33, 60], np.int32),
        "cu_seqlens_k": np.array([0, 20, 80], np.int32),
    }
    clean = _run(backend, q, k, v, layout="thd", **offsets)
    q[33:], k[20:], v[20:] = np.nan, np.nan, np.nan
    out, lse = _run(backend, q, k, v, layout="thd", **offsets)
    _assert_same_bits((clean[0][:33], clean[1][:, :33]), (out[:33], lse[:, :33]))
    assert np.isnan(out[33:60]).all()
    assert not out[60:].any()
    assert np.isneginf(lse[:, 60:]).all()


def test_nan_in_a_key_that_no_row_sees_is_not_seen(backend: Backend, rng: Random) -> None:
    q, k, v = _qkv(rng, len_q=40, len_k=100)
    clean = _run(backend, q, k, v, causal="top-left")
    k[:, 40:], v[:, 40:] = np.nan, np.nan
    _assert_same_bits(clean, _run(backend, q, k, v, causal="top-left"))


def test_nan_in_a_key_that_the_bias_masks_is_not_seen(rng: Random) -> None:
    q, k, v = _qkv(rng)
    bias = np.zeros((1, 1, 1, 90), np.float32)
    bias[..., 50:] = -np.inf
    clean = _run(NumpyBackend(), q, k, v, bias=bias)
    k[:, 50:], v[:, 50:] = np.nan, np.nan
    _assert_same_bits(clean, _run(NumpyBackend(), q, k, v, bias=bias))


# ------------------------------------------------------------------------------------------------ pages and splits


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_are_the_keys_they_hold(backend: Backend, layout: str, page_size: int, rng: Random) -> None:
    used = np.array([0, 37, 5], np.int32)
    max_pages = -(-40 // page_size)
    table = np.full((3, max_pages), -7, np.int32)  # dead entries must not be followed
    pages = 3 * max_pages + 2
    free = iter(rng.permutation(pages))
    for row, live in enumerate(used):
        table[row, : -(-live // page_size)] = [next(free) for _ in range(-(-live // page_size))]
    pools = [np.full((pages, page_size, 2, 32), np.nan, np.float32) for _ in range(2)]
    q, *dense = _qkv(rng, batch=3, len_q=6, len_k=40)
    for row, live in enumerate(used):
        for j in range(live):
            for pool, keys in zip(pools, dense, strict=True):
                pool[table[row, j // page_size], j % page_size] = keys[row, j]
    expected = _run(backend, q, *dense, seqused_k=used, causal=True)
    options: dict[str, Any] = {"block_table": table, "seqused_k": used, "causal": True, "layout": layout}
    if layout == "bhsd":
        q, pools = q.swapaxes(1, 2), [pool.swapaxes(1, 2) for pool in pools]
    if layout == "thd":
        q, options["cu_seqlens_q"] = q.reshape(18, 2, 32), np.array([0, 6, 12, 18], np.int32)
    out, lse = _run(backend, q, *pools, **options)
    check_forward(out, lse, q, *pools, name="paged", **options)
    if backend.name != "numpy":  # which has another tile for pages
        return
    if layout == "bhsd":
        out = out.swapaxes(1, 2)
    if layout == "thd":
        lse = lse.reshape(2, 3, 6).swapaxes(0, 1)
    assert (out.reshape(expected[0].shape) == expected[0]).all()
    assert (lse == expected[1]).all()


@pytest.mark.parametrize("len_q", [1, 3, 70])
def test_a_row_split_by_length_does_not_depend_on_its_batch(backend: Backend, len_q: int, rng: Random) -> None:
    q, k, v = map(backend.put, _qkv(rng, batch=5, len_q=len_q, len_k=400))
    together = cf.attn_fwd(q, k, v, split_len=64)
    alone = cf.attn_fwd(q[2:3], k[2:3], v[2:3], split_len=64)
    assert (backend.get(together.out[2:3]) == backend.get(alone.out)).all()
    assert (backend.get(together.lse[2:3]) == backend.get(alone.lse)).all()


# ------------------------------------------------------------------------------------------------ seeds and plans


def test_seed_and_offset_may_be_arrays(rng: Random) -> None:
    q, k, v = _qkv(rng)
    attn = cf.Attention(dropout_p=0.4)
    plain = attn.fwd(q, k, v, seed=2**40 + 3, offset=9)
    for dtype in (np.int64, np.uint64):
        arrays = attn.fwd(q, k, v, seed=np.array([2**40 + 3], dtype), offset=np.array([9], dtype))
        _assert_same_bits(tuple(plain), tuple(arrays))
    for other in ({"seed": 2**40 + 4, "offset": 9}, {"seed": 2**40 + 3, "offset": 10}):
        assert (attn.fwd(q, k, v, **other).out != plain.out).any()


@pytest.mark.parametrize("blocks", [(1, 1), (7, 5), (64, 1000)])
def test_block_sizes_change_rounding_only(blocks: tuple[int, int], rng: Random) -> None:
    problem = make(next(case for case in CASES if case.name == "dropout, everything"), "float32", rng)
    attn = cf.Attention(**{name: problem.options.pop(name) for name in ("dropout_p", "softcap", "causal")})
    q, k, v = problem.q, problem.k, problem.v
    plan = dataclasses.replace(attn.plan(q, k, v, **problem.options), block_q=blocks[0], block_k=blocks[1])
    options = {"dropout_p": attn.dropout_p, "softcap": attn.softcap, "causal": attn.causal, **problem.options}
    out, lse = attn.fwd(q, k, v, plan=plan, **problem.options)
    check_forward(out, lse, q, k, v, name=str(blocks), **options)


def test_a_plan_for_another_job_is_refused(rng: Random) -> None:
    q, k, v = _qkv(rng)
    attn = cf.Attention()
    with pytest.raises(ValueError, match=r"`plan`.*backward.*forward"):
        attn.fwd(q, k, v, plan=attn.plan(q, k, v, backward=True))
    for size in (0, -1, 1.5, "64"):
        with pytest.raises(ValueError, match=rf"`plan`.*block_k={size!r}"):
            attn.fwd(q, k, v, plan=dataclasses.replace(attn.plan(q, k, v), block_k=size))
    with pytest.raises(TypeError, match="`plan` is a str"):
        attn.fwd(q, k, v, plan="fast")


@pytest.mark.parametrize("option", [{"scale": 1e39}, {"softcap": 1e39}, {"softcap": 1e-46}, {"scale": -1e300}])
def test_options_that_float32_cannot_hold_make_no_nan(option: dict[str, float], rng: Random) -> None:
    """float64 serves them on NumPy; a GPU refuses what its kernels cannot hold."""
    q, k, v = _qkv(rng)
    out, lse = cf.attn_fwd(np.zeros_like(q), k, v, **option)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


def test_a_softcap_beyond_float32_is_none(rng: Random) -> None:
    q, k, v = _qkv(rng)
    check_forward(*cf.attn_fwd(q, k, v, softcap=1e39), q, k, v, name="cap without effect")
