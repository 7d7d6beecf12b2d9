"""The only caller of a kernel.

All but the first kernel of a call may start before the one in front of them is done (programmatic dependent launch, on
sm_90 and later): they wait for it themselves, `ptx/griddepcontrol.cuh`, so that only the starting overlaps. So may the
first of a merge or of split keys, whatever is in front. Other first kernels have so many blocks that they would stand
in the way of what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._errors import UnsupportedError
from .._spec import FilledIn
from . import driver
from .compile import kernel
from .params import Template
from .plan import MAX_BLOCKS, Plan

_EARLY_ARCH = 90  # the first whose kernels can start early
Step = Callable[[FilledIn, Any], None]  # what is given, and the stream as CuPy's launch wants it


def refuse_blocks(plan: Plan[Any], blocks: int) -> None:
    """Raise UnsupportedError for more tiles than a kernel can count."""
    if blocks > MAX_BLOCKS:
        given = f"{blocks} blocks; a grid holds at most {MAX_BLOCKS}"
        raise UnsupportedError(f"{plan.kernel}: {given}. Split the batch.")


class Launch:
    """A kernel with its grid and its struct, whose blanks are filled at each call."""

    __slots__ = ("_block", "_grid", "_kernel", "_smem_bytes", "_struct")

    def __init__(self, plan: Plan[Any], blocks: int, values: tuple[Any, ...], device: int) -> None:
        refuse_blocks(plan, blocks)
        self._kernel, self._struct = kernel(plan, device), Template(plan.kernel, values)
        self._grid, self._block, self._smem_bytes = (blocks,), plan.block, plan.smem_bytes

    def __call__(self, given: FilledIn, stream: Any) -> None:
        arguments = (self._struct.filled(given),)
        self._kernel(self._grid, self._block, arguments, shared_mem=self._smem_bytes, stream=stream)


class EarlyLaunch(Launch):
    """The same of a kernel that may start before the one in front of it is done."""

    __slots__ = ("_launch",)

    def __init__(self, plan: Plan[Any], blocks: int, values: tuple[Any, ...], device: int) -> None:
        super().__init__(plan, blocks, values, device)
        self._launch = driver.EarlyLauncher(self._kernel.ptr, blocks, plan.block, plan.smem_bytes)

    def __call__(self, given: FilledIn, stream: Any) -> None:
        self._launch(self._struct.packed(given), stream.ptr)


class Schedule:
    """What a call runs on its device, in order."""

    def __init__(self, device: int) -> None:
        import cupy

        self.device = device
        self.steps: list[Step] = []
        self._cuda: Any = cupy.cuda

    def launch(self, plan: Plan[Any], blocks: int, values: tuple[Any, ...]) -> None:
        """Add a launch of `blocks` blocks with this struct; nothing for none."""
        if blocks:
            may_be_early = bool(self.steps) or plan.is_always_early
            is_early = may_be_early and plan.arch >= _EARLY_ARCH and driver.launches_early()
            self.steps.append((EarlyLaunch if is_early else Launch)(plan, blocks, values, self.device))

    def __call__(self, given: FilledIn, stream: int) -> None:
        if self._cuda.runtime.getDevice() == self.device:  # nearly always; entering the device would cost more
            self._run(given, _Stream(stream))
        else:
            with self._cuda.Device(self.device):
                self._run(given, _Stream(stream))

    def _run(self, given: FilledIn, stream: Any) -> None:
        for step in self.steps:
            step(given, stream)


class _Stream:
    """A stream by its pointer, as CuPy's launch wants it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
