"""Sequences that begin with one long prompt decode a token each: the prompt is attended once for all of them.

Checked against calls on every sequence's keys written out, values and gradients.
"""

from __future__ import annotations

import sys

import numpy as np

import cupyflash as cf

PROMPT, OWN = 2000, (1, 40, 7, 120)  # keys of all sequences, and of each
HEADS_Q, HEADS_KV, WIDTH = 8, 2, 64
ATTENTION = cf.Attention(layout="thd", causal=True)

LARGEST_ERROR = 2e-5  # float32: the same sums in another order


def main() -> int:
    rng = np.random.default_rng(0)
    batch, offsets = len(OWN), np.cumsum([0, *OWN])
    q, dout = rng.standard_normal((2, batch, HEADS_Q, WIDTH), dtype=np.float32)
    prompt = rng.standard_normal((2, PROMPT, HEADS_KV, WIDTH), dtype=np.float32)  # k and v
    own = rng.standard_normal((2, offsets[-1], HEADS_KV, WIDTH), dtype=np.float32)

    levels = [
        cf.CascadeLevel(*prompt, groups=[batch], cu_seqlens_k=np.array([0, PROMPT])),
        cf.CascadeLevel(*own, cu_seqlens_k=offsets),
    ]
    options = {"attention": ATTENTION, "cu_seqlens_q": np.arange(batch + 1)}
    out, lse = cf.attn_cascade(q, levels, **options)
    grads = cf.attn_cascade_bwd(q, levels, out, lse, dout, **options)

    keys, values = (
        np.concatenate([x for b in range(batch) for x in (shared, each[offsets[b] : offsets[b + 1]])])
        for shared, each in zip(prompt, own, strict=True)
    )
    lengths = {"cu_seqlens_q": np.arange(batch + 1), "cu_seqlens_k": np.cumsum([0, *(PROMPT + n for n in OWN)])}
    flat = ATTENTION.fwd(q, keys, values, **lengths)
    flat_grads = ATTENTION.bwd(q, keys, values, *flat, dout, **lengths)
    starts = lengths["cu_seqlens_k"][:-1]
    flat_dk = sum(flat_grads.dk[start : start + PROMPT] for start in starts)  # every sequence's share of the prompt's

    pairs = {"out": (out, flat.out), "dq": (grads.dq, flat_grads.dq), "dk of the prompt": (grads.dks[0], flat_dk)}
    errors = {name: float(np.abs(ours - theirs).max()) for name, (ours, theirs) in pairs.items()}
    is_close = all(error <= LARGEST_ERROR for error in errors.values())
    listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"{PROMPT + offsets[-1]:,} keys instead of {len(keys):,}: largest differences {listed}: ", end="")
    print("good" if is_close else "TOO FAR APART")
    return 0 if is_close else 1


if __name__ == "__main__":
    sys.exit(main())
