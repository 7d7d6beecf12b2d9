"""`check`: does this machine compute what the contract says? Every backend that runs here, against float64."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import secrets
import time
from collections.abc import Iterator
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
    began, wrong = time.perf_counter(), {}
    xp = importlib.import_module({"numpy": "numpy", "cuda": "cupy"}[backend])
    if backend == "cuda" and not _warmup.why_not_kept():
        from cupyflash._cuda.device import of

        # Some seventy kernels, minutes one after the other. What does not compile fails again below, and is named.
        _warmup.compile_all(_warmup.distinct(judged(seed), of(0)))
    with _say.Progress(_problems.count()) as progress:
        for problem in _problems.problems(seed):
            try:
                _solve(problem, xp)
            except Exception as error:  # whatever it is, the machine did not do what it should: say what, and go on
                wrong[problem.name] = " ".join(f"{type(error).__name__}: {error}".split())
            progress.step(f"{backend}: {problem.name}")
    return Verdict(backend, _problems.count(), wrong, round(time.perf_counter() - began, 3))


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
