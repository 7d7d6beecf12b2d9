"""Texts of a kernel beside each other: `python -m benchmarks.variants FOLDER ... --cases d128-full-4096 dim-192`.

A folder holds the files of `cuda_src` that a variant replaces. All variants, the text as it stands first, are compiled
in this process, held to float64 by the rule of the benchmarks, and take turns, call by call. Two binaries that differ
in a handful of instructions can differ by a tenth in speed, and two GPUs or days by as much: only such turns tell.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.cases import GRIDS, Case
from benchmarks.overlay import sources
from benchmarks.peers import PEERS, Absent, Prepared
from benchmarks.reference import attention
from benchmarks.run import OUTPUTS, beyond, errors_of, inputs, limits, times
from cupyflash import _check

AS_IT_STANDS = "as it stands"
CASES = {case.name: case for grid in GRIDS.values() for case in grid}
SAMPLES = 10  # of each launch


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description="Variants of a kernel in turns.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="files that replace those of cuda_src")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), metavar="CASE", required=True)
    parser.add_argument("--pass", dest="one_pass", choices=sorted(OUTPUTS), default="backward")
    parser.add_argument("--deterministic", action="store_true", help="gradients in order")
    parser.add_argument("--backends", nargs="*", choices=sorted(PEERS), default=["cudnn"], help="default: cudnn")
    parser.add_argument("--reps", type=int, default=20, help="timed calls of each; default: 20")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    rest = options.folders, options.backends, options.one_pass, options.reps, torch.device(options.device)
    verdicts = [compare(CASES[name], options.deterministic, *rest) for name in options.cases]
    return int(not all(verdicts))


def compare(
    case: Case,
    deterministic: bool,
    folders: Sequence[Path],
    backends: Sequence[str],
    one_pass: str,
    reps: int,
    device: Any,
) -> bool:
    """Prints a line for each variant and peer, and says whether all variants are right."""
    tensors = inputs(case, device)
    exact, plain = attention(case, *tensors), attention(case, *tensors, rounded=True)
    bounds = limits(errors_of(plain, exact, one_pass), case, tensors, exact)
    contestants: dict[str, Any] = {}
    for name, folder in ((AS_IT_STANDS, None), *((str(folder), folder) for folder in folders)):
        with sources(folder):
            ours = Prepared(case, *tensors)
            ours.attention = ours.attention.replace(deterministic=deterministic)
            contestants[name] = called(ours, one_pass)
    variants = list(contestants)
    for name in backends:
        try:
            contestants[name] = called(PEERS[name](case, *tensors), one_pass)
        except Absent as why:
            print(f"{case.name:20} {name:30} absent: {why}")
    taken = times(case, contestants, one_pass, reps, device)
    is_right = True
    for name, quartiles in taken.items():
        line = (
            f"{case.name:20} {name:30} {quartiles[1]:9.4f} ms  {taken[AS_IT_STANDS][1] / quartiles[1]:.3f} of its speed"
        )
        if name in variants:
            wrong = beyond(errors_of(contestants[name].results(), exact, one_pass), bounds)
            is_right &= not wrong
            if device.type == "cuda":
                line += f"  launches {' '.join(f'{ms:.4f}' for ms in launches(getattr(contestants[name], one_pass)))}"
            line += f"  WRONG: {'; '.join(wrong)}" if wrong else ""
        print(line, flush=True)
    return is_right


def called(contestant: Any, one_pass: str) -> Any:
    """With a call behind it, so that what it compiles is compiled."""
    with contestant.context():
        contestant.forward()
        if one_pass == "backward":
            contestant.backward()
    return contestant


def launches(call: Any) -> list[float]:
    """The median time in milliseconds of each launch of a prepared call."""
    given, stream = _check.given(call.checked), SimpleNamespace(ptr=torch.cuda.current_stream().cuda_stream)
    samples: list[list[float]] = []
    for _ in range(SAMPLES):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(call.ready.work.steps) + 1)]
        events[0].record()
        for step, event in zip(call.ready.work.steps, events[1:], strict=True):
            step(given, stream)
            event.record()
        torch.cuda.synchronize()
        samples.append([begin.elapsed_time(end) for begin, end in itertools.pairwise(events)])
    return [statistics.median(column) for column in zip(*samples, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
