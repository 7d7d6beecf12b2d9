"""What `check` computes: small problems, each for what can go wrong in it, in numbers drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyflash import _interop

_CAUSAL: dict[str, Any] = {"causal": True}
_ALL = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Case:
    """Shapes and options; `arrays` are drawn too. `lens_q` and `lens_k` pack it, pages are for a forward alone."""

    name: str
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    batch: int = 1
    len_q: int = 130
    len_k: int = 130
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    options: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    page_size: int = 0


CASES = (
    Case("plain", _ALL, len_k=389),
    Case("many keys", ("float16", "bfloat16"), len_k=1100, options=_CAUSAL),
    Case("causal", _ALL, len_k=200, options=_CAUSAL),
    Case("causal, top-left", ("bfloat16",), len_q=70, options={"causal": "top-left"}),
    Case("rows without keys", len_q=150, len_k=70, options=_CAUSAL, arrays=("dlse",)),
    Case("window", ("float16", "float32"), options={"window": (20, 5)}),
    Case("head dims 128", ("float16", "bfloat16"), len_k=300, dims=(128, 128), options=_CAUSAL),
    Case("head dims 192 and 128", ("bfloat16",), dims=(192, 128), options=_CAUSAL),
    Case("head dims 19 and 23", dims=(19, 23), options=_CAUSAL),
    Case("one KV head", ("bfloat16",), heads=(8, 1), options=_CAUSAL),
    Case("layout bhsd", ("bfloat16",), batch=2, options={"layout": "bhsd"}),
    Case("softcap", options={"softcap": 2.0}),
    Case("ALiBi", batch=2, options=_CAUSAL, arrays=("alibi_slopes",)),
    Case("bias", ("bfloat16",), batch=2, arrays=("bias",)),
    Case("sink", options=_CAUSAL, arrays=("sink", "dlse")),
    Case("dropout", batch=2, options={"dropout_p": 0.2, "seed": 3}),
    Case(
        "all score changes",
        ("float32",),
        options={"dropout_p": 0.2, "seed": 3, "softcap": 2.0, **_CAUSAL},
        arrays=("alibi_slopes", "bias", "sink", "dlse"),
    ),
    Case("live lengths", batch=3, options=_CAUSAL, arrays=("seqused_k",)),
    Case("packed sequences", lens_q=(0, 65, 1, 90), lens_k=(7, 80, 65, 90), options=_CAUSAL),
    Case("deterministic", ("bfloat16",), options={"deterministic": True, **_CAUSAL}),
    Case("splits", ("bfloat16",), len_q=3, len_k=700, options={"split_len": 256}),
    Case("one query", ("bfloat16",), batch=2, len_q=1, len_k=700, dims=(128, 128)),
    Case(
        "pages",
        ("float16", "bfloat16"),
        batch=2,
        len_q=1,
        len_k=700,
        dims=(128, 128),
        arrays=("seqused_k",),
        page_size=64,
    ),
)


@dataclass
class Problem:
    """A case in numbers: NumPy arrays, and what only the gradients see apart."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    options: dict[str, Any]
    backward_options: dict[str, Any]
    has_backward: bool


def problems(seed: int) -> Iterator[Problem]:
    """Each case in each of its dtypes; a problem's numbers depend on the seed and its own place alone."""
    named = [(case, dtype) for case in CASES for dtype in case.dtypes]
    for number, (case, dtype) in enumerate(named):
        yield _drawn(case, dtype, np.random.default_rng((seed, number)))


def count() -> int:
    return sum(len(case.dtypes) for case in CASES)


def _drawn(case: Case, dtype: str, rng: np.random.Generator) -> Problem:
    element, row = _interop.NUMPY_DTYPES[dtype], np.dtype("float64" if dtype == "float64" else "float32")
    options, (heads_q, heads_kv), (dim, dim_v) = dict(case.options), case.heads, case.dims
    batch, len_q, len_k = case.batch, case.len_q, case.len_k
    if case.lens_q:
        len_q, len_k = sum(case.lens_q), sum(case.lens_k)
        options |= {"layout": "thd"}
        options |= {f"cu_seqlens_{of}": _offsets(lens) for of, lens in (("q", case.lens_q), ("k", case.lens_k))}
    layout = options.get("layout", "bshd")

    def draw(length: int, heads: int, width: int) -> np.ndarray:
        shapes = {
            "bshd": (batch, length, heads, width),
            "bhsd": (batch, heads, length, width),
            "thd": (length, heads, width),
        }
        return rng.standard_normal(shapes[layout]).astype(element)

    q, k = draw(len_q, heads_q, dim), draw(len_k, heads_kv, dim)
    v, dout = draw(len_k, heads_kv, dim_v), draw(len_q, heads_q, dim_v)
    if case.page_size:  # that lie in any order
        table = batch, -(-len_k // case.page_size)
        options["block_table"] = rng.permutation(table[0] * table[1]).reshape(table).astype(np.int32)
        pools = rng.standard_normal((2, table[0] * table[1], case.page_size, heads_kv, dim)).astype(element)
        k, v = pools
    makers = {
        "alibi_slopes": lambda: rng.random(heads_q).astype(row),
        "bias": lambda: rng.standard_normal((batch, heads_q, len_q, len_k)).astype(element),
        "sink": lambda: rng.standard_normal(heads_q).astype(row),
        "seqused_k": lambda: np.linspace(len_k, 0, batch, endpoint=False).astype(np.int32),
        "dlse": lambda: rng.standard_normal((batch, heads_q, len_q)).astype(row),
    }
    drawn = {name: makers[name]() for name in case.arrays}
    backward_options = {"dlse": drawn.pop("dlse")} if "dlse" in drawn else {}
    name = f"{case.name}, {dtype}"
    return Problem(name, q, k, v, dout, options | drawn, backward_options, has_backward=not case.page_size)


def _offsets(lens: tuple[int, ...]) -> np.ndarray:
    return np.cumsum((0, *lens)).astype(np.int32)
