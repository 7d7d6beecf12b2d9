"""A cascade is one call with every sequence's keys written out, and so are its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash import _cascade
from cupyflash.testing import assert_close, check_forward, peer_bwd, reference_bwd, rounding_terms, row_dtype
from tests.backends import Backend, NumpyBackend, gpu_is_there
from tests.cases import DTYPES

Random = np.random.Generator
HEADS_Q, HEADS_KV, WIDTH, WIDTH_V = 4, 2, 24, 16


@dataclass(frozen=True)
class Case:
    """Queries by sequence; by level the groups (None: one each) and how many keys each has."""

    queries: tuple[int, ...]
    levels: tuple[tuple[tuple[int, ...] | None, tuple[int, ...]], ...]
    options: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    unused: int = 0  # keys at the end of each group's that `seqused_k` leaves out


ONE_EACH = (1, 1, 1, 1, 1)
PREFILL = (7, 1, 19, 4, 30)
OWN = (None, (9, 1, 33, 5, 30))
SHARED: Any = (((5,), (70,)), OWN)  # one prefix for all
UNEQUAL: Any = (((3, 2), (41, 67)), OWN)
THREE: Any = (((5,), (37,)), ((2, 1, 2), (13, 50, 1)), OWN)
CAUSAL = {"causal": True}
EVERYTHING: dict[str, Any] = {"causal": True, "window": (40, 0), "softcap": 1.5, "scale": 0.4}

CASES: dict[str, Case] = {
    "decode": Case(ONE_EACH, SHARED, CAUSAL),
    "decode, unequal groups": Case(ONE_EACH, UNEQUAL, CAUSAL),
    "decode, three levels": Case(ONE_EACH, THREE, CAUSAL),
    "decode, everything": Case(ONE_EACH, THREE, EVERYTHING, ("alibi_slopes", "sink", "dlse")),
    "prefill": Case(PREFILL, SHARED, CAUSAL, ("dlse",)),
    "prefill, unequal groups": Case(PREFILL, UNEQUAL, CAUSAL),
    "prefill, three levels": Case(PREFILL, THREE, CAUSAL, ("sink", "dlse")),
    "not causal": Case(PREFILL, THREE),
    "window that ends in the suffix": Case(PREFILL, THREE, {"causal": True, "window": (0, 0)}),
    "window into the prefix": Case(PREFILL, THREE, {"causal": True, "window": (45, 0)}),
    "window without a left edge": Case(PREFILL, THREE, {"window": (None, 3)}),
    "window without a right edge": Case(PREFILL, UNEQUAL, {"window": (20, None)}),
    "alibi": Case(PREFILL, THREE, CAUSAL, ("alibi_slopes",)),
    "alibi by sequence, keys on both sides": Case(PREFILL, UNEQUAL, {}, ("alibi_slopes of rows",)),
    "sink": Case(PREFILL, THREE, {}, ("sink",)),
    "softcap and scale": Case(PREFILL, THREE, {"causal": True, "softcap": 1.5, "scale": -0.4}),
    "everything": Case(PREFILL, THREE, EVERYTHING, ("alibi_slopes of rows", "sink", "dlse")),
    "everything, live keys": Case(PREFILL, THREE, EVERYTHING, ("alibi_slopes", "sink"), unused=3),
    "live keys": Case(PREFILL, UNEQUAL, CAUSAL, unused=2),
    "groups of two": Case(PREFILL[:4], (((2, 2), (41, 67)), (None, (9, 1, 33, 5))), CAUSAL, ("dlse",)),
    "own keys before shared ones": Case(ONE_EACH, (OWN, ((2, 3), (20, 31))), CAUSAL),
    "own keys before own ones": Case(PREFILL, (OWN, OWN), {"causal": True, "window": (35, 0)}),
    "queries that reach back to the first level": Case((5, 8), ((None, (3, 4)), (None, (1, 2))), CAUSAL),
    "empty suffixes": Case(ONE_EACH, (((3, 2), (41, 67)), (None, (0, 1, 0, 0, 5))), CAUSAL),
    "sequences without any key": Case((2, 1, 3), (((2, 1), (0, 4)), (None, (0, 6, 5))), {}, ("dlse",)),
    "sequences that see the sink alone": Case((2, 1), (((2,), (0,)), (None, (0, 6))), CAUSAL, ("sink",)),
    "sequences without queries": Case((0, 3, 0), (((3,), (11,)), (None, (2, 4, 0))), CAUSAL),
    "more queries than keys behind a window": Case((9, 2), (((2,), (4,)), (None, (1, 3))), {"window": (5, 2)}),
    "one level": Case(ONE_EACH, (((4, 1), (53, 20)),), CAUSAL),
    "one level, in turns": Case(ONE_EACH, (((1, 4), (53, 20)),), CAUSAL, ("alibi_slopes",)),
    "a long prefix": Case(ONE_EACH, (((5,), (2600,)), OWN), CAUSAL),
    "long prefixes, three levels": Case(
        ONE_EACH, (((3, 2), (2600, 1900)), ((2, 1, 2), (300, 0, 1)), (None, (0, 1, 0, 0, 5))), CAUSAL, ("sink", "dlse")
    ),
    "a long prefix of many queries": Case((60, 61, 1, 70, 50), (((5,), (2600,)), OWN), {}, ("dlse",)),
    "float32 results": Case(PREFILL, THREE, {"causal": True, "out_dtype": "float32", "grad_dtype": "float32"}),
}  # fmt: skip


class Problem:
    """A case with numbers in it, as a cascade and written out."""

    def __init__(self, case: Case, dtype: str, rng: Random) -> None:
        self.case, self.row = case, row_dtype(DTYPES[dtype])
        self.attention = cf.Attention(layout="thd", **case.options)
        total = sum(case.queries) + 2  # rows that no sequence covers

        def draw(*shape: int, mean: float = 0.0) -> np.ndarray:
            return (rng.standard_normal(shape) + mean).astype(DTYPES[dtype])

        self.q, self.dout = draw(total, HEADS_Q, WIDTH), draw(total, HEADS_Q, WIDTH_V)
        self.cu_q: np.ndarray = np.cumsum([0, *case.queries], dtype=np.int32)
        self.levels: list[cf.CascadeLevel] = []
        self.parts: list[list[slice]] = []  # by level, where each sequence's keys are
        for number, (groups, live) in enumerate(case.levels):
            offsets = np.cumsum([0, *(n + case.unused for n in live)], dtype=np.int32)
            k = draw(offsets[-1], HEADS_KV, WIDTH, mean=number / 3)  # levels of unequal weight
            v = draw(offsets[-1], HEADS_KV, WIDTH_V, mean=number)  # and unequal means
            used = np.array(live, np.int32)
            for part in (slice(begin + n, begin + n + case.unused) for begin, n in zip(offsets, used, strict=False)):
                k[part], v[part] = np.nan, np.inf
            level = cf.CascadeLevel(k, v, groups, offsets, seqused_k=used if case.unused else None)
            self.levels.append(level)
            owners = np.repeat(np.arange(len(live)), groups or 1)
            self.parts.append([slice(offsets[g], offsets[g] + used[g]) for g in owners])
        self.extras: dict[str, Any] = {}
        self.dlse = None
        for name in case.arrays:
            shape = (HEADS_Q, total) if name == "dlse" else (HEADS_Q,)
            shape = (len(case.queries), HEADS_Q) if name.endswith("of rows") else shape
            value = rng.random(shape).astype(self.row)
            if name == "dlse":
                self.dlse = value
            else:
                self.extras[name.partition(" ")[0]] = value

    def flat(self) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """k, v and the options of the one call that it stands for."""
        order = [(level, parts[b]) for b in range(len(self.case.queries)) for level, parts in self._by_level()]
        k, v = (np.concatenate([getattr(level, name)[part] for level, part in order]) for name in "kv")
        options = {"layout": "thd", "cu_seqlens_q": self.cu_q, **self.case.options, **self.extras}
        lengths = [sum(n.stop - n.start for n in keys) for keys in zip(*self.parts, strict=True)]
        return k, v, options | {"cu_seqlens_k": np.cumsum([0, *lengths], dtype=np.int32)}

    def _by_level(self) -> Any:
        return zip(self.levels, self.parts, strict=True)

    def unflat(self, flat: np.ndarray) -> list[np.ndarray]:
        """By level, what was written out for each sequence, added up."""
        sums = [np.zeros((len(level.k), *flat.shape[1:])) for level in self.levels]
        begin = 0
        for b in range(len(self.case.queries)):
            for total, parts in zip(sums, self.parts, strict=True):
                end = begin + parts[b].stop - parts[b].start
                total[parts[b]] += flat[begin:end]
                begin = end
        assert begin == len(flat)
        return sums

    def arguments(self, backend: Backend) -> dict[str, Any]:
        put = {name: backend.put(value) for name, value in self.extras.items()}
        return {"attention": self.attention, "cu_seqlens_q": backend.put(self.cu_q), **put}

    def forward(self, backend: Backend) -> tuple[np.ndarray, np.ndarray]:
        out, lse = cf.attn_cascade(backend.put(self.q), put(backend, self.levels), **self.arguments(backend))
        return backend.get(out), backend.get(lse)

    def backward(self, backend: Backend, out: np.ndarray, lse: np.ndarray) -> dict[str, np.ndarray]:
        """By name; of dk and dv those of all levels, one after the other."""
        grads = cf.attn_cascade_bwd(
            backend.put(self.q),
            put(backend, self.levels),
            *map(backend.put, (out, lse, self.dout)),
            dlse=backend.put(self.dlse),
            **self.arguments(backend),
        )
        found = {"dq": grads.dq, "dk": backend.xp.concatenate(grads.dks), "dv": backend.xp.concatenate(grads.dvs)}
        assert (grads.dsink is None) == ("sink" not in self.extras)
        if grads.dsink is not None:
            found["dsink"] = grads.dsink
        return {name: backend.get(grad) for name, grad in found.items()}


def put(backend: Backend, levels: list[cf.CascadeLevel]) -> list[cf.CascadeLevel]:
    return [cf.CascadeLevel(**{name: backend.put(value) for name, value in vars(level).items()}) for level in levels]


def check(problem: Problem, backend: Backend, name: str) -> None:
    out, lse = problem.forward(backend)
    k, v, options = problem.flat()
    check_forward(out, lse, problem.q, k, v, name=name, **options)

    grads = problem.backward(backend, out, lse)
    given = {"out": out, "lse": lse, "dlse": problem.dlse, **options}
    call = problem.q, k, v, problem.dout
    expected, plain = reference_bwd(*call, **given), peer_bwd(*call, **given)
    terms = rounding_terms(*call, **given)
    assert grads.keys() == expected.keys()
    most = max(max(groups or (1,)) for groups, _ in problem.case.levels)
    for what, actual in grads.items():
        dtype = problem.row if what == "dsink" else options.get("grad_dtype") or problem.q.dtype
        right, near, added = expected[what], plain[what], terms[what]
        if what in ("dk", "dv"):
            right, near = (np.concatenate(problem.unflat(np.asarray(x, np.float64))) for x in (right, near))
            added *= most  # as many sequences add to a key
        assert_close(actual, right, near, dtype=dtype, terms=added, sums=problem.row, name=f"{name} {what}")


@pytest.mark.parametrize("name", ["decode", "groups of two"])
def test_groups_of_one_size_take_nothing_from_the_host(
    backend: Backend, name: str, rng: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a CUDA graph may hold the call."""
    problem = Problem(CASES[name], "float32", rng)

    def taken(self: Any, values: np.ndarray) -> Any:
        raise AssertionError(f"{values} came from the host")

    monkeypatch.setattr(_cascade._Cascade, "int32", taken)
    out, lse = problem.forward(backend)
    k, v, options = problem.flat()
    check_forward(out, lse, problem.q, k, v, name=name, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["decode", "a long prefix"])
