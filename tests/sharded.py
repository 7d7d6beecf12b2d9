"""Problems for context parallelism: made whole, run on one rank of a group, and judged whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import cupyflash as cf
from cupyflash import parallel
from cupyflash.parallel import Shards, shard, unshard
from cupyflash.testing import check_backward, check_forward

BATCH, HEADS_Q, HEADS_KV, WIDTH, WIDTH_V = 2, 4, 2, 16, 24
OF_QUERIES, OF_ROWS = ("q", "out", "dout", "dq"), ("lse", "dlse")


@dataclass(frozen=True)
class Case:
    """What is asked. `options` are those of `Attention`; `arrays` names what else is drawn for it."""

    len_q: Any = 45
    len_k: Any = 70
    options: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    seed: int | None = None
    dtype: Any = np.float32


EVERYTHING: dict[str, Any] = {"causal": True, "window": (31, 0), "softcap": 2.0}
CASES: dict[str, Case] = {
    "plain": Case(),
    "causal": Case(options={"causal": True}),
    "causal, as many queries as keys": Case(len_q=61, len_k=61, options={"causal": True}),
    "causal from the top left": Case(options={"causal": "top-left"}),
    "queries that see no key": Case(len_q=70, len_k=45, options={"causal": True}),
    "queries that see the sink alone": Case(len_q=70, len_k=45, options={"causal": True}, arrays=("sink",)),
    "window": Case(options={"window": (9, 3)}),
    "window narrower than a shard": Case(len_q=67, len_k=67, options={"causal": True, "window": (4, 0)}),
    "keys that no query sees": Case(len_q=5, len_k=90, options={"window": (7, 0)}, arrays=("sink",)),
    "softcap": Case(options={"softcap": 1.5}),
    "negative scale": Case(options={"scale": -0.2, "window": (40, 0)}),
    "alibi": Case(options={"causal": True}, arrays=("alibi_slopes",)),
    "alibi by batch row": Case(arrays=("alibi_slopes of rows",)),
    "sink": Case(arrays=("sink",)),
    "dropout": Case(options={"dropout_p": 0.3}, seed=5),
    "dropout, everything": Case(
        options={**EVERYTHING, "dropout_p": 0.3}, arrays=("alibi_slopes", "sink", "dlse"), seed=2**40 + 5
    ),
    "gradient of lse": Case(options={"causal": True}, arrays=("dlse",)),
    "everything, heads before rows": Case(
        options={**EVERYTHING, "layout": "bhsd"}, arrays=("alibi_slopes", "sink", "dlse")
    ),
    "fewer positions than parts": Case(len_q=3, len_k=2, arrays=("sink",)),
    "no keys": Case(len_k=0, arrays=("sink",)),
    "no queries": Case(len_q=0),
    "packed": Case(len_q=(13, 0, 30, 1, 9), len_k=(20, 5, 30, 1, 0), options={"layout": "thd", "causal": True}),
    "packed, everything": Case(
        len_q=(13, 0, 30, 1, 9),
        len_k=(20, 5, 30, 1, 3),
        options={**EVERYTHING, "layout": "thd", "window": (8, 0)},
        arrays=("alibi_slopes of rows", "sink", "dlse"),
    ),
    "packed, dropout": Case(
        len_q=(13, 0, 30), len_k=(20, 5, 30), options={"layout": "thd", "dropout_p": 0.2}, arrays=("sink",), seed=9
    ),
    "no packed sequences": Case(len_q=(), len_k=(), options={"layout": "thd"}),
    "bfloat16": Case(options={"causal": True}, arrays=("sink",), dtype=ml_dtypes.bfloat16),
    "float16, float32 results": Case(options={"out_dtype": "float32", "grad_dtype": "float32"}, dtype=np.float16),
    "float64": Case(options=EVERYTHING, arrays=("sink", "dlse"), dtype=np.float64),
}


@dataclass(frozen=True)
class Way:
    """How a case is computed."""

    scheme: str
    size: int
    zigzag: bool = False

    def __str__(self) -> str:
        return f"{self.scheme} of {self.size}{', zigzag' if self.zigzag else ''}"


class Problem:
    """A case with numbers in it: the same on every rank."""

    def __init__(self, case: Case, way: Way, seed: int) -> None:
        self.case, self.way = case, way
        self.attention = cf.Attention(**case.options)
        self.layout = self.attention.layout
        self.shards = Shards(case.len_q, way.size, way.zigzag)
        self.shards_k = Shards(case.len_k, way.size, way.zigzag)
        rng = np.random.default_rng(seed)
        rows = np.float64 if case.dtype == np.float64 else np.float32
        q = self._shape(self.shards.total, HEADS_Q, WIDTH)
        self.arrays = {
            "q": rng.standard_normal(q),
            "k": rng.standard_normal(self._shape(self.shards_k.total, HEADS_KV, WIDTH)),
            "v": rng.standard_normal(self._shape(self.shards_k.total, HEADS_KV, WIDTH_V)) + 1,
            "dout": rng.standard_normal(self._shape(self.shards.total, HEADS_Q, WIDTH_V)),
        }
        self.arrays = {name: array.astype(case.dtype) for name, array in self.arrays.items()}
        batch = len(self.shards.lengths) if self.layout == "thd" else BATCH
        self.extras: dict[str, Any] = {}
        for name in case.arrays:
            if name == "dlse":
                shape = (HEADS_Q, self.shards.total) if self.layout == "thd" else (BATCH, HEADS_Q, self.shards.total)
                self.arrays["dlse"] = rng.standard_normal(shape).astype(rows)
            else:
                shape = (batch, HEADS_Q) if name == "alibi_slopes of rows" else (HEADS_Q,)
                self.extras[name.partition(" ")[0]] = rng.random(shape).astype(rows)
        if case.seed is not None:
            self.extras |= {"seed": case.seed, "offset": 3}

    def _shape(self, length: int, heads: int, width: int) -> tuple[int, ...]:
        return {
            "bshd": (BATCH, length, heads, width),
            "bhsd": (BATCH, heads, length, width),
            "thd": (length, heads, width),
        }[self.layout]

    def _axis(self, name: str) -> int:
        if name in OF_ROWS:
            return 1 if self.layout == "thd" else 2
        return {"bshd": 1, "bhsd": 2, "thd": 0}[self.layout]

    def _shards(self, name: str) -> Shards:
        return self.shards if name in OF_QUERIES + OF_ROWS else self.shards_k

    def run(self, transport: Any, put: Any, get: Any) -> dict[str, np.ndarray]:
        """What this rank computes; `put` and `get` bring arrays to a library and back."""
        own = {
            name: put(shard(array, self._shards(name), transport.rank, axis=self._axis(name)))
            for name, array in self.arrays.items()
        }
        options: dict[str, Any] = {name: put(value) for name, value in self.extras.items()}
        options |= {"transport": transport, "attention": self.attention, "shards": self.shards}
        options |= {"shards_k": self.shards_k}
        forward, backward = (getattr(parallel, f"{self.way.scheme}_{direction}") for direction in ("fwd", "bwd"))
        q, k, v = (own[name] for name in ("q", "k", "v"))
        out, lse = forward(q, k, v, **options)
        grads = backward(q, k, v, out, lse, own["dout"], dlse=own.get("dlse"), **options)
        return {name: get(array) for name, array in {"out": out, "lse": lse, **grads._asdict()}.items()}

    def check(self, results: list[dict[str, np.ndarray]]) -> None:
        """Judge what all ranks computed as one problem."""
        whole = {
            name: sum(result[name] for result in results)
            if name == "dsink"
            else unshard([result[name] for result in results], self._shards(name), axis=self._axis(name))
            for name in results[0]
        }
        out, lse = whole.pop("out"), whole.pop("lse")
        q, k, v = (self.arrays[name] for name in ("q", "k", "v"))
        options: dict[str, Any] = {**self.case.options, **self.extras}
        if self.layout == "thd":
            for side, shards in (("q", self.shards), ("k", self.shards_k)):
                options[f"cu_seqlens_{side}"] = np.cumsum([0, *shards.lengths])
        check_forward(out, lse, q, k, v, **options)
        options |= {"out": out, "lse": lse, "dlse": self.arrays.get("dlse")}
        check_backward(tuple(whole.values()), q, k, v, self.arrays["dout"], **options)
