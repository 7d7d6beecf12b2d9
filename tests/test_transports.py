"""What moves arrays: refusals, and in which order the GPU's transports queue their work, on a stand-in for CuPy."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyflash.parallel import NcclTransport, StagedTransport, TorchTransport
from cupyflash.parallel._mpi import as_bytes
from tests import threads


class Array:
    """As far as a transport looks at CuPy's: memory of the host that says it is a GPU's."""

    def __init__(self, host: np.ndarray, device: int = 0) -> None:
        self.host, self.nbytes, self.shape = host, host.nbytes, host.shape
        self.data = SimpleNamespace(ptr=host.ctypes.data, device_id=device)


class Stream:
    names = iter(range(1, 1000))

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.ptr = log, name, next(self.names)
        self.marks = 0

    def record(self) -> str:
        self.marks += 1
        self.log.append(f"{self.name} records {self.marks}")
        return f"{self.name}'s {self.marks}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")


class Device:
    def __init__(self, id: int = 0) -> None:
        self.id = id

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is queued, once `cupy` is a stand-in."""
    entries: list[str] = []
    cupy: Any = ModuleType("cupy")
    current = Stream(entries, "current")

    def copy(to: int, source: int, count: int, kind: str, stream: int) -> None:
        entries.append(kind)
        ctypes.memmove(to, source, count)

    nccl = ModuleType("cupy.cuda.nccl")
    nccl.__dict__.update(
        NCCL_UINT8="bytes",
        groupStart=lambda: entries.append("group ("),
        groupEnd=lambda: entries.append(") group"),
    )
    cupy.ndarray = Array
    cupy.cuda = ModuleType("cupy.cuda")
    cupy.cuda.__dict__.update(
        nccl=nccl,
        Device=Device,
        Stream=lambda non_blocking: Stream(entries, "own" if non_blocking else "blocking"),
        get_current_stream=lambda device: current,
        runtime=SimpleNamespace(memcpyAsync=copy, memcpyDeviceToHost="down", memcpyHostToDevice="up"),
    )
    for name, module in (("cupy", cupy), ("cupy.cuda", cupy.cuda), ("cupy.cuda.nccl", nccl)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(empty_pinned=np.empty))
    return entries


class Communicator:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def rank_id(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def device_id(self) -> int:
        return 0

    def send(self, ptr: int, count: int, dtype: str, peer: int, stream: int) -> None:
        self.log.append(f"send {count} {dtype} to {peer}")

    def recv(self, ptr: int, count: int, dtype: str, peer: int, stream: int) -> None:
        self.log.append(f"receive {count} {dtype} from {peer}")


def test_nccl_moves_bytes_between_what_was_queued_before_and_what_is_after_the_wait(log: list[str]) -> None:
    transport = NcclTransport(Communicator(log))
    assert (transport.rank, transport.size) == (1, 3)
    transfer = transport.exchange([(2, Array(np.ones(3, np.float32)))], [(0, Array(np.ones(5, np.float16)))])
    started = [
        "current records 1",
        "own waits for current's 1",
        "group (",
        "send 12 bytes to 2",
        "receive 10 bytes from 0",
        ") group",
        "own records 1",
    ]
    assert log == started
    transfer.wait()
    assert log == [*started, "current waits for own's 1"]


def test_staging_moves_what_was_sent(log: list[str]) -> None:
    def work(host: Any) -> np.ndarray:
        transport = StagedTransport(host)
        peer = 1 - transport.rank
        sent = [Array(np.full((2, 3), transport.rank + 10 * i, np.float64)) for i in range(2)]
        received = [Array(np.empty((2, 3))) for _ in range(2)]
        transfer = transport.exchange([(peer, array) for array in sent], [(peer, array) for array in received])
        transfer.wait()
        return np.stack([array.host for array in received])

    zero, one = threads.run(2, work)
    np.testing.assert_array_equal(zero, [np.full((2, 3), 1), np.full((2, 3), 11)])
    np.testing.assert_array_equal(one, [np.full((2, 3), 0), np.full((2, 3), 10)])
    assert log.count("down") == log.count("up") == 4


def test_staging_waits_before_it_reads_and_before_it_lets_go(log: list[str]) -> None:
    class Still:
        rank, size = 0, 2

        def exchange(self, sends: Any, receives: Any) -> Any:
            log.append("exchange")
            return self

        def wait(self) -> None: ...

    transport = StagedTransport(Still())
    transport.exchange([(1, Array(np.ones(3)))], [(1, Array(np.ones(3)))]).wait()
    assert log == [
        "current records 1",
        "own waits for current's 1",
        "down",
        "the host waits for own",
        "exchange",
        "up",
        "the host waits for own",
    ]


@pytest.mark.parametrize("name", ["NcclTransport", "StagedTransport"])
def test_a_gpu_transport_refuses_what_it_cannot_move(log: list[str], name: str) -> None:
    host = SimpleNamespace(rank=0, size=2)
    transport = NcclTransport(Communicator(log)) if name == "NcclTransport" else StagedTransport(host)
    log.clear()
    with pytest.raises(TypeError, match=f"{name}.exchange: `array` is a numpy ndarray; CuPy arrays on cuda:0"):
        transport.exchange([(1, np.ones(3))], [])
    with pytest.raises(TypeError, match=f"{name}.exchange: `array` is on cuda:1; CuPy arrays on cuda:0"):
        transport.exchange([], [(1, Array(np.ones(3), device=1))])
    assert log == []


def test_torch_moves_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = pytest.importorskip("torch")
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(TypeError, match="`array` is a numpy ndarray; torch tensors are accepted"):
        TorchTransport().exchange([(1, np.ones(3))], [])


def test_bytes_are_the_memory_itself() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    as_bytes(array)[:4] = np.frombuffer(np.float32(7).tobytes(), np.uint8)
    assert array[0, 0] == 7
    with pytest.raises(ValueError, match="not C-contiguous"):
        as_bytes(array.T)
