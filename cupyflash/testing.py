"""What judges every backend: the reference, the peer, the rule that compares them, and the arithmetic of FLOPs.

`reference` and `reference_bwd` materialise everything in float64 and follow `docs/contract.md` line by line. `peer` and
`peer_bwd` are the same lines in float32 with a kernel's roundings: what a correct 16-bit kernel may lose. A result is
accepted when it is at most twice as far from the reference as the peer is, plus a rounding floor measured from the
data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from cupyflash._philox import keep_mask

__all__ = [
    "assert_close",
    "check_backward",
    "check_forward",
    "flops",
    "peer",
    "peer_bwd",
    "reference",
    "reference_bwd",
    "time_gpu",
]

Array = Any  # a NumPy array of any float dtype, ml_dtypes' bfloat16 included

# Twice the peer's error, since two orders of summation are two draws from one distribution.
PEER_FACTOR = 2.0
# And two units of rounding: of the result's dtype on its largest value, of the sums' dtype on their largest terms.
ROUNDING_UNITS = 2.0
# Central differences with step 1e-5 in float64 leave about 1e-10 of truncation and 1e-16 / 1e-5 = 1e-11 of rounding,
# times the third derivative and the loss; a wrong term is 1e-3 or more.
DIFFERENCE_STEP = 1e-5
DIFFERENCE_TOLERANCE = 2e-9
# rowsum(dO * O) and rowsum(P * dP) are the same sum of a hundred products of order one in another order: some 20 ulp.
DELTA_TOLERANCE = 4e-15
# The same float32 numbers of order ten, added once more or in another order by atomics.
SUM_TOLERANCE = 1e-5
# Linear memory: at N = 16,384 and D 64 a score matrix would be 1 GiB in float32, and a whole operand is 4 MiB.
PEAK_BYTES = 64 * 2**20

# Options of a call that change how it is computed and stored, and no value.
_NO_VALUE = {
    "out_dtype",
    "grad_dtype",
    "bias_grad",
    "num_splits",
    "split_len",
    "deterministic",
    "allow_tf32",
    "max_seqlen_q",
    "max_seqlen_k",
    "check",
    "plan",
}


# ------------------------------------------------------------------------------------------------ the reference


def reference(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """out and lse (natural log) of `attn_fwd` in float64, in the caller's layout; every option of the contract.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> from cupyflash import testing
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 5, 2, 8)).astype(np.float16)
    >>> out, lse = testing.reference(q, k, v, causal=True)
    >>> out.dtype.name, lse.shape
    ('float64', (1, 2, 5))
    """
    return _Formula(np.float64).forward(_Inputs.of(q, k, v, options))


def reference_bwd(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    delta: Array | None = None,
    dlse: Array | None = None,
    **options: Any,
) -> dict[str, Array]:
    """Gradients of `attn_bwd` by name, in float64; without `out` and `lse` its own are used.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> from cupyflash import testing
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 5, 2, 8)).astype(np.float16)
    >>> grads = testing.reference_bwd(q, k, v, dout, sink=np.zeros(2, np.float32))
    >>> sorted(grads)
    ['dk', 'dq', 'dsink', 'dv']
    """
    inputs = _Inputs.of(q, k, v, options)
    return _Formula(np.float64).backward(inputs, dout, out, lse, delta, dlse)


def peer(q: Array, k: Array, v: Array, *, grid: float = 0.0, **options: Any) -> tuple[Array, Array]:
    """The reference's formula in float32, with P rounded to q's dtype before P.V; float64 inputs stay in float64.

    `grid` in [0, 1) moves what 16-bit values are rounded to: another draw of the same errors, where a result is so
    small that one draw may be lucky.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> from cupyflash import testing
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 5, 2, 8)).astype(np.float16)
    >>> exact, _ = testing.reference(q, k, v)
    >>> rounded, _ = testing.peer(q, k, v)
    >>> bool(0 < np.abs(rounded - exact).max() < 0.01)  # what a right kernel may lose
    True
    """
    return _Formula.rounding_like(q.dtype, grid).forward(_Inputs.of(q, k, v, options))


def peer_bwd(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    delta: Array | None = None,
    dlse: Array | None = None,
    grid: float = 0.0,
    **options: Any,
) -> dict[str, Array]:
    """The gradients in float32, with out, P and dS rounded to q's dtype, dS of the rounded P; `grid` as in `peer`.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> from cupyflash import testing
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 5, 2, 8)).astype(np.float16)
    >>> exact, rounded = testing.reference_bwd(q, k, v, dout)["dq"], testing.peer_bwd(q, k, v, dout)["dq"]
    >>> bool(0 < np.abs(rounded - exact).max() < 0.01)
    True
    """
    inputs = _Inputs.of(q, k, v, options)
    return _Formula.rounding_like(q.dtype, grid).backward(inputs, dout, out, lse, delta, dlse)


def rounding_terms(
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None = None,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    delta: Array | None = None,
    dlse: Array | None = None,
    **options: Any,
) -> dict[str, float]:
    """For out, lse and each gradient, what its rounding errors are proportional to: the largest sum of absolute terms.

    A score's terms set the relative error of P, and dP - D cancels, wholly when a row has one key: a result may be far
    smaller than what it is made of. Splits that the call asks for are merged one after the other, each with a rounding
    of the sum so far, and equal splits round the same way each time.

    The peer of float64 inputs is the reference, and tells nothing of how sums round: n terms in any order then count
    n times, which is the bound of n - 1 additions.
    """
    inputs = _Inputs.of(q, k, v, options)
    scores = _Formula(np.float64).score_terms(inputs)
    weighted, _ = _Formula(np.float64).forward(replace(inputs, v=np.abs(_double(inputs.v))))
    merged = scores + _splits(inputs, options)
    terms = {"out": merged * _largest(weighted), "lse": merged}
    if dout is not None:
        grads = _Formula(np.float64, absolute=True).backward(inputs, dout, out, lse, delta, dlse)
        terms |= {name: (1 + scores) * _largest(grad) for name, grad in grads.items()}
    if q.dtype == np.float64:
        terms = {name: value * _longest_sum(inputs, name) for name, value in terms.items()}
    return terms


def _splits(inputs: _Inputs, options: dict[str, Any]) -> int:
    """Parts that the keys of the longest sequence are split into; those without keys add nothing."""
    longest = max((len(part.k) for part in inputs.sequences()), default=0)
    if options.get("split_len"):
        return max(1, -(-longest // options["split_len"]))
    return max(1, min(options.get("num_splits", 0), longest))


def _longest_sum(inputs: _Inputs, name: str) -> int:
    """Most terms that any value of this result, or of what it is made of, is a sum of."""
    rows, keys = inputs.q.shape[1], inputs.len_k
    own = {"dbias": math.prod((inputs.batch, inputs.heads, rows, keys)), "dsink": inputs.batch * rows}
    return max(1, inputs.q.shape[3], inputs.v.shape[3], keys, inputs.group * rows, own.get(name, 0))


def row_dtype(dtype: Any) -> str:
    """Of lse and of the sums that a backend makes of inputs of this dtype."""
    return "float64" if np.dtype(dtype) == np.float64 else "float32"


def check_forward(out: Array, lse: Array, q: Array, k: Array, v: Array, *, name: str = "", **options: Any) -> None:
    """`assert_close` of what `attn_fwd` gave, as NumPy arrays.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> from cupyflash import testing
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 5, 2, 8)).astype(np.float16)
    >>> out, lse = cf.attn_fwd(q, k, v, causal=True)
    >>> testing.check_forward(out, lse, q, k, v, causal=True)  # raises an AssertionError where they are wrong
    """
    expected, plain = reference(q, k, v, **options), peer(q, k, v, **options)
    terms = rounding_terms(q, k, v, **options)
    out_dtype, row = np.dtype(options.get("out_dtype") or q.dtype), row_dtype(q.dtype)
    assert_close(out, expected[0], plain[0], dtype=out_dtype, terms=terms["out"], sums=row, name=f"{name} out")
    assert_close(lse, expected[1], plain[1], dtype=row, terms=terms["lse"], sums=row, name=f"{name} lse")


def check_backward(
    grads: tuple[Array, ...], q: Array, k: Array, v: Array, dout: Array, *, name: str = "", **options: Any
) -> None:
    """`assert_close` of what `attn_bwd` gave, as NumPy arrays; `out` and `lse` among the options if they are global.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> from cupyflash import testing
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 5, 2, 8)).astype(np.float16)
    >>> grads = cf.attn_bwd(q, k, v, *cf.attn_fwd(q, k, v), dout)
    >>> testing.check_backward(grads, q, k, v, dout)  # raises an AssertionError where they are wrong
    """
    expected, plain = reference_bwd(q, k, v, dout, **options), peer_bwd(q, k, v, dout, **options)
    terms = rounding_terms(q, k, v, dout, **options)
    inputs = {"dq": q, "dk": k, "dv": v, "dbias": options.get("bias"), "dsink": options.get("sink")}
    if not options.get("bias_grad", True):
        expected.pop("dbias", None)
    if len(grads) != len(expected):
        raise AssertionError(f"{name}: {len(grads)} gradients, expected {', '.join(expected)}")
    for (what, grad), actual in zip(expected.items(), grads, strict=True):
        own = inputs[what].dtype
        dtype = own if what == "dsink" else np.dtype(options.get("grad_dtype") or own)
        sums = row_dtype(q.dtype)
        assert_close(actual, grad, plain[what], dtype=dtype, terms=terms[what], sums=sums, name=f"{name} {what}")


@dataclass(slots=True)
class _Sequence:
    """One dense problem inside a call; views, so that writing to a result's part writes the result."""

    number: int
    q: Array  # [Nq, Hq, D]
    k: Array  # [Nk, Hkv, D], live keys only
    v: Array
    batch: int  # index into [B, ...] results, and where its rows and keys lie there
    rows: slice
    keys: slice
    q_positions: Array
    k_positions: Array


