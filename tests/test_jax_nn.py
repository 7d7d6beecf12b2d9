"""`dot_product_attention` says what `jax.nn`'s says, values and gradients, over a table of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax: Any = pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("jax.experimental.buffer_callback", reason="jax is older than 0.6.2")

import jax.numpy as jnp  # noqa: E402

from cupyflash.jax import dot_product_attention  # noqa: E402
from cupyflash.testing import assert_close, reference, reference_bwd, rounding_terms  # noqa: E402

JAXS_OWN = jax.nn.dot_product_attention
Random = np.random.Generator

# Shapes of query, key and value.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "as many queries as keys": ((2, 7, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8)),
    "grouped, fewer queries": ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)),
    "one key head, more queries": ((2, 9, 4, 8), (2, 6, 1, 8), (2, 6, 1, 8)),
    "three axes": ((5, 4, 8), (7, 2, 8), (7, 2, 8)),
}
BIASES: dict[str, tuple[int, ...] | None] = {"no bias": None, "whole": (1, 1, 1, 1), "of heads": (0, 1, 0, 1)}
MASKS: dict[str, tuple[int, ...] | None] = {"no mask": None, "whole": (1, 1, 1, 1), "of rows": (0, 0, 1, 1)}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "scale": 0.3},
    {"local_window_size": 2, "lengths": True},  # alone it was ignored by older JAXs
    {"local_window_size": (3, 1), "is_causal": True},
    {"lengths": True},
    {"lengths": True, "is_causal": True, "local_window_size": (4, 0)},
]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """JAX has float64, and no TF32, only where it is told to."""
    jax.config.update("jax_enable_x64", True)
    with jax.default_matmul_precision("highest"):
        yield
    jax.config.update("jax_enable_x64", False)


def drawn(rng: Random, which: tuple[int, ...] | None, scores: tuple[int, ...], *, is_mask: bool) -> Any:
    """Of the axes that are asked for, the others 1."""
    if which is None:
        return None
    shape = tuple(extent if there else 1 for extent, there in zip(scores, which, strict=True))
    if not is_mask:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)
    # No row without a key: JAX gives those the mean of all values. The key of one's own number is seen.
    own = np.arange(shape[-2])[:, None] % scores[-1] == np.arange(shape[-1])
    return jnp.asarray((rng.random(shape) < 0.6) | own | (np.arange(shape[-1]) == 0))


def run(function: Any, arrays: list[Any], dout: Any, **options: Any) -> tuple[Any, ...]:
    """out, then the gradients of all arrays."""

    def step(*arrays: Any) -> Any:
        query, key, value, *bias = arrays
        return function(query, key, value, *bias, **options)

    out, back = jax.vjp(step, *arrays)
    return out, *back(dout)


# Where a row may see no key JAX has another value; so masks stand alone, and windows where there are keys enough.
CASES = [
    *((shapes, "no bias", "no mask", options) for shapes in SHAPES for options in OPTIONS
      if "local_window_size" not in options or "more queries" not in shapes),
    *((shapes, bias, mask, {}) for shapes in SHAPES for bias in BIASES for mask in MASKS if bias != mask),
    *(("grouped, fewer queries", "whole", "no mask", options) for options in OPTIONS[1:]),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "bias", "mask", "options"), CASES, ids=str)
def test_values_and_gradients_are_jaxs(
    jax_device: str, shapes: str, bias: str, mask: str, options: dict[str, Any], rng: Random
) -> None:
    query, key, _ = SHAPES[shapes]
    batch, len_q, len_k = (1 if len(query) == 3 else query[0]), query[-3], key[-3]
    scores = batch, query[-2], len_q, len_k
    options = dict(options)
    if options.pop("lengths", False):
        low_k = len_k if "local_window_size" in options else 1
        options["key_value_seq_lengths"] = jnp.asarray(rng.integers(low_k, len_k + 1, batch), jnp.int32)
        options["query_seq_lengths"] = jnp.asarray(rng.integers(0, len_q + 1, batch), jnp.int32)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in SHAPES[shapes]]
    added = drawn(rng, BIASES[bias], scores, is_mask=False)
    arrays += [] if added is None else [added]
    options["mask"] = drawn(rng, MASKS[mask], scores, is_mask=True)
    dout = jnp.asarray(rng.standard_normal(query), jnp.float32)
    got, want = run(dot_product_attention, arrays, dout, **options), run(JAXS_OWN, arrays, dout, **options)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_16_bit_results_are_as_near_as_jaxs(jax_device: str, dtype: str, rng: Random) -> None:
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in SHAPES["grouped, fewer queries"]]
    dout = jnp.asarray(rng.standard_normal(arrays[0].shape), dtype)
    *qkv, numpy_dout = map(np.asarray, (*arrays, dout))
    out, _ = reference(*qkv, causal="top-left")  # JAX's softmax is never float64
    exact = out, *reference_bwd(*qkv, numpy_dout, causal="top-left").values()
    terms = rounding_terms(*qkv, numpy_dout, causal="top-left")
    theirs = run(JAXS_OWN, arrays, dout, is_causal=True)
    ours = jax.jit(lambda *arrays: run(dot_product_attention, list(arrays), dout, is_causal=True))(*arrays)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), ours, exact, theirs, strict=True):
        assert_close(np.asarray(a), b, np.asarray(c, np.float64), dtype=a.dtype, terms=terms[name], name=name)


def test_a_residual_is_jaxs(jax_device: str, rng: Random) -> None:
    if "return_residual" not in inspect.signature(JAXS_OWN).parameters:
        pytest.skip("this JAX has no residuals")
    for shapes in SHAPES.values():
        arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
        _, got = dot_product_attention(*arrays, is_causal=True, return_residual=True)
        _, want = JAXS_OWN(*arrays, is_causal=True, return_residual=True)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_row_without_keys_is_zero(jax_device: str, rng: Random) -> None:
    x = jnp.asarray(rng.standard_normal((2, 5, 2, 8)), jnp.float32)
    mask = np.ones((1, 1, 5, 5), bool)
    graph = jax.make_jaxpr(jax.grad(lambda x: dot_product_attention(x, x, x, mask=mask).sum()))(x)
    assert "bias_grad=False" in str(graph)
    mask[..., 3, :] = False
    out, dq, dk, dv = run(dot_product_attention, [x, x, x], jnp.ones_like(x), mask=mask)
    assert not out[:, 3].any() and not dq[:, 3].any()
    assert np.isfinite(np.asarray([dk, dv])).all()


def test_arrays_may_be_numpys(rng: Random) -> None:
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES["three axes"]]
    got = dot_product_attention(*arrays, mask=np.ones((1, 1, 5, 7), bool))
    np.testing.assert_allclose(got, JAXS_OWN(*arrays), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"query": jnp.ones((3, 4))}, ValueError, "`query` has 2 axes"),
        ({"mask": jnp.ones((1, 1, 3, 3))}, TypeError, "`mask` is float32; bool is accepted"),
        ({"mask": jnp.ones((3, 3), bool), "bias": jnp.ones((3, 3), int)}, TypeError, "`bias` is int32; a float dtype"),
        ({"is_causal": "top-left"}, TypeError, "`is_causal` is 'top-left'"),
        ({"local_window_size": (-1, 2)}, ValueError, "`local_window_size` is -1; None, an int or a pair"),
        ({"local_window_size": (1, 2, 3)}, ValueError, r"`local_window_size` is \(1, 2, 3\)"),
        ({"local_window_size": (2.0, 1)}, TypeError, "`local_window_size` is 2.0"),
        ({"query_seq_lengths": jnp.ones(1, jnp.float32)}, TypeError, r"`query_seq_lengths` is float32\[1\]"),
        ({"key_value_seq_lengths": jnp.ones(2, jnp.int32)}, ValueError, r"int32\[2\]; int32\[1\] is accepted"),
        ({"implementation": "xla"}, TypeError, "implementation"),
    ],
    ids=str,
)
def test_a_wrong_call_says_what_is_wrong(wrong: Any, error: type[Exception], message: str) -> None:
    x = jnp.ones((1, 3, 2, 4), jnp.float32)
    arguments: dict[str, Any] = {"query": x, "key": x, "value": x} | wrong
    with pytest.raises(error, match=message):
        dot_product_attention(**arguments)
