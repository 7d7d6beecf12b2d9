"""A named cover of the binaries that plans can ask for, found through the planner, so that all are reachable.

`python -m tests.binaries --dim 128 --features softcap dropout --masked` compiles those of one request and prints what
ptxas says of them, without a GPU; `--folder` puts its files over those of `cuda_src`, as `benchmarks.variants` does.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import ptxas
from benchmarks.overlay import sources
from cupyflash._cuda.constants import HEAD_DIMS, BwdSm90, Constants, KvAppend, MergeStates, MergeStatesBwd
from cupyflash._cuda.device import KNOWN, Device
from cupyflash._cuda.plan import Plan
from cupyflash._cuda.plan import backward as plan_backward
from cupyflash._cuda.plan import forward as plan_forward
from cupyflash._errors import UnsupportedError
from cupyflash._spec import Features, Mask, Spec

DTYPES = ("bfloat16", "float16", "float32", "float64")
PLAIN = Spec(
    dtype="bfloat16",
    heads_q=4,
    heads_kv=2,
    head_dim=64,
    head_dim_v=64,
    mask=Mask.NONE,
    features=Features(),
    packed=False,
    paged=False,
    out_dtype="bfloat16",
    dout_dtype="bfloat16",
    grad_dtype="bfloat16",
    bias_dtype=None,
    dbias_dtype=None,
    accumulate=False,
    deterministic=False,
    split=False,
    allow_tf32=False,
    align=16,
    has_boxes=True,
    size_class="normal",
)


def spec(
    dtype: str = "bfloat16", dim: int = 64, dim_v: int | None = None, features: Features | None = None, **changes: Any
) -> Spec:
    """A Spec that differs from PLAIN in this; out, dout and gradients follow the dtype unless they are named."""
    follow = dict.fromkeys(("out_dtype", "dout_dtype", "grad_dtype"), dtype)
    changes = follow | changes
    return replace(
        PLAIN, dtype=dtype, head_dim=dim, head_dim_v=dim_v or dim, features=features or Features(), **changes
    )


AXES: dict[str, tuple[Any, ...]] = {
    "mask": tuple(Mask),
    "softcap": (False, True),
    "alibi": (False, True),
    "bias": (None, "float32", "bfloat16"),
    "dropout": (False, True),
    "deterministic": (False, True),
    "negative_scale": (False, True),
    "align": (16, 4, 2),
    "gradients": ("as inputs", "float32", "added to"),
    "out_dtype": ("as inputs", "float32"),
    "dout_dtype": ("as inputs", "float32"),
}
# What is compiled plain, in a forward and a backward; float16, one instruction's name away from bfloat16, in the pairs.
PLAIN_DIMS = {"bfloat16": HEAD_DIMS, "float32": HEAD_DIMS, "float64": (64, 256)}
SHAPES = ((64, 64), (128, 128), (192, 128), (64, 256), (256, 256), (96, 96), (32, 32))  # of the pairs' rows, in turn
# What the kernels before and after a backward depend on: alignment, and the dtypes of out, dout and gradients.
SMALL_KERNELS = ((16, "float32", "bfloat16", "float32"), (4, "bfloat16", "float32", "bfloat16"))
PAIR_DTYPES = ("bfloat16", "float32", "float16", "float64")


# Forwards of few queries, of split keys and of pages.
SPLITS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    # Less shared memory than groups need holds what "16 rows" and "32 rows" have.
    ("bfloat16", 128, "16 rows, in groups", {}),
    ("bfloat16", 128, "16 rows, many times", {}),
    ("bfloat16", 128, "16 rows, in groups", {"paged": True}),
    ("bfloat16", 256, "64 rows", {"paged": True}),
    ("bfloat16", 64, "32 rows, in groups", {"features": Features(alibi=True, dropout=True)}),
    ("bfloat16", 128, "few tiles", {}),
    ("bfloat16", 128, "few tiles, packed", {}),
    ("bfloat16", 96, "normal", {"split": True, "paged": True}),
    ("float32", 128, "16 rows, in groups", {"paged": True}),
    ("float64", 64, "16 rows", {"paged": True}),
)


def plans(asked: Spec, device: Device) -> tuple[Plan[Any], ...]:
    """Every kernel that a forward and a backward of this Spec launch."""
    return *plan_forward(asked, device).kernels, *plan_backward(asked, device).kernels


def cover(device: Device) -> dict[str, Plan[Any]]:
    """Name to plan: each (kernel, dtype, head-dim tile) plain, and every two features of AXES together somewhere.

    sm_89 has sm_86's plans and nearly its instructions, so the pairs of the one speak for the other.
    """
    named: dict[str, Plan[Any]] = {}
    binaries: set[Any] = set()

    def add(name: str, found: tuple[Plan[Any], ...]) -> None:
        for plan in found:
            if plan.binary not in binaries:
                binaries.add(plan.binary)
                named[f"{plan.kernel} {name}"] = plan

    for dtype, dims in PLAIN_DIMS.items():
        for dim in dims:
            if is_held(asked := spec(dtype, dim), device):
                add(f"{dtype} D{dim}", plans(asked, device))
    add("negative scale", plans(spec(features=Features(negative_scale=True)), device))  # alone, as others replace it
    add("tf32", plans(spec("float32", allow_tf32=True), device)[:1])
    for number, row in enumerate(pairwise() if device.arch != 89 else ()):
        dim, dim_v = SHAPES[number % len(SHAPES)]
        asked = spec_of({"dtype": PAIR_DTYPES[number % 4], "dim": dim, "dim_v": dim_v} | row)
        if is_held(asked, device):
            add(f"pairs {number}", tuple(plan for plan in plans(asked, device) if hasattr(plan.constants, "is_masked")))
    for number, (align, out, dout, grad) in enumerate(SMALL_KERNELS):
        asked = spec(align=align, out_dtype=out, dout_dtype=dout, grad_dtype=grad, accumulate=grad == "float32")
        add(f"widths {number}", (plan_backward(asked, device).preprocess, plan_backward(asked, device).finish))
    for number, (dtype, dim, size_class, change) in enumerate(SPLITS):
        if is_held(asked := spec(dtype, dim, size_class=size_class, mask=Mask.BAND, **change), device):
            add(f"splits {number}", plan_forward(asked, device).kernels)
    add("plain", merges(device))
    for plan in appends(device):
        add(f"by {plan.constants.copy_bytes} bytes", (plan,))
    return named


def hopper_forwards(device: Device, *, are_all: bool) -> dict[str, Plan[Any]]:
    """Name to plan: fwd_sm90 in every tile that a call can get, with each change of scores that fills its registers.

    Without a mask, which takes registers too, and with split keys, with a few of them, or all.
    """
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "negative scale": {"negative_scale": True},
        "softcap": {"softcap": True},
        "small softcap": {"softcap": True, "small_softcap": True},
        "ALiBi": {"softcap": True, "alibi": True},
        "bias": {"bias": True},
        "all but dropout": {"softcap": True, "alibi": True, "bias": True},
        "dropout": {"dropout": True},
        "everything": {"softcap": True, "alibi": True, "bias": True, "dropout": True},
    }
    shapes = (64, 64), (128, 128), (192, 192), (192, 128), (256, 256)
    classes = "normal", "few keys", "few tiles", "few tiles, packed"
    found: dict[Any, tuple[str, Plan[Any]]] = {}
    for dims, (name, switches), mask, size_class in itertools.product(shapes, changes.items(), Mask, classes):
        is_split = size_class.startswith("few tiles")
        if mask is Mask.NONE and (is_split or name not in ("plain", "negative scale", "softcap")) and not are_all:
            continue
        if is_split and name not in ("plain", "softcap", "bias", "everything") and not are_all:
            continue
        biases = ("bfloat16",) if is_split else ("bfloat16", "float32", "float64")
        for bias in biases if "bias" in switches else (None,):
            asked = spec("bfloat16", *dims, Features(**switches), mask=mask, bias_dtype=bias, size_class=size_class)
            plan = plan_forward(asked, device)
            assert plan.kernel == "fwd_sm90", plan.why
            found.setdefault(plan.binary, (f"{name} {bias or ''}, {dims}, {mask.name}, {size_class}", plan))
    return dict(found.values())


def hopper_backwards(device: Device) -> dict[str, Plan[Any]]:
    """Name to plan: Hopper's kernels of a backward in every tile, and each switch of theirs with every tile."""
    changes: dict[str, dict[str, Any]] = {
        "plain": {"mask": Mask.NONE},
        "masked": {},
        "negative scale": {"features": Features(negative_scale=True)},
        "float16": {"dtype": "float16"},
        "added to": {"accumulate": True},
        "in float32": {"grad_dtype": "float32"},
        "short": {"size_class": "short"},
        "short, added to": {"size_class": "short", "accumulate": True},
    }
    found: dict[Any, tuple[str, Plan[Any]]] = {}
    shapes = ((64, 64), (128, 128), (192, 192), (192, 128), (256, 256))
    for (dim, dim_v), (name, change), deterministic in itertools.product(shapes, changes.items(), (False, True)):
        asked = spec(**{"dim": dim, "dim_v": dim_v, "mask": Mask.BAND, "deterministic": deterministic} | change)
        for plan in plan_backward(asked, device)[1:3]:
            if plan is not None:
                assert plan.target == "sm_90a", plan.why
                found.setdefault(plan.binary, (f"{plan.kernel} {name}, {dim}, {dim_v}, {deterministic=}", plan))
    return dict(found.values())