def test_a_cuda_graph_holds_a_cascade(name: str, rng: Random) -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    if not (gpu_is_there() and torch.cuda.is_available()):
        pytest.skip("no CUDA GPU, or a torch without CUDA")

    def on_gpu(value: Any) -> Any:
        return torch.from_numpy(value).cuda() if isinstance(value, np.ndarray) else value

    problem = Problem(CASES[name], "float16", rng)
    levels = [cf.CascadeLevel(**{name: on_gpu(x) for name, x in vars(level).items()}) for level in problem.levels]
    q, offsets = on_gpu(problem.q), on_gpu(problem.cu_q)
    want = cf.attn_cascade(q, levels, attention=problem.attention, cu_seqlens_q=offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cf.attn_cascade(q, levels, attention=problem.attention, cu_seqlens_q=offsets)
    graph.replay()
    torch.testing.assert_close(tuple(found), tuple(want), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["decode", "a long prefix"])
@pytest.mark.parametrize("level", [0, 1])
def test_a_nan_among_keys_is_one_in_the_rows_that_see_it(backend: Backend, name: str, level: int, rng: Random) -> None:
    problem = Problem(CASES[name], "float32", rng)
    problem.levels[level].k[0] = np.nan  # the first key of the first group
    out, lse = problem.forward(backend)
    sharing = 5 if level == 0 else 1
    saw = np.arange(out.shape[0]) < sharing
    np.testing.assert_array_equal(np.isnan(out).all(axis=(1, 2)), saw)
    np.testing.assert_array_equal(np.isnan(lse).all(axis=0), saw)


@pytest.mark.parametrize("name", CASES)
def test_a_cascade_is_the_one_call_that_it_stands_for(backend: Backend, name: str, rng: Random) -> None:
    check(Problem(CASES[name], "float32", rng), backend, name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "name",
    [
        "decode, three levels", "prefill, three levels", "everything, live keys", "a long prefix",
        "long prefixes, three levels", "a long prefix of many queries",
    ],
)  # fmt: skip
def test_a_cascade_of_other_dtypes(backend: Backend, name: str, dtype: str, rng: Random) -> None:
    check(Problem(CASES[name], dtype, rng), backend, name)


@pytest.mark.parametrize("name", ["decode, three levels", "prefill, three levels", "everything", "empty suffixes"])
def test_pages_are_the_keys_they_hold(backend: Backend, name: str, rng: Random) -> None:
    problem = Problem(CASES[name], "float32", rng)
    k, v, options = problem.flat()
    problem.levels = [paged(level, 8, rng) for level in problem.levels]
    try:
        out, lse = problem.forward(backend)
    except cf.UnsupportedError:
        assert backend.name != "numpy"
        pytest.skip("pages are not on this GPU's kernels")
    check_forward(out, lse, problem.q, k, v, name=name, **options)


def paged(level: cf.CascadeLevel, page_size: int, rng: Random) -> cf.CascadeLevel:
    """The same keys in pages, somewhere."""
    used = np.diff(level.cu_seqlens_k)
    needed = -(-used // page_size)
    pages = rng.permutation(needed.sum() + 2)[: needed.sum()]
    table = np.full((len(used), max(1, needed.max())), -7, np.int32)  # dead entries are not followed
    pools = [np.full((needed.sum() + 2, page_size, *x.shape[1:]), np.nan, x.dtype) for x in (level.k, level.v)]
    own = iter(pages)
    for g, begin in enumerate(level.cu_seqlens_k[:-1]):
        for j in range(used[g]):
            if j % page_size == 0:
                table[g, j // page_size] = next(own)
            for pool, keys in zip(pools, (level.k, level.v), strict=True):
                pool[table[g, j // page_size], j % page_size] = keys[begin + j]
    return cf.CascadeLevel(*pools, level.groups, seqused_k=used, block_table=table)


def test_shared_keys_are_read_by_one_call_for_all(monkeypatch: pytest.MonkeyPatch, rng: Random) -> None:
    """By the batches of the calls: two groups, then five sequences; in turns always five."""
    seen: list[int] = []
    run = cf.Attention.fwd

    def counted(self: cf.Attention, *arrays: Any, **arguments: Any) -> Any:
        seen.append(len(arguments["cu_seqlens_q"]) - 1)
        return run(self, *arrays, **arguments)

    monkeypatch.setattr(cf.Attention, "fwd", counted)
    Problem(CASES["prefill, unequal groups"], "float32", rng).forward(NumpyBackend())
    assert seen == [2, 5]
    seen.clear()
    Problem(CASES["window without a right edge"], "float32", rng).forward(NumpyBackend())
    assert seen == [5, 5, 5, 5]  # the larger group has three turns


def test_hints_of_length_change_nothing(backend: Backend, rng: Random) -> None:
    problem = Problem(CASES["prefill, three levels"], "float32", rng)
    plain = problem.forward(backend)
    problem.levels = [cf.CascadeLevel(**vars(level) | {"max_seqlen_k": 1}) for level in problem.levels]
    q, levels = backend.put(problem.q), put(backend, problem.levels)
    hinted = cf.attn_cascade(q, levels, max_seqlen_q=2, **problem.arguments(backend))
    for left, right in zip(plain, map(backend.get, hinted), strict=True):
        assert left.tobytes() == right.tobytes()


def test_out_is_rounded_once(backend: Backend, rng: Random) -> None:
    problem = Problem(CASES["prefill, three levels"], "bfloat16", rng)
    rounded, _ = problem.forward(backend)
    problem.attention = problem.attention.replace(out_dtype="float32")
    exact, _ = problem.forward(backend)
    assert rounded.tobytes() == exact.astype(rounded.dtype).tobytes()


def test_torch_tensors_are_taken(rng: Random) -> None:
    torch = pytest.importorskip("torch")
    problem = Problem(CASES["everything"], "float32", rng)
    problem.cu_q = problem.cu_q.astype(np.int64)  # torch's usual integers
    problem.levels = [
        cf.CascadeLevel(**vars(level) | {"cu_seqlens_k": level.cu_seqlens_k.astype(np.int64)})
        for level in problem.levels
    ]

    class OnTorch(Backend):
        name, xp = "torch", torch

        def put(self, value: Any, memory: str = "contiguous") -> Any:
            return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

        def get(self, array: Any) -> np.ndarray:
            assert type(array) is torch.Tensor
            return array.numpy()

    check(problem, OnTorch(), "torch")


# ------------------------------------------------------------------------------------------------ refusals


def right(rng: Random) -> dict[str, Any]:
    """Arguments of a call that is right: five sequences in two groups, and their own keys."""
    problem = Problem(CASES["prefill, unequal groups"], "float32", rng)
    return {"q": problem.q, "levels": problem.levels, **problem.arguments(NumpyBackend())}


def changed(level: int, **fields: Any) -> Any:
    """What makes a call of a right one whose level has other fields."""

    def change(call: dict[str, Any]) -> None:
        call["levels"][level] = cf.CascadeLevel(**vars(call["levels"][level]) | fields)

    return change


def option(**options: Any) -> Any:
    return lambda call: call.update(attention=call["attention"].replace(**options))


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "no attention": (lambda call: call.update(attention=None), TypeError, r"`attention` is None"),
    "dense": (option(layout="bshd"), ValueError, r"`attention` has layout 'bshd'; 'thd' .*reshape"),
    "dropout": (option(dropout_p=0.1), cf.UnsupportedError, r"`attention` has dropout_p = 0.1; 0 "),
    "top left": (option(causal="top-left"), cf.UnsupportedError, r"`attention` has causal = 'top-left'; "),
    "no levels": (lambda call: call.update(levels=[]), ValueError, r"`levels` is empty"),
    "bare levels": (
        lambda call: call.update(levels=call["q"]),
        TypeError,
        r"`levels` is a ndarray; a list of CascadeLevel",
    ),
    "no level": (
        lambda call: call.update(levels=[call["q"]]),
        TypeError,
        r"`levels\[0\]` is a ndarray; a CascadeLevel",
    ),
    "no offsets": (lambda call: call.update(cu_seqlens_q=None), TypeError, r"`cu_seqlens_q` is None"),
    "flat offsets": (
        lambda call: call.update(cu_seqlens_q=np.zeros((1, 2), np.int32)),
        ValueError,
        r"`cu_seqlens_q`.*\[1, 2\]",
    ),
    "no keys": (changed(1, k=None), TypeError, r"`levels\[1\].k` is None"),
    "groups of too few": (changed(0, groups=(2, 2)), ValueError, r"`levels\[0\].groups` is \(2, 2\); .*5 sequences"),
    "an empty group": (changed(0, groups=(5, 0)), ValueError, r"`levels\[0\].groups` is \(5, 0\); ints of at least 1"),
    "a number of groups": (changed(0, groups=5), ValueError, r"`levels\[0\].groups` is 5; ints of at least 1"),
    "groups of halves": (changed(0, groups=(2.5, 2.5)), ValueError, r"`levels\[0\].groups` is \(2.5, 2.5\)"),
    "offsets of other groups": (
        changed(0, groups=(5,)),
        ValueError,
        r"`levels\[0\].cu_seqlens_k` has shape \[3\]; 2 entries",
    ),
    "no offsets of keys": (changed(1, cu_seqlens_k=None), ValueError, r"`levels\[1\].cu_seqlens_k` is None"),
    "too few lengths": (
        changed(0, seqused_k=np.ones(1, np.int32)),
        ValueError,
        r"`levels\[0\].seqused_k` has shape \[1\]; 2 ",
    ),
    "a table without lengths": (
        changed(0, block_table=np.zeros((2, 1), np.int32)),
        ValueError,
        r"`levels\[0\].seqused_k` is None",
    ),
    "another width": (
        lambda call: changed(1, k=call["levels"][1].k[..., :3])(call),
        ValueError,
        r"levels\[1\]: `k`.*24",
    ),
    "offsets that fall": (
        changed(1, cu_seqlens_k=np.array([0, 9, 3, 40, 50, 60])),
        ValueError,
        r"levels\[1\]: `cu_seqlens_k` falls",
    ),
    "a query before a shared key": (
        lambda call: call.update(levels=call["levels"][:1]),
        ValueError,
        r"`levels\[0\].k` are shared, and sequence 0 has 0 keys behind them for 7 queries; .*at least 6",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused_by_name_before_anything_is_computed(
    name: str, monkeypatch: pytest.MonkeyPatch, rng: Random
) -> None:
    change, error, message = WRONG[name]
    call = right(rng)
    out, lse = cf.attn_cascade(**call)
    for method in ("fwd", "bwd"):
        monkeypatch.setattr(cf.Attention, method, lambda *_, **__: pytest.fail("computed"))
    change(call)
    with pytest.raises(error, match=f"^attn_cascade: {message}"):
        cf.attn_cascade(**call)
    q, levels = call.pop("q"), call.pop("levels")
    message = "" if name == "a table without lengths" else message  # the table itself comes first there
    with pytest.raises(error, match=f"^attn_cascade_bwd: {message}"):
        cf.attn_cascade_bwd(q, levels, out, lse, np.ones_like(out), **call)


def test_check_finds_a_query_before_a_shared_key(backend: Backend, rng: Random) -> None:
    problem = Problem(CASES["live keys"], "float32", rng)
    q, levels = backend.put(problem.q), put(backend, problem.levels)
    cf.attn_cascade(q, levels, check=True, **problem.arguments(backend))
    levels[1] = cf.CascadeLevel(**vars(levels[1]) | {"seqused_k": backend.put(np.array([6, 0, 17, 3, 28], np.int32))})
    message = r"`levels\[0\].k` are shared, and sequence 2 has 17 keys behind them for 19 queries; .*at least 18"
    with pytest.raises(ValueError, match=message):
        cf.attn_cascade(q, levels, check=True, **problem.arguments(backend))


def test_a_backward_refuses_pages_and_a_wrong_dlse(rng: Random) -> None:
    call = right(rng)
    out, lse = cf.attn_cascade(**call)
    q, levels = call.pop("q"), call.pop("levels")
    with pytest.raises(ValueError, match=r"attn_cascade_bwd: levels\[0\]: `dlse`"):
        cf.attn_cascade_bwd(q, levels, out, lse, out, dlse=lse[:, 1:], **call)
    with pytest.raises(TypeError, match=r"attn_cascade_bwd: `dout` is None"):
        cf.attn_cascade_bwd(q, levels, out, lse, None, **call)
    with pytest.raises(ValueError, match=r"attn_cascade_bwd: `levels\[0\].block_table` is given; None"):
        cf.attn_cascade_bwd(q, [paged(levels[0], 4, rng), levels[1]], out, lse, out, **call)
