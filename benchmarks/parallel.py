"""Does transfer hide behind computing? `python -m benchmarks.parallel --engine nccl --ranks 2` starts a process a rank.

Each scheme is checked, then timed three times: without any transfer, as it is, and with every transfer made to take as
long as one step computes. Where all is hidden, the last takes no longer than the first: at most 1.15 times is allowed.
The way home of dk and dv, after a backward's last step, has nothing to hide behind and is counted apart.

Engines: `mpi` and `gloo` on the CPU, `nccl` and `torch-nccl` with a GPU a rank, `staged` with one GPU for all.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cupyflash as cf
from benchmarks import ranks, stamp
from cupyflash import parallel
from cupyflash._cuda import driver
from cupyflash.parallel import Shards, shard
from cupyflash.testing import PEER_FACTOR, ROUNDING_UNITS

MOST = 1.15  # times computing alone
REPS = 9
ON_CPU = ("mpi", "gloo")
SCHEMES = ("ring", "gather")  # Ulysses hides nothing
ATTENTION = cf.Attention()  # without a mask every step takes as long
RESULTS = ("out", "lse", "dq", "dk", "dv")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description="Transfer behind computing.")
    parser.add_argument("--engine", choices=ranks.ENGINES, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--scheme", choices=SCHEMES, nargs="+", default=SCHEMES)
    parser.add_argument("--rows", type=int, help="positions a rank; default 2,048 on the CPU and 16,384 on GPUs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found, and on what machine, here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # this process is one of the ranks
    options = parser.parse_args(arguments)
    if options.rank:
        return work(options)
    if why := ranks.missing(options.engine, options.ranks):
        print(f"{options.engine}, {options.ranks} ranks: {why}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = options.json or Path(folder) / "found.json"
        given = [*(sys.argv[1:] if arguments is None else arguments), "--json", str(found.resolve()), "--rank"]
        print(ranks.launch(options.engine, options.ranks, ["-m", "benchmarks.parallel", *given], seconds=540), end="")
        rows = json.loads(found.read_text("utf-8"))["rows"]
    return int(any(row["of_alone"] > MOST for row in rows))


def work(options: argparse.Namespace) -> int:
    """One rank: rank 0 prints and writes what was found."""
    transport = ranks.connect(options.engine)
    library = ranks.Library(options.engine)
    problem = Problem(transport, library, SMALL if options.engine in ON_CPU else LARGE, options.rows)
    found = [row for scheme in options.scheme for row in measure(problem, options.engine, scheme)]
    if transport.rank == 0:
        for row in found:
            print(
                "{scheme} {pass}: {alone_ms:.2f} ms computing alone, {real_ms:.2f} as it is, {delayed_ms:.2f} with "
                "every transfer a step long; its steps take {of_alone:.3f} of alone".format(**row)
            )
        options.json.write_text(json.dumps(stamp.record(rows=found), indent=1) + "\n", "utf-8")
    ranks.disconnect(options.engine)
    return 0


class Size(NamedTuple):
    """Of what one rank holds."""

    rows: int
    heads: int
    heads_kv: int
    width: int
    dtype: Any


SMALL = Size(2048, 4, 2, 64, np.dtype(np.float32))
LARGE = Size(16384, 16, 4, 128, np.dtype(ml_dtypes.bfloat16))


class Problem:
    """A problem in which every rank has the same to compute in every step."""

    def __init__(self, transport: Any, library: ranks.Library, size: Size, rows: int | None) -> None:
        self.transport, self.library = transport, library
        self.size = size if rows is None else size._replace(rows=rows)
        self.shards = Shards(self.size.rows * transport.size, transport.size)
        rng = np.random.default_rng(0)  # the same on every rank
        of_heads = {"q": size.heads, "k": size.heads_kv, "v": size.heads_kv, "dout": size.heads}
        self.whole: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        for name, heads in of_heads.items():
            array = rng.standard_normal((1, self.shards.total, heads, size.width), dtype=np.float32)
            self.whole[name] = array = array.astype(size.dtype)
            self.own[name] = library.put(shard(array, self.shards, transport.rank, axis=1))

    def run(self, scheme: str, transport: Any) -> tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]:
        """The forward, the backward, and what one run of both gave."""
        options: dict[str, Any] = {"transport": transport, "shards": self.shards, "attention": ATTENTION}
        q, k, v, dout = (self.own[name] for name in ("q", "k", "v", "dout"))
        fwd, bwd = (getattr(parallel, f"{scheme}_{direction}") for direction in ("fwd", "bwd"))
        out, lse = fwd(q, k, v, **options)
        grads = bwd(q, k, v, out, lse, dout, **options)
        results = {"out": out, "lse": lse, **grads._asdict()}
        return (
            lambda: fwd(q, k, v, **options),
            lambda: bwd(q, k, v, out, lse, dout, **options),
            results,
        )

    def check(self, results: dict[str, Any]) -> None:
        """Hold this rank's part to one call on the whole in the next wider dtype, as far off as one call in this is."""
        dtype = self.size.dtype
        exact, plain = (self._at_once(one) for one in (np.float32 if dtype.itemsize == 2 else np.float64, dtype))
        for name in RESULTS:
            right, rounded = (
                np.asarray(shard(part[name], self.shards, self.transport.rank, axis=2 if name == "lse" else 1))
                for part in (exact, plain)
            )
            found = self.library.get(results[name])
            eps = float(ml_dtypes.finfo(found.dtype).eps)
            right, rounded, found = (array.astype(np.float64) for array in (right, rounded, found))
            bound = PEER_FACTOR * np.abs(rounded - right).max() + ROUNDING_UNITS * eps * np.abs(right).max()
            if not np.abs(found - right).max() <= bound:
                raise AssertionError(f"{name} is {np.abs(found - right).max():.2e} off, and {bound:.2e} are allowed")

    def _at_once(self, dtype: Any) -> dict[str, np.ndarray]:
        q, k, v, dout = (self.library.put(self.whole[name].astype(dtype)) for name in ("q", "k", "v", "dout"))
        out, lse = ATTENTION.fwd(q, k, v)
        grads = ATTENTION.bwd(q, k, v, out, lse, dout)
        return {name: self.library.get(array) for name, array in {"out": out, "lse": lse, **grads._asdict()}.items()}


