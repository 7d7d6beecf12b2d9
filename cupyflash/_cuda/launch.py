"""The only caller of a kernel."""

from __future__ import annotations

from typing import Any

from .._errors import UnsupportedError
from .compile import kernel
from .params import pack
from .plan import MAX_BLOCKS, Plan


class _Stream:
    """A stream by its pointer, as CuPy's launch wants it."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def run(plan: Plan[Any], blocks: int, values: tuple[Any, ...], device: int, stream: int) -> None:
    """Launch `blocks` blocks with this struct on this stream; nothing for none."""
    import cupy

    if blocks == 0:
        return
    if blocks > MAX_BLOCKS:
        raise UnsupportedError(f"{plan.kernel}: {blocks} blocks; a grid holds at most {MAX_BLOCKS}. Split the batch.")
    launch, arguments = kernel(plan, device), (pack(plan.kernel, values),)
    grid, block, smem_bytes = (blocks,), (plan.threads,), plan.smem_bytes
    if cupy.cuda.runtime.getDevice() == device:  # nearly always; to enter a device it already is in costs more
        launch(grid, block, arguments, shared_mem=smem_bytes, stream=_Stream(stream))
    else:
        with cupy.cuda.Device(device):
            launch(grid, block, arguments, shared_mem=smem_bytes, stream=_Stream(stream))
