"""The ring: keys and values go round, and each rank merges what its queries see of them."""

from __future__ import annotations

import functools
from typing import Any

from cupyflash._attention import Attention, AttnGrads, AttnOutput
from cupyflash.parallel._problem import Problem, add
from cupyflash.parallel._shards import Shards
from cupyflash.parallel._transport import Message, Transport


def ring_fwd(
    q: Any, k: Any, v: Any, *, transport: Transport, shards: Shards, attention: Attention,
    shards_k: Shards | None = None, alibi_slopes: Any = None, sink: Any = None, seed: Any = None, offset: Any = 0,
) -> AttnOutput:  # fmt: skip
    """Attention of this rank's queries over the keys of all ranks, which pass by.

    In step t rank r has the keys of rank r − t. It sends them on to rank r + 1, and while they travel it computes their
    partial result in float32 and merges it. Keys that none of its queries sees cost it no computing; steps in which no
    rank sees any, as with a window, are left out. After Liu, Zaharia and Abbeel, Ring Attention with Blockwise
    Transformers for Near-Infinite Context (2023); `Shards(..., zigzag=True)` balances a causal mask.

    Parameters
    ----------
    q : array [B, Nq_r, Hq, D], float16 | bfloat16 | float32 | float64
        This rank's queries, as `shard` makes them. The axes are those of layout "bshd"; see `Attention`.
    k, v : array [B, Nk_r, Hkv, D] and [B, Nk_r, Hkv, Dv], q's dtype
        This rank's keys and values.
    transport : Transport
        Of arrays like these; see `docs/parallel.md`.
    shards : Shards
        How queries lie over the ranks, and keys too unless `shards_k` says otherwise.
    attention : Attention
        The options. Positions are those of the whole sequences: masks, windows and dropout mean what they mean there.
    alibi_slopes : array [Hq] or [B, Hq], float32 (float64 with float64)
    sink : array [Hq], float32 (float64 with float64)
        The same on every rank, like `alibi_slopes`, `seed` and `offset`.
    seed, offset : int or array of one element, int64 | uint64
        Of the dropout mask, which is that of the whole problem in one call.

    Returns
    -------
    out : array [B, Nq_r, Hq, Dv], q's dtype or the attention's `out_dtype`
        Rounded once, after the last merge.
    lse : array [B, Hq, Nq_r], float32 (float64 with float64)
        Natural log, over the keys of all ranks.

    Raises
    ------
    As `attn_fwd`, before anything is sent. What one rank refuses and another does not leaves the other waiting.

    Notes
    -----
    Two shards of k and v are in memory beside the rank's own. A bias is not taken: it is as large as the scores.

    Examples
    --------
    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> import cupyflash as cf
    >>> from cupyflash import parallel
    >>> attention = cf.Attention(causal=True)
    >>> x = np.random.default_rng(0).standard_normal((1, 6, 2, 8))
    >>> alone = SimpleNamespace(rank=0, size=1)  # a ring of one sends nothing, so it needs no transport
    >>> out, lse = parallel.ring_fwd(x, x, x, transport=alone, shards=parallel.Shards(6, size=1), attention=attention)
    >>> bool(np.allclose(out, attention.fwd(x, x, x).out))
    True
    """
    arrays = {"q": q, "k": k, "v": v}
    extras = {"alibi_slopes": alibi_slopes, "sink": sink, "seed": seed, "offset": offset}
    ring = _Ring("ring_fwd", transport, shards, shards_k, attention, arrays, extras)
    state = ring.state()
    held = [ring.contiguous(name) for name in ("k", "v")]
    for step in range(ring.steps):
        sends, receives, coming = ring.pass_keys(step, held)
        transfer = ring.exchange(sends, receives)
        ring.attend(ring.owner(step), held, state)
        transfer.wait()
        held = coming
    return ring.output(state)


