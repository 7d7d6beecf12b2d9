"""A named cover of the binaries that plans can ask for, found through the planner, so that all are reachable."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cupyflash._cuda.constants import HEAD_DIMS, Constants, MergeStates, MergeStatesBwd
from cupyflash._cuda.device import Device
from cupyflash._cuda.plan import Plan
from cupyflash._cuda.plan import backward as plan_backward
from cupyflash._cuda.plan import forward as plan_forward
from cupyflash._spec import Features, Mask, Spec

DTYPES = ("bfloat16", "float16", "float32")
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
    accumulate=False,
    deterministic=False,
    split=False,
    allow_tf32=False,
    align=16,
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
    "negative_scale": (False, True),
    "align": (16, 4, 2),
    "gradients": ("as inputs", "float32", "added to"),
    "out_dtype": ("as inputs", "float32"),
    "dout_dtype": ("as inputs", "float32"),
}
SHAPES = (*((dim, dim) for dim in HEAD_DIMS[:5]), (192, 128), (64, 256))  # of a feature's rows, in turn


def plans(asked: Spec, device: Device) -> tuple[Plan[Any], ...]:
    """Every kernel that a forward and a backward of this Spec launch."""
    return plan_forward(asked, device), *plan_backward(asked, device)


def cover(device: Device) -> dict[str, Plan[Any]]:
    """Name to plan: each (kernel, dtype, head-dim tile) plain, and every two features of AXES together somewhere."""
    named: dict[str, Plan[Any]] = {}
    binaries: set[Any] = set()

    def add(name: str, found: tuple[Plan[Any], ...]) -> None:
        for plan in found:
            if plan.binary not in binaries:
                binaries.add(plan.binary)
                named[f"{plan.kernel} {name}"] = plan

    for dtype, dim in itertools.product(DTYPES, HEAD_DIMS):
        add(f"{dtype} D{dim}", plans(spec(dtype, dim), device))
    add("negative scale", plans(spec(features=Features(negative_scale=True)), device))  # alone, as others replace it
    for number, row in enumerate(pairwise()):
        dim, dim_v = SHAPES[number % len(SHAPES)]
        add(f"pairs {number}", plans(spec_of({"dtype": DTYPES[number % 3], "dim": dim, "dim_v": dim_v} | row), device))
    add("plain", merges(device))
    return named


def everything(device: Device) -> dict[Any, Plan[Any]]:
    """Every binary that a Spec can reach on this device."""
    axes = {"dtype": DTYPES, "dim": HEAD_DIMS, "dim_v": HEAD_DIMS} | AXES
    rows = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    reached = {plan.binary: plan for row in rows for plan in plans(spec_of(row), device)}
    return reached | {plan.binary: plan for plan in merges(device)}


def merges(device: Device) -> tuple[Plan[Any], ...]:
    """The two kernels that no Spec leads to."""
    return tuple(Plan(constants, device.arch, "merges") for constants in (MergeStates(), MergeStatesBwd()))


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
    changes["features"] = Features(softcap=row["softcap"], alibi=row["alibi"], negative_scale=row["negative_scale"])
    changes |= {name: row[name] for name in ("out_dtype", "dout_dtype") if row[name] != "as inputs"}
    if row["gradients"] != "as inputs":
        changes |= {"grad_dtype": "float32", "accumulate": row["gradients"] == "added to"}
    return spec(**changes)


@dataclass(frozen=True)
class Report:
    """What ptxas says of one binary. `log` is the whole word of a compile that failed."""

    registers: int
    spill_bytes: int
    log: str = ""


def compile_to_report(plan: Plan[Any]) -> Report:
    """NVRTC and ptxas, no GPU and no cache: registers and the larger of spill stores and loads."""
    import cuda.pathfinder
    from cupy.cuda import nvrtc

    from cupyflash._cuda.compile import OPTIONS
    from cupyflash._cuda.source import compose

    headers = cuda.pathfinder.find_nvidia_header_directory("cudart")
    options = (*OPTIONS, f"-arch=sm_{plan.arch}", f"-I{headers}", "-ftz=true", "--ptxas-options=-v")
    program = nvrtc.createProgram(compose(plan.constants), f"{plan.kernel}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        return Report(0, 0, nvrtc.getProgramLog(program))
    log = nvrtc.getProgramLog(program)
    spills = [int(found) for found in re.findall(r"(\d+) bytes spill", log)]
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", log)]
    if not spills or not registers:
        raise AssertionError(f"ptxas did not report registers and spills: {log!r}")
    return Report(max(registers), max(spills))


def allowance_key(constants: Constants) -> tuple[str, str, int]:
    """What a recorded spill is filed under: (kernel's constants, element, larger head-dim tile)."""
    values: Any = constants
    element = getattr(values, "element", getattr(values, "grad_element", "any"))
    dims = [getattr(values, name) for name in ("head_dim", "head_dim_v") if hasattr(values, name)]
    return type(constants).__name__, element, max(dims, default=0)
