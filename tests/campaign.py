"""Random problems over every feature, size, layout and stride, judged by the reference.

    python -m tests.campaign --backend numpy --problems 3000 --seed 1

A problem is drawn from one integer, which a failure prints with the problem and the command that repeats it. Its upper
part, the kind, decides whatever a GPU kernel is compiled for; its lower 32 bits decide lengths, values, starts and
offsets. `--kinds` bounds the former, and with it what a GPU has to compile. Every choice has a stream of its own: a
feature that the backend refuses is left out, counted, and moves little else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cupyflash as cf
from benchmarks import stamp
from cupyflash.testing import assert_close, peer, peer_bwd, reference, reference_bwd, rounding_terms
from tests.backends import Backend, CupyBackend, NumpyBackend, arranged
from tests.cases import DTYPES
from tests.random_problems import FEATURES, KIND_SHIFT, Choices, Problem, draw

Array = Any  # a NumPy array of any float dtype, or the backend's own

_GRIDS = tuple(n / 8 for n in range(8))
_FEW_VALUES = 256
_SMALL = 20_000  # values in all: beyond, the draws take longer than they are worth

# ------------------------------------------------------------------------------------------------ memory


class TorchBackend(Backend):
    """Tensors on the GPU where there is one, else in host memory."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self.xp = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def put(self, value: Any, memory: str = "contiguous") -> Any:
        if not isinstance(value, np.ndarray):
            return value
        array = np.array(value, order="C")
        if array.dtype == DTYPES["bfloat16"]:
            return self.xp.from_numpy(array.view(np.int16)).view(self.xp.bfloat16).to(self.device)
        return self.xp.from_numpy(array).to(self.device)

    def get(self, array: Any) -> np.ndarray:
        assert type(array) is self.xp.Tensor
        if array.dtype is self.xp.bfloat16:
            return array.contiguous().view(self.xp.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return array.cpu().numpy()


BACKENDS = {"numpy": NumpyBackend, "cupy": CupyBackend, "torch": TorchBackend}


@dataclass
class _Placed:
    """An array of the backend somewhere in a flat buffer, and what the buffer held before the call."""

    array: Any
    flat: Any
    before: np.ndarray
    writable: np.ndarray  # of the buffer's elements


class _Arena:
    """Puts the arrays of one call into the backend's memory, and sees afterwards that nothing else was written."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.placed: dict[str, _Placed] = {}

    def put(self, name: str, value: np.ndarray, memory: str = "contiguous", *, is_output: bool = False) -> Any:
        if self.backend.name == "torch" and memory == "reversed":  # torch has no negative strides
            memory = "gaps"
        shift = 3 if memory == "shifted" else 0
        if memory in ("shifted", "broadcast"):
            view = value
        else:
            view = arranged(np, np.array(value, order="C"), memory if value.ndim else "contiguous")
        root = view
        while isinstance(root.base, np.ndarray):
            root = root.base
        assert root.flags.c_contiguous
        item = view.itemsize
        offset = shift + (view.ctypes.data - root.ctypes.data) // item if view.size else 0
        strides = view.strides
        flat = np.concatenate([_poison((shift,), view.dtype), root.reshape(-1)])
        writable = np.zeros(flat.size, bool)
        if is_output and view.size:
            steps = tuple(stride // item for stride in strides)
            np.lib.stride_tricks.as_strided(writable[offset:], view.shape, steps)[...] = True
        own = self.backend.put(flat)
        self.placed[name] = _Placed(_view(self.backend, own, offset, view.shape, strides), own, flat, writable)
        return self.placed[name].array

    def output(self, name: str, shape: tuple[int, ...], dtype: Any, memory: str) -> Any:
        return self.put(name, _poison(shape, np.dtype(dtype)), memory, is_output=True)

    def assert_nothing_else_written(self) -> None:
        for name, placed in self.placed.items():
            before, after = placed.before, self.backend.get(placed.flat)
            kept = ~placed.writable
            if before[kept].tobytes() != after[kept].tobytes():
                raise AssertionError(f"memory of or around `{name}` that is no output was written")


def _poison(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, np.nan if np.dtype(dtype).kind not in "iu" else 0x5A, dtype)


def _view(backend: Backend, flat: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """An array of the backend in `flat`; strides in bytes."""
    if backend.name == "torch":
        return backend.xp.as_strided(flat, shape, [stride // flat.element_size() for stride in strides], offset)
    if backend.name == "cupy":
        return backend.xp.ndarray(shape, flat.dtype, flat.data + offset * flat.dtype.itemsize, strides)
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, strides)


# ------------------------------------------------------------------------------------------------ judging


class OutOfRange(Exception):
    """A result beyond its dtype's range: the contract promises nothing there."""


def judge(backend: Backend, problem: Problem) -> None:
    """Run forward and backward, and compare. AssertionError for a wrong result; whatever else the call raised."""
    q, k, v = (problem.arrays[name] for name in ("q", "k", "v"))
    shared = {name: array for name, array in problem.arrays.items() if name not in ("q", "k", "v")} | problem.options
    expected_out, expected_lse = reference(q, k, v, **shared)
    grids = _grids(problem)
    plain_out, plain_lse = map(
        _farthest,
        (expected_out, expected_lse),
        zip(*(peer(q, k, v, grid=grid, **shared) for grid in grids), strict=True),
    )
    out_dtype = DTYPES[problem.options.get("out_dtype", str(q.dtype))]
    _assert_in_range(expected_out, plain_out, out_dtype)

    arena = _Arena(backend)
    inputs = {
        name: arena.put(name, array, problem.memory.get(name, "contiguous")) for name, array in problem.arrays.items()
    }
    out, lse = _forward(backend, problem, arena, inputs, out_dtype)
    arena.assert_nothing_else_written()
    saved_out, saved_lse = backend.get(out), backend.get(lse)
    backward = "block_table" not in problem.arrays
    state = {"out": saved_out, "lse": saved_lse}
    if problem.has_foreign_state:
        state = _foreign(problem, saved_out, saved_lse)
    dout, state["dlse"] = problem.dout, problem.dlse
    if backward and problem.poisons_empty_rows:
        dout, state["dlse"] = _with_poisoned_rows(problem, state["lse"])
    if saved_out.dtype not in (q.dtype, np.float32):  # what the backward takes
        state["out"] = state["out"].astype(q.dtype)
    if state["out"] is not saved_out or problem.has_foreign_state:
        out, lse = backend.put(state["out"]), backend.put(state["lse"])
    sums = problem.row_dtype
    terms = rounding_terms(q, k, v, dout if backward else None, **(state if backward else {}), **shared)
    assert_close(saved_out, expected_out, plain_out, dtype=out_dtype, terms=terms["out"], sums=sums, name="out")
    assert_close(saved_lse, expected_lse, plain_lse, dtype=problem.row_dtype, terms=terms["lse"], sums=sums, name="lse")
    if backward:
        terms["dv"] *= max(1.0, _equal_terms(problem, dout) / 8)
        _judge_backward(backend, problem, arena, inputs, out, lse, state, dout, shared, terms)


def _equal_terms(problem: Problem, dout: Array) -> int:
    """How many terms of dv are the same number: every P of a head is, and every row of dout.

    One behind the other they are rounded to the same side, so that n of them err by n / 2 roundings of their sum.
    """
    rows = np.moveaxis(dout, {"bshd": 1, "bhsd": 2, "thd": 0}[problem.options["layout"]], 0)
    if problem.options.get("scale") != 0 or not (rows == rows[:1]).all():
        return 0
    heads = {"bshd": 2, "bhsd": 1, "thd": 1}[problem.options["layout"]]
    return len(rows) * (problem.q.shape[heads] // problem.arrays["k"].shape[heads])


def _judge_backward(
    backend: Backend,
    problem: Problem,
    arena: _Arena,
    inputs: dict[str, Any],
    out: Any,
    lse: Any,
    state: dict[str, Any],
    dout: Array,
    shared: dict[str, Any],
    terms: dict[str, float],
) -> None:
    q, k, v = (problem.arrays[name] for name in ("q", "k", "v"))
    expected = reference_bwd(q, k, v, dout, **state, **shared)
    draws = [peer_bwd(q, k, v, dout, grid=grid, **state, **shared) for grid in _grids(problem)]
    plain = {name: _farthest(grad, [draw[name] for draw in draws]) for name, grad in expected.items()}
    dtypes = {name: _gradient_dtype(problem, name) for name in expected}
    for name, grad in expected.items():
        _assert_in_range(grad, plain[name], dtypes[name])

    given = {"dout": arena.put("dout", dout, problem.memory.get("dout", "contiguous"))}
    if state["dlse"] is not None:
        given["dlse"] = arena.put("dlse", state["dlse"], problem.memory.get("dlse", "contiguous"))
    if problem.gives_delta:
        given = _delta(backend, problem, out, state, dout, given)
        out = None
    grads = _backward(backend, problem, arena, inputs, out, lse, given, dtypes)
    arena.assert_nothing_else_written()
    assert grads._fields == tuple(expected)
    for name, actual in zip(expected, grads, strict=True):
        start = problem.starts.get(name, np.zeros(()))
        assert_close(
            backend.get(actual),
            expected[name] + start,
            plain[name].astype(np.float64) + start,
            dtype=dtypes[name],
            terms=terms[name] + float(np.abs(start).max(initial=0)),
            sums=problem.row_dtype,
            name=name,
        )
    if problem.options.get("deterministic") and not problem.starts:
        again = _backward(backend, problem, arena, inputs, out, lse, given, dtypes)
        for name, first, second in zip(expected, grads, again, strict=True):
            if backend.get(first).tobytes() != backend.get(second).tobytes():
                raise AssertionError(f"{name}: deterministic, and another run gave other bits")


def _forward(
    backend: Backend, problem: Problem, arena: _Arena, inputs: dict[str, Any], out_dtype: Any
) -> tuple[Any, Any]:
    shapes = {"out": (problem.out_shape, out_dtype), "lse": (problem.lse_shape, problem.row_dtype)}
    outputs = {
        name: arena.output(name, *shapes[name], problem.outputs[name]) for name in shapes if name in problem.outputs
    }
    arguments = inputs | outputs | _workspace(problem, arena, inputs, backward=False)
    result = cf.attn_fwd(**arguments, **problem.options)
    for name, array in outputs.items():
        assert getattr(result, name) is array, f"`{name}=` is not what came back"
    return result


def _backward(
    backend: Backend,
    problem: Problem,
    arena: _Arena,
    inputs: dict[str, Any],
    out: Any,
    lse: Any,
    given: dict[str, Any],
    dtypes: dict[str, Any],
) -> Any:
    outputs = {}
    for name, memory in problem.outputs.items():
        if name in problem.starts:
            outputs[name] = arena.put(name, problem.starts[name], memory, is_output=True)
        elif name in dtypes:
            outputs[name] = arena.output(name, problem.arrays[name[1:]].shape, dtypes[name], memory)
    if problem.starts:
        outputs["accumulate"] = True
    workspace = _workspace(problem, arena, inputs, backward=True, dout=given["dout"], lse=lse, out=out, **outputs)
    result = cf.attn_bwd(**inputs, out=out, lse=lse, **given, **outputs, **workspace, **problem.options)
    for name, array in outputs.items():
        assert name == "accumulate" or getattr(result, name) is array, f"`{name}=` is not what came back"
    return result


def _delta(
    backend: Backend, problem: Problem, out: Any, state: dict[str, Any], dout: Array, given: dict[str, Any]
) -> dict[str, Any]:
    """dout and delta in place of dout and dlse; delta itself is judged."""
    delta = cf.attn_bwd_preprocess(out, given["dout"], given.get("dlse"), layout=problem.options["layout"])
    products = state["out"].astype(np.float64) * dout.astype(np.float64)
    dlse = 0.0 if state["dlse"] is None else state["dlse"].astype(np.float64)

    def rows(values: np.ndarray) -> np.ndarray:
        sums = values.sum(axis=-1)
        return sums if problem.options["layout"] == "bhsd" else sums.swapaxes(-1, -2)

    expected = rows(products) - dlse
    terms = float(np.nanmax(rows(np.abs(products)) + np.abs(dlse), initial=0))
    assert_close(backend.get(delta), expected, expected, dtype=problem.row_dtype, terms=terms, name="delta")
    return {"dout": given["dout"], "delta": delta}


def _workspace(
    problem: Problem, arena: _Arena, inputs: dict[str, Any], *, backward: bool, **arrays: Any
) -> dict[str, Any]:
    """The `workspace` argument: exactly as many bytes as are asked for, poisoned, between others."""
    if not problem.gives_workspace:
        return {}
    static = {f.name for f in dataclasses.fields(cf.Attention)}
    attention = cf.Attention(**{name: value for name, value in problem.options.items() if name in static})
    of_call = {name: value for name, value in problem.options.items() if name not in static}
    size = attention.workspace_size(backward=backward, **inputs, **of_call, **arrays)
    bytes_around = arena.output("workspace", (1, size + 64), np.uint8, "contiguous")
    arena.placed["workspace"].writable[size:] = False
    return {"workspace": bytes_around[0, :size]}


def _grids(problem: Problem) -> tuple[float, ...]:
    """Draws of the peer: one where results have many values, several where the largest of a few errors is luck.

    So it is where rows repeat: over equal keys the products of dS cancel, and roundings of a few numbers are left.
    """
    sizes = [
        math.prod(problem.out_shape),
        *(array.size for array in problem.arrays.values() if array.dtype.kind == "f"),
    ]
    is_small = min(sizes) <= _FEW_VALUES and sum(sizes) <= _SMALL
    repeats = "broadcast" in (problem.memory.get(name) for name in "qkv")
    return _GRIDS if problem.q.itemsize == 2 and (is_small or repeats) else _GRIDS[:1]


def _farthest(expected: np.ndarray, draws: Sequence[np.ndarray]) -> np.ndarray:
    """Of each value the draw that is farthest from the expected one."""
    stacked = np.stack(draws)
    with np.errstate(invalid="ignore"):
        errors = np.abs(stacked.astype(np.float64) - expected)
    worst = np.where(np.isnan(errors), -1, errors).argmax(axis=0)
    return np.take_along_axis(stacked, worst[None], axis=0)[0]


def _foreign(problem: Problem, out: np.ndarray, lse: np.ndarray) -> dict[str, np.ndarray]:
    """A state as if there were keys elsewhere: other values, larger sums, rows that are empty here and there."""
    r = np.random.default_rng(problem.seed)
    more = np.logaddexp(lse, r.normal(0, 3, lse.shape)).astype(lse.dtype)
    more[r.random(lse.shape) < 0.1] = -np.inf
    return {"out": (out + r.standard_normal(out.shape)).astype(out.dtype), "lse": more}


def _with_poisoned_rows(problem: Problem, lse: np.ndarray) -> tuple[Array, Array]:
    """dout and dlse with NaN and infinities in rows without a key, which use neither."""
    empty = np.isneginf(lse)
    dlse = problem.dlse if problem.dlse is None else np.where(empty, -np.inf, problem.dlse)
    if problem.memory.get("dout") == "broadcast":
        return problem.dout, dlse
    per_row = empty if problem.options["layout"] == "bhsd" else empty.swapaxes(-1, -2)
    return np.where(per_row[..., None], np.array(np.nan, problem.dout.dtype), problem.dout), dlse


def _gradient_dtype(problem: Problem, name: str) -> Any:
    if name == "dsink":
        return DTYPES[problem.row_dtype]
    return DTYPES[problem.options.get("grad_dtype", str(problem.arrays[name[1:]].dtype))]


def _assert_in_range(expected: np.ndarray, plain: np.ndarray, dtype: Any) -> None:
    """Raises OutOfRange where a result, or what a 16-bit kernel stores on the way to it, overflows."""
    finite = np.isfinite(expected)
    if finite.any() and np.abs(expected[finite]).max() > float(ml_dtypes.finfo(dtype).max) / 4:
        raise OutOfRange(f"results beyond {dtype}")
    if not np.isfinite(plain[finite]).all():
        raise OutOfRange("the peer overflows on the way")


# ------------------------------------------------------------------------------------------------ the campaign


@dataclass
class Verdict:
    """What became of one seed."""

    seed: int
    wrong: str = ""
    refused: tuple[str, ...] = ()
    unjudged: str = ""


def verdict(backend: Backend, seed: int, features: frozenset[str], dtypes: tuple[str, ...]) -> Verdict:
    """Judge the problem of this seed, leaving out one by one what the backend refuses."""
    result = Verdict(seed)
    while True:
        problem = Problem(seed, features, dtypes)
        try:
            problem = draw(Choices(seed, features, dtypes))
            judge(backend, problem)
        except OutOfRange as beyond:
            result.unjudged = str(beyond)
        except cf.UnsupportedError as refusal:
            refused = "" if backend.name == "numpy" else _refused(problem, str(refusal))
            if refused:
                result.refused += (refused,)
                features -= {refused}
                dtypes = tuple(dtype for dtype in dtypes if dtype != refused)
                continue
            result.wrong = _report(backend, problem)
        except Exception:
            result.wrong = _report(backend, problem)
        return result


def _refused(problem: Problem, message: str) -> str:
    """The feature that a refusal names: one which the problem has, or its dtype."""
    if f"`q` is {problem.q.dtype}" in message:
        return str(problem.q.dtype)
    return next((name for name in problem.features if any(word in message for word in FEATURES[name])), "")


def _report(backend: Backend, problem: Problem) -> str:
    return f"{problem}\n{traceback.format_exc(limit=-4)}  {problem.command(backend.name)}"


def seeds_of(first: int, problems: int, kinds: int | None) -> list[list[int]]:
    """Seeds by kind: `problems` in all, of as many kinds or of `kinds` alone."""
    draws = np.random.default_rng(first)
    kinds = min(kinds or problems, problems)
    heads = [int(kind) for kind in draws.integers(2**31, size=kinds)]
    groups = [[] for _ in heads]
    for index in range(problems):
        groups[index % kinds].append((heads[index % kinds] << KIND_SHIFT) + int(draws.integers(2**32)))
    return groups


_worker: Backend | None = None


def _start(backend: str) -> None:
    global _worker
    _worker = BACKENDS[backend]()


def _work(seeds: list[int], features: frozenset[str], dtypes: tuple[str, ...], deadline: float) -> list[Verdict]:
    assert _worker is not None
    return [verdict(_worker, seed, features, dtypes) for seed in seeds if time.time() < deadline]


def _verdicts(arguments: argparse.Namespace, groups: list[list[int]]) -> Iterator[Verdict]:
    deadline = time.time() + (arguments.seconds or math.inf)
    what = frozenset(arguments.features), tuple(arguments.dtype), deadline
    if arguments.processes == 1:
        _start(arguments.backend)
        for seeds in groups:
            yield from _work(seeds, *what)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, context, _start, (arguments.backend,)) as pool:
        for future in as_completed([pool.submit(_work, seeds, *what) for seeds in groups]):
            yield from future.result()


def main(argv: list[str] | None = None) -> int:
    """Run a campaign; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign", description="Random problems over every feature, judged by the reference"
    )
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--backend", choices=BACKENDS, default="numpy")
    parser.add_argument("--problems", type=int, default=3000)
    parser.add_argument("--seed", type=int, help="of the campaign; fresh by default")
    parser.add_argument("--only", type=int, help="run one problem, by its own seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, help="start no problem after these")
    parser.add_argument("--kinds", type=int, help="kinds to draw from; default one a problem, on a GPU one in ten")
    parser.add_argument("--dtype", type=names, default=list(DTYPES), help="comma-separated; default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write here what was found, and on what")
    parser.add_argument("--features", type=names, default=list(FEATURES), help="what may occur; default all")
    arguments = parser.parse_args(argv)
    unknown = {*arguments.features} - {*FEATURES} | {*arguments.dtype} - {*DTYPES}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Features: {', '.join(FEATURES)}")
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    kinds = arguments.kinds or (None if arguments.backend == "numpy" else -(-arguments.problems // 10))
    if arguments.only is None:
        groups = seeds_of(seed, arguments.problems, kinds)
        print(f"campaign on {arguments.backend}, --problems {arguments.problems} --seed {seed}", flush=True)
    else:
        groups, arguments.processes = [[arguments.only]], 1
        print(draw(Choices(arguments.only, frozenset(arguments.features), tuple(arguments.dtype))))

    began, judged = time.perf_counter(), 0
    wrong: list[int] = []
    refused, unjudged = Counter[str](), Counter[str]()
    for result in _verdicts(arguments, groups):
        judged += 1
        refused.update(result.refused)
        unjudged.update([result.unjudged] if result.unjudged else [])
        if result.wrong:
            wrong.append(result.seed)
            print(f"\nWRONG {result.wrong}", file=sys.stderr, flush=True)
    print(f"problems: {judged}, wrong: {len(wrong)}{' ' + str(wrong) if wrong else ''}")
    for name, count in refused.most_common():
        print(f"refused: {name} {count}")
    for name, count in unjudged.most_common():
        print(f"not judged: {name} {count}")
    print(f"seconds: {time.perf_counter() - began:.0f}")
    if arguments.json:
        found = {"problems": judged, "wrong": wrong, "refused": dict(refused), "not judged": dict(unjudged)}
        record = stamp.record(backend=arguments.backend, seed=seed, kinds=kinds, **found)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
