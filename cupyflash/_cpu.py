"""FlashAttention-2 in NumPy: the backend for arrays in host memory, and the algorithm to read first.

Scores are made, used and dropped one tile of queries x keys at a time, so memory is linear in the lengths.

Forward, for each block of queries, over the blocks of keys, with a running maximum m and sum s:

    m'  = max(m, max_j x_ij)           s  <- s * exp(m - m') + sum_j exp(x_ij - m')
    out <- out * exp(m - m') + exp(x - m') V          at the end   out / s,   lse = m + log(s)

A sink is where the recurrence starts: m = sink_h, s = 1, out = 0. Backward, blocks of keys outermost as on a GPU: P is
recomputed from lse, and the contract's equations are read off line by line.

Arrays keep their five axes [batch, KV head, query head of the group, row, column] throughout; a chunk of heads is
worked on at once, as many as keep the temporaries small. A tile that the band cuts, or a bias masks with -inf, has a
`masked` array: masked entries are selected away, never multiplied, and rows or columns of a tile that nobody sees are
replaced by zeros before the matrix products, so that a NaN in them stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyflash._errors import refusal
from cupyflash._philox import keep_mask
from cupyflash._spec import AppendCall, Call, Spec, View, Work, filled

if TYPE_CHECKING:
    from cupyflash._merge import MergeCall

Array = Any  # a NumPy array; ml_dtypes' bfloat16 has no place in NumPy's own type parameters

_BLOCK = 512  # rows and columns of a tile: 1 MiB in float32, which stays in a core's cache
_CHUNK_ELEMENTS = _BLOCK * _BLOCK  # heads are worked on together while a temporary stays below this


@dataclass(frozen=True, slots=True)
class NumpyPlan:
    """How the NumPy backend will run a call; `dataclasses.replace` makes a `plan=` with other block sizes."""

    job: str
    block_q: int = _BLOCK  # rows of a tile: queries times the heads of a group
    block_k: int = _BLOCK
    why: str = "arrays in host memory run on the NumPy backend, in blocks of queries x keys"


def plan(spec: Spec, call: Call, *, backward: bool, override: object | None = None) -> NumpyPlan:
    """The block sizes; an override is validated and used as it is."""
    job = "backward" if backward else "forward"
    if override is None:
        return NumpyPlan(job)
    accepted = f"a NumpyPlan with job {job!r} and block sizes of at least 1"
    if not isinstance(override, NumpyPlan):
        raise TypeError(refusal(call.function, "plan", f"is a {type(override).__name__}", f"here it is {accepted}"))
    sizes = (override.block_q, override.block_k)
    if override.job != job or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(refusal(call.function, "plan", f"is {override}", f"here it is {accepted}"))
    return override


def workspace_bytes(spec: Spec, call: Call, *, backward: bool) -> int:
    """NumPy's temporaries are its own."""
    return 0


def plan_bytes(spec: Spec, call: Call, plan: NumpyPlan) -> int:
    """Likewise."""
    return 0


def forward(spec: Spec, call: Call, plan: NumpyPlan) -> Work:
    """To write out and lse."""
    return lambda given, _: _forward(spec, filled(call, given), plan)


def backward(spec: Spec, call: Call, plan: NumpyPlan) -> Work:
    """To write the gradients, or to add to them."""
    return lambda given, _: _backward(spec, filled(call, given), plan)


def _forward(spec: Spec, call: Call, plan: NumpyPlan) -> None:
    with np.errstate(all="ignore"):
        problem = _Problem(spec, call)
        out, lse = problem.per_query(call.out), problem.per_row(call.lse)
        if spec.packed:  # rows that no sequence covers
            out[...], lse[...] = 0, -np.inf
        for part in problem.parts(plan):
            for rows in _blocks(0, part.len_q, problem.row_step(plan)):
                at = part.query_index(rows)
                out[at], lse[at] = _attend(part, rows, plan)


