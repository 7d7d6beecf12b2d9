"""`cupyflash.jax`: the plain functions' results in JAX, with gradients, eager and under what JAX does to functions."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import check_backward, check_forward

jax: Any = pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("jax.experimental.buffer_callback", reason="jax is older than 0.6.2")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

from cupyflash.jax import _memory, attention, merge_states  # noqa: E402

Arrays = dict[str, Any]
Random = np.random.Generator
NAMES = ("q", "k", "v", "bias", "sink")  # what has a gradient
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture
def x64() -> Iterator[None]:
    """JAX has 64-bit types only where it is told to."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def exact_products() -> Iterator[None]:
    """JAX's own products of float32 are those of TF32 on a GPU, unless it is told otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one for each call that XLA makes."""
    made: list[Any] = []
    run = _memory.run

    def counted(work: Any, *rest: Any) -> None:
        made.append(work)
        run(work, *rest)

    monkeypatch.setattr(_memory, "run", counted)
    return made


def problem(rng: Random, dtype: Any = np.float32, layout: str = "bshd") -> Arrays:
    """Of NumPy arrays."""
    row = np.float64 if dtype == np.float64 else np.float32
    shapes = {"q": (2, 5, 4, 3), "k": (2, 7, 2, 3), "v": (2, 7, 2, 2)}
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    sink = rng.standard_normal(4).astype(row)
    if layout == "bhsd":
        arrays = {name: np.ascontiguousarray(array.swapaxes(1, 2)) for name, array in arrays.items()}
    if layout == "thd":
        offsets = {"cu_seqlens_q": np.array([0, 4, 10], np.int32), "cu_seqlens_k": np.array([0, 8, 14], np.int32)}
        return {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()} | offsets | {"sink": sink}
    return arrays | {"bias": rng.standard_normal((4, 5, 7)).astype(row), "sink": sink}


def of_jax(arrays: Arrays) -> Arrays:
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def plain(device: str) -> Callable[[Any], Any]:
    """NumPy's array, where the plain functions are to compute."""
    if device == "cpu":
        return np.asarray
    cupy: Any = pytest.importorskip("cupy", reason="cupy is not installed")
    return lambda array: cupy.asarray(np.asarray(array))


def host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)


def call(arrays: Arrays, **options: Any) -> Any:
    given = dict(arrays)
    return attention(given.pop("q"), given.pop("k"), given.pop("v"), **given, **options)


def value_and_gradients(arrays: Arrays, douts: Any, **options: Any) -> tuple[Any, Any]:
    """(out, lse), and the gradients by name."""
    wanted = {name: array for name, array in arrays.items() if name in NAMES}
    results, back = jax.vjp(lambda some: tuple(call(arrays | some, **options)), wanted)
    return results, back(douts)[0]


def assert_same_bits(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        a, b = host(a), host(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "scale": -0.3},
    {"causal": "top-left", "softcap": 2.0, "out_dtype": "float32"},
    {"window": (3, None), "dropout_p": 0.25, "seed": 2**63 + 7, "offset": 2**31 + 3},
    {"causal": "bottom-right", "q_start": 1, "k_start": -1, "num_splits": 2},
]


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_and_gradients_have_the_plain_functions_bits(
    jax_device: str, options: Any, layout: str, transform: Any, rng: Random
) -> None:
    options = {**options, "layout": layout, "deterministic": True}
    move = plain(jax_device)
    for dtype in DTYPES.values():
        arrays = problem(rng, dtype, layout)
        given = {name: move(array) for name, array in arrays.items()}
        for name in options.keys() & {"q_start", "k_start"}:  # which go in as arrays
            given[name] = move(np.full(2, options[name], np.int32))
        q, k, v = (given.pop(name) for name in "qkv")
        want = cf.attn_fwd(q, k, v, **(options | given))
        douts = [rng.standard_normal(result.shape).astype(host(result).dtype) for result in want]
        grads = cf.attn_bwd(q, k, v, *want, *map(move, douts[:1]), dlse=move(douts[1]), **(options | given))
        function = transform(functools.partial(value_and_gradients, **options))
        results, by_name = function(of_jax(arrays), tuple(map(jnp.asarray, douts)))
        assert all(isinstance(result, jax.Array) for result in results)
        assert_same_bits((*results, *(by_name[name] for name in NAMES if name in by_name)), (*want, *grads))