def hopper_backwards_of_changed_scores(device: Device, *, are_all: bool) -> dict[str, Plan[Any]]:
    """Name to plan: Hopper's kernels of a backward with sets of score changes that they serve, or with all."""
    found: dict[Any, tuple[str, Plan[Any]]] = {}
    switches = "softcap", "alibi", "dropout"
    biases = (None, "bfloat16", "float32", "float64", "float16") if are_all else (None, "bfloat16", "float32")
    ways: tuple[dict[str, Any], ...] = ({}, {"size_class": "short"}, {"deterministic": True})
    dims: tuple[Any, ...] = (64, 128, 192, 256)
    for dim, bias, *on in itertools.product(dims, biases, *((False, True),) * len(switches)):
        features = Features(bias=bias is not None, **dict(zip(switches, on, strict=True)))
        changes: dict[str, Any] = {"mask": Mask.BAND, "bias_dtype": bias, "dbias_dtype": bias}
        is_few = sum(on) + (bias is not None) in (1, 4)
        if (dim > 128 or bias == "float32") and not is_few and not are_all:
            continue
        for way in ways if are_all else ways[: 2 if is_few else 1]:
            for plan in plan_backward(spec("bfloat16", dim, features=features, **changes, **way), device)[1:3]:
                if plan is not None and plan.target == "sm_90a":
                    found.setdefault(plan.binary, (f"{plan.kernel} {dim}, {features}, bias {bias}, {way}", plan))
    return dict(found.values())


