"""Problems drawn from integers: what `tests.campaign` runs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyflash.testing import row_dtype
from tests.cases import DTYPES

Array = Any  # a NumPy array of any float dtype, or the backend's own
Random = np.random.Generator

KIND_SHIFT = 32
# Feature -> words, one of which a refusal of it says.
FEATURES: dict[str, tuple[str, ...]] = {
    "thd": ("thd",),
    "block_table": ("block_table", "pages"),
    "causal": ("causal",),
    "window": ("window",),
    "scale": ("scale",),
    "softcap": ("softcap",),
    "alibi_slopes": ("alibi",),
    "sink": ("sink",),
    "bias": ("bias",),
    "dropout_p": ("dropout",),
    "positions": ("q_start", "k_start"),
    "seqused_k": ("seqused_k",),
    "splits": ("num_splits", "split_len"),
    "deterministic": ("deterministic",),
    "out_dtype": ("out in", "out_dtype", "`out`"),
    "dout_dtype": ("dout",),
    "grad_dtype": ("gradients", "grad_dtype", "`dq`"),
    "accumulate": ("accumulate",),
    "dlse": ("dlse",),
    "delta": ("delta",),
    "foreign_state": ("lse",),
    "allow_tf32": ("tf32",),
    "workspace": ("workspace",),
    "outputs": ("`out`", "`lse`", "`dq`", "`dk`", "`dv`"),
    "strides": ("stride",),
}

_HEAD_DIMS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 40, 47, 48, 63, 64, 64, 65, 72, 80, 95, 96, 97, 104, 127, 128, 128)
_WIDE_HEAD_DIMS = (129, 160, 191, 192, 193, 200, 223, 224, 255, 256)
_LENGTHS = (0, 1, 1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 79, 81, 95, 97, 111, 113, 127, 128, 129, 193, 255, 257)
_MEMORIES = ("contiguous", "contiguous", "shifted", "gaps", "every second", "reversed", "transposed", "broadcast")
_OUTPUT_MEMORIES = ("contiguous", "shifted", "gaps", "every second", "reversed")
_FLAGS = ("gives_delta", "has_foreign_state", "gives_workspace", "poisons_empty_rows")
# Of the reference: scores times what each costs, in units of one column of a matrix product.
_COST = 150e6
_COST_OF_LONG = 700e6
_SCORE_COLUMNS = 300


@dataclass(frozen=True)
class Choices:
    """The random streams of one problem, and what it may have."""

    seed: int
    features: frozenset[str]
    dtypes: tuple[str, ...]

    def kind(self, name: str) -> Random:
        """Choices that a kernel is compiled for."""
        return np.random.default_rng([self.seed >> KIND_SHIFT, zlib.crc32(name.encode())])

    def number(self, name: str) -> Random:
        """Choices made at run time."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def has(self, feature: str, chance: float) -> bool:
        return feature in self.features and bool(self.kind(feature).random() < chance)


