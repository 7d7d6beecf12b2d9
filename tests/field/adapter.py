"""What the field cases ask of a package, answered by cupyflash."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cupyflash

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("numpy", "cupy", "torch")
ALWAYS = frozenset(
    (
        *("float32", "float16", "bfloat16", "backward", "varlen", "window", "softcap", "alibi", "sink", "dlse", "bhsd"),
        *("seqused_k", "dsink", "numpy_inputs", "streams", "spawn"),
    )
)


class Adapter:
    """Arrays are NumPy's or CuPy's; for `torch` they are handed over as tensors in the same memory, and taken back."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.gpu = backend == "cupy" or (backend == "torch" and self.torch.cuda.is_available())
        self.xp: Any = importlib.import_module("cupy") if self.gpu else np
        self.refusals: dict[str, str] = {}  # feature → why it is not there, in the backend's own words
        self.answers: dict[str, bool] = {}

    @property
    def torch(self) -> Any:
        return importlib.import_module("torch")

    # ------------------------------------------------------------------ what there is

    def has(self, name: str) -> bool:
        if name not in self.answers:
            self.answers[name] = self._look(name)
        return self.answers[name]

    def _look(self, name: str) -> bool:
        if name in ALWAYS:
            return True
        if name in ("float64", "dropout", "deterministic", "num_splits", "paged"):
            return self._serves(name)
        if name == "multi_gpu":
            return self.gpu and self.xp.cuda.runtime.getDeviceCount() > 1
        if name in ("gpu", "big_memory"):
            return self.gpu
        if name == "graphs":
            return self.backend == "cupy"
        return (
            name in ("dlpack", "foreign:torch_grad", "foreign:torch_bf16")
            and importlib.util.find_spec("torch") is not None
        )

    def _serves(self, name: str) -> bool:
        """Whether the backend has a plan for a call with this feature, or refuses it as unsupported."""
        static: dict[str, dict[str, Any]] = {
            "dropout": {"dropout_p": 0.5},
            "deterministic": {"deterministic": True},
            "num_splits": {"num_splits": 2},
        }
        arrays: dict[str, Any] = {"seed": 1}
        if name == "paged":
            arrays |= {"block_table": self.asarray([[0]], "int32"), "seqused_k": self.asarray([4], "int32")}
        dtype = "float64" if name == "float64" else "float16"
        q, k, v = (self._give(self.asarray(np.ones((1, 4, 1, 32)), dtype)) for _ in range(3))
        try:
            attention = cupyflash.Attention(**static.get(name, {}))
            attention.plan(q, k, v, name == "deterministic", **{key: self._give(x) for key, x in arrays.items()})
        except cupyflash.UnsupportedError as error:
            self.refusals[name] = str(error)
            return False
        return True

    # ------------------------------------------------------------------ the calls

    def fwd(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        out, lse = cupyflash.attn_fwd(*map(self._give, (q, k, v)), **self._options(options))
        return self._take(out), self._take(lse)

    def bwd(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, return_dsink: bool = False, **options: Any
    ) -> tuple[Any, ...]:
        grads = cupyflash.attn_bwd(*map(self._give, (q, k, v, out, lse, dout)), **self._options(options))
        return tuple(map(self._take, grads[: 4 if return_dsink else 3]))

    def merge(self, states: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        outs, lses = ([self._give(x) for x in column] for column in zip(*states, strict=True))
        out, lse = cupyflash.merge_states(outs, lses)
        return self._take(out), self._take(lse)

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: self._give(value) for name, value in options.items()}
        if given.get("cu_seqlens_q") is not None:
            given["layout"] = "thd"
        return given

    # ------------------------------------------------------------------ arrays

    def asarray(self, array: Any, dtype: str) -> Any:
        return self.xp.asarray(np.asarray(array).astype(np.dtype(getattr(ml_dtypes, dtype, dtype))))

    def to_numpy(self, x: Any) -> Any:
        x = self._take(x)
        return x.get() if self.gpu and isinstance(x, self.xp.ndarray) else x

    def _give(self, x: Any) -> Any:
        """An array of ours as the caller's kind, in the same memory; everything else as it is."""
        if self.backend != "torch" or not isinstance(x, self.xp.ndarray):
            return x
        if self.gpu:
            return self.torch.from_dlpack(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it cannot mark a tensor read-only
            if x.dtype == ml_dtypes.bfloat16:
                return self.torch.from_numpy(x.view(np.int16)).view(self.torch.bfloat16)
            return self.torch.from_numpy(x)

    def _take(self, x: Any) -> Any:
        """The reverse of `_give`; also of tensors that a case passed in itself."""
        if "torch" not in sys.modules or not isinstance(x, self.torch.Tensor):
            return x
        if x.is_cuda:
            return self.xp.from_dlpack(x)
        if x.dtype == self.torch.bfloat16:
            return x.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()

    def foreign(self, kind: str, array: Any, dtype: str) -> Any:
        tensor = self.torch.tensor(array, device="cuda" if self.gpu else "cpu").to(getattr(self.torch, dtype))
        return tensor.requires_grad_() if kind == "torch_grad" else tensor

    def dlpack_roundtrip(self, x: Any) -> Any:
        return self.to_numpy(self.torch.from_dlpack(x))

    def put_on(self, array: Any, dtype: str, device: int) -> Any:
        with self.xp.cuda.Device(device):
            return self.asarray(array, dtype)

    # ------------------------------------------------------------------ streams, graphs, processes

    @contextlib.contextmanager
    def stream(self) -> Iterator[Any]:
        if not self.gpu:
            yield None
            return
        with self.xp.cuda.Stream(non_blocking=True) as stream, contextlib.ExitStack() as stack:
            if self.backend == "torch":
                stack.enter_context(self.torch.cuda.stream(self.torch.cuda.ExternalStream(stream.ptr)))
            yield stream

    def capture(self, fn: Callable[[], Any]) -> Callable[[], Any]:
        pool = self.xp.cuda.MemoryPool()  # the graph's own: nobody else may be given memory that it writes
        with self.stream() as stream, self.xp.cuda.using_allocator(pool.malloc):
            fn()
            stream.synchronize()
            stream.begin_capture()
            kept = pool, fn()
            graph = stream.end_capture()

        def replay() -> Any:
            graph.launch(stream)
            stream.synchronize()
            return kept[1]

        return replay

    def cache_env(self, path: str) -> dict[str, str]:
        return {"CUPY_CACHE_DIR": str(path)}

    def spawn(self, env: Mapping[str, str], n: int, variant: int) -> list[tuple[bool, str]]:
        command = [sys.executable, "-m", "tests.field.selfcheck", self.backend, str(variant)]
        processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(n)
        ]
        texts = [process.communicate(timeout=300)[0] for process in processes]
        return [(process.returncode == 0, text) for process, text in zip(processes, texts, strict=True)]
