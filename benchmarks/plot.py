"""Pictures of stored runs: `python -m benchmarks.plot benchmarks/results/bench-*.json --out docs/images`.

bench-NAME.json becomes NAME.svg: time and peak memory beside standard attention where that took part, else TFLOP/s
beside the peers. A run without a series over N has no picture.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import NAMES, PASSES, Row, contestants, flop_ratio, length_label, load, rate, together, unique

# One colour for each contestant in every picture; told apart by colour-blind readers too (Okabe and Ito's set).
COLOURS = {
    "ours": "#0072b2",
    "fa2": "#d55e00",
    "fa4": "#f0e442",
    "cudnn": "#009e73",
    "efficient": "#cc79a7",
    "flex": "#e69f00",
    "deterministic": "#999999",
    "generic": "#56b4e9",
    "standard": "#555555",
}
WIDTH_INCHES, ROW_INCHES = 10.5, 2.1
STYLE = {
    "svg.fonttype": "none",  # text as text: a file of a few KiB
    "svg.hashsalt": "cupyflash",  # the same numbers give the same bytes
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Pictures of stored runs.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for file in options.files:
        figure = picture(load(file))
        if figure is None:
            print(f"{file}: no series over N, no picture")
            continue
        target = options.out / f"{file.stem.removeprefix('bench-')}.{options.format}"
        save(figure, target)
        print(target)
    return 0


def picture(records: Sequence[Row]) -> Any:
    """The figure of a run, or None."""
    rows = [record for record in records if record.get("series")]
    if not rows:
        return None
    [machine] = [record["machine"] for record in records if "machine" in record]
    source = f"{machine.get('GPU', 'no GPU')}, {rows[0]['dtype']}, {machine['date']}"
    with importlib.import_module("matplotlib").rc_context(STYLE):
        if any("standard" in row["times_ms"] for row in rows):
            return _beside_standard(together(rows), source)
        return _rates(rows, source)


def save(figure: Any, target: Path) -> None:
    with importlib.import_module("matplotlib").rc_context(STYLE):
        no_date = {"Date": None} if target.suffix == ".svg" else None
        figure.savefig(target, metadata=no_date, dpi=144, facecolor="white")


def _rates(rows: Sequence[Row], source: str) -> Any:
    """TFLOP/s by N: a row of panels for each pass, a column for each series."""
    who = [name for name in contestants(rows) if name in COLOURS]
    panels = [
        (one_pass, lambda row, name, one_pass=one_pass: rate(row, name) if row["pass"] == one_pass else None)
        for one_pass in PASSES
    ]
    series = unique(row["series"] for row in rows)
    figure, axes = _panels(rows, panels, who, {name: name for name in series}, source)
    for row_of_axes, one_pass in zip(axes, PASSES, strict=True):
        row_of_axes[0].set_ylabel(f"{one_pass}, TFLOP/s")
        row_of_axes[0].set_ylim(bottom=0)
    return figure


def _beside_standard(rows: Sequence[Row], source: str) -> Any:
    """Time and peak memory of forward and backward together, by N, both axes logarithmic."""
    titles = {row["series"]: f"{row['series']}\n{flop_ratio(row):.2f} times standard's FLOPs" for row in rows}
    panels = [
        ("time", lambda row, name: row["times_ms"][name][1] if name in row["times_ms"] else None),
        ("memory", lambda row, name: row["peak_bytes"][name] / 2**20 if name in row["peak_bytes"] else None),
    ]
    figure, axes = _panels(rows, panels, ["ours", "standard"], titles, f"{source}; forward and backward together")
    for row_of_axes, label in zip(axes, ("time, ms", "peak memory, MiB"), strict=True):
        row_of_axes[0].set_ylabel(label)
        row_of_axes[0].set_yscale("log")
        row_of_axes[0].margins(y=0.12)
        row_of_axes[0].yaxis.set_major_formatter("{x:,g}")
        for panel in row_of_axes:
            panel.minorticks_off()
            _say_last_ratio(panel)
    return figure


def _panels(
    rows: Sequence[Row],
    contents: Sequence[tuple[str, Callable[[Row, str], float | None]]],
    who: Sequence[str],
    titles: dict[str, str],
    source: str,
) -> tuple[Any, Any]:
    """A row of panels for each content, a column for each series, a curve for each contestant."""
    pyplot: Any = importlib.import_module("matplotlib.figure")
    figure = pyplot.Figure((WIDTH_INCHES, ROW_INCHES * len(contents) + 0.8), layout="constrained")
    axes = figure.subplots(len(contents), len(titles), sharex=True, sharey="row", squeeze=False)
    for row_of_axes, (_, value) in zip(axes, contents, strict=True):
        for panel, series in zip(row_of_axes, titles, strict=True):
            for name in who:
                points = [(row["length"], value(row, name)) for row in rows if row["series"] == series]
                points = sorted((n, y) for n, y in points if y is not None)
                if points:
                    emphasis = {"linewidth": 2.2, "zorder": 3} if name == "ours" else {}
                    panel.plot(*zip(*points, strict=True), "o-", color=COLOURS[name], label=NAMES[name], **emphasis)
    lengths = sorted({row["length"] for row in rows})
    for panel, title in zip(axes[0], titles.values(), strict=True):
        panel.set_title(title)
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [length_label(n) for n in lengths])
        panel.minorticks_off()
    for panel in axes[-1]:
        panel.set_xlabel("N")
        panel.tick_params(axis="x", labelsize=7.5)
    handles = {
        label: line for panel in axes.flat for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=len(handles), frameon=False)
    figure.supxlabel(source, fontsize=7.5, color="#555555")
    return figure, axes


def _say_last_ratio(panel: Any) -> None:
    """At the longest N that both curves of a panel reach: how many times ours the other is."""
    curves = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in panel.get_lines()}
    ours, standard = (curves.get(NAMES[name], {}) for name in ("ours", "standard"))
    if common := ours.keys() & standard.keys():
        n = max(common)
        text = f"{standard[n] / ours[n]:.1f}×"
        panel.annotate(text, (n, standard[n]), (-4, 2), textcoords="offset points", ha="right", color="#555555")


if __name__ == "__main__":
    sys.exit(main())