def everything(device: Device) -> dict[Any, Plan[Any]]:
    """Every binary that a Spec can reach on this device."""
    axes = {"dtype": DTYPES, "dim": HEAD_DIMS, "dim_v": HEAD_DIMS} | AXES
    rows = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    specs = (asked for row in rows if is_held(asked := spec_of(row), device))
    reached = {plan.binary: plan for asked in specs for plan in plans(asked, device)}
    return reached | {plan.binary: plan for plan in (*merges(device), *appends(device))}


def is_held(asked: Spec, device: Device) -> bool:
    """False where the planner says that the device is too small for this Spec, which only wide float64 rows are."""
    try:
        plans(asked, device)
    except UnsupportedError:
        assert asked.dtype == "float64"
        assert device.smem_bytes < 100 * 1024
        return False
    return True


def merges(device: Device) -> tuple[Plan[Any], ...]:
    """The two kernels that merge, to which no Spec leads: a quick form, and one for types that differ."""
    quick = MergeStates("float32", "bfloat16", "float32", columns=16, is_uniform=True)
    mixed = MergeStatesBwd("float64", "float32", "float64", columns=1, is_uniform=False)
    return tuple(Plan(constants, device.arch, "merges") for constants in (quick, mixed))


def appends(device: Device) -> tuple[Plan[KvAppend], ...]:
    """The kernel of an append, to which no Spec leads either, by the most and the fewest bytes at once."""
    return tuple(Plan(KvAppend(copy_bytes), device.arch, "appends") for copy_bytes in (16, 2))


