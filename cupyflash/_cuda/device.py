"""What a plan needs to know of a GPU; one value per device ordinal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Device:
    """Facts that choose tiles. smem_bytes: what one block may use after opting in."""

    arch: int  # 80, 86, 89, 90, 100, 120
    smem_bytes: int
    sm_count: int


KIB = 1024
# CUDA C++ Programming Guide, 'Compute Capabilities': shared memory per block after opting in; SMs of a common part.
KNOWN = {
    80: Device(80, 163 * KIB, 108),
    86: Device(86, 99 * KIB, 84),
    89: Device(89, 99 * KIB, 128),
    90: Device(90, 227 * KIB, 132),
    100: Device(100, 227 * KIB, 148),
    120: Device(120, 99 * KIB, 170),
}


@cache
def of(ordinal: int) -> Device:
    """The facts of the GPU with this CUDA ordinal."""
    import cupy

    device = cupy.cuda.Device(ordinal)
    attributes = device.attributes
    arch, smem_bytes = int(device.compute_capability), attributes["MaxSharedMemoryPerBlockOptin"]
    return Device(arch, smem_bytes, attributes["MultiProcessorCount"])
