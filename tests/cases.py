"""One table of attention problems, each with the reason why it is there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import check_backward, check_forward
from tests.backends import Backend

HALF = ("float16", "bfloat16")
USUAL = ("float32", "bfloat16")
DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}

# What a GPU kernel may still refuse, naming the NumPy backend; see docs/support.md.


@dataclass(frozen=True)
class Case:
    """Shapes, options, and which arrays a problem has. `lens_q` and `lens_k` pack it; `slack` rows follow them."""

    name: str
    why: str
    batch: int = 2
    len_q: int = 65
    len_k: int = 65
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int | None = None
    dtypes: tuple[str, ...] = USUAL
    options: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()  # names in `_MAKERS`
    lens_q: tuple[int, ...] | None = None
    lens_k: tuple[int, ...] | None = None
    slack: int = 0
    memory: str = "contiguous"
    magnitude: float = 1.0  # of q
    backward: bool = True

    @property
    def layout(self) -> str:
        return "thd" if self.lens_q is not None else self.options.get("layout", "bshd")


@dataclass
class Problem:
    """A case in numbers, as NumPy arrays."""

    case: Case
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    options: dict[str, Any]
    backward_options: dict[str, Any]  # dlse, grad_dtype: what only the gradients see


def _sink(rng: np.random.Generator, case: Case, row: np.dtype) -> np.ndarray:
    return (rng.standard_normal(case.heads_q) + 1).astype(row)


def _some_sinks(rng: np.random.Generator, case: Case, row: np.dtype) -> np.ndarray:
    sink = _sink(rng, case, row)
    sink[::2] = -np.inf
    return sink


def _bias(*axes: bool, masks: bool = False) -> Any:
    def make(rng: np.random.Generator, case: Case, row: np.dtype) -> np.ndarray:
        full = (case.batch, case.heads_q, case.len_q, case.len_k)
        bias = rng.standard_normal(tuple(n if kept else 1 for n, kept in zip(full[-len(axes) :], axes, strict=True)))
        if masks:
            bias[rng.random(bias.shape) < 0.5] = -np.inf
        return bias.astype(row)

    return make


def _used(rng: np.random.Generator, case: Case, row: np.dtype) -> np.ndarray:
    """Live keys: none in the first row, all in the last."""
    lens = np.array(case.lens_k if case.lens_k is not None else [case.len_k] * case.batch)
    used = rng.integers(0, lens + 1)
    used[:1], used[-1:] = 0, lens[-1:]
    return used.astype(np.int32)


def _starts(rng: np.random.Generator, case: Case, row: np.dtype) -> np.ndarray:
    count = case.batch if case.lens_q is None else len(case.lens_q)
    return rng.integers(-40, 40, count).astype(np.int32)


_MAKERS: dict[str, tuple[str, Any]] = {
    "alibi": ("alibi_slopes", lambda rng, case, row: rng.random(case.heads_q).astype(row)),
    "alibi [B, Hq]": (
        "alibi_slopes",
        lambda rng, case, row: rng.random((len(case.lens_q or range(case.batch)), case.heads_q)).astype(row),
    ),
    "sink": ("sink", _sink),
    "some sinks": ("sink", _some_sinks),
    "seqused_k": ("seqused_k", _used),
    "q_start": ("q_start", _starts),
    "k_start": ("k_start", _starts),
    "bias": ("bias", _bias(True, True, True, True)),
    "bias per key": ("bias", _bias(True, False, False, True, masks=True)),
    "bias per head": ("bias", _bias(True, True, False)),
    "bias [Nq, Nk]": ("bias", _bias(True, True, masks=True)),
}


def make(case: Case, dtype: str, rng: np.random.Generator) -> Problem:
    """Fresh numbers for a case."""
    row = np.dtype("float64" if dtype == "float64" else "float32")
    head_dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v

    def draw(length: int, heads: int, width: int) -> np.ndarray:
        shape = {
            "bshd": (case.batch, length, heads, width),
            "bhsd": (case.batch, heads, length, width),
            "thd": (length, heads, width),
        }[case.layout]
        return rng.standard_normal(shape).astype(DTYPES[dtype])

    len_q, len_k = case.len_q, case.len_k
    options: dict[str, Any] = dict(case.options)
    if case.lens_q is not None and case.lens_k is not None:
        len_q, len_k = sum(case.lens_q) + case.slack, sum(case.lens_k) + case.slack
        options["layout"] = "thd"
        options["cu_seqlens_q"] = np.cumsum([0, *case.lens_q]).astype(np.int32)
        options["cu_seqlens_k"] = np.cumsum([0, *case.lens_k]).astype(np.int64)
    backward_options: dict[str, Any] = {}
    for array in case.arrays:
        if array == "dlse":
            shape = (case.heads_q, len_q) if case.layout == "thd" else (case.batch, case.heads_q, len_q)
            backward_options["dlse"] = rng.standard_normal(shape).astype(row)
        else:
            name, maker = _MAKERS[array]
            options[name] = maker(rng, case, row)
    q, k = draw(len_q, case.heads_q, case.head_dim), draw(len_k, case.heads_kv, case.head_dim)
    v, dout = draw(len_k, case.heads_kv, head_dim_v), draw(len_q, case.heads_q, head_dim_v)
    return Problem(case, q * q.dtype.type(case.magnitude), k, v, dout, options, backward_options)


def run_forward(backend: Backend, problem: Problem) -> tuple[Any, Any]:
    """attn_fwd into poisoned outputs."""
    q, k, v = (backend.put(array, problem.case.memory) for array in (problem.q, problem.k, problem.v))
    row = "float64" if problem.q.dtype == np.float64 else "float32"
    out_shape = (*problem.q.shape[:-1], problem.v.shape[-1])
    lse_shape = _rows(problem)
    out = backend.poisoned(out_shape, np.dtype(problem.options.get("out_dtype", problem.q.dtype)))
    lse = backend.poisoned(lse_shape, row)
    options = {name: backend.put(value) for name, value in problem.options.items()}
    result = cf.attn_fwd(q, k, v, out=out, lse=lse, **options)
    assert result.out is out
    assert result.lse is lse
    return result


def run_backward(backend: Backend, problem: Problem, out: Any, lse: Any) -> Any:
    """attn_bwd from the arrays of the forward."""
    q, k, v, dout = (backend.put(x, problem.case.memory) for x in (problem.q, problem.k, problem.v, problem.dout))
    options = problem.options | problem.backward_options
    return cf.attn_bwd(q, k, v, out, lse, dout, **{name: backend.put(value) for name, value in options.items()})


def assert_forward(backend: Backend, problem: Problem) -> tuple[Any, Any]:
    """Run and judge."""
    out, lse = run_forward(backend, problem)
    check_forward(
        backend.get(out), backend.get(lse), problem.q, problem.k, problem.v, name=problem.case.name, **problem.options
    )
    return out, lse


def assert_backward(backend: Backend, problem: Problem, out: Any, lse: Any) -> None:
    grads = run_backward(backend, problem, out, lse)
    check_backward(
        tuple(backend.get(grad) for grad in grads),
        problem.q,
        problem.k,
        problem.v,
        problem.dout,
        out=backend.get(out),
        lse=backend.get(lse),
        name=problem.case.name,
        **problem.options,
        **problem.backward_options,
    )


def _rows(problem: Problem) -> tuple[int, ...]:
    """Shape of lse."""
    if problem.case.layout == "bshd":
        batch, length, heads, _ = problem.q.shape
        return batch, heads, length
    if problem.case.layout == "thd":
        return problem.q.shape[1], problem.q.shape[0]
    return problem.q.shape[:3]


# ------------------------------------------------------------------------------------------------ the table

CAUSAL: dict[str, Any] = {"causal": True}

CASES = [
    Case("plain", "the least there is", dtypes=("float16", "bfloat16", "float32", "float64")),
    Case("one by one", "one query, one key: dq and dk are zero by cancellation", len_q=1, len_k=1),
    Case("one key", "P = 1 in every row", len_q=63, len_k=1),
    Case("one query", "decoding; the causal mask hides nothing", len_q=1, len_k=129, options=CAUSAL),
    Case("tile less one", "the last row and column of a tile are padding", len_q=63, len_k=127, options=CAUSAL),
    Case("tile plus one", "a tile of one row, and of one column", len_q=129, len_k=65, options=CAUSAL),
    Case(
        "primes", "nothing divides anything", batch=3, len_q=37, len_k=101, head_dim=19, head_dim_v=23, options=CAUSAL
    ),
    Case(
        "many tiles", "several key tiles, the diagonal off their corners", batch=1, len_q=257, len_k=389, options=CAUSAL
    ),
    Case("MHA", "each head its own keys", heads_kv=4),
    Case("MQA", "one KV head for all: dk and dv sum over eight", heads_q=8, heads_kv=1, options=CAUSAL),
    Case("group of three", "a group that is no power of two", heads_q=6, heads_kv=2, options=CAUSAL),
    *(
        Case(f"D {d}", "a head_dim inside, at and beyond a tile's", batch=1, head_dim=d, dtypes=("float16", "float32"))
        for d in (1, 7, 40, 64, 72, 80, 96, 128, 192, 256)
    ),
    Case("Dv below D", "extents of v taken from k show in the backward", head_dim=72, head_dim_v=40, options=CAUSAL),
    Case("Dv above D", "and the other way round", head_dim=40, head_dim_v=128, options=CAUSAL),
    Case("D 1, Dv 256", "the extremes together", batch=1, head_dim=1, head_dim_v=256),
    Case("Nq above Nk", "rows before the corner see nothing: 0, -inf, gradient 0", len_q=131, len_k=70, options=CAUSAL),
    Case("top-left", "the other corner", len_q=40, len_k=77, options={"causal": "top-left"}),
    Case("top-left, Nq above Nk", "every row sees something", len_q=131, len_k=70, options={"causal": "top-left"}),
    Case("no keys", "lse -inf everywhere, empty dk", len_k=0, options=CAUSAL),
    Case("no queries", "nothing to write", len_q=0),
    Case("no batch", "nothing at all", batch=0),
    Case("window", "both sides bounded", len_q=130, len_k=130, options={"window": (9, 4)}),
    Case("window left", "-1 is unbounded too", options={"window": (7, -1)}),
    Case("window right", "None is unbounded", options={"window": (None, 3)}),
    Case("window of one", "(0, 0) is the diagonal, neither nothing nor everything", options={"window": (0, 0)}),
    Case(
        "window and causal", "the stricter bound on the right", len_k=130, options={"window": (30, 5), "causal": True}
    ),
    Case(
        "window past the keys",
        "whole tiles and whole rows see nothing",
        len_q=200,
        len_k=70,
        options={"window": (20, 2)},
    ),
    Case("softcap", "tanh, and its derivative", options={"softcap": 0.8}),
    Case("softcap, causal", "-inf must not become -cap", options={"softcap": 2.0, "causal": True}),
    Case("alibi", "distance from the position, not from the row", len_k=130, options=CAUSAL, arrays=("alibi",)),
    Case("alibi without causal", "the absolute value counts beyond the diagonal", arrays=("alibi [B, Hq]",)),
    Case("sink", "in the maximum, in the sum, and in dsink", arrays=("sink",)),
    Case(
        "sink, rows without keys",
        "lse is the sink, dlse goes to dsink",
        len_q=90,
        len_k=40,
        options=CAUSAL,
        arrays=("sink", "dlse"),
    ),
    Case(
        "some sinks -inf",
        "-inf is no sink, and has no gradient",
        len_q=90,
        len_k=40,
        options=CAUSAL,
        arrays=("some sinks", "dlse"),
    ),
    Case("sink without keys", "nothing but the sink", len_k=0, arrays=("sink", "dlse")),
    Case("dlse", "lse is an output like another", options=CAUSAL, arrays=("dlse",)),
    Case("positive scale", "not 1/sqrt(D)", options={"scale": 0.7}),
    Case("negative scale", "the maximum becomes the minimum", options={"scale": -0.3, **CAUSAL}),
    Case("zero scale", "uniform weights, dq and dk zero", options={"scale": 0.0, **CAUSAL}),
    Case("large scores", "P is one-hot, nothing overflows", options={"scale": 1.0}, magnitude=20.0),
    Case(
        "bhsd",
        "the other dense layout",
        len_q=40,
        len_k=70,
        head_dim_v=24,
        options={"layout": "bhsd", **CAUSAL},
        arrays=("dlse",),
    ),
    Case("gaps", "k, v and q are slices with NaN between them", options=CAUSAL, memory="gaps"),
    Case("every second", "odd strides with NaN between rows", options=CAUSAL, memory="every second"),
    Case("reversed", "negative strides", options=CAUSAL, memory="reversed"),
    Case("transposed", "no unit stride: copied once", options=CAUSAL, memory="transposed"),
    Case("float32 out", "partial states in full", dtypes=HALF, options={"out_dtype": "float32"}),
    Case(
        "float64 gradients",
        "wider than their sums, which are float32's; dq and dbias are zero by cancellation",
        len_q=15,
        options={"grad_dtype": "float64", "window": (0, 0)},
        arrays=("bias per key",),
    ),
    Case("float32 gradients", "to be accumulated elsewhere", dtypes=HALF, options={"grad_dtype": "float32", **CAUSAL}),
    Case(
        "seqused_k",
        "the corner moves with the live keys; one row has none",
        batch=3,
        options=CAUSAL,
        arrays=("seqused_k",),
    ),
    Case("positions", "a shard stands where it says", batch=3, options=CAUSAL, arrays=("q_start", "k_start", "alibi")),
    Case(
        "positions as ints", "one for all", options={"causal": True, "window": (20, 0), "q_start": 1000, "k_start": 970}
    ),
    Case("large positions", "beyond 2**31", options={"causal": True, "q_start": 2**33 + 10, "k_start": 2**33}),
    Case(
        "packed",
        "sequences of every size, empty ones too",
        lens_q=(0, 65, 1, 33, 0),
        lens_k=(7, 65, 80, 0, 0),
        options=CAUSAL,
    ),
    Case(
        "packed with slack",
        "rows that no sequence covers",
        lens_q=(5, 70),
        lens_k=(9, 40),
        slack=11,
        arrays=("sink", "dlse"),
    ),
    Case(
        "packed, many", "more sequences than tokens", lens_q=(0, 1, 0, 0, 2, 0, 0, 0), lens_k=(0, 2, 0, 1, 1, 0, 0, 0)
    ),
    Case(
        "packed, everything",
        "window, softcap, alibi per sequence, GQA",
        lens_q=(130, 3, 65),
        lens_k=(100, 70, 65),
        options={"window": (50, 3), "softcap": 3.0},
        arrays=("alibi [B, Hq]", "seqused_k"),
    ),
    Case(
        "packed positions",
        "each sequence its own",
        lens_q=(20, 30),
        lens_k=(40, 10),
        options=CAUSAL,
        arrays=("q_start", "k_start"),
    ),
    Case(
        "float64",
        "exact",
        dtypes=("float64",),
        len_k=130,
        options={"softcap": 1.0, **CAUSAL},
        arrays=("sink", "alibi", "dlse"),
    ),
    Case("bias", "and its gradient, full size", arrays=("bias",)),
    Case(
        "bias masks keys", "a padding mask; dbias sums over heads and queries", options=CAUSAL, arrays=("bias per key",)
    ),
    Case("bias per head", "fewer axes than the scores", len_k=40, arrays=("bias per head",)),
    Case(
        "bias shared",
        "one matrix for all heads, with -inf",
        len_k=40,
        options={"softcap": 2.0},
        arrays=("bias [Nq, Nk]",),
    ),
    Case(
        "dropout",
        "the mask is the contract's, forward and backward",
        options={"dropout_p": 0.3, "seed": 2**63 + 11, "offset": 7},
    ),
    Case(
        "dropout, packed",
        "b is the sequence's number",
        lens_q=(20, 33),
        lens_k=(40, 19),
        options={"dropout_p": 0.5, "seed": 5, **CAUSAL},
    ),
    Case(
        "dropout of nine tenths",
        "one query whose few kept weights are far below the largest: in 16 bits they round before they are scaled",
        batch=4,
        len_q=1,
        len_k=48,
        options={"dropout_p": 0.9, "seed": 1, "scale": 1.0},
    ),
    Case(
        "dropout, everything",
        "with all that changes a score",
        options={"dropout_p": 0.2, "seed": 3, "softcap": 2.0, **CAUSAL},
        arrays=("alibi", "sink", "bias", "dlse", "q_start"),
    ),
    Case(
        "splits",
        "more than there are keys: idle ones change nothing",
        len_k=40,
        options={"num_splits": 50, **CAUSAL},
        arrays=("sink",),
    ),
    Case("fixed splits", "keys per split", len_q=3, len_k=257, options={"split_len": 64}),
    Case(
        "splits of one key",
        "as many merges as keys, whose roundings must not add up",
        dtypes=("float32", "float64"),
        len_q=40,
        len_k=400,
        options={"split_len": 1},
    ),
    Case("deterministic", "accepted everywhere it can be kept", options={"deterministic": True, **CAUSAL}),
]


# ------------------------------------------------------------------------------------------------ covers

_FACTORS: dict[str, list[dict[str, Any]]] = {
    "lengths": [{"len_q": 65, "len_k": 63}, {"len_q": 1, "len_k": 129}, {"len_q": 129, "len_k": 65}],
    "heads": [{}, {"heads_kv": 4}, {"heads_kv": 1}],
    "widths": [{}, {"head_dim": 40, "head_dim_v": 24}, {"head_dim": 7, "head_dim_v": 64}],
    "form": [
        {},
        {"options": {"layout": "bhsd"}},
        {"lens_q": (33, 0, 70, 1), "lens_k": (20, 5, 70, 33), "slack": 3, "batch": 4},
    ],
    "mask": [
        {},
        {"options": {"causal": True}},
        {"options": {"causal": "top-left"}},
        {"options": {"window": (17, 3)}},
        {"options": {"causal": True, "window": (9, None)}},
    ],
    "softcap": [{}, {"options": {"softcap": 1.5}}],
    "alibi": [{}, {"arrays": ("alibi",)}, {"arrays": ("alibi [B, Hq]",)}],
    "sink": [{}, {"arrays": ("sink",)}, {"arrays": ("some sinks",)}],
    "scale": [{}, {"options": {"scale": -0.4}}],
    "dlse": [{}, {"arrays": ("dlse",)}],
    "positions": [{}, {"options": {"q_start": 5, "k_start": -3}}, {"arrays": ("q_start",)}],
    "live": [{}, {"arrays": ("seqused_k",)}],
}
_REFUSABLE: dict[str, list[dict[str, Any]]] = {
    "dropout": [{}, {"options": {"dropout_p": 0.25, "seed": 9}}],
    "bias": [{}, {"arrays": ("bias",)}, {"arrays": ("bias per key",)}],
}
# The full product is over what changes a score or a row; lengths, heads and widths stay.
_IN_PRODUCT = ("form", "mask", "softcap", "alibi", "sink", "positions", "live", "dropout", "bias")


def _combined(factors: dict[str, list[dict[str, Any]]], levels: tuple[int, ...], name: str) -> Case:
    case = Case(name, "one of a cover of all pairs of features")
    for choices, level in zip(factors.values(), levels, strict=True):
        change = dict(choices[level])
        change["options"] = case.options | change.get("options", {})
        change["arrays"] = case.arrays + change.get("arrays", ())
        case = replace(case, **change)
    return case


def _is_legal(case: Case) -> bool:
    return case.lens_q is None or not any(array.startswith("bias") for array in case.arrays)


def _pairwise(factors: dict[str, list[dict[str, Any]]], label: str) -> Iterator[Case]:
    """Cases in which every two levels of every two factors meet, greedily few, always the same ones."""
    counts = [len(choices) for choices in factors.values()]
    pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(counts)), 2)
        for x in range(counts[a])
        for y in range(counts[b])
        if _is_legal(_combined(factors, tuple(x if i == a else y if i == b else 0 for i in range(len(counts))), ""))
    }
    draw = np.random.default_rng(0)
    number = 0
    while pairs:
        a, x, b, y = min(pairs)
        candidates = []
        while len(candidates) < 20:
            levels = [int(draw.integers(n)) for n in counts]
            levels[a], levels[b] = x, y
            if _is_legal(_combined(factors, tuple(levels), "")):
                candidates.append(tuple(levels))
        best = max(candidates, key=lambda levels: len(pairs & _pairs_of(levels)))
        pairs -= _pairs_of(best)
        yield _combined(factors, best, f"{label} {number}")
        number += 1


def _pairs_of(levels: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(enumerate(levels), 2)}


PAIRS = [*_pairwise(_FACTORS, "pairs"), *_pairwise(_FACTORS | _REFUSABLE, "pairs of all")]


PRODUCT_PARTS = range(12)  # so that processes can share it


def product(part: int) -> Iterator[Case]:
    """Every legal combination of the features in `_IN_PRODUCT`, of which each part has its share."""
    return itertools.islice(_whole_product(), part, None, len(PRODUCT_PARTS))


def _whole_product() -> Iterator[Case]:
    factors = {name: choices for name, choices in (_FACTORS | _REFUSABLE).items() if name in _IN_PRODUCT}
    for levels in itertools.product(*(range(len(choices)) for choices in factors.values())):
        case = _combined(factors, levels, f"product {'-'.join(map(str, levels))}")
        if _is_legal(case):
            yield replace(case, len_q=33, len_k=29)


def parameters(cases: Iterable[Case]) -> list[Any]:
    """One pytest parameter for each case and dtype."""
    return [pytest.param(case, dtype, id=f"{case.name}-{dtype}") for case in cases for dtype in case.dtypes]
