"""What attention costs in bytes, matrix products and operations, beside attention that stores P: arithmetic alone.

The kernels' own plans and tile tables are asked; no GPU is, and no CuPy.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyflash import _attention, _check, _interop
from cupyflash._attention import Attention
from cupyflash._check import Judged
from cupyflash._errors import refusal
from cupyflash._spec import Call, Spec, filled

if TYPE_CHECKING:
    from cupyflash._cuda.plan import BackwardPlan

_Ints = Any  # a NumPy array of integers

_FUNCTION = "memory_plan"
_STANDARD_BACKWARD_GEMMS = 4  # dV, dP, dQ, dK
_SCORE_PASSES = 4, 7  # times that standard attention reads or writes all of S, P, dP or dS, forward and backward


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What `memory_plan` found. Bytes are per call; `standard_` is attention that stores P in the inputs' dtype.

    Examples
    --------
    >>> import cupyflash as cf
    >>> plan = cf.memory_plan((1, 4096, 16, 64), (1, 4096, 16, 64))
    >>> plan.saved_bytes < plan.standard_saved_bytes
    True
    >>> print(plan)  # doctest: +ELLIPSIS
    q [1, 4096, 16, 64]...
    """

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    layout: str
    dtype: str
    arch: int

    q_bytes: int
    k_bytes: int
    v_bytes: int
    out_bytes: int
    lse_bytes: int
    saved_bytes: int  # for the backward: q, k, v, out, lse
    probabilities_bytes: int
    standard_saved_bytes: int  # q, k, v, P

    forward_gemms: int
    backward_gemms: int
    recomputed_gemms: int  # among the backward's
    forward_flops: int  # of the matrix products over visible pairs
    backward_flops: int
    recomputed_flops: int
    standard_forward_flops: int  # of all pairs: plain operations skip no hidden one
    standard_backward_flops: int

    workspace_bytes: int  # of the backward; a forward's, if its keys are split, is what `workspace_size` says
    forward_allocated_bytes: int  # out, lse; not partial results of split keys
    backward_allocated_bytes: int  # dq, dk, dv, workspace

    forward_traffic_bytes: int  # what the kernels ask of memory, tile by tile
    backward_traffic_bytes: int
    least_forward_traffic_bytes: int  # each kernel and array once, as when the caches catch every second access
    least_backward_traffic_bytes: int
    standard_forward_traffic_bytes: int
    standard_backward_traffic_bytes: int

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(getattr(self, name + '_shape'))}" for name in ("q", "k", "v"))
        products = f"{self.backward_gemms} ({self.recomputed_gemms} recomputed)"
        rows = (
            ("", "cupyflash", "P stored"),
            ("saved for the backward", self.saved_bytes, self.standard_saved_bytes),
            ("  lse, P", self.lse_bytes, self.probabilities_bytes),
            ("allocated, forward", self.forward_allocated_bytes, ""),
            ("allocated, backward", self.backward_allocated_bytes, ""),
            ("  workspace, sums of dq too", self.workspace_bytes, ""),
            ("traffic asked, forward", self.forward_traffic_bytes, self.standard_forward_traffic_bytes),
            ("  least, by kernel", self.least_forward_traffic_bytes, ""),
            ("traffic asked, backward", self.backward_traffic_bytes, self.standard_backward_traffic_bytes),
            ("  least, by kernel", self.least_backward_traffic_bytes, ""),
            ("matrix products, forward", str(self.forward_gemms), str(self.forward_gemms)),
            ("matrix products, backward", products, str(self.backward_gemms - self.recomputed_gemms)),
            ("GFLOP, forward", _giga(self.forward_flops), _giga(self.standard_forward_flops)),
            ("GFLOP, backward", _giga(self.backward_flops), _giga(self.standard_backward_flops)),
        )
        lines = [f"{shapes}, {self.layout}, {self.dtype}, sm_{self.arch}"]
        for label, *cells in rows:
            shown = (in_binary(cell) if isinstance(cell, int) else cell for cell in cells)
            lines.append(f"{label:<28}{''.join(f'{text:>18}' for text in shown)}".rstrip())
        return "\n".join(lines)


