"""The picture of a stored training run: loss curves over one another, and how far they are apart."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import stamp
from benchmarks.plot import STYLE, save

# The first curve is wide and the others are drawn over it in dashes: where curves coincide, all are seen.
LOOKS = [
    {"color": "#56b4e9", "linewidth": 5.0},
    {"color": "#d55e00", "linewidth": 2.6},
    {"color": "#000000", "linewidth": 1.4, "linestyle": (0, (4, 4))},
    {"color": "#009e73", "linewidth": 2.6, "linestyle": (0, (1, 4))},
]


def draw(head: dict[str, Any], rows: Sequence[dict[str, Any]], share: float, target: Path) -> None:
    """Left: nats per byte of held-out text, and of the first run's batches. Right: held out, less the first run's.

    `share` of the bigram's nats per byte is what runs should end below.
    """
    with importlib.import_module("matplotlib").rc_context(STYLE):
        figure = importlib.import_module("matplotlib.figure").Figure((10.5, 4.2), layout="constrained")
        curves, apart = figure.subplots(1, 2, width_ratios=[3, 2])
        first, bigram = rows[0], head["bigram"]
        curves.plot(range(1, len(first["train"]) + 1), first["train"], color="#cccccc", linewidth=0.6)
        looks = iter(LOOKS)
        for row in rows:
            steps, nats = zip(*row["held"], strict=True)
            differences = [ours - its for ours, (_, its) in zip(nats, first["held"], strict=True)]
            if row["seed"] == 0:
                look = next(looks)
                curves.plot(steps, nats, label=f"{row['way']}: {nats[-1]:.4f}", **look)
                apart.plot(steps, differences, **look)
            else:
                apart.plot(steps, differences, color="#999999", linewidth=0.8)
        for level, style, name in ((bigram, "-", "bigram"), (share * bigram, ":", f"{share:.0%} of it")):
            curves.axhline(level, color="black", linewidth=1, linestyle=style, label=f"{name}: {level:.4f}")
        curves.set(ylim=(None, 1.5 * bigram), xlabel="step", ylabel="nats per byte")
        curves.set_title("held-out text, with the loss at the last step; in grey the batches of the first")
        curves.legend(frameon=False, loc="upper right")
        apart.set(xlabel="step", title="the same, less the first; in grey the first with other seeds")
        figure.supxlabel(caption(head), fontsize=7.5, color="#555555")
    save(figure, target)


def caption(head: dict[str, Any]) -> str:
    """What ran where."""
    config, settings = head["config"], head["settings"]
    where = "CPU" if head["backend"] == "numpy" else stamp.gpu_of(head["machine"])
    return (
        f"{where}, {head['date']}; {config['num_layers']} layers of width {config['width']}, {config['heads']} heads, "
        f"batch {settings['batch']}, context {settings['context']}; float32, attention in {head['attention_dtype']}"
    )
