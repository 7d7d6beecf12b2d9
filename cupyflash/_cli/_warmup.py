"""`warmup`: compile what calls will need, on all cores, into the folder where CuPy keeps kernels."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from cupyflash import _environment
from cupyflash._cli import _cache, _call, _say
from cupyflash._cli._say import UsageError
from cupyflash._errors import UnsupportedError

if TYPE_CHECKING:
    from cupyflash._check import Judged
    from cupyflash._cuda.device import Device
    from cupyflash._cuda.plan import Plan

_ELSEWHERE = (
    "CuPy compiles for the GPU that it runs on and no other, and keeps the result under a name only it can make: run "
    "this on such a machine, with CUPY_CACHE_DIR in what will become the image"
)


def _words(*choices: tuple[str, ...]) -> list[list[str]]:
    return [" ".join(words).split() for words in itertools.product(*choices)]


_USUAL = ("--dtype bfloat16", "--dtype float16"), ("--dim 64", "--dim 128"), ("", "--causal")
# Calls as they would be described here one by one.
SETS = {
    "training": _words(("--len-q 4096 --heads-q 8",), *_USUAL, ("", "--backward")),
    "decoding": _words(
        ("--len-q 1 --len-k 4096 --heads-kv 1",), *_USUAL, ("", "--page-size 64"), ("--heads-q 8", "--heads-q 32")
    ),
}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("warmup", help="compile ahead, on all cores, what calls on this machine's GPU need")
    parser.add_argument("--set", choices=SETS, help="usual calls of 16-bit types at head dims 64 and 128, not one")
    parser.add_argument("--backward", action="store_true", help="what the backward needs too")
    _say.add_json(parser)
    _call.add_arguments(parser)
    parser.set_defaults(run=_warmup)


def _warmup(options: argparse.Namespace) -> int:
    calls = _described(options)
    judged = [
        _call.judge(call, backward=is_backward) for call in calls for is_backward in (False, True)[: 1 + call.backward]
    ]
    obstacle = _environment.why_no_cuda()
    if obstacle:
        raise UnsupportedError(f"no GPU runs here ({obstacle}). {_ELSEWHERE}.")
    from cupyflash._cuda.device import of

    here = of(0)
    if options.arch not in (None, here.arch):
        raise UnsupportedError(f"`--arch` is {options.arch}, and this machine's GPU is of {here.arch}. {_ELSEWHERE}.")
    folder = _environment.cache_path()
    if why := why_not_kept():
        raise UnsupportedError(f"nothing compiled here would be kept: {why}.")
    (before, _), began = _cache.look(folder), time.perf_counter()
    plans = distinct(judged, here)
    for error in compile_all(plans):
        raise error
    seconds, new = round(time.perf_counter() - began, 3), len(_cache.look(folder)[0].keys() - before.keys())
    found = {"arch": here.arch, "folder": str(folder), "kernels": len(plans), "compiled": new, "seconds": seconds}
    text = f"{len(plans)} kernels for sm_{here.arch} are kept in {folder}; {new} of them compiled now, {seconds:.1f} s"
    _say.say(text, found, as_json=options.json)
    return 0


def distinct(judged: Iterable[Judged], target: Device) -> list[Plan[Any]]:
    """One plan for each binary that these calls need."""
    return [*{plan.binary: plan for call in judged for plan in _call.kernels(call, target)}.values()]


def compile_all(plans: Collection[Plan[Any]]) -> list[BaseException]:
    """What went wrong. In threads, as NVRTC lets go of the interpreter; past `kernel`, which compiles one at a time."""
    from cupyflash._cuda.compile import QUIET, _load

    os.environ[QUIET] = "1"  # the bar says that it takes time
    with ThreadPoolExecutor(os.cpu_count()) as pool, _say.Progress(len(plans)) as progress:
        futures = {pool.submit(_load, plan, 0): plan for plan in plans}
        for future in as_completed(futures):
            progress.step(f"compiled {futures[future].kernel}")
        return [error for future in futures if (error := future.exception())]


def why_not_kept() -> str:
    """Why the next process would compile again; empty when it would not. CuPy makes the folder when it is imported."""
    if os.environ.get("CUPY_CACHE_IN_MEMORY", "0") not in ("", "0"):
        return "CUPY_CACHE_IN_MEMORY is set"
    fact = _environment.cache_folder()
    return "" if os.access(_environment.cache_path(), os.W_OK) else f"the kernel cache is {fact.text}"


def _described(options: argparse.Namespace) -> list[argparse.Namespace]:
    if options.set is None:
        return [options]
    parser = argparse.ArgumentParser()
    parser.add_argument("--backward", action="store_true")
    parser.set_defaults(command=options.command)
    _call.add_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name != "arch" and getattr(options, name) != default:
            given = f"`--set` is given beside --{name.replace('_', '-')}"
            raise UsageError(f"warmup: {given}; a set or a described call is accepted, not both.")
    return [parser.parse_args(words) for words in SETS[options.set]]