def memory_plan(
    q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int] | None = None, *,
    dtype: Any = "bfloat16", layout: str = "bshd", causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None, deterministic: bool = False, out_dtype: Any = None,
    grad_dtype: Any = None, cu_seqlens_q: Sequence[int] | None = None, cu_seqlens_k: Sequence[int] | None = None,
    arch: int = 90,
) -> MemoryPlan:  # fmt: skip
    """What one attention layer keeps, allocates, moves and computes on a GPU, beside attention that stores P.

        saved = q + k + v + out + lse, of which lse = 4 · B · Hq · Nq
        saved with P stored = q + k + v + P, of which P = itemsize · B · Hq · Nq · Nk
        traffic with P stored = Θ(N·d + N²);   with tiles in M bytes of shared memory = Θ(N² · d² / M)

    Traffic is exact for the tiles of the kernels that would run: what they ask of memory, each block for itself. L2
    answers part of it, so that DRAM sees something between this and the least, which is each array once a kernel.

    Parameters
    ----------
    q_shape, k_shape, v_shape : sequence of int
        As `attn_fwd` takes them, [B, Nq, Hq, D], [B, Nk, Hkv, D] and [B, Nk, Hkv, Dv] with layout "bshd"; v_shape
        defaults to k_shape.
    dtype : dtype, default "bfloat16"
        Of q, k and v.
    layout, causal, window, deterministic, out_dtype, grad_dtype : as in `Attention`
    cu_seqlens_q, cu_seqlens_k : sequence of int
        With layout "thd".
    arch : int, default 90
        Compute capability of the GPU, times ten: its shared memory chooses the tiles.

    Returns
    -------
    plan : MemoryPlan
        Frozen; every number a field, printed as a table.

    Raises
    ------
    ValueError for shapes and values, TypeError for dtypes, UnsupportedError for what no CUDA kernel serves.

    Notes
    -----
    A bias or a sink adds its own size to what is saved, and its gradient's to what is allocated.

    Examples
    --------
    >>> import cupyflash as cf
    >>> plan = cf.memory_plan((1, 8192, 32, 128), (1, 8192, 32, 128), causal=True)
    >>> plan.lse_bytes // 2**20, plan.probabilities_bytes // 2**30  # MiB, GiB
    (1, 4)
    >>> plan.forward_gemms, plan.backward_gemms, plan.recomputed_gemms
    (2, 5, 1)
    """
    from cupyflash import _cuda
    from cupyflash._cuda.device import KNOWN
    from cupyflash._cuda.plan import backward, forward

    if not isinstance(arch, int) or arch not in KNOWN:
        raise ValueError(refusal(_FUNCTION, "arch", f"is {arch!r}", f"{', '.join(map(str, KNOWN))} is accepted"))
    attention = Attention(
        layout=layout, causal=causal, window=window, deterministic=deterministic, out_dtype=out_dtype,
        grad_dtype=grad_dtype,
    )  # fmt: skip
    arrays = _arrays(q_shape, k_shape, k_shape if v_shape is None else v_shape, dtype, cu_seqlens_q, cu_seqlens_k)
    fwd, bwd = (judged_of(_FUNCTION, attention, arrays, backward=is_backward) for is_backward in (False, True))
    fwd_plan, bwd_plan = forward(fwd.spec, KNOWN[arch]), backward(bwd.spec, KNOWN[arch])
    q, k, v = (arrays[name].nbytes for name in ("q", "k", "v"))
    out, lse = (_bytes(*fwd.outputs[name]) for name in ("out", "lse"))
    grads = sum(_bytes(*bwd.outputs[name]) for name in ("dq", "dk", "dv"))
    pairs = sum(len_q * len_k for len_q, len_k in _lengths(bwd.call))
    probabilities = pairs * bwd.spec.heads_q * arrays["q"].itemsize
    workspace = _cuda.plan_bytes(bwd.spec, bwd.call, bwd_plan)
    # dout comes to the preprocess and to the main kernel; dq's own kernel, if any, reads all inputs. dq's sums are
    # zeroed, unless the last block writes dq, written and read by reductions, and read; else the workspace is
    # (lse, delta), written once, read by each.
    prepared = workspace if bwd_plan.has_sums else workspace - _cuda.sums_bytes(bwd.spec, bwd.call, bwd_plan)
    has_dq_kernel = bwd_plan.dq is not None
    read_again = q + k + v + 2 * out if has_dq_kernel else out
    crossings = 3 + bwd_plan.has_sums if bwd_plan.sums_dq else 2 + has_dq_kernel

    forward_flops, scores_flops = _flops(attention, fwd), _flops(attention, fwd, head_dim_v=0)
    multiplications = pairs * bwd.spec.heads_q * (bwd.spec.head_dim + bwd.spec.head_dim_v)  # of S and P V, all pairs
    again = forward_flops if has_dq_kernel else 0  # dq's own kernel makes S and dP once more
    return MemoryPlan(
        q_shape=arrays["q"].shape,
        k_shape=arrays["k"].shape,
        v_shape=arrays["v"].shape,
        layout=attention.layout,
        dtype=bwd.spec.dtype,
        arch=arch,
        q_bytes=q,
        k_bytes=k,
        v_bytes=v,
        out_bytes=out,
        lse_bytes=lse,
        saved_bytes=q + k + v + out + lse,
        probabilities_bytes=probabilities,
        standard_saved_bytes=q + k + v + probabilities,
        forward_gemms=2,
        backward_gemms=_STANDARD_BACKWARD_GEMMS + (3 if has_dq_kernel else 1),
        recomputed_gemms=3 if has_dq_kernel else 1,
        forward_flops=forward_flops,
        backward_flops=_flops(attention, bwd, backward=True) + again,
        recomputed_flops=scores_flops + again,
        standard_forward_flops=2 * multiplications,
        standard_backward_flops=4 * multiplications,
        workspace_bytes=workspace,
        forward_allocated_bytes=out + lse,
        backward_allocated_bytes=grads + workspace,
        forward_traffic_bytes=_forward_traffic(fwd.spec, fwd.call, fwd_plan.constants.query_tile),
        backward_traffic_bytes=_backward_traffic(bwd.spec, bwd.call, bwd_plan, prepared),
        least_forward_traffic_bytes=q + k + v + out + lse,
        least_backward_traffic_bytes=q + k + v + 2 * out + lse + grads + read_again + crossings * workspace,
        standard_forward_traffic_bytes=q + k + v + out + _SCORE_PASSES[0] * probabilities,
        standard_backward_traffic_bytes=q + k + v + 2 * out + grads + _SCORE_PASSES[1] * probabilities,
    )