def _backward(spec: Spec, call: Call, plan: NumpyPlan) -> None:
    with np.errstate(all="ignore"):
        problem = _Problem(spec, call)
        if not spec.accumulate:
            for view in (call.dq, call.dk, call.dv, call.dbias, call.dsink):
                if view is not None:
                    view.array[...] = 0
        dq, dk, dv = problem.per_query(call.dq), problem.per_key(call.dk), problem.per_key(call.dv)
        lse = problem.per_row(call.lse)
        delta = problem.heads_apart(_delta(call) if call.delta is None else call.delta.array, axis=1)
        dbias = None
        if call.dbias is not None and problem.bias is not None:
            dbias = np.zeros(problem.bias.shape, problem.dtype)
        dsink = None if problem.sink is None else np.zeros(problem.sink.shape, problem.dtype)
        for part in problem.parts(plan):
            every_row, every_key = slice(0, part.len_q), slice(0, part.len_k)
            lse_rows = problem.load(lse[part.query_index(every_row)])
            has_no_key = np.isneginf(lse_rows)
            lse_rows = np.where(has_no_key, np.inf, lse_rows)  # exp(x - inf) = 0
            delta_rows = np.where(has_no_key, 0, problem.load(delta[part.query_index(every_row)]))
            dq_rows, dk_keys, dv_keys = _gradients(part, lse_rows, delta_rows, dbias, plan)
            _add(dq, part.query_index(every_row), dq_rows)
            _add(dk, part.key_index(every_key), dk_keys)
            _add(dv, part.key_index(every_key), dv_keys)
            if problem.sink is not None and dsink is not None:
                sink = problem.sink[part.heads, :, None]
                share = np.where(np.isneginf(sink), 0, np.exp(sink - lse_rows) * delta_rows)
                dsink[part.heads] -= share.sum(axis=(0, 3))
        if call.dbias is not None and dbias is not None:
            _add(call.dbias.array, ..., dbias.reshape(call.dbias.shape))
        if call.dsink is not None and dsink is not None:
            _add(call.dsink.array, ..., dsink.reshape(call.dsink.shape))


def preprocess(call: Call) -> Work:
    """To write call.delta."""
    return lambda *_: _preprocess(call)


def merge_bytes(call: MergeCall) -> int:
    """As of `workspace_bytes`."""
    return 0


def merge(call: MergeCall) -> Work:
    """To write call.out and call.lse, which may be the arrays of one of the states."""
    return lambda *_: _merge(call)


def merge_bwd(call: MergeCall) -> Work:
    """To write call.douts and call.dlses."""
    return lambda *_: _merge_bwd(call)


def _preprocess(call: Call) -> None:
    with np.errstate(all="ignore"):
        _array(call.delta)[...] = _delta(call)


def _merge(call: MergeCall) -> None:
    with np.errstate(all="ignore"):
        dtype = _widest(*call.outs, *call.lses)
        lses = [lse.array.astype(dtype) for lse in call.lses]
        top = np.maximum.reduce(lses)
        shift = np.where(np.isneginf(top), 0, top)
        weights = [np.exp(lse - shift) for lse in lses]
        total = np.add.reduce(weights)
        merged = np.zeros(_array(call.out).shape, dtype)
        for out, lse, weight in zip(call.outs, lses, weights, strict=True):
            merged += np.where(_by_row(np.isneginf(lse)), 0, _by_row(weight / total) * out.array.astype(dtype))
        _array(call.out)[...] = merged
        _array(call.lse)[...] = shift + np.log(total)


def _merge_bwd(call: MergeCall) -> None:
    with np.errstate(all="ignore"):
        dtype = _widest(*call.outs, *call.lses)
        out, lse, dout = (_array(view).astype(dtype) for view in (call.out, call.lse, call.dout))
        dlse = np.zeros_like(lse) if call.dlse is None else call.dlse.array.astype(dtype)
        for part, part_lse_view, dpart, dpart_lse in zip(call.outs, call.lses, call.douts, call.dlses, strict=True):
            part_lse = part_lse_view.array.astype(dtype)
            has_no_key = np.isneginf(part_lse)
            share = np.exp(part_lse - lse)
            inner = np.einsum("bnhc,bnhc->bhn", dout, part.array.astype(dtype) - out)
            dpart.array[...] = np.where(_by_row(has_no_key), 0, _by_row(share) * dout)
            dpart_lse.array[...] = np.where(has_no_key, 0, share * (inner + dlse))


def append(call: AppendCall) -> Work:
    """To write the new rows into their pages."""
    return lambda given, _: _append(replace(call, **given))


