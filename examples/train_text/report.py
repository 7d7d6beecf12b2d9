"""What the user sees while it runs, and the picture afterwards."""

from __future__ import annotations

import sys
import time

import numpy as np

from .train import History

BAR_WIDTH = 12  # the whole line fits in 80 columns
SMOOTH_STEPS = 25  # one batch's loss is noisy; its mean over these is shown


class Progress:
    """One line that rewrites itself on a terminal; elsewhere a line for each judgement on the held-out text."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.begin, self.is_terminal = num_steps, time.perf_counter(), sys.stdout.isatty()
        self.num_held = 0

    def __call__(self, history: History) -> None:
        step, is_new = len(history.train), len(history.held) > self.num_held
        self.num_held = len(history.held)
        if not (self.is_terminal or is_new):
            return
        seconds = time.perf_counter() - self.begin
        filled = BAR_WIDTH * step // self.num_steps
        loss = np.mean(history.train[-SMOOTH_STEPS:])
        held = f"{history.held[-1][1]:.3f}" if history.held else "  -  "
        left = seconds / step * (self.num_steps - step)
        line = (
            f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {step}/{self.num_steps}  train {loss:.3f}  held out {held}  "
            f"{step / seconds:.1f} steps/s  {left:.0f} s left"
        )
        if self.is_terminal:
            print(f"\r{line:<79}", end="\n" if step == self.num_steps else "", flush=True)
        else:
            print(line, flush=True)


def draw_curve(path: str, history: History, bigram: float) -> bool:
    """Writes the loss curve as PNG; False when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    smooth_steps = min(SMOOTH_STEPS, len(history.train))
    smooth = np.convolve(history.train, np.ones(smooth_steps) / smooth_steps, "valid")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(np.arange(1, len(history.train) + 1), history.train, color="tab:blue", alpha=0.25, label="training batch")
    axes.plot(np.arange(len(smooth)) + smooth_steps, smooth, color="tab:blue", label=f"mean of {smooth_steps} batches")
    axes.plot(*zip(*history.held, strict=True), "o-", color="tab:orange", label="held-out text")
    axes.axhline(bigram, color="black", linestyle="--", label=f"bigram on held-out text: {bigram:.3f}")
    axes.set(xlabel="step", ylabel="nats per byte", title="Byte-level transformer, attention by cupyflash")
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
    return True
