"""One process a rank: `launch` starts them, `connect` gives each its transport, `Library` its arrays.

| engine | arrays | between |
|---|---|---|
| mpi | NumPy | processes of MPI |
| gloo | torch, on the CPU | processes |
| nccl | CuPy | GPUs, one a process |
| torch-nccl | torch | GPUs, one a process |
| staged | CuPy | processes that share a GPU, through host memory and MPI |
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupyflash.parallel import MpiTransport, NcclTransport, StagedTransport, TorchTransport

ENGINES = ("mpi", "gloo", "nccl", "torch-nccl", "staged")
OVER_MPI = ("mpi", "staged")
_RANK, _SIZE, _FOLDER = "CUPYFLASH_RANK", "CUPYFLASH_RANKS", "CUPYFLASH_MEETING_FOLDER"
_SECONDS_TO_END = 10.0


def launch(engine: str, ranks: int, command: Sequence[str], *, seconds: float) -> str:
    """Run `python command...` once a rank, and return what they print; RuntimeError, with that, when one fails.

    Where one fails, the others would wait for it for ever, so they are stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        if engine in OVER_MPI:
            python = [sys.executable, "-m", "mpi4py", *command]  # which ends all when one fails
            processes = [_start([mpiexec(), "-n", str(ranks), *python], {_SIZE: str(ranks)}, Path(folder) / "output")]
        else:
            python = [sys.executable, *command]
            processes = [
                _start(python, {_RANK: str(rank), _SIZE: str(ranks), _FOLDER: folder}, Path(folder) / f"output {rank}")
                for rank in range(ranks)
            ]
        try:
            trouble = _wait(processes, seconds)
        finally:
            for process in processes:
                _end(process)
        outputs = "".join(path.read_text("utf-8", "replace") for path in sorted(Path(folder).glob("output*")))
    if trouble:
        raise RuntimeError(f"{engine}, {ranks} ranks: {trouble}\n{outputs}")
    return outputs


def connect(engine: str) -> Any:
    """This process's transport."""
    size = int(os.environ[_SIZE])
    if engine in OVER_MPI:
        transport = MpiTransport()
        if transport.size != size:
            why = "mpiexec is not of the MPI that mpi4py was built with"
            raise RuntimeError(f"a group of {transport.size}, not {size}: {why}")
        return transport if engine == "mpi" else StagedTransport(transport)
    rank, folder = int(os.environ[_RANK]), Path(os.environ[_FOLDER])
    if engine == "nccl":
        import cupy
        from cupy.cuda import nccl

        cupy.cuda.Device(rank).use()
        return NcclTransport(nccl.NcclCommunicator(size, _unique_id(rank, folder / "id"), rank))
    import torch.distributed

    if engine == "torch-nccl":
        torch.cuda.set_device(rank)
    backend = engine.removeprefix("torch-")
    torch.distributed.init_process_group(backend, f"file://{folder / 'store'}", rank=rank, world_size=size)
    return TorchTransport()


def disconnect(engine: str) -> None:
    """What torch wants before a process ends."""
    if engine in ("gloo", "torch-nccl"):
        import torch.distributed

        torch.distributed.destroy_process_group()


class Library:
    """The arrays that an engine moves, and their device."""

    def __init__(self, engine: str) -> None:
        self.name = {"mpi": "numpy", "gloo": "torch", "torch-nccl": "torch"}.get(engine, "cupy")
        self._device = "cuda" if engine == "torch-nccl" else "cpu"
        self.waits_on_streams = engine in ("nccl", "torch-nccl")  # else the host waits for a transfer

    def put(self, value: Any) -> Any:
        """A NumPy array as one of the library's, where it computes; anything else as it is."""
        if not isinstance(value, np.ndarray) or self.name == "numpy":
            return value
        if self.name == "cupy":
            import cupy

            return cupy.array(value)
        import torch

        if value.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16).to(self._device)
        return torch.from_numpy(value).to(self._device)

    def get(self, array: Any) -> np.ndarray:
        if self.name == "numpy":
            return array
        if self.name == "cupy":
            return array.get()
        import torch

        if array.dtype == torch.bfloat16:
            return array.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array.cpu().numpy()

    def stream(self) -> Any:
        """The current one, as CuPy's."""
        import cupy

        if self.name == "cupy":
            return cupy.cuda.get_current_stream()
        import torch

        return cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Where a stream of CuPy's is the current one."""
        if self.name == "cupy":
            return stream
        import torch

        return torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr))

    def synchronize(self) -> None:
        """Wait for what is queued on this rank's device."""
        if self.name == "cupy":
            import cupy

            cupy.cuda.Device().synchronize()
        elif self._device == "cuda":
            import torch

            torch.cuda.synchronize()


def missing(engine: str, ranks: int) -> str:
    """Why this engine cannot run so many ranks here, or ""."""
    needed = {"mpi": ["mpi4py"], "staged": ["mpi4py", "cupy"], "nccl": ["cupy"]}.get(engine, ["torch"])
    for name in needed:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    if engine in OVER_MPI and mpiexec() is None:
        return "there is no mpiexec: pip install mpich brings it"
    gpus = {"staged": 1, "nccl": ranks, "torch-nccl": ranks}.get(engine, 0)
    if gpus and (found := _gpus(engine)) < gpus:
        return f"{gpus} GPUs are needed and {found} are there"
    if engine == "nccl":
        from cupy.cuda import nccl

        if not nccl.available:
            return "CuPy finds no NCCL: pip install nvidia-nccl-cu12 or -cu13 brings it"
    return ""


def mpiexec() -> Any:
    """Beside this Python, where a wheel puts it, or on the path; None where it is neither."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _start(words: list[str], environment: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(words, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # which mpiexec passes on
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> str:
    """Until all are done or one failed; what went wrong, or ""."""
    end = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            return f"a rank ended with {next(filter(None, codes))}"
        if None not in codes:
            return ""
        if time.monotonic() > end:
            return f"not done after {seconds:g} s"
        time.sleep(0.02)


def _unique_id(rank: int, path: Path) -> Any:
    """NCCL's name for the group: rank 0 makes it, and a file tells the others."""
    if rank == 0:
        from cupy.cuda import nccl

        new = path.with_suffix(".new")
        new.write_bytes(pickle.dumps(nccl.get_unique_id()))  # bytes, or a tuple of numbers before CuPy 14
        new.replace(path)  # whole or not at all
    while not path.exists():
        time.sleep(0.01)
    return pickle.loads(path.read_bytes())


def _gpus(engine: str) -> int:
    if engine == "torch-nccl":
        import torch

        return torch.cuda.device_count()
    import cupy

    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0
