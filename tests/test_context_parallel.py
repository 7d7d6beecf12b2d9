"""Ring, gather and Ulysses: what the ranks compute together is the whole problem's result and gradient."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash as cf
from benchmarks import parallel as parallel_benchmark
from benchmarks import ranks
from cupyflash import UnsupportedError, parallel
from cupyflash.parallel import Shards, _problem, shard
from tests import rank, threads
from tests.backends import Backend, NumpyBackend
from tests.sharded import CASES, Case, Problem, Way

WAYS = [
    Way("ring", 2),
    Way("ring", 3, zigzag=True),
    Way("ring", 4, zigzag=True),
    Way("ring", 4),
    Way("gather", 2, zigzag=True),
    Way("gather", 3),
    Way("gather", 4, zigzag=True),
    Way("ulysses", 2, zigzag=True),
    Way("ulysses", 3),
    Way("ulysses", 4),
]


# In tiles of the usual size: what a backend computes is not the subject.
on_each = pytest.mark.parametrize("backend", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)

# Ulysses cuts the heads that a dropout mask counts.
TOGETHER = [(way, name) for way in WAYS for name in CASES if way.scheme != "ulysses" or CASES[name].seed is None]


def run(problem: Problem, backend: Backend) -> list[dict[str, np.ndarray]]:
    return threads.run(problem.way.size, lambda transport: problem.run(transport, backend.put, backend.get))


@on_each
@pytest.mark.parametrize(("way", "name"), TOGETHER, ids=[f"{way}-{name}" for way, name in TOGETHER])
def test_the_ranks_together_compute_the_whole(backend: Backend, way: Way, name: str, rng: np.random.Generator) -> None:
    problem = Problem(CASES[name], way, int(rng.integers(2**32)))
    problem.check(run(problem, backend))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "engine", ["mpi", "gloo", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("staged", "nccl", "torch-nccl"))]
)
def test_processes_together_compute_the_whole(engine: str, size: int, rng: np.random.Generator, tmp_path: Path) -> None:
    if why := ranks.missing(engine, size):
        pytest.skip(why)
    seed = int(rng.integers(2**32))
    ranks.launch(engine, size, ["-m", "tests.rank", engine, str(tmp_path), str(seed)], seconds=240)
    for name, problem in rank.problems(size, seed).items():
        results: list[dict[str, np.ndarray]] = []
        for number in range(size):
            with np.load(tmp_path / f"{name} {number}.npz") as file:
                results.append(dict(file))
        if problem.case.dtype == ml_dtypes.bfloat16:
            rows = ("lse", "dsink")
            results = [
                {what: x if what in rows else x.astype(ml_dtypes.bfloat16) for what, x in result.items()}
                for result in results
            ]
        problem.check(results)


GROUPS = """
import sys
import numpy as np
from benchmarks import ranks
from cupyflash import parallel
from tests.sharded import CASES, Problem, Way

engine, folder = sys.argv[1:]
world = ranks.connect(engine)  # of four, in two groups: the even ranks and the odd ones
if engine == "mpi":
    from mpi4py import MPI
    transport = parallel.MpiTransport(MPI.COMM_WORLD.Split(world.rank % 2))
else:
    from torch import distributed
    groups = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    transport = parallel.TorchTransport(groups[world.rank % 2])
library = ranks.Library(engine)
problem = Problem(CASES["causal"], Way("ring", 2), seed=world.rank % 2)
np.savez(f"{folder}/{world.rank}.npz", **problem.run(transport, library.put, library.get))
ranks.disconnect(engine)
"""


@pytest.mark.parametrize("engine", ["mpi", "gloo"])
def test_groups_of_processes_know_each_their_own(engine: str, tmp_path: Path) -> None:
    if why := ranks.missing(engine, 4):
        pytest.skip(why)
    ranks.launch(engine, 4, ["-c", GROUPS, engine, str(tmp_path)], seconds=120)
    for group in range(2):
        results: list[dict[str, np.ndarray]] = []
        for rank_in_group in range(2):
            with np.load(tmp_path / f"{2 * rank_in_group + group}.npz") as file:
                results.append(dict(file))
        Problem(CASES["causal"], Way("ring", 2), seed=group).check(results)


# When and how often.


class Watched:
    """A thread's transport that notes when its transfers begin and when they are waited for."""

    def __init__(self, transport: Any, log: list[str]) -> None:
        self.rank, self.size, self._transport, self._log = transport.rank, transport.size, transport, log

    def exchange(self, sends: Any, receives: Any) -> Any:
        transfer = self._transport.exchange(sends, receives)
        if not (sends or receives):
            return transfer
        number = sum(entry.startswith("begin") for entry in self._log)
        self._log.append(f"begin {number}")
        log = self._log

        class Waited:
            def wait(self) -> None:
                log.append(f"wait {number}")
                transfer.wait()

        return Waited()


