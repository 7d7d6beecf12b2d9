"""The gather: every rank gets the keys that its queries see straight from their owners."""

from __future__ import annotations

from typing import Any

from cupyflash._attention import Attention, AttnGrads, AttnOutput
from cupyflash.parallel._problem import Problem, add
from cupyflash.parallel._shards import Shards
from cupyflash.parallel._transport import Transfer, Transport


def gather_fwd(
    q: Any, k: Any, v: Any, *, transport: Transport, shards: Shards, attention: Attention,
    shards_k: Shards | None = None, alibi_slopes: Any = None, sink: Any = None, seed: Any = None, offset: Any = 0,
) -> AttnOutput:  # fmt: skip
    """Attention of this rank's queries over the keys of all ranks, gathered at once.

    Every shard of keys is sent to the ranks whose queries see any of them, and to no other: with a window or packed
    sequences that may be few. All are under way while the rank's own are computed; the others are merged as they come,
    as in `ring_fwd`. This takes memory for all keys that are seen, and no rank waits for a chain of others.

    Parameters
    ----------
    As in `ring_fwd`.

    Returns
    -------
    As `ring_fwd`.

    Raises
    ------
    As `ring_fwd`.

    Examples
    --------
    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> import cupyflash as cf
    >>> from cupyflash import parallel
    >>> attention = cf.Attention(causal=True)
    >>> x = np.random.default_rng(0).standard_normal((1, 6, 2, 8))
    >>> alone = SimpleNamespace(rank=0, size=1)
    >>> out, lse = parallel.gather_fwd(x, x, x, transport=alone, shards=parallel.Shards(6, 1), attention=attention)
    >>> bool(np.allclose(out, attention.fwd(x, x, x).out))
    True
    """
    arrays = {"q": q, "k": k, "v": v}
    extras = {"alibi_slopes": alibi_slopes, "sink": sink, "seed": seed, "offset": offset}
    gather = _Gather("gather_fwd", transport, shards, shards_k, attention, arrays, extras)
    state = gather.state()
    own, fetched = gather.fetch()
    gather.attend(gather.rank, own, state)
    for owner, keys, transfer in fetched:
        transfer.wait()
        if keys:
            gather.attend(owner, keys, state)
    return gather.output(state)


def gather_bwd(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *, transport: Transport, shards: Shards,
    attention: Attention, dlse: Any = None, shards_k: Shards | None = None, alibi_slopes: Any = None, sink: Any = None,
    seed: Any = None, offset: Any = 0,
) -> AttnGrads:  # fmt: skip
    """The gradients of `gather_fwd`, from what it returned on this rank and the gradient that flows into it.

    Keys and values are gathered again. What this rank's queries give to the gradients of another's keys is sent to that
    rank in float32 as soon as it is computed, and added there, always in the same order.

    Parameters
    ----------
    As in `ring_bwd`.

    Returns
    -------
    As `ring_bwd`.

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
    >>> group = {"transport": SimpleNamespace(rank=0, size=1), "shards": parallel.Shards(6, 1)}
    >>> group |= {"attention": cf.Attention(causal=True)}
    >>> out, lse = parallel.gather_fwd(x, x, x, **group)
    >>> grads = parallel.gather_bwd(x, x, x, out, lse, x, **group)
    >>> bool(np.allclose(grads.dk, group["attention"].bwd(x, x, x, out, lse, x).dk))
    True
    """
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    extras = {"alibi_slopes": alibi_slopes, "sink": sink, "seed": seed, "offset": offset}
    gather = _Gather("gather_bwd", transport, shards, shards_k, attention, arrays, extras)
    delta, grads = gather.delta(), gather.zero_grads()
    own, fetched = gather.fetch()
    sums = gather.keys_like(gather.rank, gather.sums, gather.zeros)
    gather.differentiate(gather.rank, own, delta, grads, sums)
    coming = []
    for owner, keys, transfer in fetched:
        transfer.wait()
        given = gather.keys_like(owner, gather.sums, gather.zeros) if keys else []
        if keys:
            gather.differentiate(owner, keys, delta, grads, given)
        coming.append(gather.send_home(owner, given))
    for parts, transfer in coming:
        transfer.wait()
        add(sums, parts)
    grads["dk"], grads["dv"] = sums
    return gather.output_grads(grads)


class _Gather(Problem):
    """Who sends whom what: in the exchange of distance t rank r gets the keys of r − t, and r + t gets those of r."""

    def fetch(self) -> tuple[list[Any], list[tuple[int, list[Any], Transfer]]]:
        """This rank's keys and values, and by owner those that are coming: none where its queries see none."""
        own, fetched = [self.contiguous(name) for name in ("k", "v")], []
        for distance in range(1, self.size):
            owner, reader = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            coming = self.keys_like(owner, self.dtype, self.empty) if self.sees(self.rank, owner) else []
            sends = [(reader, array) for array in own] if self.sees(reader, self.rank) else []
            fetched.append((owner, coming, self.exchange(sends, [(owner, array) for array in coming])))
        return own, fetched

    def send_home(self, owner: int, given: list[Any]) -> tuple[list[Any], Transfer]:
        """What is given to `owner`'s gradients; returns what another gives to this rank's, none where it sees none."""
        reader = (2 * self.rank - owner) % self.size
        coming = self.keys_like(self.rank, self.sums, self.empty) if self.sees(reader, self.rank) else []
        sends, receives = [(owner, array) for array in given], [(reader, array) for array in coming]
        return coming, self.exchange(sends, receives)
