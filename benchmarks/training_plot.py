"""The picture of a stored training run: loss curves over one another, and how far they are apart."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plot import STYLE, save

# The first curve is wide and the others are drawn over it in dashes: where curves coincide, all are seen.
LOOKS = [
    {"color": "#56b4e9", "linewidth": 5.0},
    {"color": "#d55e00", "linewidth": 2.6},
    {"color": "#000000", "linewidth": 1.4, "linestyle": (0, (4, 4))},
    {"color": "#009e73", "linewidth": 2.6, "linestyle": (0, (1, 4))},
]
SEED_LOOK = {"color": "#999999", "linewidth": 0.8}


def draw(head: dict[str, Any], rows: Sequence[dict[str, Any]], target: Path) -> None:
    """Left: nats per byte of held-out text, and of each step's batch, faint. Right: held out, less the first run's."""
    with importlib.import_module("matplotlib").rc_context(STYLE):
        figure = importlib.import_module("matplotlib.figure").Figure((10.5, 4.2), layout="constrained")
        curves, differences = figure.subplots(1, 2, width_ratios=[3, 2])
        first, *_ = rows
        curves.plot(range(1, len(first["train"]) + 1), first["train"], color="#cccccc", linewidth=0.6)
        looks = iter(LOOKS)
        for row in rows:
            is_way = row["seed"] == 0
            look = next(looks) if is_way else SEED_LOOK
            steps, nats = zip(*row["held"], strict=True)
            if is_way:
                curves.plot(steps, nats, label=f"{row['way']}: {nats[-1]:.4f}", **look)
            apart = [mine - its for mine, (_, its) in zip(nats, first["held"], strict=True)]
            name = row["way"] if is_way else f"{row['way']}, seed {row['seed']}"
            differences.plot(steps, apart, label=name, **look)
        bigram = head["bigram"]
        curves.axhline(bigram, color="black", linewidth=1, label=f"bigram: {bigram:.4f}")
        curves.axhline(
            0.9 * bigram, color="black", linewidth=1, linestyle=":", label=f"a tenth below: {0.9 * bigram:.4f}"
        )
        top = 1.3 * bigram
        curves.set(
            xlabel="step",
            ylabel="nats per byte",
            ylim=(None, top),
            title="loss on held-out text, and of batches (grey)",
        )
        curves.legend(frameon=False)
        differences.set(xlabel="step", title=f"the same, less that of {first['way']}")
        differences.legend(frameon=False, fontsize=7.5)
        figure.supxlabel(caption(head), fontsize=7.5, color="#555555")
    save(figure, target)


def caption(head: dict[str, Any]) -> str:
    """What ran where."""
    config, settings, machine = head["config"], head["settings"], head["machine"]
    where = machine["GPU"] if head["attention_dtype"] != "float32" else "CPU"
    return (
        f"{where}, {head['date']}; {config['num_layers']} layers of width {config['width']}, {config['heads']} heads, "
        f"batch {settings['batch']}, context {settings['context']}; float32, attention in {head['attention_dtype']}"
    )
