"""The benchmark driver: every cell is checked against float64, then timed beside its peers.

    python -m benchmarks.run --grid peers --d 64 128 --backends fa2 cudnn --json results.jsonl

All contestants work on the same tensors in the same process and take turns, call by call, so that whatever the clock
does it does to all of them. TF32 is off for everybody. The first line of the JSON file says on what it ran, the last
what the same run reached in a matrix product and in a copy; `python -m benchmarks.compare results.jsonl` prints the
table again.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import stamp
from benchmarks.cases import GRIDS, Case
from benchmarks.compare import table
from benchmarks.peers import PEERS, Absent, Contestant, Ours, standard_flops
from benchmarks.reference import attention
from cupyflash import UnsupportedError
from cupyflash.testing import PEER_FACTOR, ROUNDING_UNITS, flops

WARM_UP = 3
HOST_CALLS = 100  # in one host timing: few enough that their launches fit the driver's queue and none waits for the GPU
HEAD_START_CYCLES = 40_000_000  # about 20 ms in which the host fills the queue before the GPU reaches the first call
FAILED = "failed:"
OUTPUTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("highest")
    named = {
        case.name: case
        for grid in options.grid
        for case in GRIDS[grid]
        if (not options.d or case.head_dim in options.d) and (not options.n or case.length in options.n)
    }
    chosen = list(named.values())
    records: list[dict[str, Any]] = []

    def record(line: dict[str, Any]) -> None:
        if options.json:
            with options.json.open("a" if records else "w") as file:
                file.write(json.dumps(line) + "\n")
        records.append(line)

    started = time.perf_counter()
    record({"machine": machine(options.commit)})
    before = ceilings(device)
    for number, case in enumerate(chosen, 1):
        print(f"{number}/{len(chosen)} {case.name}", file=sys.stderr, flush=True)
        for row in measure(case, options.backends, device, options.reps, options.passes):
            record(row)
    record({"ceilings": {"before": before, "after": ceilings(device)}, "seconds": time.perf_counter() - started})
    print(table(records))
    return int(any(line.get("failed") for line in records))


def measure(
    case: Case, backends: Sequence[str], device: Any, reps: int, passes: Sequence[str] = tuple(OUTPUTS)
) -> Iterator[dict[str, Any]]:
    """One row for each pass: how wrong and how fast everybody was, and why anybody is absent."""
    tensors = inputs(case, device)
    exact = attention(case, *tensors)
    plain = attention(case, *tensors, rounded=True)
    makers: dict[str, Callable[..., Contestant]] = {"ours": Ours} | {name: PEERS[name] for name in backends}
    contestants: dict[str, Contestant] = {}
    held_bytes: dict[str, int] = {}  # by each contestant's last calls
    absent: dict[str, str] = {}
    for name, make in makers.items():
        with _noting_absence(name, absent):
            contestants[name] = make(case, *tensors)
    for one_pass in OUTPUTS if "backward" in passes else ("forward",):
        errors = {"plain": errors_of(plain, exact, one_pass)}
        bounds = limits(errors["plain"], case, tensors, exact)
        failed: list[str] = []
        peak_bytes: dict[str, int] = {}
        for name in list(contestants):
            with _noting_absence(name, absent):
                with _memory(name, device, held_bytes, peak_bytes), contestants[name].context():
                    getattr(contestants[name], one_pass)()
                errors[name] = errors_of(contestants[name].results(), exact, one_pass)
            if name in absent:
                del contestants[name]
        if "ours" in contestants:
            failed += beyond(errors["ours"], bounds)
        if failed:
            del contestants["ours"]  # a wrong result has no time
        if one_pass not in passes and not failed:
            continue
        taken = times(case, contestants, one_pass, reps, device)
        if "ours" in contestants:  # an error that moved while the clock ran is a race
            failed += beyond(errors_of(contestants["ours"].results(), exact, one_pass), bounds)
        if absent.get("ours", "").startswith(FAILED):
            failed.append(absent["ours"])
        yield {
            "case": case.name,
            "series": case.series,
            "dtype": case.dtype,
            "length": case.length,
            "pass": one_pass,
            "host": case.host,
            "against": case.against,
            "limit": case.limit,
            "flops": flops(
                batch=case.batch,
                len_q=case.length,
                len_k=case.length,
                heads_q=case.heads_q,
                head_dim=case.head_dim,
                head_dim_v=case.dv,
                causal=case.is_causal,
                window=case.window,
                backward=one_pass == "backward",
            ),
            "standard_flops": standard_flops(case, one_pass),
            "times_ms": taken,
            "peak_bytes": peak_bytes,
            "errors": errors,
            "absent": dict(absent),
            "failed": failed,
        }


def inputs(case: Case, device: Any) -> tuple[Any, Any, Any, Any]:
    """q, k, v and dout: standard normal, the same for every contestant."""
    generator = torch.Generator(device).manual_seed(case.length * 1000 + case.head_dim)

    def normal(heads: int, head_dim: int) -> Any:
        shape = (case.batch, case.length, heads, head_dim)
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, case.dtype))

    shapes = [(case.heads_q, case.head_dim), (case.heads_kv, case.head_dim), (case.heads_kv, case.dv)]
    q, k, v, dout = (normal(*shape) for shape in (*shapes, (case.heads_q, case.dv)))
    return q, k, v, dout


@contextmanager
def _noting_absence(name: str, absent: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except (Absent, UnsupportedError) as error:
        absent[name] = str(error)
    except Exception as error:  # the other contestants and the other cells are still worth the machine's time
        traceback.print_exc()
        absent[name] = f"{FAILED} {type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def _memory(name: str, device: Any, held_bytes: dict[str, int], peak_bytes: dict[str, int]) -> Iterator[None]:
    """The most that a contestant's call holds beside the inputs, the state of its earlier calls included."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    peak_bytes[name] = held_bytes.get(name, 0) + torch.cuda.max_memory_allocated() - before
    held_bytes[name] = held_bytes.get(name, 0) + torch.cuda.memory_allocated() - before