def ring_bwd(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *, transport: Transport, shards: Shards,
    attention: Attention, dlse: Any = None, shards_k: Shards | None = None, alibi_slopes: Any = None, sink: Any = None,
    seed: Any = None, offset: Any = 0,
) -> AttnGrads:  # fmt: skip
    """The gradients of `ring_fwd`, from what it returned on this rank and the gradient that flows into it.

    D is computed once. Keys and values pass by as before, and the sums of their gradients follow one step behind them:
    while the sums come in, the rank computes what it has to add. At the end they go home. All sums are float32, and
    each gradient is rounded once.

    Parameters
    ----------
    out, lse : array
        What `ring_fwd` returned.
    dout : array [B, Nq_r, Hq, Dv], q's dtype or float32
    dlse : array [B, Hq, Nq_r], float32 (float64 with float64)
        The gradient that flows into lse; none by default.

    Every other argument as in `ring_fwd`, with the same options.

    Returns
    -------
    dq, dk, dv[, dsink] : named tuple `AttnGrads`
        Of this rank's q, k and v, in their dtypes or the attention's `grad_dtype`: complete. dsink, when `sink` was
        given, is what this rank's queries give: like a weight's, the gradient is the sum over the ranks.

    Raises
    ------
    As `ring_fwd`.

    Examples
    --------
    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> import cupyflash as cf
    >>> from cupyflash import parallel
    >>> x = np.random.default_rng(0).standard_normal((1, 6, 2, 8))
    >>> ring = {"transport": SimpleNamespace(rank=0, size=1), "shards": parallel.Shards(6, 1)}
    >>> ring |= {"attention": cf.Attention(causal=True)}
    >>> out, lse = parallel.ring_fwd(x, x, x, **ring)
    >>> grads = parallel.ring_bwd(x, x, x, out, lse, x, **ring)
    >>> bool(np.allclose(grads.dk, ring["attention"].bwd(x, x, x, out, lse, x).dk))
    True
    """
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    extras = {"alibi_slopes": alibi_slopes, "sink": sink, "seed": seed, "offset": offset}
    ring = _Ring("ring_bwd", transport, shards, shards_k, attention, arrays, extras)
    delta, grads = ring.delta(), ring.zero_grads()
    held = [ring.contiguous(name) for name in ("k", "v")]
    sums: list[Any] = []  # dk and dv of the shard of the step before
    for step in range(ring.steps):
        owner = ring.owner(step)
        sends, receives, coming = ring.pass_keys(step, held)
        so_far = ring.keys_like(owner, ring.sums, ring.empty) if step else []
        sends += [(ring.next, array) for array in sums]
        receives += [(ring.previous, array) for array in so_far]
        transfer = ring.exchange(sends, receives)
        sums = ring.keys_like(owner, ring.sums, ring.zeros)
        ring.differentiate(owner, held, delta, grads, sums)
        transfer.wait()
        add(sums, so_far)
        held = coming
    grads["dk"], grads["dv"] = ring.bring_home(sums)
    return ring.output_grads(grads)


class _Ring(Problem):
    """Who has whose keys when, and what is passed on."""

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        return (self.rank - 1) % self.size

    @functools.cached_property
    def steps(self) -> int:
        """Up to the last in which any rank sees the keys that it has; the same number on all ranks."""
        ranks = range(self.size)
        return 1 + max(step for step in ranks if not step or any(self.sees(r, (r - step) % self.size) for r in ranks))

    def owner(self, step: int) -> int:
        """Whose keys this rank has in this step."""
        return (self.rank - step) % self.size

    def pass_keys(self, step: int, held: list[Any]) -> tuple[list[Message], list[Message], list[Any]]:
        """What to send and to receive so that the next step has its keys, and the arrays that they come in."""
        if step + 1 == self.steps:
            return [], [], []
        coming = self.keys_like(self.owner(step + 1), self.dtype, self.empty)
        return [(self.next, array) for array in held], [(self.previous, array) for array in coming], coming

    def bring_home(self, sums: list[Any]) -> list[Any]:
        """This rank's dk and dv from the rank that added to them last."""
        last = self.steps - 1
        if not last:
            return sums
        own = self.keys_like(self.rank, self.sums, self.empty)
        sends = [(self.owner(last), array) for array in sums]
        receives = [((self.rank + last) % self.size, array) for array in own]
        self.exchange(sends, receives).wait()
        return own
