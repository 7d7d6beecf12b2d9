"""Cascade: keys that sequences share are attended once for all of them, and what each level gives is merged.

    forward    out, lse = merge over levels of Attention.fwd,  in float32
    backward   delta = rowsum(dout · out) − dlse, once;   Attention.bwd of each level with the global lse and delta adds
               to dq and gives the level's dk and dv,  in float32

The sequences of a group lie side by side, so to the keys they share they are one longer sequence: the same rows under
fewer offsets. Rows stacked like that have no positions of their own. Where distances count, in ALiBi and at the left
edge of a window, the sequences of a group take turns at their keys instead, each at its own positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupyflash import _interop
from cupyflash._api import attn_bwd_preprocess
from cupyflash._attention import Attention, AttnOutput, forward_beside, leaves_parts
from cupyflash._errors import UnsupportedError, refusal
from cupyflash._making import Maker
from cupyflash._merge import merge_states


@dataclass(frozen=True, eq=False)
class CascadeLevel:
    """Keys of one level of a cascade, and the sequences that share them.

    Parameters
    ----------
    k, v : array [Tk, Hkv, D] and [Tk, Hkv, Dv]
        The keys of one group of sequences after the other. With `block_table`: pools, [pages, page_size, Hkv, D].
    groups : sequence of int, default one each
        How many sequences, neighbours in the batch, share each part of the keys: (3, 2) says that the first three have
        the first keys in common and the last two the second ones.
    cu_seqlens_k : array [G+1], int32 | int64
        Prefix sums of the groups' numbers of keys; needed unless there is a `block_table`.
    max_seqlen_k : int
        Most keys of a group, a hint for speed.
    seqused_k : array [G], int32
        Live keys of each group.
    block_table : array [G, max_pages], int32
        Key j of group g lies in page block_table[g, j // page_size]. Needs seqused_k; forward only.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> prompts = np.zeros((150, 2, 8), np.float32)  # of 100 and 50 keys: for three sequences, and for two
    >>> level = cf.CascadeLevel(prompts, prompts, groups=(3, 2), cu_seqlens_k=np.array([0, 100, 150]))
    >>> sum(level.groups)  # sequences of the batch
    5
    """

    k: Any
    v: Any
    groups: Sequence[int] | None = None
    cu_seqlens_k: Any = None
    max_seqlen_k: int | None = None
    seqused_k: Any = None
    block_table: Any = None


class CascadeGrads(NamedTuple):
    """What a cascade's backward returns: dk and dv by level; dsink is None without a sink.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> x, ends = np.ones((4, 2, 8), np.float32), np.array([0, 4])
    >>> call = {"attention": cf.Attention(layout="thd"), "cu_seqlens_q": ends}
    >>> levels = [cf.CascadeLevel(x, x, cu_seqlens_k=ends), cf.CascadeLevel(x, x, cu_seqlens_k=ends)]
    >>> grads = cf.attn_cascade_bwd(x, levels, *cf.attn_cascade(x, levels, **call), x, **call)
    >>> [dk.shape for dk in grads.dks], grads.dsink is None
    ([(4, 2, 8), (4, 2, 8)], True)
    """

    dq: Any
    dks: list[Any]
    dvs: list[Any]
    dsink: Any


def attn_cascade(
    q: Any, levels: Sequence[CascadeLevel], *, attention: Attention, cu_seqlens_q: Any,
    max_seqlen_q: int | None = None, alibi_slopes: Any = None, sink: Any = None, check: bool = False,
) -> AttnOutput:  # fmt: skip
    """Attention of sequences that have keys in common, each level's keys attended once for all that share them.

        the keys of a sequence: those of its group in levels[0], then in levels[1], ..., its queries at their end
        out, lse = merge over the levels

    Equals one call with every sequence's keys written out. A shared prefix is a level of large groups, what is each
    sequence's own a level without groups; any number of levels is between. After Ye et al., Cascade Inference (2024),
    and Juravsky et al., Hydragen (2024).

    Parameters
    ----------
    q : array [Tq, Hq, D], float16 | bfloat16 | float32 | float64
        Queries of all sequences, packed; with one each, as in decoding, [B, Hq, D].
    levels : list of CascadeLevel
        From the first keys to the last.
    attention : Attention
        The options, of layout "thd". Masks, windows and ALiBi see the positions of the written-out sequences.
    cu_seqlens_q : array [B+1], int32 | int64
        Prefix sums of the sequences' numbers of queries.
    max_seqlen_q : int
        Longest sequence of queries, a hint for speed.
    alibi_slopes : array [Hq] or [B, Hq], float32 (float64 with float64)
    sink : array [Hq], float32 (float64 with float64)
        Counted once.
    check : bool, default False
        Also look at the values of offsets, lengths and pages on a GPU, which waits for it. The CPU always does.

    Returns
    -------
    out : array [Tq, Hq, Dv], q's dtype or the attention's `out_dtype`
        Rounded once, after the merge.
    lse : array [Hq, Tq], float32 (float64 with float64)
        Natural log, over the keys of all levels.

    Raises
    ------
    As `attn_fwd`, with the number of the level; before anything is computed. ValueError where a query stands before a
    shared key that a causal mask would hide. UnsupportedError with dropout and with causal="top-left".

    Notes
    -----
    Under a causal mask shared keys stand at or before the first query of every sequence that shares them, so that none
    is hidden: keys among queries belong in a level without groups. The CPU and `check=True` refuse others; unchecked on
    a GPU they are seen. With `alibi_slopes`, or a window bounded on the left, the sequences of a group read their
    shared keys in turns, as many calls as the largest group has sequences (with a `block_table` in one call), and any
    positions are right. Allocates a float32 result for each level.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> rng = np.random.default_rng(0)
    >>> attention = cf.Attention(layout="thd", causal=True)
    >>> q, prompt, own = (rng.standard_normal((n, 2, 8)) for n in (3, 100, 6))  # three sequences decode a token each
    >>> levels = [
    ...     cf.CascadeLevel(prompt, prompt, groups=[3], cu_seqlens_k=np.array([0, 100])),
    ...     cf.CascadeLevel(own, own, cu_seqlens_k=np.array([0, 1, 3, 6])),
    ... ]
    >>> out, lse = cf.attn_cascade(q, levels, attention=attention, cu_seqlens_q=np.arange(4))
    >>> keys = np.concatenate([prompt, own[1:3]])[None]  # of the second one, written out
    >>> bool(np.allclose(out[1], cf.attn_fwd(q[None, 1:2], keys, keys, causal=True).out))
    True
    """
    extras = {"cu_seqlens_q": cu_seqlens_q, "alibi_slopes": alibi_slopes, "sink": sink}
    cascade = _Cascade("attn_cascade", {"q": q}, levels, attention, extras, max_seqlen_q, check)
    dtype = attention.out_dtype or cascade.dtype
    merging = cascade.merging_call(dtype)
    states: list[AttnOutput] = []
    last = -1
    for call in cascade.calls:
        if merging is not None and call.level == merging.level:
            continue
        state = call.attention.fwd(q, *call.keys, **call.arguments)
        if call.level == last:
            merge_states([states[-1].out, state.out], [states[-1].lse, state.lse], layout="thd", **states[-1]._asdict())
        else:
            states.append(state)
        last = call.level
    outs, lses = map(list, zip(*states, strict=True))
    if merging is None:
        return merge_states(outs, lses, layout="thd", out_dtype=dtype)
    others = states[0] if len(states) == 1 else merge_states(outs, lses, layout="thd")
    return forward_beside(merging.attention, others, merging.all_arguments(q))


def attn_cascade_bwd(
    q: Any, levels: Sequence[CascadeLevel], out: Any, lse: Any, dout: Any, *, attention: Attention, cu_seqlens_q: Any,
    dlse: Any = None, max_seqlen_q: int | None = None, alibi_slopes: Any = None, sink: Any = None, check: bool = False,
) -> CascadeGrads:  # fmt: skip
    """The gradients of `attn_cascade`, from what it returned and the gradient that flows into it.

    With the global out and lse each level's backward gives that level's exact dk and dv, summed over the sequences that
    share the keys, and its share of dq.

    Parameters
    ----------
    out, lse : array
        What `attn_cascade` returned.
    dout : array [Tq, Hq, Dv], q's dtype or float32
    dlse : array [Hq, Tq], float32 (float64 with float64)
        The gradient that flows into lse; none by default.

    Every other argument as in `attn_cascade`, with the same options. No level has a `block_table`.

    Returns
    -------
    dq, dks, dvs, dsink : CascadeGrads
        In the dtypes of q, k and v or the attention's `grad_dtype`, each rounded once; dks and dvs are lists by level.

    Raises
    ------
    As `attn_cascade`.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> x = np.random.default_rng(0).standard_normal((4, 2, 8))
    >>> levels = [cf.CascadeLevel(x, x, groups=[2], cu_seqlens_k=np.array([0, 4]))]
    >>> options = {"attention": cf.Attention(layout="thd"), "cu_seqlens_q": np.array([0, 1, 4])}
    >>> grads = cf.attn_cascade_bwd(x, levels, *cf.attn_cascade(x, levels, **options), x, **options)
    >>> flat = {"layout": "thd", "cu_seqlens_q": np.array([0, 4]), "cu_seqlens_k": np.array([0, 4])}
    >>> expected = cf.attn_bwd(x, x, x, *cf.attn_fwd(x, x, x, **flat), x, **flat)
    >>> bool(np.allclose(grads.dks[0], expected.dk))
    True
    """
    arrays = {"q": q, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    extras = {"cu_seqlens_q": cu_seqlens_q, "alibi_slopes": alibi_slopes, "sink": sink}
    cascade = _Cascade("attn_cascade_bwd", arrays, levels, attention, extras, max_seqlen_q, check)
    delta = attn_bwd_preprocess(out, dout, dlse, layout="thd")
    dq, dsink = cascade.zeros_like(q), None if sink is None else cascade.zeros_like(sink)
    dks, dvs = ([cascade.zeros_like(array) for array in arrays] for arrays in zip(*cascade.keys, strict=True))
    for call in cascade.calls:
        call.attention.bwd(
            q, *call.keys, None, lse, dout, delta=delta, dq=dq, dk=dks[call.level], dv=dvs[call.level],
            dsink=dsink if "sink" in call.arguments else None, accumulate=True, **call.arguments,
        )  # fmt: skip
    dtype = attention.grad_dtype or cascade.dtype
    dks, dvs = ([cascade.cast(array, dtype) for array in arrays] for arrays in (dks, dvs))
    return CascadeGrads(cascade.cast(dq, dtype), dks, dvs, dsink)


class _Call(NamedTuple):
    """One call of a level."""

    level: int
    attention: Attention
    keys: tuple[Any, Any]
    arguments: dict[str, Any]

    def all_arguments(self, q: Any) -> dict[str, Any]:
        return {"q": q, "k": self.keys[0], "v": self.keys[1], **self.arguments}


@dataclass(frozen=True)
class _Groups:
    """How the sequences of a batch form the groups of one level; all on the host."""

    sizes: np.ndarray

    @property
    def bounds(self) -> np.ndarray:
        """First sequence of each group, and the end."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @property
    def of_sequence(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @property
    def largest(self) -> int:
        return int(self.sizes.max(initial=0))

    @property
    def are_shared(self) -> bool:
        return self.largest > 1

    @property
    def are_equal(self) -> bool:
        return bool((self.sizes == self.largest).all())

    def turn(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Which offsets of keys give every sequence its own in this turn, and whose turn it is.

        A group that is through leaves its keys to its last sequence: offsets have no gaps.
        """
        place = np.arange(self.bounds[-1]) - self.bounds[self.of_sequence]
        holds = place == np.minimum(number, self.sizes - 1)[self.of_sequence]
        return np.concatenate([[0], np.cumsum(holds)]), place == number


class _Cascade(Maker):
    """What is given, judged, and the calls that compute it."""

    def __init__(
        self, function: str, arrays: dict[str, Any], levels: Sequence[CascadeLevel], attention: Attention,
        extras: dict[str, Any], max_seqlen_q: int | None, check: bool,
    ) -> None:  # fmt: skip
        self.function, self.arrays, self.levels, self.attention = function, arrays, levels, attention
        self.extras, self.max_seqlen_q, self.check = extras, max_seqlen_q, check
        self._check_options()
        named = {f"levels[{i}].{name}": getattr(level, name) for i, level in enumerate(levels) for name in _ARRAYS}
        self.adopted = _interop.adopt(function, arrays | extras | named)
        self._check_arrays()
        self.dtype = self.adopted.views["q"].dtype
        self.sums = "float64" if self.dtype == "float64" else "float32"  # of partial results and gradients
        self.keys = [(level.k, level.v) for level in levels]
        self.groups = [self._checked_groups(i) for i in range(len(levels))]
        self.calls = [call for i in range(len(levels)) for call in self._calls(i)]
        if extras["sink"] is not None:
            self.calls[0].arguments["sink"] = extras["sink"]
        for call in self.calls:
            self._check_call(call)
        if self.adopted.backend == "cpu" or check:
            self._check_prefixes()

    # What is judged.

    def _check_options(self) -> None:
        def refused(error: type[Exception], name: str, given: str, accepted: str) -> Exception:
            return error(refusal(self.function, name, given, accepted))

        if not isinstance(self.attention, Attention):
            accepted = "a cupyflash.Attention is accepted"
            raise refused(TypeError, "attention", f"is {self.attention!r}", accepted)
        if self.attention.layout != "thd":
            accepted = "'thd' is accepted: a dense batch q [B, N, H, D] is packed by q.reshape(B * N, H, D)"
            raise refused(ValueError, "attention", f"has layout {self.attention.layout!r}", accepted)
        if self.attention.causal == "top-left":
            accepted = "False or 'bottom-right' is accepted: queries stand at the end of their keys"
            raise refused(UnsupportedError, "attention", "has causal = 'top-left'", accepted)
        if self.attention.dropout_p:
            accepted = "0 is accepted: rows of several sequences in one call have not the mask of the written-out ones"
            raise refused(UnsupportedError, "attention", f"has dropout_p = {self.attention.dropout_p}", accepted)
        if not isinstance(self.levels, (list, tuple)):
            raise refused(
                TypeError, "levels", f"is a {type(self.levels).__name__}", "a list of CascadeLevel is accepted"
            )
        if not self.levels:
            raise refused(ValueError, "levels", "is empty", "at least one level is accepted")
        for i, level in enumerate(self.levels):
            if not isinstance(level, CascadeLevel):
                raise refused(TypeError, f"levels[{i}]", f"is a {type(level).__name__}", "a CascadeLevel is accepted")
            if level.block_table is not None and "dout" in self.arrays:
                raise refused(ValueError, f"levels[{i}].block_table", "is given", "None is accepted for a backward")

    def _check_arrays(self) -> None:
        views = self.adopted.views
        if self.adopted.kind == "dlpack":
            given, accepted = (
                f"is an array of {self.adopted.library.name}",
                "arrays of NumPy, CuPy or torch are accepted",
            )
            raise TypeError(refusal(self.function, "q", given, accepted))
        needed = [name for name in (*self.arrays, "cu_seqlens_q") if name != "dlse"]
        needed += [f"levels[{i}].{name}" for i in range(len(self.levels)) for name in "kv"]
        for name in needed:
            if name not in views:
                raise TypeError(refusal(self.function, name, "is None", _interop.ACCEPTED_ARRAYS))
        shape = views["cu_seqlens_q"].shape
        if len(shape) != 1 or not shape[0]:
            given, accepted = f"has shape {list(shape)}", "[B+1], one more than there are sequences, is accepted"
            raise ValueError(refusal(self.function, "cu_seqlens_q", given, accepted))
        self.batch = shape[0] - 1

    def _checked_groups(self, i: int) -> _Groups:
        """Of a level; its offsets, lengths and tables have as many entries."""
        level, prefix = self.levels[i], f"levels[{i}]"
        sizes = [1] * self.batch if level.groups is None else level.groups
        is_list = isinstance(sizes, (list, tuple, np.ndarray))
        if not (
            is_list and all(isinstance(n, (int, np.integer)) and n >= 1 for n in sizes) and sum(sizes) == self.batch
        ):
            accepted = f"ints of at least 1 that add up to the {self.batch} sequences of `cu_seqlens_q` are accepted"
            raise ValueError(refusal(self.function, f"{prefix}.groups", f"is {level.groups!r}", accepted))
        needed = "cu_seqlens_k" if level.block_table is None else "seqused_k"
        if getattr(level, needed) is None:
            given = "None is accepted with a `block_table` alone" if needed == "cu_seqlens_k" else "a table needs it"
            raise ValueError(refusal(self.function, f"{prefix}.{needed}", "is None", given))
        for name, rank, more in (("cu_seqlens_k", 1, 1), ("seqused_k", 1, 0), ("block_table", 2, 0)):
            view = self.adopted.views.get(f"{prefix}.{name}")
            if view is not None and (len(view.shape) != rank or view.shape[0] != len(sizes) + more):
                accepted = f"{len(sizes) + more} entries for {len(sizes)} groups are accepted"
                raise ValueError(refusal(self.function, f"{prefix}.{name}", f"has shape {list(view.shape)}", accepted))
        return _Groups(np.array(sizes, np.int64))

    def _check_call(self, call: _Call) -> None:
        """As any other call is, and whether a kernel serves it."""
        others = {name: array for name, array in self.arrays.items() if name != "q"}
        try:
            call.attention.plan(self.arrays["q"], *call.keys, "dout" in others, **others, **call.arguments)
        except (ValueError, TypeError, UnsupportedError) as error:
            said = str(error).removeprefix("Attention.plan: ")
            raise type(error)(f"{self.function}: levels[{call.level}]: {said}") from error.__cause__

    def _check_prefixes(self) -> None:
        """No stacked query stands before a key that its mask would hide."""
        num_queries = np.diff(self.adopted.host("cu_seqlens_q"))
        behind = np.zeros(self.batch, np.int64)
        for i in reversed(range(len(self.levels))):
            name = f"levels[{i}].seqused_k"
            is_used = name in self.adopted.views
            lengths = self.adopted.host(name) if is_used else np.diff(self.adopted.host(f"levels[{i}].cu_seqlens_k"))
            lengths = lengths[self.groups[i].of_sequence]
            wrong = np.flatnonzero((lengths > 0) & (behind < num_queries - 1))
            if wrong.size and self._is_stacked(i) and self._has_right_edge:
                b = int(wrong[0])
                given = f"are shared, and sequence {b} has {behind[b]} keys behind them for {num_queries[b]} queries"
                accepted = f"under such a mask at least {num_queries[b] - 1} are accepted"
                advice = "Keys that stand among queries belong in a level without groups."
                raise ValueError(refusal(self.function, f"levels[{i}].k", given, accepted, advice))
            behind += lengths

    # What is computed.

    @property
    def _has_right_edge(self) -> bool:
        window = self.attention.window
        return bool(self.attention.causal) or (window is not None and window[1] is not None)

    @property
    def _sees_distances(self) -> bool:
        window = self.attention.window
        return self.extras["alibi_slopes"] is not None or (window is not None and window[0] is not None)

    def _is_stacked(self, i: int) -> bool:
        return self.groups[i].are_shared and not self._sees_distances

    def _calls(self, i: int) -> Iterator[_Call]:
        level, groups, offsets_q = self.levels[i], self.groups[i], self.extras["cu_seqlens_q"]
        attention = self.attention.replace(out_dtype=self.sums, grad_dtype=self.sums)
        own: dict[str, Any] = {"check": self.check, "max_seqlen_q": self.max_seqlen_q, "cu_seqlens_q": offsets_q}
        own |= {name: getattr(level, name) for name in _OF_KEYS if getattr(level, name) is not None}
        if self._is_stacked(i):
            # Groups of one size take nothing from the host, so that a CUDA graph may hold the call.
            firsts = slice(None, None, groups.largest) if groups.are_equal else self.int32(groups.bounds)
            own["cu_seqlens_q"] = offsets_q[firsts]
            if self.max_seqlen_q is not None:
                own["max_seqlen_q"] = self.max_seqlen_q * groups.largest
            yield _Call(i, attention.replace(causal=False, window=None), self.keys[i], own)
            return
        own |= {"alibi_slopes": self.extras["alibi_slopes"], "q_start": self._q_start(i)}
        if not groups.are_shared:
            yield _Call(i, attention, self.keys[i], own)
        elif level.block_table is not None:
            own |= {name: self._by_sequence(i, own[name]) for name in ("block_table", "seqused_k")}
            yield _Call(i, attention, self.keys[i], own)
        else:
            lengths = self._by_sequence(i, self._lengths(i))
            for number in range(groups.largest):
                index, is_turn = groups.turn(number)
                offsets_k = level.cu_seqlens_k[self.int32(index)]
                live = self.cast(lengths * self.int32(is_turn), "int32")
                yield _Call(i, attention, self.keys[i], own | {"cu_seqlens_k": offsets_k, "seqused_k": live})

    def _q_start(self, i: int) -> Any:
        """Where queries stand when a level's first key stands at 0; only differences of positions count.

        The default is right for the last level, behind which nothing is, and where nothing depends on positions.
        """
        last = len(self.levels) - 1
        if i == last or not (self._has_right_edge or self._sees_distances):
            return None
        offsets = self.extras["cu_seqlens_q"]
        first = offsets[:-1] - offsets[1:]
        for j in range(i, last + 1):
            first = first + self._by_sequence(j, self._lengths(j))
        return self.cast(first, "int32")

    def _lengths(self, i: int) -> Any:
        """Live keys of each group."""
        level = self.levels[i]
        return level.seqused_k if level.seqused_k is not None else level.cu_seqlens_k[1:] - level.cu_seqlens_k[:-1]

    def _by_sequence(self, i: int, of_groups: Any) -> Any:
        """Each group's entry for each of its sequences."""
        groups = self.groups[i]
        return of_groups[self.int32(groups.of_sequence)] if groups.are_shared else of_groups

    def merging_call(self, out_dtype: str) -> _Call | None:
        """The only call of a level, which merges parts of its keys anyway, and so the other levels' states too."""
        if self.adopted.backend != "cuda" or len(self.levels) == 1:
            return None
        levels = [call.level for call in self.calls]
        for call in self.calls:
            last = call._replace(attention=call.attention.replace(out_dtype=out_dtype))
            if levels.count(call.level) == 1 and leaves_parts(last.attention, last.all_arguments(self.arrays["q"])):
                return last
        return None

    def zeros_like(self, array: Any) -> Any:
        return self.zeros(tuple(array.shape), self.sums)


_OF_KEYS = ("cu_seqlens_k", "max_seqlen_k", "seqused_k", "block_table")
_ARRAYS = ("k", "v", "cu_seqlens_k", "seqused_k", "block_table")
