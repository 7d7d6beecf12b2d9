"""Tests for a JAX of several devices, which a process has from its start or not: `test_jax_sharded` starts one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cupyflash as cf
from cupyflash.jax import attention, dot_product_attention, merge_states
from examples.ring_jax import over_all_devices

P = jax.sharding.PartitionSpec
Random = np.random.Generator


@pytest.fixture
def mesh() -> Any:
    devices = jax.devices()
    assert len(devices) >= 2
    return jax.sharding.Mesh(np.array(devices), ("x",))


def draw(rng: Random, *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[Any]:
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def results_and_gradients(function: Callable[..., Any], arrays: list[Any]) -> list[Any]:
    def loss(*arrays: Any) -> Any:
        results = jax.tree.leaves(function(*arrays))
        return sum((jnp.arange(1, x.size + 1).reshape(x.shape) * jnp.sin(x)).mean() for x in results), results

    grads, results = jax.jit(jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True))(*arrays)
    return [*results, *grads]


def assert_near(got: list[Any], want: list[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-5)


def of_rows(q: Any, k: Any, v: Any, sink: Any) -> Any:
    return tuple(attention(q, k, v, sink=sink, causal=True, deterministic=True))


@pytest.mark.parametrize("check_vma", [True, False])
def test_batch_over_devices(mesh: Any, check_vma: bool, rng: Random) -> None:
    """The sink is the same on all devices, and its gradient the sum over them."""
    size = mesh.size
    arrays = draw(rng, (2 * size, 5, 4, 8), (2 * size, 7, 2, 8), (2 * size, 7, 2, 6), (4,))
    specs = P("x"), P("x"), P("x"), P()
    sharded = jax.shard_map(of_rows, mesh=mesh, in_specs=specs, out_specs=(P("x"), P("x")), check_vma=check_vma)
    assert_near(results_and_gradients(sharded, arrays), results_and_gradients(of_rows, arrays))
    assert_near(list(sharded(*arrays)), list(of_rows(*arrays)))  # eager


def test_heads_over_devices(mesh: Any, rng: Random) -> None:
    size = mesh.size
    arrays = draw(rng, (3, 5, 2 * size, 8), (3, 7, size, 8), (3, 7, size, 6), (2 * size,))
    heads = P(None, None, "x")
    sharded = jax.shard_map(of_rows, mesh=mesh, in_specs=(heads, heads, heads, P("x")), out_specs=(heads, P(None, "x")))
    assert_near(results_and_gradients(sharded, arrays), results_and_gradients(of_rows, arrays))


def test_queries_over_devices_beside_keys_of_all(mesh: Any, rng: Random) -> None:
    """Keys vary less than queries do; their gradient is the sum over devices."""
    size = mesh.size
    arrays = draw(rng, (2, 3 * size, 4, 8), (2, 3 * size, 2, 8), (2, 3 * size, 2, 8))

    def whole(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, causal="top-left").out

    def part(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, causal=True, q_start=jax.lax.axis_index("x") * 3).out

    rows = P(None, "x")
    sharded = jax.shard_map(part, mesh=mesh, in_specs=(rows, P(), P()), out_specs=rows)
    assert_near(results_and_gradients(sharded, arrays), results_and_gradients(whole, arrays))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "window": (11, 0)}, {"window": (3, 9), "softcap": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_ring_is_one_call_on_the_whole(options: dict[str, Any], dtype: str, rng: Random) -> None:
    size, attn = len(jax.devices()), cf.Attention(**options, deterministic=True)
    arrays = draw(rng, (2, 7 * size, 6, 8), (2, 7 * size, 2, 8), (2, 7 * size, 2, 5), dtype=dtype)
    got = results_and_gradients(over_all_devices(attn), arrays)
    want = results_and_gradients(lambda *qkv: tuple(attn.fwd(*qkv)), arrays)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        limit = 4 * float(jnp.finfo(dtype).eps) * max(np.abs(b).max(), 1)  # each side rounds out and a gradient once
        assert np.abs(a - b).max() <= limit + 2e-5


def test_a_ring_by_automatic_derivatives(mesh: Any, rng: Random) -> None:
    """`attention` and `merge_states` have gradients, so a loop over them has too, scanned."""
    size, length = mesh.size, 5
    arrays = draw(rng, (2, length * size, 4, 8), (2, length * size, 2, 8), (2, length * size, 2, 6))
    options = {"causal": True, "window": (8, 0)}

    def ring(q: Any, k: Any, v: Any) -> Any:
        own = jax.lax.axis_index("x")

        def step(held: Any, number: Any) -> Any:
            state = attention(q, *held, q_start=own * length, k_start=(own - number) % size * length, **options)
            return [jax.lax.ppermute(x, "x", [(i, (i + 1) % size) for i in range(size)]) for x in held], state

        _, states = jax.lax.scan(step, [k, v], jnp.arange(size))
        return tuple(merge_states(states.out, states.lse))

    rows = P(None, "x")
    sharded = jax.shard_map(ring, mesh=mesh, in_specs=rows, out_specs=(rows, P(None, None, "x")))
    want = results_and_gradients(lambda *qkv: tuple(attention(*qkv, **options)), arrays)
    assert_near(results_and_gradients(sharded, arrays), want)


def test_jaxs_own_signature_over_devices(mesh: Any, rng: Random) -> None:
    arrays = draw(rng, (2 * mesh.size, 5, 4, 8), (2 * mesh.size, 5, 4, 8), (2 * mesh.size, 5, 4, 8), (1, 4, 5, 5))

    def function(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return dot_product_attention(q, k, v, bias, is_causal=True)

    sharded = jax.shard_map(function, mesh=mesh, in_specs=(P("x"), P("x"), P("x"), P()), out_specs=P("x"))
    assert_near(results_and_gradients(sharded, arrays), results_and_gradients(function, arrays))


def test_arrays_on_several_devices_are_refused_outside_shard_map(mesh: Any, rng: Random) -> None:
    [x] = draw(rng, (mesh.size, 3, 2, 4))
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("x")))
    with pytest.raises(TypeError, match=rf"`q` lies on {mesh.size} devices; inside jax.shard_map"):
        attention(sharded, sharded, sharded)
    explicit = jax.make_mesh((mesh.size,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    typed = jax.device_put(x, jax.sharding.NamedSharding(explicit, P("x")))
    with pytest.raises(TypeError, match=r"attn_fwd: an array is sharded as .*x"):
        jax.jit(attention)(typed, typed, typed)
    mapped = jax.jit(jax.shard_map(lambda x: attention(x, x, x).out, mesh=explicit, in_specs=P("x"), out_specs=P("x")))
    assert_near([mapped(typed)], [attention(x, x, x).out])
    far = jax.device_put(x, jax.devices()[1])
    with pytest.raises(TypeError, match=r"`k` is on .* and `q` on .*; all arrays of a call must be on one device"):
        attention(x, far, x)
    seed = jax.random.key(0)  # on the first device
    there = attention(far, far, far, q_start=5, k_start=2, causal=True, dropout_p=0.2, seed=seed).out
    assert there.devices() == {jax.devices()[1]}
    assert_near([there], [attention(x, x, x, q_start=5, k_start=2, causal=True, dropout_p=0.2, seed=seed).out])


def test_a_call_is_made_where_its_arrays_are(mesh: Any, rng: Random) -> None:
    """Those that were put on a device decide, seeds and starts among them; nothing goes from one to another."""
    first, last = mesh.devices.flat[0], mesh.devices.flat[-1]
    [x] = draw(rng, (2, 5, 4, 8))
    x = jax.device_put(x, last)
    key, number = jax.random.key(1), jnp.int32(1)
    step = jax.value_and_grad(lambda x, key: attention(x, x, x, dropout_p=0.5, seed=key, q_start=2).out.sum())
    for result in step(x, jax.device_put(key, last)):
        assert result.devices() == {last}
    for name, given in {"seed": key, "offset": number, "q_start": number}.items():
        arguments = {"seed": 1, name: jax.device_put(given, first)}
        with pytest.raises(
            TypeError, match=f"attention: `{name}` is on .* and `q` on .*; all arrays of a call must be"
        ):
            attention(x, x, x, dropout_p=0.5, **arguments)
