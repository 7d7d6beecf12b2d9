"""A CUDA that computes nothing: what is allocated and launched is kept and can be compared, without a GPU."""

from __future__ import annotations

import ctypes
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupyflash import _append, _attention, _check
from cupyflash._cuda import device
from cupyflash._cuda.device import KNOWN

FIRST_ADDRESS = 0x7_1234_5678_0000  # no number that a launch has for other reasons


def make_cupy() -> Any:
    """A stand-in for CuPy that keeps what was asked of it: two devices, each with its own stream.

    `cupy.at` is the address of the next array, so that two runs can be given the same ones.
    """
    cupy: Any = ModuleType("cupy")
    cupy.current, cupy.allocations, cupy.launches, cupy.at = 0, [], [], FIRST_ADDRESS

    class Device:
        def __init__(self, id: int | None = None) -> None:
            self.id = cupy.current if id is None else id

        def __enter__(self) -> None:
            self.outer, cupy.current = cupy.current, self.id

        def __exit__(self, *error: object) -> None:
            cupy.current = self.outer

    class Array:
        def __init__(self, host: np.ndarray, device: int, ptr: int | None = None) -> None:
            self.host, self.device = host, Device(device)
            self.shape, self.strides, self.dtype, self.itemsize = host.shape, host.strides, host.dtype, host.itemsize
            self.data = SimpleNamespace(ptr=cupy.at if ptr is None else ptr, device_id=device)
            cupy.at += -(-host.nbytes // 256) * 256 + 256

        def get(self) -> np.ndarray:
            return self.host

        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError("CuPy's arrays are read by their attributes")

    def empty(shape: tuple[int, ...], dtype: Any) -> Array:
        cupy.allocations.append((shape, cupy.current))
        return Array(np.empty(shape, dtype), cupy.current)

    def ascontiguousarray(array: Array) -> Array:
        cupy.allocations.append((array.shape, cupy.current))
        return Array(np.ascontiguousarray(array.host), cupy.current)

    cupy.ndarray, cupy.empty, cupy.ascontiguousarray = Array, empty, ascontiguousarray
    cupy.cuda = SimpleNamespace(
        Device=Device,
        get_current_stream=lambda device: SimpleNamespace(ptr=1000 + device),
        runtime=SimpleNamespace(getDevice=lambda: cupy.current, setDevice=lambda id: setattr(cupy, "current", id)),
    )
    return cupy


class Launched(NamedTuple):
    """One launch, as the kernel would see it."""

    binary: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    struct: bytes
    smem_bytes: int
    stream: int
    device: int


def take_launches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that leave a `Launched` in `cupy.launches` and do nothing else."""

    def load(plan: Any, ordinal: int) -> Any:
        def launch(grid: Any, block: Any, arguments: Any, *, shared_mem: int, stream: Any) -> None:
            (struct,) = arguments
            launched = Launched(plan.binary, grid, block, struct.tobytes(), shared_mem, stream.ptr, cupy.current)
            cupy.launches.append(launched)

        return launch

    maps = importlib.import_module("cupyflash._cuda.tensor_map")
    monkeypatch.setattr(maps, "_driver", lambda: _Driver)
    monkeypatch.setattr(maps, "_words", maps._words.__wrapped__)  # nothing of this driver's is kept
    compiler = importlib.import_module("cupyflash._cuda.compile")
    monkeypatch.setattr(compiler, "_load", load)
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(device, "of", lambda ordinal: KNOWN[90])


class _Driver:
    """Tensor maps that hold what was asked for, number by number."""

    @staticmethod
    def cuTensorMapEncodeTiled(
        at: Any, dtype: int, rank: int, address: Any, extents: Any, strides: Any, box: Any, steps: Any, *modes: int
    ) -> int:
        asked = [address.value, dtype, rank, *extents, *strides, *box[:2], *modes]
        ctypes.memmove(at, (ctypes.c_uint64 * 16)(*asked), 128)
        return 0


def forget_forms() -> None:
    """As in a new process."""
    _check._judge.cache_clear()
    _attention._ready.cache_clear()
    _attention._accepted.clear()
    _check._judge_append.cache_clear()
    _append._ready.cache_clear()