@pytest.mark.parametrize("dtype", DTYPES)
def test_jitted_gradients_are_near_the_reference(jax_device: str, dtype: str, rng: Random) -> None:
    shapes = (2, 33, 6, 40), (2, 57, 2, 40), (2, 57, 2, 24), (2, 33, 6, 24)
    q, k, v, dout = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)

    @jax.jit
    def step(q: Any, k: Any, v: Any) -> Any:
        results, back = jax.vjp(lambda *qkv: tuple(attention(*qkv, causal=True, window=(20, 0))), q, k, v)
        return results, back((jnp.asarray(dout), jnp.zeros_like(results[1])))

    results, grads = step(*map(jnp.asarray, (q, k, v)))
    check_forward(*map(host, results), q, k, v, causal=True, window=(20, 0))
    check_backward(tuple(map(host, grads)), q, k, v, dout, causal=True, window=(20, 0))


def assert_gradients_are_differences(function: Any, arrays: list[Any]) -> None:
    """Of numbers that come as NumPy's."""
    check_grads(lambda *some: function(*map(jnp.asarray, some)), arrays, order=1, modes=["rev"])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options", OPTIONS[:2] + OPTIONS[3:], ids=str)
def test_gradients_are_differences(jax_device: str, options: Any, rng: Random) -> None:
    arrays = of_jax(problem(rng, np.float64))
    assert call(arrays, **options).out.dtype == jnp.float64

    def function(*some: Any) -> Any:
        return tuple(call(dict(zip(NAMES, some, strict=True)), **options))

    assert_gradients_are_differences(function, [arrays[name] for name in NAMES])


def test_a_bias_without_its_gradient_changes_no_other(jax_device: str, rng: Random) -> None:
    arrays = of_jax(problem(rng))
    results, whole = value_and_gradients(arrays, tuple(map(jnp.ones_like, call(arrays))), deterministic=True)
    again, less = value_and_gradients(arrays, results, deterministic=True, bias_grad=False)
    _, whole = value_and_gradients(arrays, results, deterministic=True)
    assert_same_bits(again, results)
    assert not less.pop("bias").any()
    assert whole.pop("bias").any()
    assert_same_bits(less.values(), whole.values())


def test_the_plain_backward_leaves_a_biass_gradient_out_too(jax_device: str, rng: Random) -> None:
    arrays = of_jax({name: array for name, array in problem(rng).items() if name != "sink"})
    out, lse = cf.attn_fwd(**arrays)
    bias, saved = arrays.pop("bias"), (out, lse, jnp.ones_like(out))
    whole, less = (
        cf.attn_bwd(*arrays.values(), *saved, bias=bias, deterministic=True, bias_grad=wanted)
        for wanted in (True, False)
    )
    assert (whole._fields, less._fields) == (("dq", "dk", "dv", "dbias"), ("dq", "dk", "dv"))
    assert_same_bits(less, whole[:3])