def errors_of(results: dict[str, Any], exact: dict[str, Any], one_pass: str) -> dict[str, float]:
    """Largest absolute error of each result of the pass; infinite when anything in it is NaN."""
    errors = {x: (results[x].double() - exact[x]).abs().max().item() for x in OUTPUTS[one_pass] if x in results}
    return {x: math.inf if math.isnan(error) else error for x, error in errors.items()}


def limits(plain: dict[str, float], case: Case, tensors: Sequence[Any], exact: dict[str, Any]) -> dict[str, float]:
    """The largest error that is accepted of each result, where plain operations have these."""
    return {x: PEER_FACTOR * error + _rounding(x, case, tensors, exact) for x, error in plain.items()}


def _rounding(x: str, case: Case, tensors: Sequence[Any], exact: dict[str, Any]) -> float:
    """The floor of `testing.assert_close`; the terms of a score are bounded by |q| |k|, and are P's relative error."""
    eps_sums = torch.finfo(torch.float32).eps
    eps = eps_sums if x == "lse" else torch.finfo(tensors[0].dtype).eps
    scores = case.scale * math.prod(y.float().norm(dim=-1).max().item() for y in tensors[:2])
    return ROUNDING_UNITS * (eps * exact[x].abs().max().item() + eps_sums * (1 + scores) * exact["terms"].get(x, 1.0))


def beyond(errors: dict[str, float], bounds: dict[str, float]) -> list[str]:
    """What is wrong, in words."""
    return [f"{x}: error {errors[x]:.3g}, accepted {bounds[x]:.3g}" for x in errors if not errors[x] <= bounds[x]]


def times(case: Case, contestants: dict[str, Any], one_pass: str, reps: int, device: Any) -> dict[str, list[float]]:
    """Quartiles of everybody's time of a call in milliseconds: the GPU's, or the host's if asked or without a GPU."""
    measured = _host_times if case.host or device.type != "cuda" else _event_times
    return measured(case, contestants, one_pass, reps)


