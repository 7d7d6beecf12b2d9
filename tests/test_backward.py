"""The backward against the reference, and what the contract says of it exactly."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import SUM_TOLERANCE, check_backward
from tests.backends import Backend, NumpyBackend
from tests.cases import (
    CASES,
    DTYPES,
    PAIRS,
    PRODUCT_PARTS,
    Case,
    assert_backward,
    make,
    parameters,
    product,
    run_forward,
)
from tests.test_forward import _assert_same_bits, _qkv

Random = np.random.Generator


def _judge(backend: Backend, case: Case, dtype: str, rng: Random) -> None:
    problem = make(case, dtype, rng)
    assert_backward(backend, problem, *run_forward(backend, problem))


@pytest.mark.parametrize(("case", "dtype"), parameters(CASES + PAIRS))
def test_gradients_are_as_close_to_the_reference_as_plain_operations(
    backend: Backend, case: Case, dtype: str, rng: Random
) -> None:
    _judge(backend, case, dtype, rng)


@pytest.mark.slow
@pytest.mark.parametrize("part", PRODUCT_PARTS)
def test_gradients_over_the_product_of_all_features(backend: Backend, part: int, rng: Random) -> None:
    for case in product(part):
        _judge(backend, case, "float32", rng)


def _saved(backend: Backend, rng: Random, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """q, k, v, out, lse and dout on the backend."""
    q, k, v = (backend.put(array) for array in _qkv(rng))
    out, lse = cf.attn_fwd(q, k, v, **options)
    return [q, k, v, out, lse, backend.put(rng.standard_normal(out.shape).astype(np.float32))], options


def _numpy(backend: Backend, arrays: Any) -> tuple[np.ndarray, ...]:
    return tuple(backend.get(array) for array in arrays)


def test_gradients_are_named_and_as_many_as_the_inputs(rng: Random) -> None:
    q, k, v = _qkv(rng)
    sink, bias = np.zeros(2, np.float32), np.zeros((70, 90), np.float32)
    for extra, names in (
        ({}, "dq dk dv"),
        ({"bias": bias}, "dq dk dv dbias"),
        ({"sink": sink}, "dq dk dv dsink"),
        ({"bias": bias, "sink": sink}, "dq dk dv dbias dsink"),
    ):
        out, lse = cf.attn_fwd(q, k, v, **extra)
        grads = cf.attn_bwd(q, k, v, out, lse, out, **extra)
        assert grads._fields == tuple(names.split())


def test_delta_is_what_the_backward_makes_of_out_and_dout(backend: Backend, rng: Random) -> None:
    (q, k, v, out, lse, dout), options = _saved(backend, rng, causal=True)
    dlse = backend.put(rng.standard_normal(lse.shape).astype(np.float32))
    delta = cf.attn_bwd_preprocess(out, dout, dlse)
    assert delta.shape == lse.shape
    plain = cf.attn_bwd(q, k, v, out, lse, dout, dlse=dlse, **options)
    given = cf.attn_bwd(q, k, v, None, lse, dout, delta=delta, **options)
    arrays = _numpy(backend, (q, k, v, dout))
    for grads in (plain, given):
        check_backward(
            _numpy(backend, grads),
            *arrays,
            out=backend.get(out),
            lse=backend.get(lse),
            dlse=backend.get(dlse),
            name="delta",
            **options,
        )


def test_accumulate_adds_to_what_is_there(backend: Backend, rng: Random) -> None:
    arrays, options = _saved(backend, rng, causal=True)
    fresh = _numpy(backend, cf.attn_bwd(*arrays, **options))
    before = [rng.standard_normal(grad.shape).astype(np.float32) for grad in fresh]
    sums = dict(zip(("dq", "dk", "dv"), map(backend.put, before), strict=True))
    result = cf.attn_bwd(*arrays, accumulate=True, **sums, **options)
    for total, start, grad, given in zip(result, before, fresh, sums.values(), strict=True):
        assert total is given
        np.testing.assert_allclose(backend.get(total), start + grad, rtol=0, atol=SUM_TOLERANCE)


def test_accumulated_halves_of_the_queries_make_the_whole(rng: Random) -> None:
    (q, k, v, out, lse, dout), _ = _saved(NumpyBackend(), rng)
    sums = {name: np.zeros(array.shape, np.float32) for name, array in (("dk", k), ("dv", v))}
    dq = np.zeros(q.shape, np.float32)
    for rows in (slice(0, 30), slice(30, 70)):
        cf.attn_bwd(
            q[:, rows], k, v, out[:, rows], lse[:, :, rows], dout[:, rows], dq=dq[:, rows], accumulate=True, **sums
        )
    check_backward((dq, sums["dk"], sums["dv"]), q, k, v, dout, out=out, lse=lse, name="halves")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("has_sink", [False, True])
def test_rows_without_keys_add_bitwise_zero(backend: Backend, has_sink: bool, accumulate: bool, rng: Random) -> None:
    """Neither such a row nor what flows into it may reach a gradient, whether its lse is -inf or the sink."""
    q, k, v = _qkv(rng, len_q=130, len_k=70)
    options: dict[str, Any] = {"causal": True, "window": (20, 0), "scale": -0.3}
    if has_sink:
        options["sink"] = backend.put(rng.standard_normal(2).astype(np.float32))
    out, lse = cf.attn_fwd(*map(backend.put, (q, k, v)), **options)
    q[:, :60] = np.nan
    dout = rng.standard_normal(out.shape).astype(np.float32)
    dout[:, :60] = np.inf
    dlse = np.where(np.isneginf(backend.get(lse)), -np.inf, 1).astype(np.float32)
    arrays = [backend.put(array) for array in (q, k, v)]
    sums = {}
    if accumulate:
        sums = {f"d{name}": backend.put(np.zeros_like(array)) for name, array in (("q", q), ("k", k), ("v", v))}
        if has_sink:
            sums["dsink"] = backend.put(np.zeros(2, np.float32))
    grads = cf.attn_bwd(
        *arrays, out, lse, backend.put(dout), dlse=backend.put(dlse), accumulate=accumulate, **sums, **options
    )
    dq, dk, dv = _numpy(backend, grads[:3])
    assert dq[:, :60].tobytes() == bytes(dq[:, :60].nbytes)
    for grad in (dq[:, 60:], dk, dv):
        assert np.isfinite(grad).all()
        assert grad.any()


def test_nothing_comes_from_dead_keys_and_they_get_zero(backend: Backend, rng: Random) -> None:
    q, k, v = _qkv(rng, batch=2)
    options: dict[str, Any] = {"seqused_k": backend.put(np.array([33, 0], np.int32)), "causal": True}
    saved = cf.attn_fwd(*map(backend.put, (q, k, v)), **options)
    dout = backend.put(rng.standard_normal(q.shape).astype(np.float32))
    clean = _numpy(backend, cf.attn_bwd(*map(backend.put, (q, k, v)), *saved, dout, **options))
    k[0, 33:], v[0, 33:], k[1], v[1] = np.nan, np.nan, np.inf, np.nan
    dirty = _numpy(backend, cf.attn_bwd(*map(backend.put, (q, k, v)), *saved, dout, **options))
    for before, after in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(before, after)
    for grad in dirty[1:]:
        assert not grad[0, 33:].any()
        assert not grad[1].any()


def test_nan_stays_in_its_sequence_its_row_and_its_kv_head(backend: Backend, rng: Random) -> None:
    (q, k, v, out, lse, dout), _ = _saved(backend, rng)
    clean = _numpy(backend, cf.attn_bwd(q, k, v, out, lse, dout))
    dout = backend.get(dout).copy()
    dout[0, 3, 1] = np.nan
    dirty = _numpy(backend, cf.attn_bwd(q, k, v, out, lse, backend.put(dout)))
    for before, after in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(before[:, :, 0], after[:, :, 0])
        assert np.isnan(after[:, :, 1]).any()


def test_a_row_whose_lse_is_minus_infinity_is_not_used(backend: Backend, rng: Random) -> None:
    """Whatever it could see: neither its q nor what flows into it."""
    (q, k, v, out, lse, dout), _ = _saved(backend, rng)
    q, out, lse, dout = (backend.get(array).copy() for array in (q, out, lse, dout))
    dlse = rng.standard_normal(lse.shape).astype(np.float32)
    keep = np.arange(70) != 33

    def gradients(rows: np.ndarray) -> tuple[np.ndarray, ...]:
        arrays = (backend.put(np.ascontiguousarray(array[:, rows])) for array in (q, out, dout))
        of_rows = (backend.put(np.ascontiguousarray(array[:, :, rows])) for array in (lse, dlse))
        (own_q, own_out, own_dout), (own_lse, own_dlse) = arrays, of_rows
        return _numpy(backend, cf.attn_bwd(own_q, k, v, own_out, own_lse, own_dout, dlse=own_dlse))

    dq, dk, dv = gradients(keep)
    lse[:, :, 33], q[:, 33], dout[:, 33], dlse[:, :, 33] = -np.inf, np.nan, np.inf, np.inf
    all_dq, all_dk, all_dv = gradients(np.full(70, True))
    assert not all_dq[:, 33].any()
    for left, right in ((dq, all_dq[:, keep]), (dk, all_dk), (dv, all_dv)):
        np.testing.assert_allclose(right, left, rtol=0, atol=SUM_TOLERANCE)


def test_nan_stays_within_reach_of_the_window(backend: Backend, rng: Random) -> None:
    """Row 0 and key 0 see keys and rows to 5: a tile of at most 512 lies between them and the last ones."""
    q, k, v = _qkv(rng, len_q=1500, len_k=1500, width=16)
    options: dict[str, Any] = {"window": (5, 5)}
    saved = cf.attn_fwd(*map(backend.put, (q, k, v)), **options)
    dout = rng.standard_normal(saved.out.shape).astype(np.float32)
    clean = _numpy(backend, cf.attn_bwd(*map(backend.put, (q, k, v)), *saved, backend.put(dout), **options))
    for poisoned in (q, k, v, dout):
        kept = poisoned[:, 0].copy()
        poisoned[:, 0] = np.nan
        dirty = _numpy(backend, cf.attn_bwd(*map(backend.put, (q, k, v)), *saved, backend.put(dout), **options))
        poisoned[:, 0] = kept
        assert any(np.isnan(grad).any() for grad in dirty)
        for before, after in zip(clean, dirty, strict=True):
            np.testing.assert_array_equal(after[:, 1024:], before[:, 1024:])


def test_a_key_that_no_row_sees_is_not_seen(backend: Backend, rng: Random) -> None:
    q, k, v = _qkv(rng, len_q=40, len_k=100)
    options: dict[str, Any] = {"causal": "top-left"}
    saved = cf.attn_fwd(*map(backend.put, (q, k, v)), **options)
    dout = backend.put(rng.standard_normal(saved.out.shape).astype(np.float32))
    clean = _numpy(backend, cf.attn_bwd(*map(backend.put, (q, k, v)), *saved, dout, **options))
    k[:, 40:], v[:, 40:] = np.nan, np.nan
    dirty = _numpy(backend, cf.attn_bwd(*map(backend.put, (q, k, v)), *saved, dout, **options))
    for before, after in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(before, after)
    for grad in dirty[1:]:
        assert grad[:, 40:].tobytes() == bytes(grad[:, 40:].nbytes)


def test_a_sink_of_minus_infinity_has_gradient_zero_whatever_flows(backend: Backend, rng: Random) -> None:
    q, k, v = map(backend.put, _qkv(rng))
    sink = backend.put(np.array([-np.inf, 0.5], np.float32))
    out, lse = cf.attn_fwd(q, k, v, sink=sink)
    dout = rng.standard_normal(out.shape).astype(np.float32)
    dout[:, 3, 0] = np.nan
    dsink = backend.get(cf.attn_bwd(q, k, v, out, lse, backend.put(dout), sink=sink).dsink)
    assert dsink[0] == 0
    assert np.isfinite(dsink[1])
    assert dsink[1] != 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_products_see_dout_in_the_dtype_of_q(backend: Backend, dtype: str, rng: Random) -> None:
    """dv is a product of dout and knows nothing of delta."""
    q, k, v = (backend.put(array.astype(DTYPES[dtype])) for array in _qkv(rng))
    out, lse = cf.attn_fwd(q, k, v)
    dout = rng.standard_normal(out.shape).astype(np.float32)
    full = cf.attn_bwd(q, k, v, out, lse, backend.put(dout)).dv
    rounded = cf.attn_bwd(q, k, v, out, lse, backend.put(dout.astype(DTYPES[dtype]))).dv
    _assert_same_bits((backend.get(full),), (backend.get(rounded),))


def test_rows_of_no_sequence_are_not_read(backend: Backend, rng: Random) -> None:
    q, k, v = (array[0] for array in _qkv(rng))
    options: dict[str, Any] = {
        "layout": "thd",
        "cu_seqlens_q": backend.put(np.array([0, 20, 50], np.int32)),
        "cu_seqlens_k": backend.put(np.array([0, 33, 60], np.int32)),
    }
    out, lse = cf.attn_fwd(*map(backend.put, (q, k, v)), **options)
    dout = rng.standard_normal(q.shape).astype(np.float32)
    clean = _numpy(backend, cf.attn_bwd(*map(backend.put, (q, k, v)), out, lse, backend.put(dout), **options))
    q[50:], k[60:], v[60:], dout[50:] = np.nan, np.inf, np.nan, np.nan
    dirty = _numpy(backend, cf.attn_bwd(*map(backend.put, (q, k, v)), out, lse, backend.put(dout), **options))
    for before, after, end in zip(clean, dirty, (50, 60, 60), strict=True):
        np.testing.assert_array_equal(before, after)
        assert not after[end:].any()


def test_a_broadcast_output_gradient_is_read_as_it_is(backend: Backend, rng: Random) -> None:
    (q, k, v, out, lse, _), _ = _saved(backend, rng)
    ones = backend.xp.broadcast_to(backend.put(np.ones((1, 1, 1, 32), np.float32)), out.shape)
    dense = backend.put(np.ones(out.shape, np.float32))
    broadcast = _numpy(backend, cf.attn_bwd(q, k, v, out, lse, ones))
    check_backward(
        broadcast,
        *_numpy(backend, (q, k, v, dense)),
        out=backend.get(out),
        lse=backend.get(lse),
        name="broadcast dout",
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dout_and_out_may_be_float32(backend: Backend, dtype: str, rng: Random) -> None:
    q, k, v = (array.astype(DTYPES[dtype]) for array in _qkv(rng))
    out, lse = cf.attn_fwd(*map(backend.put, (q, k, v)), out_dtype="float32")
    dout = rng.standard_normal(out.shape).astype(np.float32)
    grads = cf.attn_bwd(*map(backend.put, (q, k, v)), out, lse, backend.put(dout))
    check_backward(
        _numpy(backend, grads), q, k, v, dout, out=backend.get(out), lse=backend.get(lse), name="float32 dout"
    )


@pytest.mark.parametrize("blocks", [(1, 1), (7, 5), (64, 1000)])
def test_block_sizes_change_rounding_only(blocks: tuple[int, int], rng: Random) -> None:
    problem = make(next(case for case in CASES if case.name == "dropout, everything"), "float32", rng)
    out, lse = run_forward(NumpyBackend(), problem)
    static = {name: problem.options[name] for name in ("dropout_p", "softcap", "causal")}
    of_call = {name: value for name, value in problem.options.items() if name not in static}
    attn = cf.Attention(**static)
    plan = attn.plan(problem.q, problem.k, problem.v, backward=True, **of_call)
    plan = dataclasses.replace(plan, block_q=blocks[0], block_k=blocks[1])
    grads = attn.bwd(
        problem.q, problem.k, problem.v, out, lse, problem.dout, plan=plan, **of_call, **problem.backward_options
    )
    check_backward(
        grads,
        problem.q,
        problem.k,
        problem.v,
        problem.dout,
        out=out,
        lse=lse,
        name=str(blocks),
        **problem.options,
        **problem.backward_options,
    )


def test_a_forward_dropout_mask_is_the_backwards(rng: Random) -> None:
    """With P uniform and one-hot values the forward shows the mask; dv shows the backward's."""
    length = 33
    q = np.zeros((1, length, 1, length), np.float32)
    v = np.eye(length, dtype=np.float32)[None, :, None, :]
    attn = cf.Attention(dropout_p=0.4)
    out, lse = attn.fwd(q, q, v, seed=11)
    dv = attn.bwd(q, q, v, out, lse, v, seed=11).dv
    np.testing.assert_array_equal(dv[0, :, 0], out[0, :, 0].T)
    assert 0 < (out == 0).mean() < 1


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_bias_without_its_gradient_changes_no_other(backend: Backend, dtype: str, rng: Random) -> None:
    q, k, v = (backend.put(array.astype(dtype)) for array in _qkv(rng))
    bias = rng.standard_normal((1, 2, 70, 90))
    bias[..., rng.random(90) < 0.3] = -np.inf
    options: dict[str, Any] = {"bias": backend.put(bias.astype(dtype)), "deterministic": True}
    out, lse = cf.attn_fwd(q, k, v, **options)
    saved = (q, k, v, out, lse, backend.put(rng.standard_normal(out.shape).astype(dtype)))
    whole, less = cf.attn_bwd(*saved, **options), cf.attn_bwd(*saved, **options, bias_grad=False)
    assert (*less._fields, "dbias") == whole._fields
    without_bias = cf.attn_bwd(*saved, bias_grad=False)
    *inputs, out, lse, dout = _numpy(backend, saved)
    check_backward(_numpy(backend, without_bias), *inputs, dout, out=out, lse=lse, bias_grad=False)
    for mine, other in zip(_numpy(backend, less), _numpy(backend, whole[:3]), strict=True):
        _assert_same_bits(mine, other)
    added = {name: backend.put(np.zeros(x.shape, np.float64)) for name, x in less._asdict().items()}
    if dtype == "float64":
        cf.attn_bwd(*saved, **options, bias_grad=False, accumulate=True, **added)
        for mine, other in zip(_numpy(backend, added.values()), _numpy(backend, less), strict=True):
            _assert_same_bits(mine, other)