# Shapes.


def _arrays(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    dtype: Any,
    cu_seqlens_q: Sequence[int] | None,
    cu_seqlens_k: Sequence[int] | None,
) -> dict[str, np.ndarray]:
    """Arrays of these shapes that take no memory, so that the checks of every call judge them."""
    name = _check.dtype_option(_FUNCTION, "dtype", dtype)
    if name is None:
        raise TypeError(refusal(_FUNCTION, "dtype", "is None", "a float dtype is accepted"))
    element = np.zeros((), _interop.NUMPY_DTYPES[name])
    arrays = {}
    for argument, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
        sizes = tuple(shape) if isinstance(shape, (tuple, list)) else ()
        if not sizes or not all(isinstance(size, (int, np.integer)) and size >= 0 for size in sizes):
            raise ValueError(
                refusal(_FUNCTION, f"{argument}_shape", f"is {shape!r}", "a sequence of ints of at least 0 is accepted")
            )
        arrays[argument] = np.broadcast_to(element, sizes)
    for argument, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is not None:
            if not all(isinstance(offset, (int, np.integer)) for offset in offsets):
                raise TypeError(refusal(_FUNCTION, argument, f"is {offsets!r}", "a sequence of ints is accepted"))
            arrays[argument] = np.asarray(offsets, np.int64)
    return arrays


def judged_of(function: str, attention: Attention, arrays: dict[str, Any], *, backward: bool) -> Judged:
    """What the checks of a call make of such arrays; their memory is looked at where it holds offsets and lengths."""
    arguments = {
        name: parameter.default
        for name, parameter in inspect.signature(Attention.plan).parameters.items()
        if name not in ("self", "backward")
    }
    checked, _ = _attention._plannable(function, attention, arguments | arrays, backward)
    judged = checked.judged
    return replace(judged, call=filled(judged.call, _check.given(checked)))  # the offsets of packed sequences are read


def _flops(attention: Attention, judged: Judged, *, head_dim_v: int | None = None, backward: bool = False) -> int:
    from cupyflash.testing import flops

    spec = judged.spec
    return sum(
        flops(
            batch=1,
            len_q=len_q,
            len_k=len_k,
            heads_q=spec.heads_q,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v if head_dim_v is None else head_dim_v,
            causal=attention.causal,
            window=(judged.call.window_left, judged.call.window_right),
            backward=backward,
        )
        for len_q, len_k in _lengths(judged.call)
    )


