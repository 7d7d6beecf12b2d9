"""Causal attention with ALiBi that keeps P: what `layers.attention` is compared with."""

from __future__ import annotations

from types import ModuleType

from .layers import Array


def attention(xp: ModuleType, qkv: Array, slopes: Array) -> tuple[Array, Array]:
    """As `layers.attention`, but keeps P [B, H, N, N] where that keeps lse."""
    q, k, v = _heads_first(qkv)
    position = xp.arange(q.shape[2], dtype=slopes.dtype)
    distance = position[:, None] - position  # [N, N], negative where a key comes after its query
    penalty = xp.where(distance < 0, xp.inf, distance)
    p = q @ k.swapaxes(2, 3)
    p *= q.shape[-1] ** -0.5
    for head, slope in enumerate(slopes):  # one at a time: together they are as large as P
        p[:, head] -= slope * penalty
    p -= p.max(axis=-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    return xp.ascontiguousarray((p @ v).swapaxes(1, 2)), p


def attention_bwd(xp: ModuleType, dout: Array, qkv: Array, out: Array, p: Array) -> Array:
    """dqkv [B, N, 3, H, D]: dV = Pᵀ dO, dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)), dQ = s dS K, dK = s dSᵀ Q."""
    q, k, v = _heads_first(qkv)
    delta = (dout * out).sum(axis=-1).swapaxes(1, 2)[..., None]
    dout = dout.swapaxes(1, 2)
    dqkv = xp.empty_like(qkv)
    dq, dk, dv = _heads_first(dqkv)
    dv[...] = p.swapaxes(2, 3) @ dout
    ds = dout @ v.swapaxes(2, 3)
    ds -= delta
    ds *= p
    ds *= q.shape[-1] ** -0.5
    dq[...] = ds @ k
    dk[...] = ds.swapaxes(2, 3) @ q
    return dqkv


def _heads_first(qkv: Array) -> tuple[Array, Array, Array]:
    """Views q, k, v [B, H, N, D] of qkv [B, N, 3, H, D]."""
    return qkv[:, :, 0].swapaxes(1, 2), qkv[:, :, 1].swapaxes(1, 2), qkv[:, :, 2].swapaxes(1, 2)
