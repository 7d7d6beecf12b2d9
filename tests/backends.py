"""The same arrays in host memory and on a GPU, in ordinary and awkward memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


class Backend:
    """Arrays of one library. `xp` is its namespace."""

    name: str
    xp: Any

    def put(self, value: Any, memory: str = "contiguous") -> Any:
        """A copy of a NumPy array as one of this backend's; anything else as it is."""
        return arranged(self.xp, self.xp.array(value), memory) if isinstance(value, np.ndarray) else value

    def get(self, array: Any) -> np.ndarray:
        raise NotImplementedError

    def poisoned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """What an output must not keep anything of."""
        return self.put(np.full(shape, np.nan, dtype))


class NumpyBackend(Backend):
    name = "numpy"
    xp = np

    def get(self, array: Any) -> np.ndarray:
        assert type(array) is np.ndarray
        return array


class CupyBackend(Backend):
    name = "cupy"

    def __init__(self) -> None:
        import cupy

        self.xp = cupy

    def get(self, array: Any) -> np.ndarray:
        assert type(array) is self.xp.ndarray
        return array.get()


@functools.cache
def gpu_is_there() -> bool:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # no package, no driver, no device: each has its own type
        return False


def arranged(xp: Any, array: Any, memory: str) -> Any:
    """The same values at other strides, with NaN in the memory between them where the dtype has one."""
    if memory == "contiguous":
        return array
    if memory == "gaps":  # every axis but the last is a slice of a longer one
        hole = xp.full(tuple(n + 3 for n in array.shape[:-1]) + array.shape[-1:], np.nan, array.dtype)
        view = hole[tuple(slice(2, 2 + n) for n in array.shape[:-1])]
    elif memory == "every second":  # outer strides twice what they would be, rows odd in length
        shape = (*(2 * n for n in array.shape[:-1]), array.shape[-1] + 1)
        view = xp.full(shape, np.nan, array.dtype)[(*(slice(None, None, 2),) * (array.ndim - 1), slice(None, -1))]
    elif memory == "reversed":  # negative strides outside the last axis
        outer = tuple(range(array.ndim - 1))
        view = xp.flip(xp.empty_like(array), outer)
    elif memory == "transposed":  # the last axis does not have stride 1
        view = xp.empty(array.shape[::-1], array.dtype).T
    else:
        raise AssertionError(memory)
    view[...] = array
    return view
