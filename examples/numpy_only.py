"""Attention on plain NumPy arrays: forward, backward, and the same again from the keys split in two.

Every result is compared with an independent one; the exit code says whether all agree.
"""

from __future__ import annotations

import sys

import numpy as np

import cupyflash

LARGEST_ERROR = 1e-11  # float64 leaves about 1e-14; a wrong scale, mask or merge is off by 1e-3 or more
STEP = 1e-5  # of the finite difference, whose own error is near step² = 1e-10
LARGEST_SLOPE_ERROR = 1e-7  # relative


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention as in a textbook, with P [B, H, N, N] in memory; each KV head serves several query heads."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat(group, axis=2), v.repeat(group, axis=2)
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    lse = np.log(np.exp(scores).sum(axis=-1))
    return np.einsum("bhij,bjhd->bihd", np.exp(scores - lse[..., None]), v), lse


def main() -> int:
    rng = np.random.default_rng()
    length, half = 301, 140
    q, dout = rng.standard_normal((2, 2, length, 8, 64))  # [B, N, Hq, D] each
    k, v = rng.standard_normal((2, 2, length, 2, 64))  # [B, N, Hkv, D] each
    errors: dict[str, float] = {}

    out, lse = cupyflash.attn_fwd(q, k, v, causal=True)
    plain_out, plain_lse = plain_attention(q, k, v)
    errors["out against softmax(q k' / sqrt(D)) v"] = abs(out - plain_out).max()
    errors["lse against log(sum(exp(scores)))"] = abs(lse - plain_lse).max()

    # Two sets of keys, each with its place in the sequence; LSE is all that a merge needs to weigh them.
    parts = [slice(0, half), slice(half, length)]
    shards = [cupyflash.attn_fwd(q, k[:, p], v[:, p], causal=True, q_start=0, k_start=p.start) for p in parts]
    merged = cupyflash.merge_states([shard.out for shard in shards], [shard.lse for shard in shards])
    errors["out merged from two sets of keys"] = abs(merged.out - out).max()
    errors["lse merged from two sets of keys"] = abs(merged.lse - lse).max()

    # The backward takes the whole's out and lse, also for one set of keys: dq is a sum, dk and dv stand side by side.
    dq, dk, dv = cupyflash.attn_bwd(q, k, v, out, lse, dout, causal=True)
    grads = [
        cupyflash.attn_bwd(q, k[:, p], v[:, p], out, lse, dout, causal=True, q_start=0, k_start=p.start) for p in parts
    ]
    errors["dq summed over two sets of keys"] = abs(grads[0].dq + grads[1].dq - dq).max()
    errors["dk of two sets of keys"] = abs(np.concatenate([grad.dk for grad in grads], axis=1) - dk).max()
    errors["dv of two sets of keys"] = abs(np.concatenate([grad.dv for grad in grads], axis=1) - dv).max()

    # Where only the merged result has a gradient, the merge's own backward gives each state's, and dlse carries it on.
    douts, dlses = cupyflash.merge_states_bwd(
        [shard.out for shard in shards], [shard.lse for shard in shards], merged.out, merged.lse, dout
    )
    dq_of_states = sum(
        cupyflash.attn_bwd(
            q, k[:, p], v[:, p], *shard, dout_s, dlse=dlse_s, causal=True, q_start=0, k_start=p.start
        ).dq
        for p, shard, dout_s, dlse_s in zip(parts, shards, douts, dlses, strict=True)
    )  # fmt: skip
    errors["dq through the merge's own backward"] = abs(dq_of_states - dq).max()

    # Sequences of different lengths, end to end in one array of rows.
    offsets = np.array([0, 100, 100, length], np.int32)
    packed = cupyflash.attn_fwd(q[0], k[0], v[0], layout="thd", causal=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    last = cupyflash.attn_fwd(q[:1, 100:], k[:1, 100:], v[:1, 100:], causal=True)
    errors["the last of three packed sequences"] = abs(packed.out[100:] - last.out[0]).max()

    # The slope of sum(out * dout) along a random direction, from the gradients and from two more forwards.
    tq, tk, tv = rng.standard_normal(q.shape), rng.standard_normal(k.shape), rng.standard_normal(v.shape)
    ahead, behind = (cupyflash.attn_fwd(q + h * tq, k + h * tk, v + h * tv, causal=True).out for h in (STEP, -STEP))
    measured = ((ahead - behind) * dout).sum() / (2 * STEP)
    slope = (dq * tq).sum() + (dk * tk).sum() + (dv * tv).sum()
    scale = np.sqrt((dq**2).sum() + (dk**2).sum() + (dv**2).sum())
    slope_error = abs(slope - measured) / scale

    for name, error in errors.items():
        print(f"{name:<40} largest difference {error:.1e}")
    print(f"{'slope of a loss, gradients against steps':<40} relative difference {slope_error:.1e}")
    is_right = all(error <= LARGEST_ERROR for error in errors.values()) and slope_error <= LARGEST_SLOPE_ERROR
    print("all agree" if is_right else "NOT ALL AGREE")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
