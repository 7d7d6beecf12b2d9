"""What a bfloat16 log-sum-exp costs: `python -m docs.figures.lse_precision` runs, prints the tables, draws the picture.

Keys in eight parts, each attended by the NumPy backend in float32; the parts' log-sum-exps are rounded to bfloat16, or
are not, and merged. The backward gets the whole one, rounded or not. All is held to the float64 reference.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cupyflash as cf
from benchmarks.plot import COLOURS, STYLE, save
from cupyflash.testing import reference, reference_bwd

PICTURE = Path(__file__).parents[1] / "images" / "lse-precision.svg"
QUERIES, HEADS, HEAD_DIM, PARTS = 64, 2, 64, 8
LENGTHS = (256, 1024, 4096, 16384, 65536)
SPREADS = (0.5, 1, 2, 4, 8)  # standard deviations of the scores
Errors = dict[str, dict[str, float]]  # by dtype, by result
USUAL_LENGTH, USUAL_SPREAD = 4096, 1
DTYPES = ("float32", "bfloat16")
WHAT = ("out", "dq", "dk", "dv")
COLUMNS = [(dtype, name) for dtype in reversed(DTYPES) for name in WHAT]
LINES = {"out": COLOURS["ours"], "dq": COLOURS["fa2"], "dk": COLOURS["cudnn"], "dv": COLOURS["efficient"]}


def measure(length: int, spread: float) -> Errors:
    """Of each result, with its LSEs rounded to each dtype: norm of the error over norm of the float64 result."""
    rng = np.random.default_rng(length)
    q, dout = rng.standard_normal((2, 1, QUERIES, HEADS, HEAD_DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, length, HEADS, HEAD_DIM), dtype=np.float32)
    q *= np.float32(spread)
    exact_out, _ = reference(q, k, v)
    exact = {"out": exact_out, **reference_bwd(q, k, v, dout)}

    parts = [slice(at, at + length // PARTS) for at in range(0, length, length // PARTS)]
    states = [cf.attn_fwd(q, k[:, part], v[:, part]) for part in parts]
    whole = cf.attn_fwd(q, k, v)
    errors = {}
    for dtype in DTYPES:
        merged = cf.merge_states([state.out for state in states], [rounded(state.lse, dtype) for state in states])
        grads = cf.attn_bwd(q, k, v, whole.out, rounded(whole.lse, dtype), dout)
        found = {"out": merged.out, **grads._asdict()}
        errors[dtype] = {
            name: float(np.linalg.norm(found[name] - exact[name]) / np.linalg.norm(exact[name])) for name in WHAT
        }
    return errors


def of_rounding_alone() -> float:
    """The same for a result that is exact and kept in bfloat16."""
    numbers = np.random.default_rng(0).standard_normal(2**16, dtype=np.float32)
    return float(np.linalg.norm(rounded(numbers, "bfloat16") - numbers) / np.linalg.norm(numbers))


def rounded(numbers: Any, dtype: str) -> Any:
    """float32 numbers as that dtype keeps them."""
    return numbers.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).astype(np.float32)


def table(first: str, runs: dict[float, Errors]) -> str:
    """As Markdown: a row for each run."""
    lines = [f"| {first} | {' | '.join(f'{name}, {dtype}' for dtype, name in COLUMNS)} |", "|---" * 9 + "|"]
    for key, errors in runs.items():
        lines.append(f"| {key:,} | {' | '.join(f'{errors[dtype][name]:.1e}' for dtype, name in COLUMNS)} |")
    return "\n".join(lines)


def picture(by_length: dict[float, Errors], by_spread: dict[float, Errors]) -> Any:
    """Both series, bfloat16 in full lines and float32 in dashed ones."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    with importlib.import_module("matplotlib").rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
        titles = f"keys (scores' spread {USUAL_SPREAD})", f"spread of the scores ({USUAL_LENGTH:,} keys)"
        for axis, title, runs in zip(axes, titles, (by_length, by_spread), strict=True):
            for dtype, style in (("bfloat16", "-"), ("float32", "--")):
                for name, colour in LINES.items():
                    values = [errors[dtype][name] for errors in runs.values()]
                    axis.plot(list(runs), values, style, color=colour, marker="o", label=f"{name}, {dtype} LSE")
            axis.axhline(of_rounding_alone(), color="#555555", linestyle=":", label="a result rounded to bfloat16")
            axis.set(xscale="log", yscale="log", xlabel=title)
            axis.set_xticks(list(runs), [f"{key:,}" for key in runs])
            axis.minorticks_off()
        axes[0].set_ylabel("error over norm")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def main() -> None:
    by_length: dict[float, Errors] = {length: measure(length, USUAL_SPREAD) for length in LENGTHS}
    by_spread: dict[float, Errors] = {spread: measure(USUAL_LENGTH, spread) for spread in SPREADS}
    print(
        table("keys", by_length), table("spread", by_spread), f"rounding alone: {of_rounding_alone():.1e}", sep="\n\n"
    )
    save(picture(by_length, by_spread), PICTURE)


if __name__ == "__main__":
    main()
