"""CuPy arrays over NCCL, one GPU a rank, or through host memory, where ranks share a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash._errors import refusal
from cupyflash.parallel._transport import Message, Transport, check_messages
from cupyflash.parallel._worker import Moving, Worker


def _check(transport: str, messages: Sequence[Message], cupy: Any, device: int) -> None:
    """All of them are CuPy arrays on the transport's GPU."""
    accepted = f"CuPy arrays on cuda:{device} are accepted"
    check_messages(transport, messages, cupy.ndarray, accepted)
    for _, array in messages:
        if array.data.device_id != device:
            given = f"is on cuda:{array.data.device_id}"
            raise TypeError(refusal(f"{transport}.exchange", "array", given, accepted))


class NcclTransport:
    """CuPy arrays between the GPUs of an NCCL communicator, on a stream of its own.

    Parameters
    ----------
    communicator : cupy.cuda.nccl.NcclCommunicator
        One for each process, with a GPU of its own: NCCL refuses two on one, where `StagedTransport` serves.

    Examples
    --------
    In each process, after `cupy.cuda.Device(rank).use()`, with an id that rank 0 made and the others were told; here in
    a process alone:

    >>> from cupy.cuda import nccl
    >>> from cupyflash import parallel
    >>> rank, size, unique_id = 0, 1, nccl.get_unique_id()
    >>> transport = parallel.NcclTransport(nccl.NcclCommunicator(size, unique_id, rank))
    >>> transport.rank, transport.size
    (0, 1)
    """

    def __init__(self, communicator: Any) -> None:
        import cupy
        from cupy.cuda import nccl

        self._cupy, self._nccl, self._communicator = cupy, nccl, communicator
        self.rank: int = communicator.rank_id()
        self.size: int = communicator.size()
        self._device = cupy.cuda.Device(communicator.device_id())
        with self._device:
            self.stream: Any = cupy.cuda.Stream(non_blocking=True)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Queued:
        messages = [*sends, *receives]
        _check("NcclTransport", messages, self._cupy, self._device.id)
        byte, queue = self._nccl.NCCL_UINT8, self.stream.ptr  # as bytes: every dtype, bfloat16 too
        with self._device:
            # What is sent was computed on the current stream, which may still read where something is received.
            self.stream.wait_event(self._cupy.cuda.get_current_stream(self._device.id).record())
            self._nccl.groupStart()
            for peer, array in sends:
                self._communicator.send(array.data.ptr, array.nbytes, byte, peer, queue)
            for peer, array in receives:
                self._communicator.recv(array.data.ptr, array.nbytes, byte, peer, queue)
            self._nccl.groupEnd()
            return _Queued(self._cupy, self._device.id, self.stream.record(), messages)


class _Queued:
    def __init__(self, cupy: Any, device: int, done: Any, held: list[Message]) -> None:
        self._cupy, self._device, self._done, self._held = cupy, device, done, held

    def wait(self) -> None:
        """The current stream waits, and memory that is freed from now on is used again after the transfer only."""
        self._cupy.cuda.get_current_stream(self._device).wait_event(self._done)
        self._held.clear()


class StagedTransport:
    """CuPy arrays through pinned host memory and a transport of NumPy arrays: for processes that share a GPU.

    A thread copies on a stream of its own, so that kernels run while messages travel.

    Parameters
    ----------
    host : Transport
        Of NumPy arrays: `MpiTransport`.

    Examples
    --------
    >>> from cupyflash import parallel
    >>> transport = parallel.StagedTransport(parallel.MpiTransport())
    >>> 0 <= transport.rank < transport.size
    True
    """

    def __init__(self, host: Transport) -> None:
        import cupy
        import cupyx

        self._cupy, self._empty_pinned, self._host = cupy, cupyx.empty_pinned, host
        self.rank: int = host.rank
        self.size: int = host.size
        self._device = cupy.cuda.Device()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._worker = Worker("cupyflash staging")

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Moving:
        messages = [*sends, *receives]
        _check("StagedTransport", messages, self._cupy, self._device.id)
        with self._device:
            ready = self._cupy.cuda.get_current_stream(self._device.id).record()
        return self._worker.start(lambda: self._move(ready, sends, receives), messages)

    def _move(self, ready: Any, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        runtime, stream = self._cupy.cuda.runtime, self._stream
        with self._device:
            stream.wait_event(ready)
            outgoing = [(peer, self._empty_pinned(array.nbytes, np.uint8)) for peer, array in sends]
            for (_, array), (_, staged) in zip(sends, outgoing, strict=True):
                runtime.memcpyAsync(
                    staged.ctypes.data, array.data.ptr, array.nbytes, runtime.memcpyDeviceToHost, stream.ptr
                )
            incoming = [(peer, self._empty_pinned(array.nbytes, np.uint8)) for peer, array in receives]
            stream.synchronize()  # the bytes to send are here, and what is received is no longer read
            self._host.exchange(outgoing, incoming).wait()
            for (_, array), (_, staged) in zip(receives, incoming, strict=True):
                runtime.memcpyAsync(
                    array.data.ptr, staged.ctypes.data, array.nbytes, runtime.memcpyHostToDevice, stream.ptr
                )
            stream.synchronize()  # before the pinned memory is given back
