"""One long sequence over several JAX devices: a ring in `shard_map`, beside one call on the whole.

Each device holds a part of the queries, keys and values. Keys and values go round by `ppermute`, and each device merges
what its queries see of them. The backward is a ring too: given the global out and lse, `attn_bwd` on any part of the
keys is exactly that part's gradient, so that sums of dk and dv travel with their keys and no device keeps more than two
parts. Where JAX has one device, a CPU is made to look like four.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np

import cupyflash as cf

LENGTH, HEADS_Q, HEADS_KV, WIDTH = 1000, 4, 2, 32
ATTENTION = cf.Attention(causal=True, window=(300, 0))  # of positions in the whole sequence

LARGEST_ERROR = 2e-5  # float32: the same sums in another order


def positions(axis: str, size: int, step: int, length: int) -> dict[str, Any]:
    """Where this device's queries stand, and the keys that it has in this step."""
    own = jax.lax.axis_index(axis)
    return {"q_start": own * length, "k_start": (own - step) % size * length}


def pass_on(axis: str, size: int, *arrays: Any) -> list[Any]:
    """To the next device, from the one before."""
    return [jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)]) for x in arrays]


def attend(attention: cf.Attention, axis: str, size: int, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """(out, lse) of this device's queries over the keys of all. Shards of q are of one length, and as long as k's."""
    partial = attention.replace(out_dtype="float32")
    merged: Any = None
    for step in range(size):
        part = partial.fwd(q, k, v, **positions(axis, size, step, q.shape[1]))
        merged = part if merged is None else cf.merge_states(*zip(merged, part, strict=True))
        k, v = pass_on(axis, size, k, v)
    out, lse = merged
    return out.astype(q.dtype), lse


def ring_fwd(attention: cf.Attention, axis: str, size: int, q: Any, k: Any, v: Any) -> Any:
    out, lse = ring(attention, axis, size, q, k, v)
    return (out, lse), (q, k, v, out, lse)


def ring_bwd(attention: cf.Attention, axis: str, size: int, saved: Any, cotangents: Any) -> Any:
    q, k, v, out, lse = saved
    dout, dlse = cotangents
    partial, delta = attention.replace(grad_dtype="float32"), cf.attn_bwd_preprocess(out, dout, dlse)
    dq, dk, dv = (jnp.zeros_like(x, jnp.float32) for x in (q, k, v))
    for step in range(size):
        where = positions(axis, size, step, q.shape[1])
        grads = partial.bwd(q, k, v, None, lse, dout, delta=delta, **where)
        dq, dk, dv = (total + grad for total, grad in zip((dq, dk, dv), grads, strict=True))
        k, v, dk, dv = pass_on(axis, size, k, v, dk, dv)  # after the last step dk and dv are at home
    return tuple(grad.astype(x.dtype) for grad, x in zip((dq, dk, dv), (q, k, v), strict=True))


ring: Any = jax.custom_vjp(attend, nondiff_argnums=(0, 1, 2))
ring.defvjp(ring_fwd, ring_bwd)


def over_all_devices(attention: cf.Attention) -> Any:
    """The ring as a function of whole arrays, cut along their second axis."""
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("ring",))
    rows, row = jax.sharding.PartitionSpec(None, "ring"), jax.sharding.PartitionSpec(None, None, "ring")
    of_one = functools.partial(ring, attention, "ring", len(devices))
    return jax.shard_map(of_one, mesh=mesh, in_specs=rows, out_specs=(rows, row))


def loss(function: Any) -> Any:
    def of(*arrays: Any) -> Any:
        out, lse = function(*arrays)
        return jnp.sin(out).sum() + 0.1 * lse.sum(), out

    return jax.jit(jax.value_and_grad(of, argnums=(0, 1, 2), has_aux=True))


def main() -> int:
    devices, rng = jax.devices(), np.random.default_rng(0)
    length = LENGTH // len(devices) * len(devices)
    heads = HEADS_Q, HEADS_KV, HEADS_KV
    q, k, v = (jnp.asarray(rng.standard_normal((1, length, n, WIDTH)), jnp.float32) for n in heads)
    (_, out), grads = loss(over_all_devices(ATTENTION))(q, k, v)
    (_, right), right_grads = loss(ATTENTION.fwd)(q, k, v)
    pairs = zip(("out", "dq", "dk", "dv"), (out, *grads), (right, *right_grads), strict=True)
    errors = {name: float(np.abs(np.asarray(ours) - np.asarray(theirs)).max()) for name, ours, theirs in pairs}
    is_close = all(error <= LARGEST_ERROR for error in errors.values())
    listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"{len(devices)} {devices[0].platform} devices: largest differences from one call {listed}: "
          f"{'good' if is_close else 'TOO FAR APART'}")  # fmt: skip
    return 0 if is_close else 1


if __name__ == "__main__":
    sys.exit(main())
