"""Ulysses: the ranks trade positions for heads, and each computes whole sequences of its heads."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from cupyflash._attention import Attention, AttnGrads, AttnGradsPlain, AttnGradsSink, AttnOutput
from cupyflash._errors import UnsupportedError, refusal
from cupyflash._making import dtype_of
from cupyflash.parallel._problem import Problem
from cupyflash.parallel._shards import Shards, along, cut
from cupyflash.parallel._transport import Transport


def ulysses_fwd(
    q: Any, k: Any, v: Any, *, transport: Transport, shards: Shards, attention: Attention,
    shards_k: Shards | None = None, alibi_slopes: Any = None, sink: Any = None,
) -> AttnOutput:  # fmt: skip
    """Attention of this rank's queries over the keys of all ranks, each rank computing some of the heads.

    Two all-to-all exchanges: q, k and v go from some positions of all heads to all positions of some heads, out and lse
    come back. Between them each rank makes one ordinary call, so results are those of one call on the whole. After
    Jacobs et al., DeepSpeed Ulysses (2023). Where there are fewer KV heads than ranks, ranks share them.

    Parameters
    ----------
    As in `ring_fwd`, but for `seed` and `offset`: the dropout mask counts all query heads, of which a rank has some.
    Any `Shards` will do; each rank has the same work whatever the mask.

    Returns
    -------
    As `ring_fwd`.

    Raises
    ------
    As `ring_fwd`. UnsupportedError with dropout, or where some rank would have no query head.

    Notes
    -----
    No transfer overlaps computing here. A rank holds q, k, v and out of its heads for all positions. Rows are brought
    in order by a copy for each run of them, which packed sequences have many of.

    Examples
    --------
    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> import cupyflash as cf
    >>> from cupyflash import parallel
    >>> attention = cf.Attention(causal=True)
    >>> x = np.random.default_rng(0).standard_normal((1, 6, 2, 8))
    >>> alone = SimpleNamespace(rank=0, size=1)
    >>> out, lse = parallel.ulysses_fwd(x, x, x, transport=alone, shards=parallel.Shards(6, 1), attention=attention)
    >>> bool(np.allclose(out, attention.fwd(x, x, x).out))
    True
    """
    arrays = {"q": q, "k": k, "v": v}
    extras = {"alibi_slopes": alibi_slopes, "sink": sink, "seed": None, "offset": 0}
    ulysses = _Ulysses("ulysses_fwd", transport, shards, shards_k, attention, arrays, extras)
    whole = ulysses.to_heads(q=q, k=k, v=v)
    out, lse = attention.fwd(*whole, **ulysses.arguments())
    out, lse = ulysses.to_rows(out=out, lse=lse)
    return AttnOutput(out, lse)


def ulysses_bwd(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *, transport: Transport, shards: Shards,
    attention: Attention, dlse: Any = None, shards_k: Shards | None = None, alibi_slopes: Any = None, sink: Any = None,
) -> AttnGrads:  # fmt: skip
    """The gradients of `ulysses_fwd`, from what it returned on this rank and the gradient that flows into it.

    D is computed from this rank's rows before anything is sent, and goes in place of out. The gradients of a KV head
    that ranks share are sent in float32, added at home and rounded once.

    Parameters
    ----------
    As in `ring_bwd`, but for `seed` and `offset`.

    Returns
    -------
    As `ring_bwd`. dsink is what this rank's heads give, and 0 for others: the gradient is the sum over the ranks.

    Raises
    ------
    As `ulysses_fwd`.

    Examples
    --------
    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> import cupyflash as cf
    >>> from cupyflash import parallel
    >>> x = np.random.default_rng(0).standard_normal((1, 6, 2, 8))
    >>> group = {"transport": SimpleNamespace(rank=0, size=1), "shards": parallel.Shards(6, 1)}
    >>> group |= {"attention": cf.Attention(causal=True)}
    >>> out, lse = parallel.ulysses_fwd(x, x, x, **group)
    >>> grads = parallel.ulysses_bwd(x, x, x, out, lse, x, **group)
    >>> bool(np.allclose(grads.dk, group["attention"].bwd(x, x, x, out, lse, x).dk))
    True
    """
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    extras = {"alibi_slopes": alibi_slopes, "sink": sink, "seed": None, "offset": 0}
    ulysses = _Ulysses("ulysses_bwd", transport, shards, shards_k, attention, arrays, extras)
    q, k, v, lse, dout, delta = ulysses.to_heads(q=q, k=k, v=v, lse=lse, dout=dout, delta=ulysses.delta())
    options = ulysses.partial if ulysses.heads_are_shared else attention
    grads = options.bwd(q, k, v, None, lse, dout, delta=delta, **ulysses.arguments())
    dtype = attention.grad_dtype or ulysses.dtype
    dq, dk, dv = (ulysses.cast(array, dtype) for array in ulysses.to_rows(dq=grads.dq, dk=grads.dk, dv=grads.dv))
    if sink is None:
        return AttnGradsPlain(dq, dk, dv)
    dsink = ulysses.zeros(tuple(sink.shape), ulysses.sums)
    dsink[ulysses.heads[ulysses.rank].queries] = grads.dsink
    return AttnGradsSink(dq, dk, dv, dsink)


class _Heads(NamedTuple):
    """What one rank computes."""

    queries: slice
    keys: slice  # the KV heads that those read


class _Ulysses(Problem):
    """Which heads a rank has, and the two ways between some positions of all heads and all positions of some."""

    def _check_call(self) -> dict[str, tuple[int, ...]]:
        if self.attention.dropout_p:
            given = f"has dropout_p = {self.attention.dropout_p}"
            accepted = "the dropout mask counts all query heads, and here each rank has some: 0 is accepted"
            advice = "The ring and the gather take dropout."
            raise UnsupportedError(refusal(self.function, "attention", given, accepted, advice))
        shapes = super()._check_call()
        if self._number_of_heads("q") < self.size:
            given = f"has {self._number_of_heads('q')} heads"
            accepted = f"at least one for each of {self.size} ranks is accepted"
            raise UnsupportedError(refusal(self.function, "q", given, accepted, "The ring and the gather take any."))
        return shapes

    @functools.cached_property
    def heads(self) -> tuple[_Heads, ...]:
        """By rank."""
        return _divide(self._number_of_heads("q"), self._number_of_heads("k"), self.size)

    @property
    def heads_are_shared(self) -> bool:
        """Whether ranks have KV heads in common."""
        return self._number_of_heads("k") < self.size

    def _number_of_heads(self, name: str) -> int:
        return self.adopted.views[name].shape[self._axes(name)[1]]

    def arguments(self) -> dict[str, Any]:
        """Of this rank's one call."""
        queries = self.heads[self.rank].queries
        slopes, sink = self.extras["alibi_slopes"], self.extras["sink"]
        own = {
            "alibi_slopes": None if slopes is None else slopes[..., queries],
            "sink": None if sink is None else sink[queries],
        }
        if self.shards_q.is_packed:
            for side, shards in (("q", self.shards_q), ("k", self.shards_k)):
                own[f"cu_seqlens_{side}"] = self.int32(np.cumsum([0, *shards.lengths]))
                own[f"max_seqlen_{side}"] = max(shards.lengths, default=0)
        return own

    def to_heads(self, **arrays: Any) -> list[Any]:
        """All rows of this rank's heads, of arrays that have this rank's rows of all heads."""
        sends, receives, parts = [], [], []
        for peer in range(self.size):
            own: dict[str, Any] = {}
            for name, array in arrays.items():
                theirs = array[self._heads_of(name, peer)]
                if peer == self.rank:
                    own[name] = theirs
                    continue
                sends.append((peer, self.copy(theirs)))
                own[name] = self._like(name, array[self._heads_of(name, self.rank)], self._shards(name).rows(peer))
                receives.append((peer, own[name]))
            parts.append(own)
        self.exchange(sends, receives).wait()
        return [self._in_order(name, [own[name] for own in parts]) for name in arrays]

    def to_rows(self, **arrays: Any) -> list[Any]:
        """This rank's rows of all heads, of arrays that have all rows of this rank's heads."""
        sends, receives, parts = [], [], []
        for peer in range(self.size):
            own: dict[str, Any] = {}
            for name, array in arrays.items():
                theirs = self._rows_of(name, array, peer)
                if peer == self.rank:
                    own[name] = theirs
                    continue
                sends.append((peer, theirs))
                of_peer = self._slice(name, peer)
                heads = of_peer.stop - of_peer.start
                own[name] = self._like(name, theirs, self._shards(name).rows(self.rank), heads)
                receives.append((peer, own[name]))
            parts.append(own)
        self.exchange(sends, receives).wait()
        return [self._all_heads(name, [own[name] for own in parts]) for name in arrays]

    def _in_order(self, name: str, parts: list[Any]) -> Any:
        """The whole of what the ranks have of some heads."""
        rows_axis, _ = self._axes(name)
        shards = self._shards(name)
        whole = self._like(name, parts[0], shards.total)
        for rank, part in enumerate(parts):
            for run in shards.runs(rank):
                whole[along(rows_axis, run.whole)] = part[along(rows_axis, run.local)]
        return whole

    def _rows_of(self, name: str, whole: Any, rank: int) -> Any:
        """What a rank has of a whole: a copy."""
        rows_axis, _ = self._axes(name)
        shards = self._shards(name)
        part = self._like(name, whole, shards.rows(rank))
        for run in shards.runs(rank):
            part[along(rows_axis, run.local)] = whole[along(rows_axis, run.whole)]
        return part

    def _all_heads(self, name: str, parts: list[Any]) -> Any:
        """All heads of what the ranks computed of each; what they give to a head that they share is added."""
        _, heads_axis = self._axes(name)
        shape = list(parts[0].shape)
        shape[heads_axis] = self._number_of_heads("k" if name in _OF_KEYS else "q")
        is_sum = name in _OF_KEYS and self.heads_are_shared
        array = (self.zeros if is_sum else self.empty)(tuple(shape), dtype_of(parts[0]))
        for rank, part in enumerate(parts):
            at = self._heads_of(name, rank)
            array[at] = array[at] + part if is_sum else part
        return array

    def _axes(self, name: str) -> tuple[int, int]:
        """Of rows and of heads."""
        is_packed = self.attention.layout == "thd"
        if name in ("lse", "delta"):
            return (1, 0) if is_packed else (2, 1)
        return self.rows_axis, 1 if is_packed else 3 - self.rows_axis

    def _shards(self, name: str) -> Shards:
        return self.shards_k if name in _OF_KEYS else self.shards_q

    def _slice(self, name: str, rank: int) -> slice:
        heads = self.heads[rank]
        return heads.keys if name in _OF_KEYS else heads.queries

    def _heads_of(self, name: str, rank: int) -> tuple[slice, ...]:
        """The index that takes the heads of a rank."""
        return along(self._axes(name)[1], self._slice(name, rank))

    def _like(self, name: str, array: Any, rows: int, heads: int | None = None) -> Any:
        """An array like this one, with so many rows, and so many heads where given."""
        rows_axis, heads_axis = self._axes(name)
        shape = list(array.shape)
        shape[rows_axis] = rows
        shape[heads_axis] = shape[heads_axis] if heads is None else heads
        return self.empty(tuple(shape), dtype_of(array))


_OF_KEYS = ("k", "v", "dk", "dv")


def _divide(heads_q: int, heads_kv: int, size: int) -> tuple[_Heads, ...]:
    """By rank: whole groups of query heads with their KV head, or parts of groups where ranks outnumber KV heads."""
    group = heads_q // heads_kv
    if heads_kv >= size:
        spans = [cut(heads_kv, size, rank) for rank in range(size)]
        return tuple(_Heads(slice(begin * group, end * group), slice(begin, end)) for begin, end in spans)
    divided = []
    for head in range(heads_kv):
        first, last = cut(size, heads_kv, head)  # the ranks that share this KV head
        for sharer in range(last - first):
            begin, end = cut(group, last - first, sharer)
            divided.append(_Heads(slice(head * group + begin, head * group + end), slice(head, head + 1)))
    return tuple(divided)