@dataclass
class Problem:
    """One call of the forward and one of the backward, in NumPy arrays."""

    seed: int
    features: frozenset[str]
    dtypes: tuple[str, ...]
    arrays: dict[str, Array] = field(default_factory=dict)  # q, k, v and all that both directions read
    options: dict[str, Any] = field(default_factory=dict)  # values of both directions
    dout: Array = None
    dlse: Array = None
    memory: dict[str, str] = field(default_factory=dict)  # of inputs, contiguous if absent
    outputs: dict[str, str] = field(default_factory=dict)  # of results that the caller allocates
    gives_delta: bool = False
    has_foreign_state: bool = False  # out and lse are not this forward's
    starts: dict[str, Array] = field(default_factory=dict)  # what the gradients are added to
    gives_workspace: bool = False
    poisons_empty_rows: bool = False

    @property
    def q(self) -> Array:
        return self.arrays["q"]

    @property
    def row_dtype(self) -> str:
        """Of lse, sink and the like."""
        return row_dtype(self.q.dtype)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.arrays["v"].shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        layout, shape = self.options["layout"], self.q.shape
        return {
            "bshd": lambda: (shape[0], shape[2], shape[1]),
            "bhsd": lambda: shape[:3],
            "thd": lambda: (shape[1], shape[0]),
        }[layout]()

    def __str__(self) -> str:
        lines = [f"problem {self.seed} (kind {self.seed >> KIND_SHIFT})"]
        for name, array in {**self.arrays, "dout": self.dout, "dlse": self.dlse}.items():
            if array is not None:
                values = f" {array.tolist()}" if array.size <= 8 and array.dtype.kind in "iu" else ""
                memory = self.memory.get(name, "contiguous")
                lines.append(f"  {name}: {array.dtype} {list(array.shape)}, {memory}{values}")
        lines += [f"  {name}={value!r}" for name, value in self.options.items()]
        lines += [f"  {name}= given, {memory}" for name, memory in self.outputs.items()]
        if self.starts:
            lines.append("  accumulate=True")
        lines += [f"  {name}" for name in _FLAGS if getattr(self, name)]
        return "\n".join(lines)

    def command(self, backend: str) -> str:
        """What repeats it."""
        parts = [f"python -m tests.campaign --backend {backend} --only {self.seed}"]
        if self.features != frozenset(FEATURES):
            parts.append(f"--features {','.join(name for name in FEATURES if name in self.features)}")
        if self.dtypes != tuple(DTYPES):
            parts.append(f"--dtype {','.join(self.dtypes)}")
        return " ".join(parts)


# ------------------------------------------------------------------------------------------------ drawing


@dataclass
class _Sizes:
    lens_q: list[int]  # of each sequence or batch row
    lens_k: list[int]
    heads_kv: int
    group: int
    head_dim: int
    head_dim_v: int
    page_size: int = 0
    slack: tuple[int, int] = (0, 0)

    @property
    def heads_q(self) -> int:
        return self.heads_kv * self.group

    @property
    def batch(self) -> int:
        return len(self.lens_q)

    @property
    def pairs(self) -> int:
        return sum(a * b for a, b in zip(self.lens_q, self.lens_k, strict=True))

    @property
    def dense(self) -> tuple[int, int]:
        """Nq and Nk of the bias's full shape."""
        return (self.lens_q or [5])[0], (self.lens_k or [5])[0]


def draw(choices: Choices) -> Problem:
    """The problem of these choices."""
    problem = Problem(choices.seed, choices.features, choices.dtypes)
    layout = str(choices.kind("layout").choice(["bshd", "bhsd", "thd"]))
    if layout == "thd" and "thd" not in choices.features:
        layout = "bshd"
    problem.options["layout"] = layout
    is_paged = choices.has("block_table", 0.08)
    dtype = str(choices.kind("dtype").choice(choices.dtypes))
    sizes = _draw_sizes(choices, layout, is_paged)
    _draw_operands(problem, choices, sizes, dtype, layout, is_paged)
    _draw_lengths(problem, choices, sizes, layout, is_paged)
    _draw_scores(problem, choices, sizes)
    _draw_positions(problem, choices, sizes)
    _draw_forward(problem, choices)
    if not is_paged:
        _draw_backward(problem, choices)
    _draw_memory(problem, choices)
    return problem


def _log_uniform(r: Random, low: float, high: float) -> float:
    return float(np.exp(r.uniform(np.log(low), np.log(high))))


def _draw_head_dim(r: Random) -> int:
    share = r.random()
    if share < 0.55:
        return int(r.choice(_HEAD_DIMS))
    return int(r.choice(_WIDE_HEAD_DIMS)) if share < 0.7 else int(r.integers(1, 257))