def test_bias_of_stride_zero_has_a_gradient_of_its_shape(rng: Random) -> None:
    q, k, v = _qkv(rng)
    row = rng.standard_normal(90).astype(np.float32)
    bias = np.broadcast_to(row, (1, 2, 70, 90))
    out, lse = cf.attn_fwd(q, k, v, bias=bias)
    full = cf.attn_bwd(q, k, v, out, lse, v[:, :70], bias=bias).dbias
    assert full.shape == bias.shape
    check_backward(
        cf.attn_bwd(q, k, v, out, lse, v[:, :70], bias=row), q, k, v, v[:, :70], out=out, lse=lse, bias=row, name="row"
    )


def test_deterministic_gradients_repeat_bitwise(backend: Backend, rng: Random) -> None:
    arrays, _ = _saved(backend, rng)
    attn = cf.Attention(causal=True, deterministic=True)
    first, *others = (_numpy(backend, attn.bwd(*arrays)) for _ in range(3))
    for other in others:
        _assert_same_bits(first, other)


@pytest.mark.parametrize("hidden_by", ["band", "bias"])
def test_softcap_does_not_carry_what_nobody_sees(hidden_by: str, rng: Random) -> None:
    """tanh of a NaN score is a NaN, and its derivative multiplies dx: a key that no row sees reaches no gradient.

    On a GPU a bias is added to the score, so keys that only a bias hides must be finite there.
    """
    q, k, v = _qkv(rng, len_q=40, len_k=50)
    options: dict[str, Any] = {"softcap": 5.0, "causal": "top-left"}
    if hidden_by == "bias":
        options = {"softcap": 5.0, "bias": np.where(np.arange(50) < 40, 0, -np.inf).astype(np.float32)}
    k[:, 40:] = np.nan
    saved = cf.attn_fwd(q, k, v, **options)
    grads = cf.attn_bwd(q, k, v, *saved, rng.standard_normal(saved.out.shape).astype(np.float32), **options)
    for array in (*saved, *grads[:3]):
        assert np.isfinite(array).all()


def test_softcap_does_not_carry_a_row_that_sees_its_sink_alone(rng: Random) -> None:
    q, k, v = _qkv(rng, len_q=40, len_k=30)
    options: dict[str, Any] = {"softcap": 5.0, "causal": True, "sink": np.zeros(q.shape[2], np.float32)}
    q[:, :10] = np.nan
    saved = cf.attn_fwd(q, k, v, **options)
    grads = cf.attn_bwd(q, k, v, *saved, rng.standard_normal(saved.out.shape).astype(np.float32), **options)
    assert not grads.dq[:, :10].any()
    for grad in grads:
        assert np.isfinite(grad).all()