def logs(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, list[str]]]:
    """What each rank does, in order, in its forward and in its backward."""
    by_thread: dict[int, list[str]] = {}

    def noted(patch: pytest.MonkeyPatch, name: str, entry: str, of: Any = cf.Attention) -> None:
        usual = getattr(of, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            by_thread[threading.get_ident()].append(entry)
            return usual(*args, **kwargs)

        patch.setattr(of, name, call)

    def work(transport: Any) -> dict[str, list[str]]:
        log = by_thread[threading.get_ident()] = []
        problem.run(Watched(transport, log), lambda x: x, lambda x: x)
        split = log.index("delta")
        return {"forward": log[:split], "backward": log[split:]}

    with monkeypatch.context() as patch:  # undone before the next ranks, whose threads have other numbers
        noted(patch, "fwd", "compute")
        noted(patch, "bwd", "compute")
        noted(patch, "attn_bwd_preprocess", "delta", _problem)
        return threads.run(problem.way.size, work)


FULL = Case(len_q=24, len_k=24)


def test_a_ring_computes_while_the_next_keys_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    for log in logs(Problem(FULL, Way("ring", 3), 0), monkeypatch):
        assert log["forward"] == ["begin 0", "compute", "wait 0", "begin 1", "compute", "wait 1", "compute"]
        assert log["backward"] == [
            "delta",
            *("begin 2", "compute", "wait 2"),  # the next keys
            *("begin 3", "compute", "wait 3"),  # the next keys, and the sums of the step before
            *("begin 4", "compute", "wait 4"),  # the sums of the step before
            *("begin 5", "wait 5"),  # home
        ]


def test_a_gather_computes_while_all_keys_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    for log in logs(Problem(FULL, Way("gather", 3), 0), monkeypatch):
        assert log["forward"] == ["begin 0", "begin 1", "compute", "wait 0", "compute", "wait 1", "compute"]
        assert log["backward"][:5] == ["delta", "begin 2", "begin 3", "compute", "wait 2"]
        assert log["backward"][5:] == [
            *("compute", "begin 4", "wait 3", "compute", "begin 5", "wait 4", "wait 5")  # home, each once computed
        ]


def test_nothing_is_computed_for_keys_that_no_query_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    causal = Case(len_q=24, len_k=24, options={"causal": True})
    found = logs(Problem(causal, Way("ring", 4), 0), monkeypatch)
    assert [log["forward"].count("compute") for log in found] == [1, 2, 3, 4]
    balanced = logs(Problem(causal, Way("ring", 4, zigzag=True), 0), monkeypatch)
    # Of its own keys a rank computes three of four pairs of pieces, two halves among them; of others' two.
    assert [log["forward"].count("compute") for log in balanced] == [3 + 2 * 3] * 4
    assert [log["backward"].count("compute") for log in balanced] == [3 + 2 * 3] * 4


def test_nothing_is_sent_that_no_query_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Case(len_q=32, len_k=32, options={"causal": True, "window": (5, 0)})  # a shard of 8 sees one more
    ring = logs(Problem(narrow, Way("ring", 4), 0), monkeypatch)
    assert [sum("begin" in entry for entry in log["forward"]) for log in ring] == [1] * 4
    gather = logs(Problem(narrow, Way("gather", 4), 0), monkeypatch)
    # Distance 1 alone, in which rank 0 sends and does not receive, and rank 3 receives and does not send.
    assert [sum("begin" in entry for entry in log["forward"]) for log in gather] == [1] * 4


def test_zigzag_gives_every_rank_the_same_causal_work() -> None:
    length, size = 96, 4
    seen = np.tril(np.ones((length, length), int)).sum(axis=1)
    shares = [shard(seen, Shards(length, size, zigzag=True), rank, axis=0).sum() for rank in range(size)]
    assert len(set(shares)) == 1
    plain = [shard(seen, Shards(length, size), rank, axis=0).sum() for rank in range(size)]
    assert max(plain) > 6 * min(plain)


def test_partial_results_and_gradients_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fwd, bwd = cf.Attention.fwd, cf.Attention.bwd

    def forward(self: Any, *arrays: Any, **options: Any) -> Any:
        result = fwd(self, *arrays, **options)
        seen.append(result.out.dtype.name)
        return result

    def backward(self: Any, *arrays: Any, **options: Any) -> Any:
        result = bwd(self, *arrays, **options)
        seen.extend(grad.dtype.name for grad in result)
        return result

    monkeypatch.setattr(cf.Attention, "fwd", forward)
    monkeypatch.setattr(cf.Attention, "bwd", backward)
    for scheme in ("ring", "gather"):
        seen.clear()
        [result, _] = run(Problem(CASES["bfloat16"], Way(scheme, 2), 0), NumpyBackend())
        assert set(seen) == {"float32"}
        assert {result[name].dtype.name for name in ("out", "dq", "dk", "dv")} == {"bfloat16"}
        assert {result[name].dtype.name for name in ("lse", "dsink")} == {"float32"}


@pytest.mark.parametrize("memory", ["gaps", "reversed"])
@pytest.mark.parametrize("way", [Way("ring", 3), Way("gather", 3), Way("ulysses", 2)], ids=str)
def test_arrays_of_any_strides_are_taken(way: Way, memory: str, rng: np.random.Generator) -> None:
    problem = Problem(CASES["causal"], way, int(rng.integers(2**32)))

    def put(value: Any) -> Any:
        return NumpyBackend().put(value, memory)

    problem.check(threads.run(way.size, lambda transport: problem.run(transport, put, lambda x: x)))


class Alone:
    rank, size = 0, 1

    def exchange(self, sends: Any, receives: Any) -> Any:
        assert not sends and not receives
        return self

    def wait(self) -> None: ...


@pytest.mark.parametrize("scheme", ["ring", "gather", "ulysses"])
def test_a_group_of_one_is_an_ordinary_call(scheme: str, rng: np.random.Generator) -> None:
    problem = Problem(CASES["everything, heads before rows"], Way(scheme, 1), int(rng.integers(2**32)))
    problem.check([problem.run(Alone(), lambda x: x, lambda x: x)])


# What is refused.


X = np.ones((1, 6, 2, 8), np.float32)
GROUP: dict[str, Any] = {"transport": Alone(), "shards": Shards(6, 1), "attention": cf.Attention()}


class Two(Alone):
    size = 2


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = {
    "no options": (parallel.ring_fwd, {"attention": {"causal": True}}, TypeError, "`attention` is {'causal': True}"),
    "no shards": (parallel.gather_fwd, {"shards": 6}, TypeError, "`shards` is 6; a cupyflash.parallel.Shards"),
    "shards for another group": (
        parallel.ring_fwd,
        {"shards": Shards(6, 2)},
        ValueError,
        "`shards` is for 2 ranks",
    ),
    "keys for another group": (parallel.ring_fwd, {"shards_k": Shards(6, 3)}, ValueError, "`shards_k` is for 3 ranks"),
    "packed shards, dense arrays": (parallel.ring_fwd, {"shards": Shards([6], 1)}, ValueError, "'bshd'.*'thd'"),
    "another length": (parallel.ring_fwd, {"shards": Shards(7, 1)}, ValueError, "`q` has 6 positions.*holds 7"),
    "another length of keys": (parallel.gather_fwd, {"shards_k": Shards(5, 1)}, ValueError, "`k` has 6 .*holds 5"),
    "heads that do not divide": (parallel.ring_fwd, {"q": X[:, :, :1]}, ValueError, "ring_fwd: `k` has 2 heads"),
    "another dtype": (parallel.ring_fwd, {"v": X.astype(np.float64)}, TypeError, "ring_fwd: `v` is float64"),
    "dropout without a seed": (
        parallel.ring_fwd,
        {"attention": cf.Attention(dropout_p=0.5)},
        ValueError,
        "ring_fwd: `seed` is None",
    ),
    "dropout over heads": (
        parallel.ulysses_fwd,
        {"attention": cf.Attention(dropout_p=0.5)},
        UnsupportedError,
        "ulysses_fwd: `attention` has dropout_p = 0.5.*The ring and the gather take dropout",
    ),
    "fewer heads than ranks": (
        parallel.ulysses_fwd,
        {"q": X[:, :3, :1], "k": X[:, :3, :1], "v": X[:, :3, :1], "transport": Two(), "shards": Shards(6, 2)},
        UnsupportedError,
        "`q` has 1 heads; at least one for each of 2 ranks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_call_says_what_is_wrong_before_anything_is_sent(name: str) -> None:
    function, change, error, message = REFUSED[name]
    arguments = {"q": X, "k": X, "v": X} | GROUP | change
    with pytest.raises(error, match=message):
        function(**arguments)


def test_a_wrong_backward_says_what_is_wrong() -> None:
    out, lse = parallel.ring_fwd(X, X, X, **GROUP)
    with pytest.raises(ValueError, match="ring_bwd: `lse` has 5 in axis 2"):
        parallel.ring_bwd(X, X, X, out, lse[..., :5], X, **GROUP)
    with pytest.raises(TypeError, match="ring_bwd: `dout` is None"):
        parallel.ring_bwd(X, X, X, out, lse, None, **GROUP)


def test_packed_shards_agree_in_number() -> None:
    packed = {"attention": cf.Attention(layout="thd"), "shards": Shards([6], 1), "shards_k": Shards([3, 3], 1)}
    with pytest.raises(ValueError, match="`shards_k` has 2 packed sequences; `shards` has 1"):
        parallel.ring_fwd(X[0], X[0], X[0], **(GROUP | packed))


def test_the_benchmark_runs(tmp_path: Path) -> None:
    if why := ranks.missing("mpi", 2):
        pytest.skip(why)
    path = tmp_path / "found.json"
    parallel_benchmark.main(["--engine", "mpi", "--rows", "64", "--json", str(path)])  # too small to hide anything
    found = json.loads(path.read_text("utf-8"))["rows"]
    assert [(row["scheme"], row["pass"]) for row in found] == [
        (scheme, one) for scheme in ("ring", "gather") for one in ("forward", "backward")
    ]
    assert all(row["alone_ms"] > 0 and row["of_alone"] > 0 for row in found)


def test_a_rank_that_fails_while_messages_travel_ends_the_others_over_mpi() -> None:
    if why := ranks.missing("mpi", 2):
        pytest.skip(why)
    fails = """
import numpy as np
from cupyflash.parallel import MpiTransport
transport = MpiTransport()
peer = 1 - transport.rank
transfer = transport.exchange([], [(peer, np.empty(1000))])
if transport.rank == 1:
    raise RuntimeError("rank 1 has had enough")
transfer.wait()
"""
    with pytest.raises(RuntimeError, match=r"mpi, 2 ranks: a rank ended with 1\n(.*\n)*.*rank 1 has had enough"):
        ranks.launch("mpi", 2, ["-c", fails], seconds=30)


def test_a_rank_that_fails_ends_the_others() -> None:
    fails = "import os, sys, time; sys.exit(3) if os.environ['CUPYFLASH_RANK'] == '1' else time.sleep(60)"
    with pytest.raises(RuntimeError, match="gloo, 2 ranks: a rank ended with 3"):
        ranks.launch("gloo", 2, ["-c", fails], seconds=30)


@pytest.mark.parametrize("engine", ["mpi", "staged"])
def test_ranks_that_mpi_does_not_bring_together_are_an_error(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where mpiexec is of another MPI than mpi4py: then each process is a world of one."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    monkeypatch.setattr(ranks, "MpiTransport", lambda: SimpleNamespace(rank=0, size=1))
    monkeypatch.setenv("CUPYFLASH_RANKS", "2")
    with pytest.raises(RuntimeError, match="a group of 1, not 2: mpiexec"):
        ranks.connect(engine)