def _draw_sizes(choices: Choices, layout: str, is_paged: bool) -> _Sizes:
    r, shape = choices.number("sizes"), choices.kind("head dims")
    head_dim = _draw_head_dim(shape)
    head_dim_v = head_dim if shape.random() < 0.5 else _draw_head_dim(shape)
    is_long = r.random() < 0.015

    def length() -> int:
        if is_long and r.random() < 0.7:
            return int(r.integers(600, 1501))
        return int(r.choice(_LENGTHS)) if r.random() < 0.6 else int(r.integers(0, 300))

    batch = int(r.choice([0, 1, 2, 3, 4], p=[0.01, 0.39, 0.3, 0.2, 0.1]))
    if layout == "thd":
        batch = int(r.integers(0, 7)) if r.random() < 0.9 else int(r.integers(7, 40))
        lens = [[0 if r.random() < 0.15 else length() for _ in range(batch)] for _ in range(2)]
        if r.random() < 0.3:
            lens[1] = list(lens[0])
    else:
        len_q = length()
        len_k = len_q if r.random() < 0.3 else length()
        if is_paged and r.random() < 0.7:
            len_q = int(r.integers(1, 5))
        lens = [[len_q] * batch, [len_k] * batch]
    sizes = _Sizes(
        *lens,
        heads_kv=int(r.choice([1, 2, 3, 4])),
        group=int(r.choice([1, 2, 3, 4, 8], p=[0.4, 0.25, 0.15, 0.1, 0.1])),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        page_size=int(r.choice([1, 2, 3, 7, 16, 17, 64])) if is_paged else 0,
        slack=(int(r.integers(0, 40)), int(r.integers(0, 40))) if layout == "thd" and r.random() < 0.5 else (0, 0),
    )
    columns = _SCORE_COLUMNS + head_dim + head_dim_v
    limit = _COST_OF_LONG if is_long else _COST
    while sizes.pairs * sizes.heads_q * columns > limit:  # heads go first, then sequences, then length
        if sizes.group > 3:
            sizes.group = 2
        elif sizes.heads_kv > 2:
            sizes.heads_kv = 2
        elif sizes.batch > 2:
            sizes.lens_q, sizes.lens_k = sizes.lens_q[:-1], sizes.lens_k[:-1]
        elif sizes.heads_q > 2:
            sizes.group, sizes.heads_kv = (1, 2) if sizes.heads_kv > 1 else (2, 1)
        elif sizes.batch > 1:
            sizes.lens_q, sizes.lens_k = sizes.lens_q[:1], sizes.lens_k[:1]
        elif sizes.heads_q > 1:
            sizes.group = sizes.heads_kv = 1
        else:
            sizes.lens_q = [n * 3 // 4 for n in sizes.lens_q]
    return sizes


def _draw_operands(problem: Problem, choices: Choices, sizes: _Sizes, dtype: str, layout: str, is_paged: bool) -> None:
    tokens_q, tokens_k = (
        sum(lens) + more for lens, more in zip((sizes.lens_q, sizes.lens_k), sizes.slack, strict=True)
    )
    len_q, len_k = sizes.dense

    def shape(tokens: int, length: int, heads: int, width: int) -> tuple[int, ...]:
        return {
            "bshd": (sizes.batch, length, heads, width),
            "bhsd": (sizes.batch, heads, length, width),
            "thd": (tokens, heads, width),
        }[layout]

    r = choices.number("pages")
    needed = sum(-(-n // sizes.page_size) for n in sizes.lens_k) if is_paged else 0
    pages = needed + int(r.integers(0, 4))
    pool = {"bhsd": (pages, sizes.heads_kv, sizes.page_size)}.get(layout, (pages, sizes.page_size, sizes.heads_kv))
    magnitude = choices.number("magnitude")
    of_q = float(magnitude.choice([1.0, 8.0, 0.1], p=[0.85, 0.1, 0.05]))
    shapes = {
        "q": shape(tokens_q, len_q, sizes.heads_q, sizes.head_dim),
        "k": (*pool, sizes.head_dim) if is_paged else shape(tokens_k, len_k, sizes.heads_kv, sizes.head_dim),
        "v": (*pool, sizes.head_dim_v) if is_paged else shape(tokens_k, len_k, sizes.heads_kv, sizes.head_dim_v),
        "dout": shape(tokens_q, len_q, sizes.heads_q, sizes.head_dim_v),
    }
    dout_dtype = "float32" if choices.has("dout_dtype", 0.2) and dtype != "float64" else dtype
    for name, full in shapes.items():
        values = choices.number(name).standard_normal(full) * (of_q if name == "q" else 1)
        array = values.astype(DTYPES[dout_dtype if name == "dout" else dtype])
        if choices.has("strides", 0.5) and not is_paged:
            memory = str(choices.kind(f"memory of {name}").choice(_MEMORIES))
            problem.memory[name] = memory
            if memory == "broadcast":
                array = _broadcast(choices.kind(f"axes of {name}"), array)
        if name == "dout":
            problem.dout = array
        else:
            problem.arrays[name] = array


def _broadcast(r: Random, array: Array) -> Array:
    """The same shape with stride 0 along some of the axes, seldom along the last."""
    kept = [r.random() < 0.4 for _ in array.shape[:-1]] + [r.random() < 0.85]
    first = array[tuple(slice(None) if keep else slice(0, 1) for keep in kept)]
    return np.broadcast_to(first.copy(), array.shape)


def _draw_lengths(problem: Problem, choices: Choices, sizes: _Sizes, layout: str, is_paged: bool) -> None:
    r, arrays = choices.number("lengths"), problem.arrays
    lens_k = np.array(sizes.lens_k, np.int64)
    if layout == "thd":
        for name, lens in (("q", sizes.lens_q), ("k", sizes.lens_k)):
            if name == "q" or not is_paged:
                offsets = np.cumsum([0, *lens])
                arrays[f"cu_seqlens_{name}"] = offsets.astype(r.choice([np.int32, np.int64]))
            if r.random() < 0.5:  # a hint, of any value
                problem.options[f"max_seqlen_{name}"] = int(r.choice([max(lens, default=0), 0, 1, 10_000]))
    if is_paged:
        max_pages = int(max((-(-n // sizes.page_size) for n in sizes.lens_k), default=0) + r.integers(0, 3))
        table = r.choice([-1, -(2**31), 2**31 - 1, 10**6], (sizes.batch, max_pages)).astype(np.int32)
        free = iter(r.permutation(arrays["k"].shape[0]))
        for row, live in zip(table, sizes.lens_k, strict=True):
            for page in range(-(-live // sizes.page_size)):
                row[page] = next(free)
        arrays["block_table"], arrays["seqused_k"] = table, lens_k.astype(np.int32)
        is_live = np.zeros((*arrays["k"].shape[:1], sizes.page_size), bool)
        for row, live in zip(table, sizes.lens_k, strict=True):
            j = np.arange(live)
            is_live[row[j // sizes.page_size], j % sizes.page_size] = True
        for name in ("k", "v"):
            pool = arrays[name].swapaxes(1, 2) if layout == "bhsd" else arrays[name]
            pool[~is_live] = np.nan
        return
    if choices.has("seqused_k", 0.2):
        used = r.integers(0, lens_k + 1)
        edge = r.random(len(used))
        used = np.where(edge < 0.15, 0, np.where(edge > 0.7, lens_k, used))
        arrays["seqused_k"] = used.astype(np.int32)
    if r.random() < 0.6:
        _poison_the_dead(problem, sizes, layout)


def _poison_the_dead(problem: Problem, sizes: _Sizes, layout: str) -> None:
    """NaN in keys that are not live and in rows of no sequence: nothing may read them."""
    arrays = problem.arrays
    used = arrays.get("seqused_k", np.array(sizes.lens_k))
    for name in ("q", "k", "v", "dout"):
        array = problem.dout if name == "dout" else arrays[name]
        if problem.memory.get(name) == "broadcast":
            continue
        lens = sizes.lens_k if name in ("k", "v") else sizes.lens_q
        live = used if name in ("k", "v") else np.array(lens)
        if layout == "thd":
            array[sum(lens) :] = np.nan
        for b, begin in enumerate(np.cumsum([0, *lens])[:-1]):
            rows = array[begin : begin + lens[b]] if layout == "thd" else array[b]
            (rows.swapaxes(0, 1) if layout == "bhsd" else rows)[live[b] :] = np.nan


def _draw_scores(problem: Problem, choices: Choices, sizes: _Sizes) -> None:
    options, arrays, row = problem.options, problem.arrays, problem.row_dtype
    if choices.has("causal", 0.5):
        options["causal"] = choices.kind("corner").choice(np.array([True, "bottom-right", "top-left"], object))
    if choices.has("window", 0.3):
        r = choices.number("window")
        left, right = (int(x) for x in r.choice([0, 0, 1, 3, 17, 63, 64, 100, 400], 2))
        pairs = [(left, right), (left, right), (0, 0), (left, None), (-1, right), (None, right), [left, -1]]
        options["window"] = pairs[r.integers(len(pairs))]
    if choices.has("scale", 0.35):
        r = choices.number("scale")
        scale = {
            "zero": 0.0,
            "negative": -_log_uniform(r, 0.01, 0.6),
            "positive": _log_uniform(r, 0.01, 0.6),
            "large": 1.0,
        }
        options["scale"] = scale[str(choices.kind("scale sign").choice(["zero", "negative", "positive", "large"]))]
    if choices.has("softcap", 0.2):
        options["softcap"] = _log_uniform(choices.number("softcap"), 0.3, 30)
    if choices.has("alibi_slopes", 0.25):
        values = choices.number("alibi_slopes")
        shape = (sizes.heads_q,) if values.random() < 0.5 else (sizes.batch, sizes.heads_q)
        slopes = (2.0 ** values.uniform(-8, 0, shape)).astype(row)
        if len(shape) == 2 and values.random() < 0.3:
            slopes = np.broadcast_to(slopes[:1].copy(), shape) if sizes.batch else slopes
            problem.memory["alibi_slopes"] = "broadcast"
        arrays["alibi_slopes"] = slopes
    if choices.has("sink", 0.25):
        values = choices.number("sink")
        sink = values.normal(1, 3, sizes.heads_q)
        sink[values.random(sizes.heads_q) < 0.3] = -np.inf
        arrays["sink"] = sink.astype(row)
    if options["layout"] != "thd" and choices.has("bias", 0.25):
        _draw_bias(problem, choices, sizes)
    if choices.has("dropout_p", 0.2):
        values = choices.number("dropout")
        options["dropout_p"] = float(values.choice([0.1, 0.5, 0.9, 1e-3, values.random()]))
        seed, offset = int(values.integers(2**63)), int(values.integers(2**32))
        if values.random() < 0.3:
            arrays["seed"] = np.array([seed], values.choice([np.int64, np.uint64]))
            arrays["offset"] = np.array([offset], np.int64)
        else:
            options["seed"], options["offset"] = seed * int(values.choice([1, 2])), offset


def _draw_bias(problem: Problem, choices: Choices, sizes: _Sizes) -> None:
    r, kind = choices.number("bias values"), choices.kind("bias shape")
    keys = problem.arrays["block_table"].shape[1] * sizes.page_size if sizes.page_size else sizes.dense[1]
    full = (sizes.batch, sizes.heads_q, sizes.dense[0], keys)
    axes = full[4 - int(kind.choice([4, 4, 4, 3, 2, 1, 0])) :]
    shape = tuple(n if kind.random() < 0.6 else 1 for n in axes)
    bias = r.standard_normal(shape) * r.choice([1.0, 5.0])
    if kind.random() < 0.5:
        bias = np.where(r.random(shape) < r.choice([0.1, 0.5, 0.97]), -np.inf, bias)
    bias = np.asarray(bias).astype(DTYPES[str(kind.choice([problem.row_dtype, *DTYPES]))])
    memory = str(kind.choice(["contiguous", "contiguous", "broadcast", "gaps", "reversed", "transposed"]))
    if bias.ndim > 1 and "strides" in choices.features:
        problem.memory["bias"] = memory
        if memory == "broadcast":
            bias = _broadcast(kind, bias)
    problem.arrays["bias"] = bias


def _draw_positions(problem: Problem, choices: Choices, sizes: _Sizes) -> None:
    if not choices.has("positions", 0.25):
        return
    r = choices.number("starts")
    which = str(r.choice(["both", "both", "q_start", "k_start"]))
    is_array = {name: bool(r.random() < 0.5) for name in ("q_start", "k_start")}
    base = int(r.choice([0, 0, 1000, -77, 2**30, 2**33])) if which == "both" else 0
    if any(is_array.values()):
        base = min(base, 2**30)
    for name in ("q_start", "k_start"):
        if which in ("both", name):
            starts = base + r.integers(-60, 60, sizes.batch if is_array[name] else 1)
            if is_array[name]:
                problem.arrays[name] = starts.astype(np.int32)
            else:
                problem.options[name] = int(starts[0])


def _draw_forward(problem: Problem, choices: Choices) -> None:
    options = problem.options
    if choices.has("splits", 0.2):
        r = choices.number("splits")
        name = str(r.choice(["num_splits", "split_len"]))
        options[name] = int(r.choice([1, 2, 3, 7, 50]) if name == "num_splits" else r.choice([1, 16, 64, 100, 1000]))
    if choices.has("out_dtype", 0.25):
        options["out_dtype"] = str(choices.kind("dtype of out").choice(["float32", "float32", *DTYPES]))
    if choices.has("allow_tf32", 0.1) and problem.q.dtype != np.float32:  # there it is another arithmetic
        options["allow_tf32"] = True
    if choices.number("check").random() < 0.1:
        options["check"] = True
    problem.gives_workspace = choices.has("workspace", 0.25)


def _draw_backward(problem: Problem, choices: Choices) -> None:
    options, arrays = problem.options, problem.arrays
    if choices.has("dlse", 0.3):
        problem.dlse = choices.number("dlse").standard_normal(problem.lse_shape).astype(problem.row_dtype)
    problem.gives_delta = choices.has("delta", 0.15)
    problem.has_foreign_state = choices.has("foreign_state", 0.1)
    if choices.has("deterministic", 0.2):
        options["deterministic"] = True
    if choices.has("grad_dtype", 0.2):
        options["grad_dtype"] = str(choices.kind("dtype of gradients").choice(["float32", "float32", *DTYPES]))
    if choices.has("accumulate", 0.15):
        if options.get("grad_dtype", "float16") in ("float16", "bfloat16"):
            options["grad_dtype"] = problem.row_dtype
        for name in _gradient_names(problem):
            dtype = problem.row_dtype if name == "dsink" else options["grad_dtype"]
            shape = arrays[name[1:]].shape
            problem.starts[name] = choices.number(f"start of {name}").standard_normal(shape).astype(dtype)
    problem.poisons_empty_rows = choices.number("empty rows").random() < 0.3 and not problem.gives_delta


def _draw_memory(problem: Problem, choices: Choices) -> None:
    if problem.dlse is not None and choices.has("strides", 0.5):
        problem.memory["dlse"] = str(choices.kind("memory of dlse").choice(_MEMORIES[:-1]))
    for name in ("out", "lse", *_gradient_names(problem)):
        if name in problem.starts or ("outputs" in choices.features and choices.kind(f"given {name}").random() < 0.5):
            memory = str(choices.kind(f"memory of {name}").choice(_OUTPUT_MEMORIES))
            problem.outputs[name] = memory if "strides" in choices.features else "contiguous"


def _gradient_names(problem: Problem) -> list[str]:
    names = ["dq", "dk", "dv"] if "block_table" not in problem.arrays else []
    return names + [f"d{name}" for name in ("bias", "sink") if names and name in problem.arrays]
