"""`check`: does this machine compute what the contract says? Every backend that runs here, against float64."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import multiprocessing
import os
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import _environment
from cupyflash._api import attn_bwd, attn_fwd
from cupyflash._attention import Attention
from cupyflash._check import Judged
from cupyflash._cli import _problems, _say, _warmup
from cupyflash._cli._problems import Problem
from cupyflash._memory import judged_of
from cupyflash.testing import check_backward, check_forward

_OPTIONS = {option.name for option in dataclasses.fields(Attention)}
BACKENDS = ("numpy", "cuda")
_MOST_PROCESSES = 4  # each takes longer to start than most problems take


@dataclass(frozen=True)
class Verdict:
    """What became of one backend. `obstacle`: why it was not asked."""

    backend: str
    problems: int
    wrong: dict[str, str]  # by the problem's name
    seconds: float
    obstacle: str = ""

    def __str__(self) -> str:
        if self.obstacle:
            return f"{self.backend:<6} not checked: {self.obstacle}"
        of = f"{self.problems} problems, forward and backward, against float64, in {self.seconds:.1f} s"
        if not self.wrong:
            return f"{self.backend:<6} right: {of}"
        lines = [f"  {name}: {what}" for name, what in self.wrong.items()]
        return "\n".join([f"{self.backend:<6} WRONG in {len(self.wrong)} of {of}", *lines])


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("check", help="compute small problems here and compare them with float64")
    only = "only this one, which then has to run; default: those that do"
    parser.add_argument("--backend", choices=BACKENDS, help=only)
    parser.add_argument("--seed", type=int, metavar="N", help="draw the numbers of that run again; default: new ones")
    _say.add_json(parser)
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    if seed < 0:
        raise _say.UsageError(f"check: `--seed` is {seed}; 0 and more is accepted.")
    verdicts = [_verdict(backend, seed) for backend in BACKENDS if options.backend in (None, backend)]
    is_right = not any(verdict.wrong or (options.backend and verdict.obstacle) for verdict in verdicts)
    found = {"seed": seed, "is_right": is_right, "backends": [dataclasses.asdict(verdict) for verdict in verdicts]}
    _say.say("\n".join([f"seed   {seed}", *map(str, verdicts)]), found, as_json=options.json)
    return 0 if is_right else 1


def _verdict(backend: str, seed: int) -> Verdict:
    obstacle = _environment.why_no_cuda() if backend == "cuda" else ""
    if obstacle:
        return Verdict(backend, 0, {}, 0.0, obstacle)
    began, solve = time.perf_counter(), _on_cpu if backend == "numpy" else _on_gpu
    wrong: dict[str, str] = {}
    with _say.Progress(_problems.count()) as progress:
        for problem, complaint in zip(_problems.problems(seed), solve(seed), strict=True):
            if complaint:
                wrong[problem.name] = complaint
            progress.step(f"{backend}: {problem.name}")
    return Verdict(backend, _problems.count(), wrong, round(time.perf_counter() - began, 3))


def _on_cpu(seed: int) -> Iterator[str]:
    """In processes with one BLAS thread each: on a busy machine more of them wait for each other in every product."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when NumPy is imported
    workers = min(os.cpu_count() or 1, _MOST_PROCESSES)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_complaint, _problems.problems(seed), itertools.repeat("numpy"))


def _on_gpu(seed: int) -> Iterator[str]:
    """Compiled ahead, since one after the other many kernels take minutes."""
    from cupyflash._cuda.device import of

    if not _warmup.why_not_kept():
        _warmup.compile_all(_warmup.distinct(judged(seed), of(0)))  # what fails here fails again below, and is named
    for problem in _problems.problems(seed):
        yield _complaint(problem, "cupy")


def _complaint(problem: Problem, library: str) -> str:
    """What is wrong; empty when nothing is. Whatever is raised, the machine did not do what it should."""
    try:
        _solve(problem, importlib.import_module(library))
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def judged(seed: int) -> Iterator[Judged]:
    """The calls of all problems, forward and backward."""
    for problem in _problems.problems(seed):
        said = {name: value for name, value in problem.options.items() if name in _OPTIONS}
        arrays = {"q": problem.q, "k": problem.k, "v": problem.v}
        arrays |= {name: value for name, value in problem.options.items() if name not in _OPTIONS}
        for is_backward in (False, True)[: 1 + problem.has_backward]:
            yield judged_of("check", Attention(**said), arrays, backward=is_backward)


def _solve(problem: Problem, xp: Any) -> None:
    """Raises AssertionError for a wrong result."""
    inputs, options = (problem.q, problem.k, problem.v), problem.options
    q, k, v, dout = (xp.asarray(array) for array in (*inputs, problem.dout))
    out, lse = attn_fwd(q, k, v, **_put(options, xp))
    check_forward(_host(out), _host(lse), *inputs, **options)
    if problem.has_backward:
        gradients = options | problem.backward_options
        grads = attn_bwd(q, k, v, out, lse, dout, **_put(gradients, xp))
        results = {"out": _host(out), "lse": _host(lse)}
        check_backward(tuple(_host(grad) for grad in grads), *inputs, problem.dout, **results, **gradients)


def _put(options: dict[str, Any], xp: Any) -> dict[str, Any]:
    return {name: xp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}


def _host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()
