"""The picture of a `bench`: speed over length, a panel for each pass."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from cupyflash._cli._say import UsageError
from cupyflash._errors import UnsupportedError

_SUFFIXES = (".png", ".svg")


def require(file: Path) -> None:
    """Raises, before minutes of measuring, for what could not be written after them."""
    if file.suffix not in _SUFFIXES or not file.absolute().parent.is_dir():
        raise UsageError(f"bench: `--plot` is {file}; a .png or .svg in a folder that exists is accepted.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("`--plot` needs matplotlib, which is not installed; `pip install matplotlib`.")


def draw(found: dict[str, Any], title: str, file: Path) -> None:
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(9, 3.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    passes = list(dict.fromkeys(row["pass"] for row in found["rows"]))
    for panel, one_pass in zip(figure.subplots(1, len(passes)), passes, strict=True):
        rows = [row for row in found["rows"] if row["pass"] == one_pass]
        for name in rows[0]["ms"]:
            speeds = [row["flops"] / row["ms"][name]["median"] / 1e6 for row in rows]
            panel.plot([row["length"] for row in rows], speeds, marker="o", label=name)
        panel.set(title=one_pass, xlabel="N", ylabel="GFLOP/s", xscale="log", ylim=(0, None))
        lengths = [row["length"] for row in rows]
        panel.set_xticks(lengths, labels=map(str, lengths))
        panel.minorticks_off()
        panel.legend()
    figure.savefig(file)