def measure(problem: Problem, engine: str, scheme: str) -> list[dict[str, Any]]:
    """A row for the forward and one for the backward."""
    transport, found = problem.transport, []
    *real, results = problem.run(scheme, transport)
    problem.check(results)
    *alone, _ = problem.run(scheme, Still(transport))
    for number, name in enumerate(("forward", "backward")):
        [first] = times(problem, [alone[number]])
        step_ms = statistics.median(first) / transport.size
        *delayed, _ = problem.run(scheme, delay(problem, step_ms))
        alone_ms, real_ms, delayed_ms = times(problem, [calls[number] for calls in (alone, real, delayed)])
        way_home_ms = step_ms if name == "backward" else 0.0
        found.append(
            {
                "scheme": scheme,
                "pass": name,
                "engine": engine,
                "ranks": transport.size,
                **problem.size._asdict(),
                "dtype": problem.size.dtype.name,
                "alone_ms": statistics.median(alone_ms),
                "real_ms": statistics.median(real_ms),
                "delayed_ms": statistics.median(delayed_ms),
                "of_alone": statistics.median(
                    (late - way_home_ms) / prompt for late, prompt in zip(delayed_ms, alone_ms, strict=True)
                ),
            }
        )
    return found


def times(problem: Problem, calls: Sequence[Callable[[], Any]]) -> list[list[float]]:
    """What each call takes on the slowest rank, in ms, several times: in turns, all ranks beginning together."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(REPS):
        for call, of_call in zip(calls, taken, strict=True):
            meet(problem, 0.0)
            start = time.perf_counter()
            call()
            problem.library.synchronize()
            of_call.append(max(meet(problem, 1e3 * (time.perf_counter() - start))))
    return taken


def meet(problem: Problem, value: float) -> list[float]:
    """Wait for all ranks; their values."""
    transport, library = problem.transport, problem.library
    peers = [peer for peer in range(transport.size) if peer != transport.rank]
    own = np.array([value], np.float32)
    coming = [(peer, library.put(np.zeros(1, np.float32))) for peer in peers]
    transport.exchange([(peer, library.put(own)) for peer in peers], coming).wait()
    return [value, *(float(library.get(array)[0]) for _, array in coming)]


class Still:
    """A transport that moves nothing: computing alone, on whatever the memory holds."""

    def __init__(self, transport: Any) -> None:
        self.rank, self.size = transport.rank, transport.size

    def exchange(self, sends: Any, receives: Any) -> Any:
        return self

    def wait(self) -> None:
        pass


def delay(problem: Problem, ms: float) -> Any:
    """The same transport, later: on a stream where that is what waits for it, on the host otherwise."""
    if problem.library.waits_on_streams:
        return LaterOnStream(problem.transport, problem.library, ms)
    return LaterOnHost(problem.transport, ms)


class Later:
    """A transport whose messages arrive late; where there are none, nothing does."""

    def __init__(self, transport: Any) -> None:
        self.rank, self.size, self._transport = transport.rank, transport.size, transport

    def exchange(self, sends: Any, receives: Any) -> Any:
        return (self._delayed if sends or receives else self._transport.exchange)(sends, receives)

    def _delayed(self, sends: Any, receives: Any) -> Any:
        raise NotImplementedError


class LaterOnHost(Later):
    """What is received is there no sooner than `ms` after the exchange began."""

    def __init__(self, transport: Any, ms: float) -> None:
        super().__init__(transport)
        self._seconds = ms / 1e3

    def _delayed(self, sends: Any, receives: Any) -> Any:
        return _Later(self._transport.exchange(sends, receives), time.perf_counter() + self._seconds)


class _Later:
    def __init__(self, transfer: Any, end: float) -> None:
        self._transfer, self._end = transfer, end

    def wait(self) -> None:
        self._transfer.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))


class LaterOnStream(Later):
    """What is received is there no sooner than `ms` after what is sent was.

    On a stream that nothing else uses the C library sleeps meanwhile: a kernel would wait for a multiprocessor, and
    Python for the thread that launches.
    """

    def __init__(self, transport: Any, library: ranks.Library, ms: float) -> None:
        import cupy

        super().__init__(transport)
        self._library, self._stream = library, cupy.cuda.Stream(non_blocking=True)
        self._microseconds = ctypes.c_void_p(round(1e3 * ms))
        self._sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)

    def _delayed(self, sends: Any, receives: Any) -> Any:
        self._stream.wait_event(self._library.stream().record())
        transfer = self._transport.exchange(sends, receives)
        stream = ctypes.c_void_p(self._stream.ptr)
        if status := driver.library().cuLaunchHostFunc(stream, self._sleep, self._microseconds):
            raise RuntimeError(f"cuLaunchHostFunc said {status}, and nothing would be late")
        with self._library.on(self._stream):
            transfer.wait()
        return _LaterOnStream(self._library, self._stream.record(), [*sends, *receives])


class _LaterOnStream:
    def __init__(self, library: ranks.Library, done: Any, held: list[Any]) -> None:
        self._library, self._done, self._held = library, done, held

    def wait(self) -> None:
        self._library.stream().wait_event(self._done)
        self._held.clear()  # memory that is freed from now on is used again after the transfer only


if __name__ == "__main__":
    sys.exit(main())