def _append(call: AppendCall) -> None:
    page_size = call.k_pages.shape[1]
    for b, used in enumerate(call.seqused_k.array):
        begin, end = _bounds(call.cu_seqlens_k, b, call.k.shape[1])
        keys = np.arange(used - (end - begin), used)
        at = call.block_table.array[b, keys // page_size], keys % page_size
        row = b if call.cu_seqlens_k is None else 0
        for pages, new in ((call.k_pages, call.k), (call.v_pages, call.v)):
            pages.array[at] = new.array[row, begin:end]


# ------------------------------------------------------------------------------------------------ the algorithm


def _attend(part: _Part, rows: slice, plan: NumpyPlan) -> tuple[Array, Array]:
    """A block of queries over all keys: out [b, h, g, n, Dv] and lse [b, h, g, n]."""
    first, *others = part.splits()
    out, top = _attend_split(part, rows, first, plan, sink=part.problem.sink)
    total = np.where(np.isneginf(top), 0, 1).astype(top.dtype)
    for split in others:  # as the tiles of one split: rounded once at the end, however many there are
        split_out, split_lse = _attend_split(part, rows, split, plan, sink=None)
        new_top = np.maximum(top, split_lse)
        shift = _finite_shift(new_top)
        decay, weight = np.exp(top - shift), np.exp(split_lse - shift)
        total = total * decay + weight
        out = out * decay[..., None] + split_out * weight[..., None]
        top = new_top
    return out / np.where(total == 0, 1, total)[..., None], _finite_shift(top) + np.log(total)


def _attend_split(part: _Part, rows: slice, keys: slice, plan: NumpyPlan, *, sink: Array | None) -> tuple[Array, Array]:
    """The same over a range of keys: the running softmax."""
    problem = part.problem
    q = part.load_q(rows)
    top = np.full(q.shape[:-1], -np.inf, problem.dtype)
    if sink is not None:
        top[...] = sink[part.heads, :, None]
    total = np.where(np.isneginf(top), 0, 1).astype(problem.dtype)
    out = np.zeros((*top.shape, problem.head_dim_v), problem.dtype)

    for cols in _blocks(keys.start, keys.stop, plan.block_k):
        if part.hides(rows, cols):
            continue
        k, v = part.load_keys(cols)
        tile = part.scores(rows, cols, q, k)
        new_top = np.maximum(top, tile.x.max(axis=-1))
        shift = _finite_shift(new_top)
        p = np.exp(tile.x - shift[..., None])
        decay = np.exp(top - shift)
        total = total * decay + p.sum(axis=-1)
        if problem.dropout_p:
            p = np.where(part.keep(rows, cols), p * problem.keep_scale, 0)
        out = out * decay[..., None] + _times(p, tile.blank_cols(v))
        top = new_top

    return np.where(total[..., None] == 0, 0, out / total[..., None]), _finite_shift(top) + np.log(total)


def _finite_shift(top: Array) -> Array:
    """What to subtract before exp: the maximum, or 0 where nothing was seen, so that exp(-inf - 0) = 0."""
    return np.where(np.isneginf(top), 0, top)


def _gradients(
    part: _Part, lse: Array, delta: Array, dbias: Array | None, plan: NumpyPlan
) -> tuple[Array, Array, Array]:
    """dq [b, h, g, Nq, D], dk [b, h, Nk, D] and dv [b, h, Nk, Dv]; dbias is added to.

    `lse` [b, h, g, Nq] is +inf, and `delta` zero, on rows that have no key.
    """
    problem = part.problem
    batch, heads, group, len_q = lse.shape
    dq = np.zeros((batch, heads, group, len_q, problem.head_dim), problem.dtype)
    dk = np.zeros((batch, heads, part.len_k, problem.head_dim), problem.dtype)
    dv = np.zeros((batch, heads, part.len_k, problem.head_dim_v), problem.dtype)

    for cols in _blocks(0, part.len_k, plan.block_k):
        k, v = part.load_keys(cols)
        for rows in _blocks(0, len_q, problem.row_step(plan)):
            if part.hides(rows, cols):
                continue
            has_no_key = np.isposinf(lse[..., rows])
            q, dout = _blank(has_no_key, part.load_q(rows)), _blank(has_no_key, part.load_dout(rows))
            tile = part.scores(rows, cols, q, k)
            q, dout = tile.blank_rows(q), tile.blank_rows(dout)

            p = p_dropped = tile.select(np.exp(tile.x - lse[..., rows, None]))
            dp = _times(dout, v.mT)  # an unseen key's column is selected away in dx
            if problem.dropout_p:
                keep = part.keep(rows, cols)
                p_dropped = np.where(keep, p * problem.keep_scale, 0)
                dp = np.where(keep, dp * problem.keep_scale, 0)
            dv[:, :, cols] += _transposed_times(p_dropped, dout)
            dx = tile.select(p * (dp - delta[..., rows, None]))
            if dbias is not None:
                broadcast = tuple(axis for axis, size in enumerate(dbias.shape) if size == 1)
                dbias[part.bias_index(rows, cols)] += dx.sum(axis=broadcast, keepdims=True)
            ds = dx if tile.tanh is None else dx * (1 - tile.tanh * tile.tanh)
            dq[..., rows, :] += _times(ds, tile.blank_cols(k))
            dk[:, :, cols] += _transposed_times(ds, q)

    dq *= problem.scale
    dk *= problem.scale
    return dq, dk, dv


def _delta(call: Call) -> Array:
    """rowsum(dO * O) - dlse, [B, Hq, Nq], from out and dout as they come."""
    out, dout = _array(call.out), _array(call.dout)
    batch, len_q, heads, _ = out.shape
    dtype = _widest(call.out, call.dout)
    delta = np.zeros((batch, heads, len_q), dtype)
    for rows in _blocks(0, len_q, _BLOCK):
        delta[..., rows] = np.einsum("bnhc,bnhc->bhn", out[:, rows].astype(dtype), dout[:, rows].astype(dtype))
    return delta if call.dlse is None else delta - call.dlse.array


@dataclass(slots=True)
class _Tile:
    """Scores of queries x keys, and what their consumers must select."""

    x: Array  # [b, h, g, n, m], -inf where masked
    tanh: Array | None  # tanh(x / softcap), for the derivative
    masked: Array | None  # broadcasts to x; None when every entry is visible

    def select(self, values: Array) -> Array:
        """`values`, with zeros put where masked."""
        if self.masked is not None:
            np.copyto(values, 0, where=self.masked)
        return values

    def blank_rows(self, per_query: Array) -> Array:
        """Rows [b, h, g, n, c] that see nothing in this tile, replaced by zeros."""
        return per_query if self.masked is None else _blank(self.masked.all(axis=-1), per_query)

    def blank_cols(self, per_key: Array) -> Array:
        """Keys [b, h, m, c] that nothing in this tile sees, replaced by zeros."""
        return per_key if self.masked is None else _blank(self.masked.all(axis=(2, 3)), per_key)


# ---------------------------------------------------------------------------------------------- what it works on


def _computed_in(spec: Spec, call: Call) -> np.dtype:
    """float32, or float64 for float64 inputs and for a scale or softcap that float32 cannot hold."""
    float32 = np.finfo(np.float32)
    is_held = abs(call.scale) <= float32.max and (not call.softcap or float32.tiny <= call.softcap <= float32.max)
    return np.dtype(np.float32 if spec.dtype != "float64" and is_held else np.float64)


class _Problem:
    """A call's arrays with heads apart and outermost, and its options: what does not change from tile to tile."""

    def __init__(self, spec: Spec, call: Call) -> None:
        self.spec, self.call = spec, call
        self.dtype = _computed_in(spec, call)
        self.group = spec.heads_q // spec.heads_kv
        self.head_dim, self.head_dim_v = spec.head_dim, spec.head_dim_v
        self.scale, self.softcap, self.dropout_p = call.scale, call.softcap, call.dropout_p
        self.keep_scale = 1 / (1 - call.dropout_p)
        self.seed, self.offset = _scalar(call.seed) % 2**64, _scalar(call.offset) % 2**32
        self.q = self.per_query(call.q)
        self.k, self.v = _array(call.k), _array(call.v)
        if not spec.paged:
            self.k, self.v = self.per_key(call.k), self.per_key(call.v)
        self.dout = None if call.dout is None else self.per_query(call.dout)
        self.bias = None if call.bias is None else self.heads_apart(call.bias.array, axis=1)
        self.alibi_slopes = None if call.alibi_slopes is None else self.heads_apart(call.alibi_slopes.array, axis=1)
        self.sink = None if call.sink is None else self.load(self.heads_apart(call.sink.array, axis=0))

    def load(self, array: Array) -> Array:
        """Contiguous, in the dtype that is computed in; not to be written to."""
        return np.ascontiguousarray(array, self.dtype)

    def heads_apart(self, array: Array, axis: int) -> Array:
        """A view in which an axis of query heads has become [KV head, group]."""
        heads = (1, 1) if array.shape[axis] == 1 else (self.spec.heads_kv, self.group)
        return array.reshape(*array.shape[:axis], *heads, *array.shape[axis + 1 :], copy=False)

    def per_query(self, view: View | None) -> Array:
        """[B, N, Hq, C] as [B, Hkv, g, N, C]."""
        return self.heads_apart(_array(view), axis=2).transpose(0, 2, 3, 1, 4)

    def per_key(self, view: View | None) -> Array:
        """[B, N, Hkv, C] as [B, Hkv, N, C]."""
        return _array(view).transpose(0, 2, 1, 3)

    def per_row(self, view: View | None) -> Array:
        """[B, Hq, N] as [B, Hkv, g, N]."""
        return self.heads_apart(_array(view), axis=1)

    def row_step(self, plan: NumpyPlan) -> int:
        """Queries in a tile."""
        return max(1, plan.block_q // self.group)

    def parts(self, plan: NumpyPlan) -> Iterator[_Part]:
        """The whole problem, as sequences and as many of their heads as are worked on together."""
        for sequence in _sequences(self.spec, self.call):
            batch, heads = self._chunk(sequence, plan)
            rows = range(sequence.batch.start, sequence.batch.stop, batch)
            for row, head in product(rows, range(0, self.spec.heads_kv, heads)):
                ahead = sequence.first - sequence.batch.start
                yield _Part(
                    self,
                    sequence,
                    batch=slice(row, min(row + batch, sequence.batch.stop)),
                    numbers=slice(row + ahead, min(row + batch, sequence.batch.stop) + ahead),
                    heads=slice(head, min(head + heads, self.spec.heads_kv)),
                )

    def _chunk(self, sequence: _Sequence, plan: NumpyPlan) -> tuple[int, int]:
        """Batch rows and KV heads to take at once: one KV head at least, many when they are small."""
        tile = min(self.group * sequence.len_q, plan.block_q) * min(sequence.len_k, plan.block_k)
        lines = (self.group * sequence.len_q + sequence.len_k) * max(self.head_dim, self.head_dim_v)
        one_head = max(tile, lines, 1)
        heads = min(self.spec.heads_kv, max(1, _CHUNK_ELEMENTS // one_head))
        return max(1, _CHUNK_ELEMENTS // (one_head * heads)) if heads == self.spec.heads_kv else 1, heads


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Batch rows of equal lengths and positions, or one packed sequence."""

    batch: slice  # in the arrays' first axis
    first: int  # number of the first sequence
    q_begin: int
    len_q: int
    k_begin: int
    len_k: int  # live keys
    q_start: int
    k_start: int


def _sequences(spec: Spec, call: Call) -> Iterator[_Sequence]:
    """Every sequence; the rows of a dense batch are one when nothing tells them apart."""
    told_apart = (call.seqused_k, call.block_table, call.cu_seqlens_q)
    if all(x is None for x in told_apart) and not any(isinstance(x, View) for x in (call.q_start, call.k_start)):
        numbers, width = range(min(call.batch, 1)), call.batch
    else:
        numbers, width = range(call.batch), 1
    for b in numbers:
        q_begin, q_end = _bounds(call.cu_seqlens_q, b, call.len_q)
        k_begin, k_end = _bounds(call.cu_seqlens_k, b, call.len_k)
        len_q, len_k = q_end - q_begin, k_end - k_begin
        if call.seqused_k is not None:
            len_k = min(len_k, int(call.seqused_k.array[b]))
        yield _Sequence(
            batch=slice(0, 1) if spec.packed else slice(b, b + width),
            first=b,
            q_begin=q_begin,
            len_q=len_q,
            k_begin=k_begin,
            len_k=len_k,
            q_start=len_k - len_q if call.q_start is None else _scalar(call.q_start, b),
            k_start=_scalar(call.k_start, b),
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """A sequence and some of its heads. Rows and columns are slices that count from the sequence's beginning."""

    problem: _Problem
    sequence: _Sequence
    batch: slice  # in the arrays' first axis
    numbers: slice  # of the sequences
    heads: slice  # KV heads

    @property
    def len_q(self) -> int:
        return self.sequence.len_q

    @property
    def len_k(self) -> int:
        return self.sequence.len_k

    def query_index(self, rows: slice) -> tuple[slice, ...]:
        """Where these rows lie in what `per_query` and `per_row` give."""
        begin = self.sequence.q_begin
        return self.batch, self.heads, slice(None), slice(begin + rows.start, begin + rows.stop)

    def key_index(self, cols: slice) -> tuple[slice, ...]:
        """Where these keys lie in what `per_key` gives."""
        begin = self.sequence.k_begin
        return self.batch, self.heads, slice(begin + cols.start, begin + cols.stop)

    def bias_index(self, rows: slice, cols: slice) -> tuple[slice, ...]:
        """Where this tile lies in the bias, whose broadcast axes have extent 1."""
        where = (self.batch, self.heads, slice(None), rows, cols)
        shape = _some(self.problem.bias).shape
        return tuple(slice(None) if size == 1 else at for size, at in zip(shape, where, strict=True))

    def load_q(self, rows: slice) -> Array:
        return self.problem.load(self.problem.q[self.query_index(rows)])

    def load_dout(self, rows: slice) -> Array:
        """Rounded to q's dtype, as every backend's matrix products see it."""
        dout = _some(self.problem.dout)[self.query_index(rows)]
        return self.problem.load(dout.astype(self.problem.q.dtype, copy=False))

    def load_keys(self, cols: slice) -> tuple[Array, Array]:
        """k [b, h, m, D] and v [b, h, m, Dv], gathered when they lie in pages."""
        problem = self.problem
        if problem.call.block_table is None:
            at = self.key_index(cols)
            return problem.load(problem.k[at]), problem.load(problem.v[at])
        page_size = problem.k.shape[1]
        j = np.arange(cols.start, cols.stop)
        at = problem.call.block_table.array[self.numbers.start, j // page_size], j % page_size, self.heads
        k, v = problem.k[at], problem.v[at]
        return problem.load(k.transpose(1, 0, 2)[None]), problem.load(v.transpose(1, 0, 2)[None])

    def splits(self) -> list[slice]:
        """Ranges of keys to attend separately; at least one, perhaps empty."""
        call = self.problem.call
        length = call.split_len or -(-self.len_k // max(1, call.num_splits))
        return list(_blocks(0, self.len_k, max(1, length))) or [slice(0, 0)]

    def scores(self, rows: slice, cols: slice, q: Array, k: Array) -> _Tile:
        """Steps 1 to 5 of the contract's forward."""
        problem = self.problem
        x = _times(q, k.mT)
        x *= problem.scale
        tanh = None
        if problem.softcap:
            tanh = np.tanh(x / problem.softcap)
            x = problem.softcap * tanh
        if problem.alibi_slopes is not None:
            slopes = problem.load(problem.alibi_slopes[self.numbers, self.heads])
            x -= slopes[..., None, None] * np.abs(self._distance(rows, cols)).astype(problem.dtype)
        masked = self._band(rows, cols)
        if problem.bias is not None:
            bias = problem.load(problem.bias[self.bias_index(rows, cols)])
            x += bias
            closed = np.isneginf(bias)
            if closed.any():
                masked = closed if masked is None else masked | closed
        if masked is not None:
            np.copyto(x, -np.inf, where=masked)
            if tanh is not None:
                np.copyto(tanh, 0, where=masked)  # its derivative multiplies dx, and may be a NaN's
        return _Tile(x, tanh, masked)

    def keep(self, rows: slice, cols: slice) -> Array:
        """Dropout's mask, [b, h, g, n, m]."""
        problem, heads = self.problem, self.problem.spec.heads_q
        kv_heads = np.arange(self.heads.start, self.heads.stop)[:, None] * problem.group
        numbers = np.arange(self.numbers.start, self.numbers.stop)[:, None, None]
        return keep_mask(
            numbers * heads + kv_heads + np.arange(problem.group),
            self._positions(self.sequence.q_start, rows),
            self._positions(self.sequence.k_start, cols),
            dropout_p=problem.dropout_p,
            seed=problem.seed,
            offset=problem.offset,
        )

    def hides(self, rows: slice, cols: slice) -> bool:
        """Whether the band leaves nothing of this tile."""
        least, greatest = self._distance_range(rows, cols)
        left, right = self.problem.call.window_left, self.problem.call.window_right
        return (right is not None and least > right) or (left is not None and greatest < -left)

    def _band(self, rows: slice, cols: slice) -> Array | None:
        """True where the band masks, [1, 1, 1, n, m]; None when it shows the whole tile."""
        least, greatest = self._distance_range(rows, cols)
        left, right = self.problem.call.window_left, self.problem.call.window_right
        if (right is None or greatest <= right) and (left is None or least >= -left):
            return None
        distance = self._distance(rows, cols)
        masked = np.zeros(distance.shape, bool)
        if right is not None:
            masked |= distance > right
        if left is not None:
            masked |= distance < -left
        return masked[None, None, None]

    def _distance(self, rows: slice, cols: slice) -> Array:
        """r_j - p_i, [n, m]."""
        k_positions = self._positions(self.sequence.k_start, cols)
        return k_positions[None, :] - self._positions(self.sequence.q_start, rows)[:, None]

    def _distance_range(self, rows: slice, cols: slice) -> tuple[int, int]:
        """The least and the greatest r_j - p_i of a tile."""
        start = self.sequence.k_start - self.sequence.q_start
        return start + cols.start - (rows.stop - 1), start + cols.stop - 1 - rows.start

    @staticmethod
    def _positions(start: int, block: slice) -> Array:
        return np.arange(block.start, block.stop) + start


# ------------------------------------------------------------------------------------------------ small helpers


def _blocks(begin: int, end: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, end)) for at in range(begin, end, step))


def _times(a: Array, b: Array) -> Array:
    """[b, h, g, n, c] @ [b, h, c, m]: the heads of a group share b, so their rows are one matrix."""
    batch, heads, group, rows, inner = a.shape
    return (a.reshape(batch, heads, group * rows, inner) @ b).reshape(batch, heads, group, rows, b.shape[-1])


def _transposed_times(a: Array, b: Array) -> Array:
    """sum over g and n of a [b, h, g, n, m] times b [b, h, g, n, c]: [b, h, m, c]."""
    batch, heads, group, rows, cols = a.shape
    return a.reshape(batch, heads, group * rows, cols).mT @ b.reshape(batch, heads, group * rows, b.shape[-1])


def _blank(unseen: Array, lines: Array) -> Array:
    """`lines` [..., c] with zeros where `unseen` [...]."""
    return np.where(unseen[..., None], 0, lines) if unseen.any() else lines


def _by_row(per_row: Array) -> Array:
    """[B, H, N] beside [B, N, H, C]."""
    return per_row.swapaxes(1, 2)[..., None]


def _add(target: Array, at: Any, value: Array) -> None:
    target[at] += value.astype(target.dtype, copy=False)


def _widest(*views: View | None) -> np.dtype:
    """float64 if any of them is, else float32."""
    return np.dtype(np.float64 if any(view is not None and view.dtype == "float64" for view in views) else np.float32)


def _bounds(cu_seqlens: View | None, b: int, length: int) -> tuple[int, int]:
    return (0, length) if cu_seqlens is None else (int(cu_seqlens.array[b]), int(cu_seqlens.array[b + 1]))


def _scalar(value: int | View, at: int = 0) -> int:
    """An int, or entry `at` of a device array, signed or not."""
    return value if isinstance(value, int) else int(value.array.reshape(-1)[at])


def _some(value: Any) -> Any:
    """What the checks have promised to be there."""
    if value is None:
        raise AssertionError("the NumPy backend was called without an array that the job needs")
    return value


def _array(view: View | None) -> Array:
    return _some(view).array
