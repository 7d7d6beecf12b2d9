"""Tensor maps: what the copy engine of Hopper knows of an array, made by the driver on the host, without a kernel.

Of a map's sixteen words only the first, the address, changes from call to call (cuTensorMapReplaceAddress): the others
are made once a form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from .._spec import View
from . import driver
from .constants import ITEM_BYTES, SM90_PANEL
from .params import MAP_WORDS

NO_MAP = (0,) * (1 + MAP_WORDS)
_SOME_ADDRESS = 1 << 40
_ALIGN = 64  # bytes, of a map
# Of cuda.h: CUtensorMapDataType, -Interleave, -Swizzle, -L2promotion, -FloatOOBfill.
_DTYPES = {"float16": 6, "bfloat16": 9}
_NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_WITH_ZEROS = 0, 3, 3, 0


def tensor_map(view: View, rows: int, device: int, group: int = 1) -> tuple[int, ...]:
    """Of a [B, N, H, D] view: boxes of SM90_PANEL columns and `rows` rows, swizzled over 128 bytes; zeros outside.

    `group`: so many heads side by side are rows of a box, whose axes then are (D, group, N, H / group, B).
    """
    return (view.ptr, *_words(view.dtype, view.shape, view.strides, rows, device, group))


@lru_cache(maxsize=1024)
def _words(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, device: int, group: int
) -> tuple[int, ...]:
    batch, length, heads, dim = shape
    row_bytes = -(-dim * ITEM_BYTES[dtype] // 16) * 16  # for axes of one, whose strides may be anything
    stride_b, stride_n, stride_h = (
        row_bytes if extent == 1 else stride * ITEM_BYTES[dtype]
        for extent, stride in zip(shape[:3], strides[:3], strict=True)
    )
    extents, steps, box = [dim, length, heads, batch], [stride_n, stride_h, stride_b], [SM90_PANEL, rows, 1, 1]
    if group > 1:
        extents, box = [dim, group, length, heads // group, batch], [SM90_PANEL, group, rows // group, 1, 1]
        steps = [stride_h, stride_n, group * stride_h, stride_b]
    rank = len(extents)
    buffer = ctypes.create_string_buffer(8 * len(NO_MAP) + _ALIGN)
    at = -(-ctypes.addressof(buffer) // _ALIGN) * _ALIGN
    with _current(device):
        status = driver.library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            _DTYPES[dtype],
            rank,
            ctypes.c_void_p(_SOME_ADDRESS),
            (ctypes.c_uint64 * rank)(*extents),
            (ctypes.c_uint64 * (rank - 1))(*steps),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            _NO_INTERLEAVE,
            _SWIZZLE_128,
            _PROMOTE_256,
            _FILL_WITH_ZEROS,
        )
    words = (ctypes.c_uint64 * len(NO_MAP)).from_address(at)
    if status or words[0] != _SOME_ADDRESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled said {status} of {dtype} {shape} with strides {strides}")
    return tuple(words[1:])


@contextmanager
def _current(device: int) -> Iterator[None]:
    """The device's context is this thread's: one that has not touched CUDA yet has none, and setting it makes it so."""
    import cupy

    runtime = cupy.cuda.runtime
    before = runtime.getDevice()
    runtime.setDevice(device)
    try:
        yield
    finally:
        if before != device:
            runtime.setDevice(before)
