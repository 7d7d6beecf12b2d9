"""New arrays of the caller's library and on its device, for what is composed of public calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash import _interop
from cupyflash._interop import Adopted


class Maker:
    """Makes arrays like those that were adopted."""

    adopted: Adopted

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.adopted.library.empty(shape, dtype, self.adopted.place)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def copy(self, array: Any, dtype: str | None = None) -> Any:
        """C-contiguous, in this dtype or its own."""
        new = self.empty(tuple(array.shape), dtype or dtype_of(array))
        new[...] = array
        return new

    def cast(self, array: Any, dtype: str) -> Any:
        return array if dtype_of(array) == dtype else self.copy(array, dtype)

    def int32(self, values: np.ndarray) -> Any:
        """The values, from the host."""
        values = values.astype(np.int32)
        if self.adopted.kind == "torch":
            import torch

            return torch.from_numpy(values).to(next(iter(self.adopted.given.values())).device)
        array = self.empty(values.shape, "int32")
        if self.adopted.kind == "cupy":
            array.set(values)
        else:
            array[...] = values
        return array


def dtype_of(array: Any) -> str:
    name = _interop.dtype_name(array.dtype)
    assert name is not None, array.dtype
    return name
