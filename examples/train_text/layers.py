"""The layers, each with its gradient beside it.

Activations are [rows, width] with rows = batch * length; only attention looks at them as [B, N, H, D]. A function
ending in `_bwd` takes the gradient of its layer's result, then what the layer was given and kept, and returns gradients
in the order of the layer's arguments. `xp` is NumPy or CuPy.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import cupyflash

Array = Any  # numpy.ndarray or cupy.ndarray

NORM_EPS = 1e-5  # keeps a row of zeros finite


def linear(x: Array, weight: Array) -> Array:
    """y = x W"""
    return x @ weight


def linear_bwd(dy: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    """dx = dy Wᵀ, dW = xᵀ dy"""
    return dy @ weight.T, x.T @ dy


def rms_norm(x: Array, gain: Array) -> tuple[Array, Array]:
    """y = g x r with r = (mean(x²) + eps)^-1/2 of each row; also returns r [rows, 1]."""
    inverse_rms = ((x * x).mean(axis=-1, keepdims=True) + NORM_EPS) ** -0.5
    return x * inverse_rms * gain, inverse_rms


def rms_norm_bwd(dy: Array, x: Array, gain: Array, inverse_rms: Array) -> tuple[Array, Array]:
    """With n = x r: dg = Σ_rows dy n, dn = g dy, dx = r (dn - n mean(dn n))."""
    normed = x * inverse_rms
    dnormed = dy * gain
    dx = inverse_rms * (dnormed - normed * (dnormed * normed).mean(axis=-1, keepdims=True))
    return dx, (dy * normed).sum(axis=0)


def relu_squared(x: Array) -> Array:
    """y = max(x, 0)²: smooth at zero, and cheap where tanh or erf is not."""
    return x * x * (x > 0)


def relu_squared_bwd(dy: Array, x: Array) -> Array:
    """dx = 2 max(x, 0) dy"""
    return 2 * x * (x > 0) * dy


def attention(qkv: Array, slopes: Array) -> tuple[Array, Array]:
    """Causal attention of qkv [B, N, 3, H, D] with ALiBi: out [B, N, H, D] and lse [B, H, N], natural log.

    q, k and v are views of one array: cupyflash reads them where they are. They may be narrower than the slopes, whose
    dtype is the model's: out has that, and so has dqkv below.
    """
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    out, lse = cupyflash.attn_fwd(q, k, v, causal=True, alibi_slopes=slopes, out_dtype=slopes.dtype)
    return out, lse


def attention_bwd(xp: ModuleType, dout: Array, qkv: Array, slopes: Array, out: Array, lse: Array) -> Array:
    """dqkv [B, N, 3, H, D]; P is recomputed from q, k and lse, and the three gradients are written in place."""
    dqkv = xp.empty(qkv.shape, slopes.dtype)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    dq, dk, dv = dqkv[:, :, 0], dqkv[:, :, 1], dqkv[:, :, 2]
    cupyflash.attn_bwd(
        q, k, v, out, lse, dout, causal=True, alibi_slopes=slopes, grad_dtype=slopes.dtype, dq=dq, dk=dk, dv=dv
    )
    return dqkv


def embedding(tokens: Array, table: Array) -> Array:
    """y = table[tokens], tokens [rows]"""
    return table[tokens]


def embedding_bwd(xp: ModuleType, dy: Array, tokens: Array, table: Array) -> Array:
    """dtable: row t is the sum of dy where token t stands. As a product, it needs no atomics on a GPU."""
    one_hot = (tokens == xp.arange(len(table))[:, None]).astype(dy.dtype)
    return one_hot @ dy


def cross_entropy(xp: ModuleType, logits: Array, targets: Array) -> tuple[Array, Array]:
    """loss = -mean log softmax(logits)[target], in nats; also returns log softmax [rows, vocabulary]."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p = shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))
    return -log_p[xp.arange(len(targets)), targets].mean(), log_p


def cross_entropy_bwd(xp: ModuleType, targets: Array, log_p: Array) -> Array:
    """dlogits = (softmax(logits) - one_hot(target)) / rows"""
    dlogits = xp.exp(log_p)
    dlogits[xp.arange(len(targets)), targets] -= 1
    return dlogits / len(targets)
