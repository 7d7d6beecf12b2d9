"""Torch tensors over a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyflash.parallel._transport import Message, check_messages


class TorchTransport:
    """Torch tensors between the processes of a group of torch.distributed: gloo on the CPU, nccl on GPUs.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, default the group of all processes
        All its processes make their transports together: NCCL wants them all in a group's first exchange.

    Examples
    --------
    `torchrun --nproc-per-node 4 program.py` starts four processes, in which `init_process_group("nccl")` is enough. In
    a process alone:

    >>> import torch.distributed
    >>> from cupyflash import parallel
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> transport = parallel.TorchTransport()
    >>> transport.rank, transport.size
    (0, 1)
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed

        self._torch: Any = torch
        self._group = group
        self.rank: int = torch.distributed.get_rank(group)
        self.size: int = torch.distributed.get_world_size(group)
        torch.distributed.barrier(group)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Works:
        check_messages("TorchTransport", [*sends, *receives], self._torch.Tensor, "torch tensors are accepted")
        dist = self._torch.distributed
        operations = [self._operation(dist.isend, *message) for message in sends]
        operations += [self._operation(dist.irecv, *message) for message in receives]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Works(works, [*sends, *receives])

    def _operation(self, operation: Any, peer: int, tensor: Any) -> Any:
        dist = self._torch.distributed
        if self._group is not None:
            peer = dist.get_global_rank(self._group, peer)
        return dist.P2POp(operation, tensor, peer, self._group)


class _Works:
    def __init__(self, works: list[Any], held: list[Message]) -> None:
        self._works, self._held = works, held

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._held.clear()