def _event_times(case: Case, contestants: dict[str, Contestant], one_pass: str, reps: int) -> dict[str, list[float]]:
    """Quartiles of the GPU's time of one call in milliseconds. The host never waits inside, so the queue stays full."""
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in contestants}
    for rep in range(-WARM_UP, reps):
        if rep == 0:
            torch.cuda.synchronize()
            torch.cuda._sleep(HEAD_START_CYCLES)
        for name, contestant in contestants.items():
            call = getattr(contestant, one_pass)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with contestant.context():
                begin.record()
                call()
                end.record()
            if rep >= 0:
                events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: _quartiles([begin.elapsed_time(end) for begin, end in pairs]) for name, pairs in events.items()}


def _host_times(case: Case, contestants: dict[str, Contestant], one_pass: str, reps: int) -> dict[str, list[float]]:
    """Quartiles of the host's time of one call in milliseconds; on a GPU the calls are queued, not awaited."""
    calls = HOST_CALLS if case.host else 1
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(reps):
        for name, contestant in contestants.items():
            call = getattr(contestant, one_pass)
            with contestant.context():
                _synchronize()
                begin = time.perf_counter()
                for _ in range(calls):
                    call()
                samples[name].append((time.perf_counter() - begin) * 1e3 / calls)
    _synchronize()
    return {name: _quartiles(sample) for name, sample in samples.items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _quartiles(sample: Sequence[float]) -> list[float]:
    return [float(x) for x in np.quantile(sample, [0.25, 0.5, 0.75])]


def ceilings(device: Any) -> dict[str, float]:
    """What this run reaches in a bfloat16 matrix product of 8,192³ and in a copy, bytes read plus written."""
    if device.type != "cuda":
        return {}
    a, b = (torch.randn(8192, 8192, device=device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    gemm = call_ms(lambda: torch.mm(a, b, out=product))
    copy = call_ms(lambda: target.copy_(source))
    return {"gemm_tflops": 2 * 8192**3 / gemm / 1e9, "copy_tb_s": 2 * source.nbytes / copy / 1e9}


def call_ms(call: Callable[[], Any], reps: int = 20) -> float:
    """The median time of a call on the GPU in milliseconds, the queue filled before the GPU reaches the first one."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + reps + 1)]
    call()
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CYCLES)
    for event in events:
        event.record()
        call()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events[WARM_UP:]))


def save(file: Path, rows: Sequence[dict[str, Any]], commit: str | None, device: Any) -> None:
    """Rows of a program of its own as lines of JSON, between on what it ran and what the run reached elsewhere."""
    records = [{"machine": machine(commit)}, *rows, {"ceilings": {"after": ceilings(device)}}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


def machine(commit: str | None) -> dict[str, str]:
    """On what this ran."""
    return {
        **stamp.machine(),
        "torch": torch.__version__,
        "cuDNN": str(torch.backends.cudnn.version()),
        "commit": commit or _commit(),
        "inputs": "standard normal; L2 not flushed; allow_tf32 off",
        "date": datetime.date.today().isoformat(),
    }


def _commit() -> str:
    root = Path(__file__).resolve().parents[1]
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def add_common(parser: argparse.ArgumentParser, *, reps: int = 20) -> None:
    """The options that benchmarks in turns have in common."""
    parser.add_argument("--reps", type=int, default=reps, help="timed calls of each contestant; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row here as one line of JSON")
    parser.add_argument("--commit", help="what to stamp where git does not know")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Check every cell, then time it.")
    parser.add_argument("--grid", nargs="+", choices=sorted(GRIDS), default=["quick"], help="default: quick")
    parser.add_argument("--backends", nargs="*", choices=sorted(PEERS), default=["fa2"], help="peers; default: fa2")
    parser.add_argument("--passes", nargs="+", choices=sorted(OUTPUTS), default=list(OUTPUTS))
    parser.add_argument("--d", nargs="*", type=int, help="only these head dims")
    parser.add_argument("--n", nargs="*", type=int, help="only these lengths")
    add_common(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