def _lengths(call: Call) -> list[tuple[int, int]]:
    """Queries and keys of every sequence."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return [(call.len_q, call.len_k)] * call.batch
    lens_q, lens_k = (np.diff(view.array).tolist() for view in (call.cu_seqlens_q, call.cu_seqlens_k))
    return list(zip(lens_q, lens_k, strict=True))


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * _interop.NUMPY_DTYPES[dtype].itemsize


def in_binary(size: int) -> str:
    """Bytes for people."""
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    return f"{size / 2 ** (10 * power):.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if power else f"{size} B"


def _giga(flops: int) -> str:
    return f"{flops / 1e9:.1f}"


# Traffic.


@dataclass(frozen=True, slots=True)
class _Band:
    """What one sequence's mask shows: key j to query i iff i + low <= j <= i + high."""

    len_q: int
    len_k: int
    low: int
    high: int

    def keys_of(self, begin: _Ints, end: _Ints) -> _Ints:
        """How many keys queries [begin, end) span."""
        return np.maximum(np.minimum(self.len_k, end + self.high) - np.maximum(0, begin + self.low), 0)

    def queries_of(self, begin: _Ints, end: _Ints) -> tuple[_Ints, _Ints]:
        """The queries that keys [begin, end) are seen by, a half-open range that may be empty."""
        first = np.maximum(0, begin - self.high)
        return first, np.maximum(np.minimum(self.len_q, end - self.low), first)


def _bands(call: Call) -> Iterator[_Band]:
    """Of every sequence."""
    for len_q, len_k in _lengths(call):
        start = len_k - len_q if call.q_start is None else 0  # 0: top-left
        far = len_q + len_k
        left, right = (far if side is None else side for side in (call.window_left, call.window_right))
        yield _Band(len_q, len_k, max(start - left, -far), min(start + right, far))


def _tiles(length: int, tile: int) -> tuple[_Ints, _Ints]:
    """Where tiles begin and end."""
    begin = np.arange(0, length, tile)
    return begin, np.minimum(begin + tile, length)


def _forward_traffic(spec: Spec, call: Call, tile: int) -> int:
    """q, and the keys that its tile sees, once a query tile; out and lse once."""
    item, row = _item(spec.dtype), _item(_row_dtype(spec))
    total = 0
    for band in _bands(call):
        total += item * _query_tiles_read(band, tile, spec.head_dim, spec.head_dim + spec.head_dim_v)
        total += band.len_q * (spec.head_dim_v * _item(spec.out_dtype) + row)
    return spec.heads_q * total


def _query_tiles_read(band: _Band, tile: int, columns: int, key_columns: int) -> int:
    """Elements that a kernel with a query tile a block reads: its rows if they see a key, and the keys they see."""
    begin, end = _tiles(band.len_q, tile)
    keys = band.keys_of(begin, end)
    return int((end - begin)[keys > 0].sum()) * columns + int(keys.sum()) * key_columns


def _backward_traffic(spec: Spec, call: Call, plan: BackwardPlan, prepared: int) -> int:
    """The preprocess, the main kernel, and `bwd_finish` or dq's own kernel.

    A reduction into the dq sums counts as one writing, and so does their last reading where that comes in its place.
    `prepared`: bytes of the workspace that the preprocess writes, each once.
    """
    main = plan.main.constants
    item, row, both = _item(spec.dtype), _item(_row_dtype(spec)), spec.head_dim + spec.head_dim_v
    grad = _item(spec.grad_dtype or spec.dtype)
    per_query_head = per_kv_head = 0
    for band in _bands(call):
        rows = band.len_q
        per_query_head += rows * (
            spec.head_dim_v * (_item(spec.out_dtype) + _item(spec.dout_dtype or spec.dtype)) + row
        )

        begin, end = _tiles(band.len_k, main.key_tile)
        first, last = band.queries_of(begin, end)
        seen = last > first
        steps = int((-(-last // main.query_tile) - first // main.query_tile)[seen].sum())  # query tiles, all key tiles'
        per_step = main.query_tile * 2 * row + (main.query_tile * main.head_dim * row if plan.sums_dq else 0)
        per_query_head += int((last - first).sum()) * both * item + steps * per_step
        keys = np.minimum(end, band.len_q + band.high) - np.maximum(begin, band.low)  # that some query sees
        per_kv_head += int(np.maximum(keys, 0)[seen].sum()) * both * item + band.len_k * both * grad

        if plan.dq is not None:
            tile = plan.dq.constants.query_tile
            per_query_head += item * _query_tiles_read(band, tile, both, both) + rows * 2 * row
        elif plan.has_sums:
            per_query_head += -(-rows // 16) * 16 * -(-spec.head_dim // 16) * 16 * row
        per_query_head += rows * spec.head_dim * grad
    return spec.heads_q * per_query_head + spec.heads_kv * per_kv_head + prepared


def _item(dtype: str) -> int:
    return _interop.NUMPY_DTYPES[dtype].itemsize


def _row_dtype(spec: Spec) -> str:
    return "float64" if spec.dtype == "float64" else "float32"