def test_a_shared_mask_does_not_keep_mapped_calls_apart(jax_device: str, rng: Random) -> None:
    """Where a bias that is shared has a gradient of all, calls follow one another."""
    x, mask = jnp.asarray(rng.standard_normal((3, 2, 5, 4, 8)), jnp.float32), jnp.zeros((5, 5))

    def loss(bias_grad: bool, x: Any) -> Any:
        return attention(x, x, x, bias=mask, bias_grad=bias_grad).out.sum()

    mapped = {wanted: jax.vmap(jax.grad(functools.partial(loss, wanted))) for wanted in (False, True)}
    loops = {wanted: "scan" in str(jax.make_jaxpr(function)(x)) for wanted, function in mapped.items()}
    assert loops == {False: False, True: True}
    np.testing.assert_allclose(mapped[False](x), mapped[True](x), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_gradients_of_packed_sequences_and_live_keys_are_differences(jax_device: str, rng: Random) -> None:
    packed = of_jax(problem(rng, np.float64, "thd"))

    def of_packed(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return tuple(call(packed | {"q": q, "k": k, "v": v, "sink": sink}, layout="thd"))

    assert_gradients_are_differences(of_packed, [packed[name] for name in ("q", "k", "v", "sink")])
    dense = of_jax(problem(rng, np.float64))
    live, slopes = jnp.array([7, 0], jnp.int32), jnp.asarray(rng.random((2, 4)))

    def shortened(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, seqused_k=live, alibi_slopes=slopes).out

    assert_gradients_are_differences(shortened, [dense[name] for name in "qkv"])


# The plain functions.


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_plain_functions_take_jax_arrays(jax_device: str, transform: Any, rng: Random) -> None:
    arrays, move = problem(rng), plain(jax_device)
    q, k, v, bias, sink = (arrays[name] for name in NAMES)
    dout = rng.standard_normal((2, 5, 4, 2)).astype(np.float32)
    halves = [(slice(0, 3), -3), (slice(3, 7), 0)]

    def everything(q: Any, k: Any, v: Any, bias: Any, sink: Any, dout: Any) -> list[Any]:
        out, lse = cf.attn_fwd(q, k, v, bias=bias, sink=sink, causal=True)
        delta = cf.attn_bwd_preprocess(out, dout, lse)
        of_both = cf.attn_bwd(q, k, v, out, lse, dout, dlse=lse, bias=bias, sink=sink, causal=True, deterministic=True)
        of_delta = cf.attn_bwd(q, k, v, None, lse, dout, delta=delta, bias=bias, causal=True, deterministic=True)
        assert of_both._fields == ("dq", "dk", "dv", "dbias", "dsink")
        assert of_delta._fields == ("dq", "dk", "dv", "dbias")
        parts = [cf.attn_fwd(q, k[:, at], v[:, at], k_start=start + 3) for at, start in halves]
        outs, lses = [part.out for part in parts], tuple(part.lse for part in parts)
        merged = cf.merge_states(outs, lses, out_dtype="float32")
        douts, dlses = cf.merge_states_bwd(outs, lses, *merged, dout, lse)
        assert (type(douts), type(dlses)) == (list, tuple)
        return [out, lse, delta, *of_both, *of_delta, *merged, *douts, *dlses]

    numpy_arrays = q, k, v, bias, sink, dout
    want = everything(*map(move, numpy_arrays))
    assert_same_bits(transform(everything)(*map(jnp.asarray, numpy_arrays)), want)


@pytest.mark.parametrize("count", [1, 3, 30, 50])
def test_merges_of_stacked_and_of_many_states_have_gradients(jax_device: str, count: int, rng: Random) -> None:
    outs = rng.standard_normal((count, 2, 3, 2, 5)).astype(np.float32)
    lses = rng.standard_normal((count, 2, 2, 3)).astype(np.float32)
    dout, dlse = rng.standard_normal(outs.shape[1:]).astype(np.float32), rng.standard_normal(lses.shape[1:])
    want = cf.merge_states(outs.astype(np.float64), lses.astype(np.float64))
    want_grads = cf.merge_states_bwd(outs.astype(np.float64), lses.astype(np.float64), *want, dout, dlse)
    for unstack in (jnp.asarray, lambda array: list(map(jnp.asarray, array))):
        results, back = jax.vjp(lambda a, b: tuple(merge_states(a, b)), unstack(outs), unstack(lses))
        grads = back((jnp.asarray(dout), jnp.asarray(dlse, jnp.float32)))
        for got, expected in zip((*results, *grads), (*want, *want_grads), strict=True):
            np.testing.assert_allclose(np.asarray(got), expected, rtol=2e-5, atol=2e-6)


def test_plain_functions_make_their_own_outputs(jax_device: str) -> None:
    x = jnp.ones((1, 3, 2, 4))
    lse = jnp.ones((1, 2, 3))
    for name, given in {"out": x, "lse": lse, "workspace": x, "plan": "fwd_generic", "check": True}.items():
        with pytest.raises(TypeError, match=f"attn_fwd: `{name}` is given; .* with JAX arrays"):
            cf.attn_fwd(x, x, x, **{name: given})
    for name, given in {"dq": x, "accumulate": True, "workspace": x}.items():
        with pytest.raises(TypeError, match=f"attn_bwd: `{name}` is given; .* with JAX arrays"):
            cf.attn_bwd(x, x, x, x, lse, x, **{name: given})
    with pytest.raises(TypeError, match="merge_states: `out` is given"):
        cf.merge_states([x], [lse], out=x)


# What JAX does to functions.


def stacked(rng: Random, arrays: Arrays, names: tuple[str, ...], size: int = 3) -> Arrays:
    """With a leading axis of other numbers for these."""
    more = [arrays] + [problem(rng) for _ in range(size - 1)]
    return arrays | {name: np.stack([each[name] for each in more]) for name in names}


@pytest.mark.parametrize(
    ("mapped", "options", "calls"),
    [
        (("q", "k", "v"), {"causal": True}, 1),
        (("q",), {"window": (2, 1)}, 1),
        (("k", "v"), {"layout": "bhsd"}, 1),
        (("q", "k", "v"), {"dropout_p": 0.3, "seed": 5}, 3),
        (("q", "bias"), {}, 3),
        (("v", "sink"), {}, 3),
        (("q", "k", "v"), {"q_start": 3}, 1),
    ],
    ids=str,
)
def test_vmap_is_a_call_for_each(
    jax_device: str, mapped: tuple[str, ...], options: Any, calls: int, rng: Random, callbacks: list[Any]
) -> None:
    options = {"deterministic": True, **options}
    used = {"q", "k", "v", *mapped}
    arrays = stacked(rng, {name: array for name, array in problem(rng).items() if name in used}, mapped)
    if options.get("layout") == "bhsd":
        arrays = {name: np.ascontiguousarray(array.swapaxes(-2, -3)) for name, array in arrays.items()}
    axes = {name: 0 if name in mapped else None for name in arrays}
    jax_arrays = of_jax(arrays)
    got = jax.jit(jax.vmap(lambda given: tuple(call(given, **options)), in_axes=(axes,)))(jax_arrays)
    jax.block_until_ready(got)
    assert len(callbacks) == calls

    def gradients(given: Arrays) -> Any:
        return jax.grad(lambda some: sum((x**2).sum() for x in call(some, **options)))(given)

    got_grads = jax.vmap(gradients, in_axes=(axes,))(jax_arrays)
    for i in range(3):
        one = {name: array[i] if name in mapped else array for name, array in jax_arrays.items()}
        assert_same_bits([result[i] for result in got], call(one, **options))
        want = gradients(one)
        assert_same_bits([got_grads[name][i] for name in arrays], [want[name] for name in arrays])


def test_vmap_of_what_goes_with_the_batch(jax_device: str, rng: Random, callbacks: list[Any]) -> None:
    """Lengths, positions, slopes and a bias of each row join the batch, mapped or not, and axes may be any; nested."""
    x = of_jax({name: problem(rng)[name] for name in "qkv"})
    live = jnp.asarray(rng.integers(1, 8, (3, 2)), jnp.int32)
    slopes, starts = jnp.asarray(rng.random((2, 4)), jnp.float32), jnp.asarray([4, -2], jnp.int32)
    biases = jnp.asarray(rng.standard_normal((2, 1, 5, 7, 3)), jnp.float32)
    scales = jnp.asarray(rng.random(2) + 1, jnp.float32)

    def loss(scale: Any, live: Any, bias: Any) -> Any:
        result = attention(
            x["q"] * scale, x["k"], x["v"], seqused_k=live, alibi_slopes=slopes, q_start=starts, bias=bias,
            causal=True, deterministic=True,
        )  # fmt: skip
        return jnp.sin(result.out).sum()

    both = jax.value_and_grad(loss, argnums=(0, 2))
    got = jax.jit(jax.vmap(jax.vmap(both, (None, 0, 4)), (0, None, None)))(scales, live, biases)
    jax.block_until_ready(got)
    assert len(callbacks) == 2  # a forward and a backward
    for i in range(2):
        for j in range(3):
            want = both(scales[i], live[j], biases[..., j])
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(host(a)[i, j], host(b), rtol=1e-5, atol=1e-6)


def test_vmap_of_merges_and_packed_sequences(jax_device: str, rng: Random) -> None:
    outs, lses = (jnp.asarray(rng.standard_normal((4, 3, *shape)), jnp.float32) for shape in ((2, 5, 2, 3), (2, 2, 5)))
    mapped = jax.vmap(lambda o, s: tuple(merge_states(list(o), list(s))), in_axes=1)(outs, lses)
    stacked = jax.vmap(lambda o, s: tuple(merge_states(o, s)), in_axes=1)(outs, lses)
    deltas = jax.vmap(cf.attn_bwd_preprocess)(outs[0], outs[1])
    packed = of_jax(problem(rng, layout="thd"))
    queries = jnp.stack([packed["q"], packed["q"] * 2])
    of_packed = jax.vmap(lambda q: call(packed | {"q": q}, layout="thd").out)(queries)
    for i in range(3):
        want = merge_states(list(outs[:, i]), list(lses[:, i]))
        assert_same_bits([result[i] for result in mapped], want)
        assert_same_bits([result[i] for result in stacked], want)
        assert_same_bits([deltas[i]], [cf.attn_bwd_preprocess(outs[0, i], outs[1, i])])
    for i in range(2):
        assert_same_bits([of_packed[i]], [call(packed | {"q": queries[i]}, layout="thd").out])


def test_vmap_over_nothing(jax_device: str) -> None:
    nothing = jnp.ones((0, 2, 5, 4, 8))
    for options in ({}, {"dropout_p": 0.5, "seed": 1}):
        function = jax.vmap(lambda x, o=options: jax.value_and_grad(lambda x: attention(x, x, x, **o).out.sum())(x))
        values, grads = function(nothing)
        assert (values.shape, grads.shape) == ((0,), nothing.shape)
    out, lse = jax.vmap(lambda x: tuple(attention(x, x, x)))(nothing)
    assert (out.shape, lse.shape) == (nothing.shape, (0, 2, 4, 5))


@pytest.mark.usefixtures("exact_products")
def test_remat_and_scan(jax_device: str, rng: Random) -> None:
    x = jnp.asarray(rng.standard_normal((2, 5, 2, 8)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((3, 8, 8)) / 3, jnp.float32)

    def layer(x: Any, weight: Any) -> tuple[Any, Any]:
        out, lse = attention(x @ weight, x, x, causal=True, deterministic=True)
        return x + out, lse

    def loop(x: Any, weights: Any) -> Any:
        lses = []
        for weight in weights:
            x, lse = layer(x, weight)
            lses.append(lse)
        return x, jnp.stack(lses)

    def loss(run: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda *given: sum(jnp.sin(y).sum() for y in run(*given)), argnums=(0, 1)))

    want = loss(loop)(x, weights)
    scanned = loss(lambda x, weights: jax.lax.scan(layer, x, weights))(x, weights)
    recomputed = loss(lambda x, weights: jax.lax.scan(jax.checkpoint(layer), x, weights))(x, weights)
    for got in (scanned, recomputed):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(host(a), host(b), rtol=2e-5, atol=2e-5)


def test_calls_that_are_equal_are_traced_once(jax_device: str, rng: Random) -> None:
    arrays = of_jax(problem(rng))
    traced = []

    @functools.partial(jax.jit, static_argnames="attn")
    def step(q: Any, k: Any, v: Any, attn: cf.Attention) -> Any:
        traced.append(attn)
        return attn.fwd(q, k, v).out

    q, k, v = (arrays[name] for name in "qkv")
    for _ in range(2):
        step(q, k, v, attn=cf.Attention(causal=True, window=(3, 0)))
    assert len(traced) == 1


def test_a_program_holds_one_call_of_ours_for_each(jax_device: str, rng: Random) -> None:
    arrays = of_jax(problem(rng))
    text = str(jax.make_jaxpr(jax.grad(lambda q: call(arrays | {"q": q}, causal=True).out.sum()))(arrays["q"]))
    assert text.count("= cupyflash[") == 2
    want = call(arrays, causal=True)
    with jax.disable_jit():
        assert_same_bits(jax.jit(lambda arrays: tuple(call(arrays, causal=True)))(arrays), want)


def test_gradients_have_the_dtypes_of_what_they_are_of(jax_device: str, rng: Random) -> None:
    """By jax.grad always; `grad_dtype` is for who calls the backward."""
    arrays = of_jax(problem(rng, DTYPES["bfloat16"]))
    q, k, v = (arrays[name] for name in "qkv")
    attn = cf.Attention(causal=True, out_dtype="float32", grad_dtype="float32")
    results = attn.fwd(q, k, v)
    assert results.out.dtype == jnp.float32
    grads = jax.grad(lambda *qkv: attn.fwd(*qkv).out.sum(), argnums=(0, 1, 2))(q, k, v)
    wide = attn.bwd(q, k, v, *results, jnp.ones_like(results.out))
    assert {grad.dtype for grad in grads} == {q.dtype} and {grad.dtype for grad in wide} == {results.out.dtype}
    for grad, exact in zip(grads, wide, strict=True):
        np.testing.assert_allclose(host(grad).astype(np.float32), host(exact), rtol=2**-7, atol=2**-7)


def test_each_result_alone_has_its_gradient(jax_device: str, rng: Random) -> None:
    arrays = of_jax(problem(rng))
    options = {"causal": True, "deterministic": True}
    of_out, of_lse, of_both = (
        jax.grad(lambda some, pick=pick: sum(x.sum() for x in pick(call(some, **options))))(arrays)
        for pick in (lambda r: r[:1], lambda r: r[1:], lambda r: r)
    )
    assert not host(of_lse["v"]).any()
    for name in NAMES:
        np.testing.assert_allclose(host(of_out[name] + of_lse[name]), host(of_both[name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_nans_are_found_where_jax_is_told_to_look(jax_device: str, transform: Any) -> None:
    x = jnp.ones((1, 3, 2, 4))
    function = transform(lambda x: attention(x, x, x).out.sum())
    with jax.debug_nans(True):
        function(x)
    bad = x.at[0, 0].set(jnp.nan)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        function(bad)


def test_donated_inputs_are_read_before_they_are_written(jax_device: str, rng: Random) -> None:
    x = jnp.asarray(rng.standard_normal((2, 65, 4, 8)), jnp.float32)
    want = attention(x, x * 2, x * 3, causal=True).out
    donating = jax.jit(lambda q, k, v: attention(q, k, v, causal=True).out, donate_argnums=(0, 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # XLA has one result to put into three
        assert_same_bits([donating(x + 0, x * 2, x * 3)], [want])


def test_integer_arguments_have_gradients_without_a_value(jax_device: str) -> None:
    x, live = jnp.ones((2, 3, 2, 4)), jnp.array([3, 1], jnp.int32)
    function = jax.grad(lambda x, live: attention(x, x, x, seqused_k=live).out.sum(), argnums=(0, 1), allow_int=True)
    assert [grad.dtype for grad in jax.jit(function)(x, live)] == [x.dtype, jax.dtypes.float0]


@pytest.mark.parametrize("spelling", [jnp.float32, jnp.bfloat16, jnp.dtype("float16"), np.float32, "bfloat16"], ids=str)
def test_dtypes_may_be_jaxs(spelling: Any) -> None:
    x = jnp.ones((1, 3, 2, 4), jnp.float16)
    for function in (attention, cf.attn_fwd):
        assert jax.eval_shape(lambda x, f=function: f(x, x, x, out_dtype=spelling).out, x).dtype == spelling
    with pytest.raises(TypeError, match=r"`out_dtype` is <class 'jax.numpy.int32'>"):
        attention(x, x, x, out_dtype=jnp.int32)


@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_empty_arrays(jax_device: str, batch: int, len_q: int, len_k: int) -> None:
    q, k = jnp.ones((batch, len_q, 4, 8)), jnp.ones((batch, len_k, 2, 8))
    (out, lse), back = jax.vjp(lambda q, k: tuple(attention(q, k, k)), q, k)
    assert (out.shape, lse.shape) == (q.shape, (batch, 4, len_q))
    assert not host(out).any() and (host(lse) == -np.inf).all()  # the rows that there are see no key
    dq, dk = back((jnp.ones_like(out), jnp.ones_like(lse)))
    assert (dq.shape, dk.shape) == (q.shape, k.shape)
    assert not host(dq).any() and not host(dk).any()


# Dropout.


def test_seeds_of_all_kinds(jax_device: str, rng: Random) -> None:
    x = jnp.asarray(rng.standard_normal((1, 9, 2, 4)), jnp.float32)
    drop = jax.jit(lambda seed, offset: attention(x, x, x, dropout_p=0.5, seed=seed, offset=offset).out)

    def of(seed: int, offset: int = 0) -> Any:
        return cf.attn_fwd(*[plain(jax_device)(x)] * 3, dropout_p=0.5, seed=seed, offset=offset).out

    for key in (jax.random.key(3), jax.random.PRNGKey(4), jax.random.key(5, impl="rbg")):
        low, high = (int(word) for word in jax.random.bits(key, (2,), jnp.uint32))
        assert_same_bits([drop(key, 0)], [of(low + (high << 32))])
    assert_same_bits([drop(jnp.uint32(2**32 - 1), jnp.array([2**32 - 1], jnp.uint32))], [of(2**32 - 1, 2**32 - 1)])
    assert_same_bits([drop(jnp.int32(7), jnp.int32(9))], [of(7, 9)])
    assert_same_bits([drop(jnp.int32(-7), jnp.int32(0))], [of(2**64 - 7)])
    assert_same_bits([attention(x, x, x, dropout_p=0.5, seed=2**64 - 1).out], [of(2**64 - 1)])
    assert not np.array_equal(drop(jnp.int32(7), jnp.int32(9)), drop(jnp.int32(7), jnp.int32(8)))


def test_keys_may_be_mapped_and_scanned_and_checkpoints_drop_the_same(jax_device: str, rng: Random) -> None:
    x, keys = jnp.asarray(rng.standard_normal((1, 9, 2, 4)), jnp.float32), jax.random.split(jax.random.key(1), 3)

    def drop(key: Any, x: Any = x) -> Any:
        return attention(x, x, x, dropout_p=0.5, seed=key, deterministic=True).out

    one_by_one = jnp.stack([drop(key) for key in keys])
    assert_same_bits(jax.jit(jax.vmap(drop))(keys), one_by_one)
    assert_same_bits(jax.lax.scan(lambda carry, key: (carry, drop(key)), 0, keys)[1], one_by_one)
    kept, again = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sin(f(keys[0], x)).sum()))(x) for f in (drop, jax.checkpoint(drop))
    )
    assert_same_bits([again], [kept])


@pytest.mark.usefixtures("x64")
def test_seeds_of_64_bits(jax_device: str, rng: Random) -> None:
    x = jnp.asarray(rng.standard_normal((1, 9, 2, 4)), jnp.float32)
    seed = 2**63 + 2**40 + 5
    want = attention(x, x, x, dropout_p=0.5, seed=seed, offset=2**32 - 1).out
    got = attention(x, x, x, dropout_p=0.5, seed=jnp.uint64(seed), offset=jnp.array([2**32 - 1])).out
    assert_same_bits([got], [want])


# Refusals.


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"causal": 1}, ValueError, "Attention: `causal` is 1"),
        ({"window": 3}, ValueError, "Attention: `window` is 3"),
        ({"dropout_p": 0.5}, ValueError, "attention: `seed` is None while `dropout_p` is 0.5"),
        ({"dropout_p": 0.5, "seed": -1}, ValueError, "attention: `seed` is -1"),
        ({"dropout_p": 0.5, "seed": 1.0}, TypeError, "attention: `seed` is 1.0"),
        ({"dropout_p": 0.5, "seed": 2**64}, ValueError, "an array of one element of int32, uint32, int64, uint64"),
        ({"dropout_p": 0.5, "seed": jnp.ones(3, int)}, ValueError, r"`seed` is an array int32\[3\]"),
        ({"dropout_p": 0.5, "seed": 1, "offset": jnp.ones(())}, TypeError, r"`offset` is an array float32\[\]"),
        ({"q_start": 2**31}, ValueError, "attention: `q_start` is 2147483648"),
        ({"q_start": np.zeros(1, np.int32)}, TypeError, "attention: `q_start` is of type ndarray"),
        ({"alibi_slopes": jnp.ones(3)}, ValueError, "attn_fwd: `alibi_slopes` has 3"),
        ({"sink": jnp.ones(2, jnp.bfloat16)}, TypeError, "attn_fwd: `sink` is bfloat16"),
        ({"bias": np.ones((3, 3))}, TypeError, r"`bias` is of type ndarray; .* jax.numpy.asarray\(bias\)"),
        ({"max_seqlen_q": jnp.ones((), int)}, TypeError, "attention: `max_seqlen_q` is Array"),
        ({"k": None}, TypeError, "attention: `k` is None"),
        ({"k": jax.random.split(jax.random.key(0), (1, 3, 2, 4))}, TypeError, "attn_fwd: `k` is key<fry>"),
        ({"q_start": jnp.ones(())}, TypeError, "attn_fwd: `q_start` is float32; int32 is accepted"),
        ({"cu_seqlens_q": jnp.zeros(2, int)}, ValueError, "attn_fwd: `cu_seqlens_q` is given"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_call_says_what_is_wrong(
    jax_device: str, wrong: Any, error: type[Exception], message: str, transform: Any
) -> None:
    def function(q: Any) -> Any:
        arguments = {"k": q, "v": q} | wrong
        return attention(q, arguments.pop("k"), arguments.pop("v"), **arguments).out.sum()

    with pytest.raises(error, match=message):
        transform(function)(jnp.ones((1, 3, 2, 4)))


def test_values_that_are_wrong_are_named(rng: Random) -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        packed = of_jax(problem(rng, layout="thd") | {"cu_seqlens_k": np.array([0, 8, 3], np.int32)})
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="`cu_seqlens_k` falls from 8 to 3"):
            call(packed, layout="thd").out.block_until_ready()


def test_arrays_of_other_libraries_beside_jaxs_are_refused() -> None:
    x, other = jnp.ones((1, 3, 2, 4)), np.ones((1, 3, 2, 4), np.float32)
    for arrays in ((x, other, other), (other, x, x)):
        with pytest.raises(TypeError, match="is of type ndarray; among JAX arrays only JAX arrays"):
            cf.attn_fwd(*arrays)
    with pytest.raises(TypeError, match=r"`lses\[0\]` is of type ndarray"):
        cf.merge_states([x], [np.ones((1, 2, 3), np.float32)])


def test_pages_without_a_gradient_only(jax_device: str, rng: Random) -> None:
    arrays = of_jax({name: problem(rng)[name] for name in "qkv"})
    pages = {"block_table": jnp.array([[1], [0]], jnp.int32), "seqused_k": jnp.array([7, 5], jnp.int32)}
    swapped = {name: arrays[name][::-1] for name in "kv"}
    got = jax.jit(lambda given: call(given))(arrays | pages)
    assert_same_bits(got[:1], [call(arrays | swapped | {"seqused_k": pages["seqused_k"]}).out])
    with pytest.raises(cf.UnsupportedError, match="`block_table` is given; with pages no gradient may be asked for"):
        jax.grad(lambda q: call(arrays | pages | {"q": q}).out.sum())(arrays["q"])


def test_second_and_forward_derivatives_are_refused() -> None:
    x = jnp.ones((1, 3, 2, 4))
    with pytest.raises(cf.UnsupportedError, match="attn_bwd: has no derivative of its own"):
        jax.grad(lambda y: jax.grad(lambda x: attention(x, x, x).out.sum())(y).sum())(x)
    with pytest.raises(cf.UnsupportedError, match="attn_bwd_preprocess: has no derivative of its own"):
        jax.grad(lambda y: cf.attn_bwd_preprocess(y, y).sum())(x)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: attention(x, x, x).out, (x,), (x,))


def test_slopes_have_no_gradient_rather_than_0(rng: Random) -> None:
    x, slopes = jnp.asarray(rng.standard_normal((1, 5, 2, 4)), jnp.float32), jnp.array([0.5, 0.25])

    def loss(x: Any, slopes: Any) -> Any:
        return attention(x, x, x, alibi_slopes=slopes, causal=True, deterministic=True).out.sum()

    with pytest.raises(cf.UnsupportedError, match=r"attention: `alibi_slopes` is differentiated; .*stop_gradient"):
        jax.grad(loss, argnums=(0, 1))(x, slopes)
    with pytest.raises(cf.UnsupportedError, match="attn_fwd: `alibi_slopes` is differentiated"):
        jax.grad(lambda slopes: cf.attn_fwd(x, x, x, alibi_slopes=slopes).lse.sum())(slopes)
    want = jax.grad(loss)(x, slopes)
    for function in (
        jax.jit(loss),
        jax.checkpoint(loss),
        lambda x, s: loss(x, jax.lax.stop_gradient(x[0, 0, :, 0]) * 0 + s),
    ):
        np.testing.assert_allclose(host(jax.grad(function)(x, slopes)), host(want), rtol=1e-6, atol=1e-6)


def test_an_old_jax_is_refused_by_name() -> None:
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.endswith("buffer_callback") else find(name, *rest)
import cupyflash.jax
"""
    root = Path(cf.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=120)
    assert "ImportError: cupyflash.jax needs JAX 0.6.2 or newer" in done.stderr
