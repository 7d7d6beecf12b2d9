"""Whether strided views share memory: cheap tests that are sure when they say no, and right for every usual layout.

What depends on shapes and strides alone is worked out once; calls that write into given arrays repeat them.
"""

from __future__ import annotations

from functools import lru_cache

from cupyflash._interop import NUMPY_DTYPES
from cupyflash._spec import View

_remembering = lru_cache(maxsize=4096)


def byte_range(view: View) -> tuple[int, int]:
    """First address, and the one after the last; empty for a view of no elements."""
    if 0 in view.shape:
        return 0, 0
    low, length = _reach(view.shape, view.strides, view.dtype, 0)
    return view.ptr + low, view.ptr + low + length


def is_injective(view: View) -> bool:
    """Whether no two elements share memory: each axis, from the smallest stride up, steps over all that is below it."""
    return _is_injective(view.shape, view.strides)


def are_apart(a: View, b: View) -> bool:
    """Whether two views share no byte: disjoint ranges, or disjoint residues modulo one of their strides.

    The second finds the slices of one packed buffer: in [B, N, 3, H, D] the gradients of q, k and v have the same outer
    strides, and within one step of 3·H·D each keeps to its own third.
    """
    (begin_a, end_a), (begin_b, end_b) = byte_range(a), byte_range(b)
    if end_a <= begin_b or end_b <= begin_a:
        return True
    steps = _steps(a.shape, a.strides, a.dtype) + _steps(b.shape, b.strides, b.dtype)
    for period in {abs(step) for step, _ in steps if step}:
        low_a, length_a = _reach(a.shape, a.strides, a.dtype, period)
        low_b, length_b = _reach(b.shape, b.strides, b.dtype, period)
        gap = (b.ptr + low_b - a.ptr - low_a) % period
        if length_a <= gap and gap + length_b <= period:
            return True
    return False


@_remembering
def _is_injective(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    reach = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return 0 in shape
        reach += (extent - 1) * stride
    return True


@_remembering
def _steps(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> tuple[tuple[int, int], ...]:
    """(bytes per step, extent) of every axis that moves."""
    itemsize = NUMPY_DTYPES[dtype].itemsize
    return tuple((stride * itemsize, extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1)


@_remembering
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, period: int) -> tuple[int, int]:
    """First byte, from the first element, and length of what is touched without the steps of multiples of `period`.

    0 is no period: all steps count.
    """
    low, length = 0, NUMPY_DTYPES[dtype].itemsize
    for step, extent in _steps(shape, strides, dtype):
        if not period or step % period:
            low += min(0, step * (extent - 1))
            length += abs(step) * (extent - 1)
    return low, length
