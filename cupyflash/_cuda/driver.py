"""The CUDA driver's library, for the calls that CuPy does not have."""

from __future__ import annotations

import ctypes
import os
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


def launch_early(function: int, blocks: int, threads: int, smem_bytes: int, struct: bytes, stream: int) -> None:
    """Launch a kernel that may start before the one in front of it is done, and waits for that one itself."""
    config = Config((blocks, 1, 1), (threads, 1, 1), smem_bytes, stream, ctypes.pointer(_STARTS_EARLY), 1)
    status = library().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), _Arguments(struct), None)
    if status:
        raise RuntimeError(f"cuLaunchKernelEx said {status} of {blocks} blocks of {threads} threads")