@dataclass(slots=True)
class _Inputs:
    """A call in the form bshd, with packed = a leading axis of one."""

    q: Array
    k: Array
    v: Array
    layout: str = "bshd"
    scale: float | None = None
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: Any = None
    offset: Any = 0
    bias: Array | None = None
    alibi_slopes: Array | None = None
    sink: Array | None = None
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    seqused_k: Array | None = None
    block_table: Array | None = None
    q_start: Any = None
    k_start: Any = 0

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, options: dict[str, Any]) -> _Inputs:
        inputs = cls(q, k, v, **{name: value for name, value in options.items() if name not in _NO_VALUE})
        inputs.q = inputs.canonical(q)
        pool = inputs.block_table is not None and inputs.layout == "thd"  # pools are always [pages, page_size, Hkv, D]
        inputs.k, inputs.v = (k, v) if pool else (inputs.canonical(k), inputs.canonical(v))
        return inputs

    def canonical(self, array: Array) -> Array:
        """[B, N, H, C] of an array in the caller's layout."""
        return {"bshd": lambda x: x, "bhsd": lambda x: x.swapaxes(1, 2), "thd": lambda x: x[None]}[self.layout](array)

    def original(self, array: Array) -> Array:
        """The caller's layout of an array [B, N, H, C]."""
        return {"bshd": lambda x: x, "bhsd": lambda x: x.swapaxes(1, 2), "thd": lambda x: x[0]}[self.layout](array)

    def per_row(self, array: Array) -> Array:
        """[B, Hq, N] of an lse in the caller's layout, and back."""
        return array[None] if self.layout == "thd" else array

    @property
    def len_k(self) -> int:
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def group(self) -> int:
        return self.heads // self.k.shape[2]

    @property
    def batch(self) -> int:
        return len(self.q) if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1

    def sequences(self) -> Iterator[_Sequence]:
        packed = self.layout == "thd"
        for b in range(self.batch):
            index = 0 if packed else b
            rows, keys = slice(0, self.q.shape[1]), slice(0, self.k.shape[1])
            if self.cu_seqlens_q is not None:
                rows = slice(int(self.cu_seqlens_q[b]), int(self.cu_seqlens_q[b + 1]))
            if self.block_table is not None and self.seqused_k is not None:
                live = int(self.seqused_k[b])
                pages = self.block_table[b, : -(-live // self.k.shape[1])]
                k, v = (np.concatenate([*pool[pages], pool[:0, 0]])[:live] for pool in (self.k, self.v))
            else:
                if self.cu_seqlens_k is not None:
                    keys = slice(int(self.cu_seqlens_k[b]), int(self.cu_seqlens_k[b + 1]))
                if self.seqused_k is not None:
                    keys = slice(keys.start, keys.start + int(self.seqused_k[b]))
                k, v = self.k[index, keys], self.v[index, keys]
            len_q, len_k = rows.stop - rows.start, len(k)
            q_start = self.q_start
            if q_start is None:
                q_start = 0 if self.causal == "top-left" else len_k - len_q
            yield _Sequence(
                number=b,
                q=self.q[index, rows],
                k=k,
                v=v,
                batch=index,
                rows=rows,
                keys=keys,
                q_positions=_entry(q_start, b) + np.arange(len_q),
                k_positions=_entry(self.k_start, b) + np.arange(len_k),
            )

    def visible(self, sequence: _Sequence) -> Array:
        """[Nq, Nk]"""
        p, r = sequence.q_positions[:, None], sequence.k_positions[None, :]
        visible = np.ones((len(sequence.q), len(sequence.k)), bool)
        left, right = self.window or (None, None)
        if left not in (None, -1):
            visible &= p - left <= r
        if right not in (None, -1):
            visible &= r <= p + right
        if self.causal:
            visible &= r <= p
        return visible


@dataclass(slots=True)
class _Formula:
    """The contract's equations in one dtype, with a rounding before the matrix products.

    `absolute` replaces each term of the backward's sums by its absolute value.
    """

    dtype: Any
    rounded: Callable[[Array], Array] = field(default=lambda x: x)
    tanh: Callable[[Array], Array] = np.tanh
    absolute: bool = False

    @classmethod
    def rounding_like(cls, dtype: Any, grid: float = 0.0) -> _Formula:
        """What a kernel does with inputs of this dtype; for 16 bits tanh may be the hardware's, good to 2**-11."""
        steps, stretch = np.float32(2**10), np.float32(1 + grid)
        if np.dtype(dtype).itemsize > 2:
            return cls(np.dtype(dtype).type)
        return cls(
            np.float32,
            rounded=lambda x: (x * stretch).astype(dtype).astype(np.float32) / stretch,
            tanh=lambda x: (np.round(np.tanh(x) * steps + np.float32(grid)) - np.float32(grid)) / steps,
        )

    def forward(self, inputs: _Inputs) -> tuple[Array, Array]:
        with np.errstate(all="ignore"):
            out = np.zeros((*inputs.q.shape[:3], inputs.v.shape[3]), self.dtype)
            lse = np.full((inputs.q.shape[0], inputs.heads, inputs.q.shape[1]), -np.inf, self.dtype)
            for sequence in inputs.sequences():
                x, _ = self._scores(inputs, sequence)
                top = x.max(axis=-1, initial=-np.inf)
                if inputs.sink is not None:
                    top = np.maximum(top, self._cast(inputs.sink)[:, None])
                shift = np.where(np.isneginf(top), 0, top)
                p = np.exp(x - shift[..., None])
                total = p.sum(axis=-1)
                if inputs.sink is not None:
                    total = total + np.exp(self._cast(inputs.sink)[:, None] - shift)
                p = self.rounded(self._kept(inputs, sequence, p))  # 1 / (1 - p_drop) follows the product
                product = self._keep_scale(inputs) * (p @ self._per_head(inputs, sequence.v))
                divisor = np.where(total == 0, 1, total)[..., None]
                out[sequence.batch, sequence.rows] = (product / divisor).swapaxes(0, 1)
                lse[sequence.batch, :, sequence.rows] = shift + np.log(total)
        return inputs.original(out), lse[0] if inputs.layout == "thd" else lse

    def score_terms(self, inputs: _Inputs) -> float:
        """The largest sum of absolute terms of a score."""
        bias, slopes, scale = inputs.bias, inputs.alibi_slopes, inputs.scale
        positive = replace(
            inputs,
            q=np.abs(_double(inputs.q)),
            k=np.abs(_double(inputs.k)),
            scale=None if scale is None else abs(scale),
            softcap=None,
            alibi_slopes=None if slopes is None else -np.abs(_double(slopes)),
            bias=None if bias is None else np.where(np.isneginf(_double(bias)), -np.inf, np.abs(_double(bias))),
        )
        with np.errstate(all="ignore"):
            return max((_largest(self._scores(positive, part)[0]) for part in positive.sequences()), default=0.0)

    def backward(
        self,
        inputs: _Inputs,
        dout: Array,
        out: Array | None,
        lse: Array | None,
        delta: Array | None,
        dlse: Array | None,
    ) -> dict[str, Array]:
        own_out, own_lse = _Formula(self.dtype, self.rounded, self.tanh).forward(inputs)
        out = inputs.canonical(self.rounded(own_out) if out is None else self._cast(out))
        lse = inputs.per_row(self._cast(own_lse if lse is None else lse))
        dout = inputs.canonical(self._cast(dout))
        with np.errstate(all="ignore"):
            if delta is None:
                terms = self._sign(dout * out).sum(axis=-1).swapaxes(1, 2)
                delta = terms if dlse is None else terms + self._sign(-inputs.per_row(self._cast(dlse)))
            else:
                delta = self._sign(inputs.per_row(self._cast(delta)))
            grads = {name: np.zeros(getattr(inputs, name[1:]).shape, self.dtype) for name in ("dq", "dk", "dv")}
            for name in ("bias", "sink"):
                if (array := getattr(inputs, name)) is not None:
                    grads["d" + name] = np.zeros(array.shape, self.dtype)
            for sequence in inputs.sequences():
                self._sequence_backward(inputs, sequence, grads, dout, lse, delta)
        return {name: inputs.original(grad) if name in ("dq", "dk", "dv") else grad for name, grad in grads.items()}

    def _sequence_backward(
        self, inputs: _Inputs, sequence: _Sequence, grads: dict[str, Array], dout: Array, lse: Array, delta: Array
    ) -> None:
        scale = 1 / math.sqrt(inputs.q.shape[3]) if inputs.scale is None else inputs.scale
        lse, delta = (array[sequence.batch, :, sequence.rows] for array in (lse, delta))  # [Hq, Nq]
        has_no_key = np.isneginf(lse)
        delta = np.where(has_no_key, 0, delta)
        d_o = self._cast(dout[sequence.batch, sequence.rows].astype(inputs.q.dtype)).swapaxes(0, 1)
        d_o = self._sign(np.where(has_no_key[..., None], 0, d_o))  # [Hq, Nq, Dv]
        q = self._cast(sequence.q).swapaxes(0, 1)
        k, v = self._per_head(inputs, sequence.k), self._per_head(inputs, sequence.v)

        x, slope = self._scores(inputs, sequence)
        hidden = np.isneginf(x) | has_no_key[..., None]
        p = np.where(hidden, 0, np.exp(x - lse[..., None]))
        dp = self._keep_scale(inputs) * self._kept(inputs, sequence, d_o @ self._sign(v).mT)
        centred = dp + delta[..., None] if self.absolute else dp - delta[..., None]
        dx = np.where(hidden, 0, p * centred)
        ds = self.rounded(np.where(hidden, 0, self.rounded(p * self._sign(slope)) * centred))

        dq, dk = ds @ self._sign(k), ds.mT @ self._sign(q)
        dv = self._keep_scale(inputs) * (self.rounded(self._kept(inputs, sequence, p)).mT @ d_o)
        at_rows, at_keys = (sequence.batch, sequence.rows), (sequence.batch, sequence.keys)
        grads["dq"][at_rows] = self._sign(np.asarray(scale)) * dq.swapaxes(0, 1)
        grads["dk"][at_keys] = self._sign(np.asarray(scale)) * self._per_kv_head(inputs, dk)
        grads["dv"][at_keys] = self._per_kv_head(inputs, dv)
        if inputs.bias is not None:
            full = np.zeros((inputs.batch, *dx.shape[:2], inputs.k.shape[1]), self.dtype)
            full[sequence.number, ..., : len(sequence.k)] = dx
            grads["dbias"] += _sum_to(full, inputs.bias.shape)
        if inputs.sink is not None:
            sink = self._cast(inputs.sink)[:, None]
            unused = np.isneginf(sink) | has_no_key
            share = np.where(unused, 0, np.exp(sink - lse) * delta).sum(axis=-1)
            grads["dsink"] += share if self.absolute else -share

    def _scores(self, inputs: _Inputs, sequence: _Sequence) -> tuple[Array, Array]:
        """x [Hq, Nq, Nk], -inf where masked, and dx / d(scale q.k)."""
        scale = 1 / math.sqrt(inputs.q.shape[3]) if inputs.scale is None else inputs.scale
        x = self.dtype(scale) * (self._cast(sequence.q).swapaxes(0, 1) @ self._per_head(inputs, sequence.k).mT)
        slope = np.ones((), self.dtype)
        if inputs.softcap:
            x = self.dtype(inputs.softcap) * self.tanh(x / self.dtype(inputs.softcap))
            slope = 1 - (x / self.dtype(inputs.softcap)) ** 2
        if inputs.alibi_slopes is not None:
            slopes = np.broadcast_to(self._cast(inputs.alibi_slopes), (inputs.batch, inputs.heads))[sequence.number]
            distance = np.abs(sequence.q_positions[:, None] - sequence.k_positions[None, :])
            x = x - slopes[:, None, None] * distance.astype(self.dtype)
        visible = inputs.visible(sequence)
        if inputs.bias is not None:
            full = (inputs.batch, inputs.heads, len(sequence.q), inputs.len_k)
            bias = np.broadcast_to(self._cast(inputs.bias), full)[sequence.number, ..., : len(sequence.k)]
            x = x + bias
            visible = visible & ~np.isneginf(bias)
        return np.where(visible, x, -np.inf).astype(self.dtype), slope

    def _kept(self, inputs: _Inputs, sequence: _Sequence, values: Array) -> Array:
        """`values`, 0 where dropped."""
        if not inputs.dropout_p:
            return values
        keep = keep_mask(
            sequence.number * inputs.heads + np.arange(inputs.heads),
            sequence.q_positions,
            sequence.k_positions,
            dropout_p=inputs.dropout_p,
            seed=_entry(inputs.seed, 0) % 2**64,
            offset=_entry(inputs.offset, 0),
        )
        return np.where(keep, values, 0)

    def _keep_scale(self, inputs: _Inputs) -> Any:
        return self.dtype(1 / (1 - inputs.dropout_p))

    def _per_head(self, inputs: _Inputs, per_key: Array) -> Array:
        """[Nk, Hkv, C] as [Hq, Nk, C]."""
        return np.repeat(self._cast(per_key).swapaxes(0, 1), inputs.group, axis=0)

    def _per_kv_head(self, inputs: _Inputs, per_head: Array) -> Array:
        """[Hq, Nk, C] summed over each group, as [Nk, Hkv, C]."""
        heads, len_k, width = per_head.shape
        return per_head.reshape(heads // inputs.group, inputs.group, len_k, width).sum(axis=1).swapaxes(0, 1)

    def _cast(self, array: Array) -> Array:
        return np.asarray(array).astype(self.dtype)

    def _sign(self, array: Array) -> Array:
        return np.abs(array) if self.absolute else array


def _entry(value: Any, index: int) -> int:
    """An int, or entry `index` of an array of them."""
    return int(value) if np.ndim(value) == 0 else int(np.asarray(value).reshape(-1)[index])


def _double(array: Array) -> Array:
    return np.asarray(array).astype(np.float64)


def _largest(array: Array) -> float:
    return float(np.max(array, initial=0.0, where=np.isfinite(array)))


def _sum_to(array: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of np.broadcast_to."""
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    return array.sum(axis=tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True)


# ------------------------------------------------------------------------------------------------ the comparison


def assert_close(
    actual: Array,
    expected: Array,
    peer: Array,
    *,
    dtype: Any = None,
    terms: float = 0.0,
    sums: Any = None,
    name: str = "array",
) -> None:
    """Shape, dtype, places of infinities and NaNs, then values, then the angle between the whole tensors.

        max|actual - expected| <= 2 max|peer - expected| + 2 eps(dtype) max(max|expected|, tiny(dtype))
                                  + 2 eps(sums) terms + 2 tiny(sums) / eps(sums)

    with tiny the smallest normal number, below which numbers lie as far apart as above it. Sums may flush what is
    smaller: only beside numbers of less than tiny / eps does that count.

    Parameters
    ----------
    expected : array, float64
        The reference.
    peer : array
        The same formula in plain operations with the kernel's roundings.
    dtype : dtype, default whatever `actual` has
        What `actual` must have.
    terms : float
        The largest sum of absolute terms behind a value, see `rounding_terms`.
    sums : dtype, default float32, or a wider `actual`'s own
        What those are summed in, which a wider result keeps the rounding of.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> from cupyflash import testing
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 5, 2, 8)).astype(np.float16)
    >>> (out, _), (exact, _), (rounded, _) = (f(q, k, v) for f in (cf.attn_fwd, testing.reference, testing.peer))
    >>> testing.assert_close(out, exact, rounded, dtype=np.float16)
    >>> try:
    ...     testing.assert_close(1.1 * out, exact, rounded)
    ... except AssertionError:
    ...     print("too far")
    too far
    """
    actual, expected, peer = np.asarray(actual), np.asarray(expected, np.float64), np.asarray(peer, np.float64)
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {actual.shape}, expected {expected.shape}")
    if dtype is not None and actual.dtype != np.dtype(dtype):
        raise AssertionError(f"{name}: dtype {actual.dtype}, expected {dtype}")
    actual_dtype = actual.dtype
    eps = _eps(actual_dtype)
    if sums is None:
        sums = actual_dtype if eps < _eps(np.float32) else np.float32
    eps_sums, tiny_sums = _eps(sums), _tiny(sums)
    actual = actual.astype(np.float64)
    for what, found in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = found(actual) != found(expected)
        if wrong.any():
            raise AssertionError(f"{name}: {what} in the wrong place. {_worst(actual, expected, wrong)}")

    finite = np.isfinite(expected)
    if not finite.any():
        return
    actual, expected, peer = (np.where(finite, array, 0) for array in (actual, expected, peer))
    size, length = np.abs(expected).max(), float(np.linalg.norm(expected))
    peer_error = np.abs(peer - expected).max(initial=0, where=np.isfinite(peer))
    floor = eps * max(size, _tiny(actual_dtype)) + eps_sums * terms + tiny_sums / eps_sums
    limit = PEER_FACTOR * peer_error + ROUNDING_UNITS * floor
    wrong = ~(np.abs(actual - expected) <= limit)
    if wrong.any():
        bound = f"error above {limit:.3e} (peer {peer_error:.3e}, floor {floor:.3e})"
        raise AssertionError(f"{name}: {bound}. {_worst(actual, expected, wrong)}")
    if length == 0:
        return
    angle, peer_angle = _angle(actual, expected), _angle(peer, expected)
    everywhere = eps * _tiny(actual_dtype) + eps_sums * terms  # what any element may be off by, however small
    floor = floor / size + everywhere * math.sqrt(finite.sum()) / length
    limit = PEER_FACTOR * peer_angle + ROUNDING_UNITS * floor
    if not angle <= limit:
        raise AssertionError(f"{name}: angle {angle:.3e} to the reference is above {limit:.3e} (peer {peer_angle:.3e})")


def _eps(dtype: Any) -> float:
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps)


def _tiny(dtype: Any) -> float:
    return float(ml_dtypes.finfo(np.dtype(dtype)).tiny)


def _worst(actual: Array, expected: Array, wrong: Array) -> str:
    with np.errstate(invalid="ignore"):
        error = np.where(wrong, np.nan_to_num(np.abs(actual - expected), nan=np.inf), -1)
    at = tuple(int(i) for i in np.unravel_index(np.argmax(error), error.shape))
    return f"Worst at {at}: {actual[at]!r}, expected {expected[at]!r}; {int(wrong.sum())} of {wrong.size} wrong"


def _angle(a: Array, b: Array) -> float:
    """In radians while small. sqrt(2 (1 - cos)) would lose all that matters below 1e-8 to cancellation."""
    length_a, length_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if not length_a or not length_b:
        return 0.0
    return float(np.linalg.norm(a / length_a - b / length_b))


# ------------------------------------------------------------------------------------------------ speed


def flops(
    *,
    batch: int,
    len_q: int,
    len_k: int,
    heads_q: int,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    backward: bool = False,
) -> int:
    """Floating-point operations of the matrix products over visible pairs: two forward, five backward.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> from cupyflash import testing
    >>> testing.flops(batch=1, len_q=4, len_k=4, heads_q=1, head_dim=8, causal=True)  # 10 pairs, 8 + 8 multiply-adds
    320
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    q_start = 0 if causal == "top-left" else len_k - len_q
    left, right = (None if bound == -1 else bound for bound in window or (None, None))
    if causal:
        right = 0 if right is None else min(right, 0)
    p = np.arange(len_q) + q_start
    first = np.zeros_like(p) if left is None else np.maximum(p - left, 0)
    last = np.full_like(p, len_k - 1) if right is None else np.minimum(p + right, len_k - 1)
    pairs = int(np.maximum(last - first + 1, 0).sum())
    width = 3 * head_dim + 2 * head_dim_v if backward else head_dim + head_dim_v
    return 2 * batch * heads_q * pairs * width


def time_gpu(run: Callable[[], object], *, warm_up: int = 5, repeats: int = 30) -> tuple[float, float]:
    """Median and interquartile range in milliseconds, by CUDA events on CuPy's current stream; L2 is not flushed.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> from cupyflash import testing
    >>> import cupy
    >>> x = cupy.ones((1, 256, 8, 64), "float16")
    >>> median, spread = testing.time_gpu(lambda: cf.attn_fwd(x, x, x))
    >>> median > 0
    True
    """
    import cupy

    for _ in range(warm_up):
        run()
    marks = [cupy.cuda.Event() for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    times = [cupy.cuda.get_elapsed_time(a, b) for a, b in itertools.pairwise(marks)]
    low, median, high = np.percentile(times, (25, 50, 75))
    return float(median), float(high - low)