def pairwise() -> Iterator[dict[str, Any]]:
    """Rows of AXES in which every two values of two axes meet, greedily few."""
    wanted = {
        ((a, x), (b, y)) for a, b in itertools.combinations(AXES, 2) for x, y in itertools.product(AXES[a], AXES[b])
    }
    candidates = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    met = [{pair for pair in wanted if pair[0] in row.items() and pair[1] in row.items()} for row in candidates]
    while wanted:
        best = max(range(len(candidates)), key=lambda number: len(met[number] & wanted))
        wanted -= met[best]
        yield candidates[best]


def spec_of(row: dict[str, Any]) -> Spec:
    """The Spec of one row of AXES with a dtype and head dims."""
    changes = {name: row[name] for name in ("dtype", "dim", "dim_v", "mask", "align")}
    has_bias, switches = row["bias"] is not None, ("softcap", "alibi", "dropout", "negative_scale")
    changes["features"] = Features(bias=has_bias, **{name: row[name] for name in switches})
    changes |= {"deterministic": row["deterministic"], "bias_dtype": row["bias"], "dbias_dtype": row["bias"]}
    changes |= {name: row[name] for name in ("out_dtype", "dout_dtype") if row[name] != "as inputs"}
    if row["gradients"] != "as inputs":
        changes |= {"grad_dtype": "float32", "accumulate": row["gradients"] == "added to"}
        changes["dbias_dtype"] = "float32" if has_bias else None
    return spec(**changes)


SERIALIZED = re.compile(r"\(C75\d\d\)")  # ptxas makes one product of wgmma wait for another, or ignores setmaxnreg


@dataclass(frozen=True)
class Report:
    """What ptxas says of one binary. `log` is the whole word of a compile that failed or warned."""

    registers: int
    spill_bytes: int
    log: str = ""


def compile_to_report(plan: Plan[Any]) -> Report:
    """Registers, and the larger of spill stores and loads."""
    from cupyflash._cuda.source import compose

    is_compiled, log = ptxas.compiled(compose(plan.constants), f"{plan.kernel}.cu", plan.target)
    if not is_compiled or "warning" in log or SERIALIZED.search(log):
        return Report(0, 0, log)
    spills = [int(found) for found in re.findall(r"(\d+) bytes spill", log)]
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", log)]
    if not registers:
        raise AssertionError(f"ptxas did not report registers: {log!r}")
    return Report(max(registers), max(spills))


def allowance_key(constants: Constants) -> tuple[str, str, int]:
    """What a recorded spill is filed under: (kernel's constants, element, larger head-dim tile)."""
    values: Any = constants
    element = getattr(values, "element", getattr(values, "grad_element", "any"))
    element = "16-bit" if element in ("float16", "bfloat16") else element
    dims = [getattr(values, name) for name in ("head_dim", "head_dim_v") if hasattr(values, name)]
    kind = type(constants).__name__
    if isinstance(constants, BwdSm90):
        kind += " stored" if constants.stores_dq else ""
        changes = constants.has_softcap, constants.has_alibi, constants.has_bias, constants.has_dropout
        kind += " of changed scores" if any(changes) else ""
    return kind, element, max(dims, default=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """A line for each kernel of a forward and a backward."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.binaries", description="Registers and spills of one request."
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dim-v", type=int)
    parser.add_argument("--features", nargs="*", default=[], choices=("softcap", "alibi", "bias", "dropout"))
    parser.add_argument("--masked", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--short", action="store_true", help="at most 256 keys")
    parser.add_argument("--arch", type=int, choices=sorted(KNOWN), default=90)
    parser.add_argument("--folder", type=Path, help="files that replace those of cuda_src")
    options = parser.parse_args(arguments)
    features = Features(**dict.fromkeys(options.features, True))
    bias = "bfloat16" if features.bias else None
    changes: dict[str, Any] = {
        "mask": Mask.BAND if options.masked else Mask.NONE,
        "bias_dtype": bias,
        "dbias_dtype": bias,
    }
    changes |= {"deterministic": options.deterministic, "size_class": "short" if options.short else "normal"}
    asked = spec(options.dtype, options.dim, options.dim_v, features, **changes)
    with sources(options.folder):
        for plan in plans(asked, KNOWN[options.arch]):
            report = compile_to_report(plan)
            print(f"{plan.kernel:20} {report.registers:4} registers {report.spill_bytes:5} bytes spilled  {report.log}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
