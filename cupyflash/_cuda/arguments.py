"""Call to field values: the flat tuples that `params.pack` turns into one struct. Order as in `params.STRUCTS`."""

from __future__ import annotations

import math
from typing import Any

from .._spec import Call, Spec, View

UNBOUNDED = 2**62  # a window bound further than any position; beside a start it still fits 64 bits
LOG2_E = math.log2(math.e)
LEAST_FOLD = 2.0**-100  # of a scale near 0: it must stay a normal float, or a masked -inf times it would be a NaN
NO_TENSOR = (0, 0, 0, 0)
TYPE_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}


def pointer(view: View | None) -> int:
    return 0 if view is None else view.ptr


def rows(view: View | None) -> tuple[int, ...]:
    """A [B, N, H, D] view as Tensor."""
    return NO_TENSOR if view is None else (view.ptr, view.strides[0], view.strides[1], view.strides[2])


def per_row(view: View | None) -> tuple[int, ...]:
    """A [B, H, N] view as Tensor."""
    return NO_TENSOR if view is None else (view.ptr, view.strides[0], view.strides[2], view.strides[1])


def is_64(view: View | None) -> int:
    return int(view is not None and view.dtype == "int64")


def tiles_of(length: int, tile: int, call: Call) -> int:
    """Tiles of one head: of one sequence, or of all packed ones, with a ragged tile each and two of slack."""
    whole = -(-length // tile)
    return whole if call.cu_seqlens_q is None else whole + call.batch + 2


def problem(spec: Spec, call: Call, query_tile: int, key_tile: int, group: int = 1) -> tuple[Any, ...]:
    """`group`: rows of a query, where a tile has several heads'."""
    q_start, k_start = call.q_start, call.k_start
    return (
        pointer(call.cu_seqlens_q),
        pointer(call.cu_seqlens_k),
        pointer(call.seqused_k),
        q_start.ptr if isinstance(q_start, View) else 0,
        k_start.ptr if isinstance(k_start, View) else 0,
        0 if call.cu_seqlens_q is None else call.cu_seqlens_q.strides[0],
        0 if call.cu_seqlens_k is None else call.cu_seqlens_k.strides[0],
        q_start if isinstance(q_start, int) else 0,
        k_start if isinstance(k_start, int) else 0,
        UNBOUNDED if call.window_left is None else min(call.window_left, UNBOUNDED),
        UNBOUNDED if call.window_right is None else min(call.window_right, UNBOUNDED),
        call.batch,
        call.len_q,
        call.len_k,
        spec.heads_q,
        spec.heads_kv,
        spec.head_dim,
        spec.head_dim_v,
        tiles_of(call.len_q * group, query_tile, call),
        tiles_of(call.len_k, key_tile, call),
        is_64(call.cu_seqlens_q),
        is_64(call.cu_seqlens_k),
        int(q_start is not None),
    )


def fold_of(spec: Spec, call: Call) -> float:
    """What brings the kernels' scores to base-2 exponents (scores.cuh): they leave out a last step that only scales."""
    features = spec.features
    if features.alibi or features.bias:
        return LOG2_E
    return max((call.softcap if features.softcap else abs(call.scale)) * LOG2_E, LEAST_FOLD)


def scores(spec: Spec, call: Call) -> tuple[Any, ...]:
    slopes, seed, offset = call.alibi_slopes, call.seed, call.offset
    keep = 1.0 - call.dropout_p
    return (
        pointer(slopes),
        pointer(call.sink),
        pointer(call.bias),
        seed.ptr if isinstance(seed, View) else 0,
        offset.ptr if isinstance(offset, View) else 0,
        *((0, 0) if slopes is None else slopes.strides),
        *((0, 0, 0, 0) if call.bias is None else broadcast_strides(call.bias)),
        0 if isinstance(seed, View) else seed,
        0 if isinstance(offset, View) else offset,
        call.scale,
        fold_of(spec, call),
        call.softcap,
        call.scale / call.softcap if call.softcap else 0.0,
        1.0 / keep,
        min(math.floor(call.dropout_p * 2**32 + 0.5), 2**32 - 1),
        0,
    )


def broadcast_strides(view: View) -> tuple[int, ...]:
    """Strides in which an axis of one serves every index."""
    return tuple(0 if extent == 1 else stride for extent, stride in zip(view.shape, view.strides, strict=True))
