"""The CUDA driver's library, for the calls that CuPy does not have."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of cuda.h's CUlaunchAttributeID
_FIRST_VERSION = 12_030  # whose graphs hold early launches too


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


_STARTS_EARLY = Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))
_Arguments = ctypes.c_char_p * 1


@cache
def launches_early() -> bool:
    """Whether this driver can, in graphs too."""
    import cupy

    return cupy.cuda.runtime.driverGetVersion() >= _FIRST_VERSION


class EarlyLauncher:
    """Launches a kernel that may start before the one in front of it is done, and waits for that one itself."""

    __slots__ = ("_after_stream", "_before_stream", "_function", "_what")

    def __init__(self, function: int, blocks: int, block: tuple[int, int], smem_bytes: int) -> None:
        config = bytes(Config((blocks, 1, 1), (*block, 1), smem_bytes, 0, ctypes.pointer(_STARTS_EARLY), 1))
        begin = Config.stream.offset
        self._before_stream, self._after_stream = config[:begin], config[begin + ctypes.sizeof(ctypes.c_void_p) :]
        self._function = ctypes.c_void_p(function)
        self._what = f"{blocks} blocks of {block[0]} by {block[1]} threads"

    def __call__(self, struct: bytes, stream: int) -> None:
        # A bytes object is passed as its address. Making a Config at each call takes longer than the launch.
        config = (
            self._before_stream + stream.to_bytes(ctypes.sizeof(ctypes.c_void_p), sys.byteorder) + self._after_stream
        )
        status = library().cuLaunchKernelEx(config, self._function, _Arguments(struct), None)
        if status:
            raise RuntimeError(f"cuLaunchKernelEx said {status} of {self._what}")
