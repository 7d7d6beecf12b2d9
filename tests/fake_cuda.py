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
        runtime=SimpleNamespace(
            getDevice=lambda: cupy.current,
            setDevice=lambda id: setattr(cupy, "current", id),
            driverGetVersion=lambda: 13_000,
        ),
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
    is_early: bool


def take_launches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that leave a `Launched` in `cupy.launches` and do nothing else."""

    class Kernel:
        def __init__(self, plan: Any, ordinal: int) -> None:
            self.binary, self.kernel, self.ptr = plan.binary, plan.kernel, 1 + len(loaded)
            loaded[self.ptr] = self

        def __call__(self, grid: Any, block: Any, arguments: Any, *, shared_mem: int, stream: Any) -> None:
            self.take(grid, block, arguments[0].tobytes(), shared_mem, stream.ptr)

        def take(self, *asked: Any, is_early: bool = False) -> None:
            cupy.launches.append(Launched(self.binary, *asked, cupy.current, is_early))

    loaded: dict[int, Kernel] = {}
    maps, driver, params = (
        importlib.import_module(f"cupyflash._cuda.{name}") for name in ("tensor_map", "driver", "params")
    )

    class Driver(_Driver):
        @staticmethod
        def cuLaunchKernelEx(config: Any, function: Any, arguments: Any, extra: Any) -> int:
            """What `driver.EarlyLauncher` asks for, read back from where the driver would read it."""
            asked, kernel = driver.Config.from_buffer_copy(config), loaded[function.value]
            size = -(-params.packer(kernel.kernel).size // params._ALIGN) * params._ALIGN
            struct = ctypes.string_at(ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0], size)
            grid, block = (asked.grid[0],), tuple(asked.block[:2])
            attribute = asked.attributes[0]
            is_early = (asked.num_attributes, attribute.id, attribute.value[0]) == (1, 6, 1)
            kernel.take(grid, block, struct, asked.smem_bytes, asked.stream, is_early=is_early)
            return 0

    monkeypatch.setattr(driver, "library", lambda: Driver)
    monkeypatch.setattr(maps, "_words", maps._words.__wrapped__)  # nothing of this driver's is kept
    compiler = importlib.import_module("cupyflash._cuda.compile")
    monkeypatch.setattr(compiler, "_load", Kernel)
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(device, "of", lambda ordinal: KNOWN[90])


class _Driver:
    """Tensor maps that hold what was asked for, number by number."""

    @staticmethod
    def cuTensorMapEncodeTiled(
        at: Any, dtype: int, rank: int, address: Any, extents: Any, strides: Any, box: Any, steps: Any, *modes: int
    ) -> int:
        asked = [address.value, dtype, rank, *extents, *strides, *box[: rank - 2], *modes]
        ctypes.memmove(at, (ctypes.c_uint64 * 16)(*asked[:16]), 128)
        return 0


def forget_forms() -> None:
    """As in a new process."""
    _check._judge.cache_clear()
    _attention._ready.cache_clear()
    _attention._accepted.clear()
    _check._judge_append.cache_clear()
    _append._ready.cache_clear()
