"""Whether strided views share memory: cheap tests that are sure when they say no, and right for every usual layout."""

from __future__ import annotations

from cupyflash._interop import NUMPY_DTYPES
from cupyflash._spec import View


def byte_range(view: View) -> tuple[int, int]:
    """First address, and the one after the last; empty for a view of no elements."""
    if 0 in view.shape:
        return 0, 0
    begin, length = _reach(view, _steps(view), 0)
    return begin, begin + length


def is_injective(view: View) -> bool:
    """Whether no two elements share memory: each axis, from the smallest stride up, steps over all that is below it."""
    reach = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride <= reach:
            return 0 in view.shape
        reach += (extent - 1) * stride
    return True


def are_apart(a: View, b: View) -> bool:
    """Whether two views share no byte: disjoint ranges, or disjoint residues modulo one of their strides.

    The second finds the slices of one packed buffer: in [B, N, 3, H, D] the gradients of q, k and v have the same outer
    strides, and within one step of 3·H·D each keeps to its own third.
    """
    (begin_a, end_a), (begin_b, end_b) = byte_range(a), byte_range(b)
    if end_a <= begin_b or end_b <= begin_a:
        return True
    steps_a, steps_b = _steps(a), _steps(b)
    for period in {abs(step) for step, _ in steps_a + steps_b if step}:
        (low_a, length_a), (low_b, length_b) = _reach(a, steps_a, period), _reach(b, steps_b, period)
        gap = (low_b - low_a) % period
        if length_a <= gap and gap + length_b <= period:
            return True
    return False


def _steps(view: View) -> list[tuple[int, int]]:
    """(bytes per step, extent) of every axis that moves."""
    itemsize = NUMPY_DTYPES[view.dtype].itemsize
    return [(stride * itemsize, extent) for stride, extent in zip(view.strides, view.shape, strict=True) if extent > 1]


def _reach(view: View, steps: list[tuple[int, int]], period: int) -> tuple[int, int]:
    """First address and length of the bytes touched, leaving out steps that are multiples of `period` (0: none are)."""
    low, length = view.ptr, NUMPY_DTYPES[view.dtype].itemsize
    for step, extent in steps:
        if not period or step % period:
            low += min(0, step * (extent - 1))
            length += abs(step) * (extent - 1)
    return low, length
