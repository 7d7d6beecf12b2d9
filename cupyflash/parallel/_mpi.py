"""NumPy arrays over MPI."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash._errors import UnsupportedError
from cupyflash.parallel._transport import Message, check_messages
from cupyflash.parallel._worker import Moving, Worker

# Between two looks at a transfer. Each look also moves it along, and a thread that only looks takes a core from NumPy.
_SECONDS_BETWEEN_LOOKS = 5e-5


class MpiTransport:
    """NumPy arrays between the processes of an MPI communicator, by mpi4py.

    MPI moves long messages while it is called and not otherwise, so a thread of the transport's own does the calling.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, default MPI.COMM_WORLD
        Duplicated, which all its processes do together, so that these messages meet no others.

    Raises
    ------
    UnsupportedError where MPI was started without MPI_THREAD_MULTIPLE; mpi4py asks for it unless told otherwise.

    Examples
    --------
    `mpiexec -n 4 python -m mpi4py program.py` starts four processes, and ends all when one fails. In each of them, or
    in a process alone:

    >>> from cupyflash import parallel
    >>> transport = parallel.MpiTransport()
    >>> 0 <= transport.rank < transport.size
    True
    """

    def __init__(self, comm: Any = None) -> None:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UnsupportedError(
                "MpiTransport: MPI was started without MPI_THREAD_MULTIPLE, and messages travel in a thread of their "
                "own; leave mpi4py.rc.thread_level at 'multiple'"
            )
        self._mpi: Any = MPI
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self._worker = Worker("cupyflash MPI")

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Moving:
        messages = [*sends, *receives]
        check_messages("MpiTransport", messages, np.ndarray, "NumPy arrays are accepted")
        outgoing = [(peer, as_bytes(array)) for peer, array in sends]
        incoming = [(peer, as_bytes(array)) for peer, array in receives]
        return self._worker.start(lambda: self._move(outgoing, incoming), messages)

    def _move(self, outgoing: list[Message], incoming: list[Message]) -> None:
        requests = [self._comm.Irecv(array, source=peer) for peer, array in incoming]
        requests += [self._comm.Isend(array, dest=peer) for peer, array in outgoing]
        while not self._mpi.Request.Testall(requests):
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a C-contiguous array; MPI knows no bfloat16."""
    if not array.flags.c_contiguous:
        raise ValueError("exchange: an array is not C-contiguous")
    return array.reshape(-1).view(np.uint8)
