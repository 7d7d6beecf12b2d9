"""What computing activations again saves and costs: `python -m benchmarks.recompute --backend cupy --json FILE`.

A training step of the transformer in `examples/train_text`, at a size of its own, in three ways: everything is kept,
attention's P among it; attention is cupyflash's, which computes P again by construction; the feed-forward blocks are
computed again too, by choice. The gradients of all ways are compared before anything is measured. Where P is too large
to be kept, what layers would keep stands alone, and the table says that it is arithmetic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks import stamp
from examples.train_text import data
from examples.train_text.__main__ import array_module
from examples.train_text.model import Config, Keep, Transformer
from examples.train_text.optim import Adam

WAYS = {
    "everything kept, P too": Keep(p=True),
    "attention computed again": Keep(),
    "attention and feed-forward computed again": Keep(feed_forward=False),
}
# By backend: a size and contexts that take seconds there, and up to which context P is kept.
SIZES = {
    "numpy": (Config(num_layers=4, width=128, heads=4, hidden=512), (512, 1024), 1024),
    "cupy": (Config(num_layers=8, width=512, heads=8, hidden=2048), (2048, 4096, 16384), 4096),
}
REPEATS = 5  # the median of so many steps, after one that compiles and allocates
LARGEST_DIFFERENCE = 1e-3  # float32, of the largest gradient in an array: sums over all positions, in another order


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recompute", description="Kept or computed again.")
    parser.add_argument("--backend", choices=list(SIZES), default="numpy")
    parser.add_argument("--context", type=int, nargs="+", help="bytes that a step sees; default: by backend")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row here as one line of JSON")
    options = parser.parse_args(arguments)
    config, contexts, largest_with_p = SIZES[options.backend]
    xp = array_module(options.backend)
    rows = [
        row
        for context in options.context or contexts
        for row in measure(xp, config, context, context <= largest_with_p)
    ]
    print(table(config, rows))
    if options.json:
        lines = [stamp.record(config=vars(config)), *rows]
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return 0


def measure(xp: ModuleType, config: Config, context: int, keeps_p: bool) -> list[dict[str, Any]]:
    """A row for each way at one context; without peak and time where P is not kept though the way asks for it."""
    rows, first = [], None
    for way, keep in WAYS.items():
        kept = config.num_layers * keep.bytes_per_layer(config, 1, context)
        row: dict[str, Any] = {"context": context, "way": way, "kept_bytes": kept, "peak_bytes": None, "step_ms": None}
        rows.append(row)
        if keep.p and not keeps_p:
            continue
        grads, row["peak_bytes"], row["step_ms"] = train(xp, config, keep, context)
        first = first or grads
        for name, grad in grads.items():
            difference, largest = np.abs(grad - first[name]).max(), np.abs(first[name]).max()
            if not difference <= LARGEST_DIFFERENCE * largest:
                given = f"the gradient of {name} is off by {difference:.1e} of {largest:.1e}"
                raise AssertionError(f"{way}, context {context}: {given}")
    return rows


def train(xp: ModuleType, config: Config, keep: Keep, context: int) -> tuple[dict[str, np.ndarray], int, float]:
    """A few steps: the gradients of the first, the peak of another, the time of the rest."""
    rng = np.random.default_rng(0)  # the same weights and bytes for all ways
    model = Transformer(config, xp, rng, keep=keep)
    tokens, targets = xp.asarray(rng.integers(0, data.VOCABULARY, (2, 1, context)))
    grads = {name: _host(grad) for name, grad in model.loss_and_grads(tokens, targets)[1].items()}
    optimizer = Adam(xp, model.params)

    def step() -> None:
        optimizer.step(model.loss_and_grads(tokens, targets)[1], 1e-4)

    weights_and_optimizer = 3 * sum(value.nbytes for value in model.params.values())
    return grads, peak_bytes(xp, step, weights_and_optimizer), step_ms(xp, step)


def peak_bytes(xp: ModuleType, step: Callable[[], None], held: int) -> int:
    """The most memory that arrays take in a step: what CuPy's pool grows to, or `held` and what is traced."""
    if xp is not np:
        pool = xp.get_default_memory_pool()
        pool.free_all_blocks()
        step()
        return pool.total_bytes()
    tracemalloc.start()
    try:
        step()
        return held + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def step_ms(xp: ModuleType, step: Callable[[], None]) -> float:
    """Median time of a step."""
    times = []
    for _ in range(REPEATS):
        _wait(xp)
        begin = time.perf_counter()
        step()
        _wait(xp)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def table(config: Config, rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        f"A training step of {config.num_layers} layers of width {config.width}, {config.heads} heads, feed-forward "
        f"{config.hidden}, one sequence, float32:",
        "",
        "| context | way | layers keep | peak memory | step |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        kept = _mebibytes(row["kept_bytes"])
        found = (
            f"{_mebibytes(row['peak_bytes'])} | {row['step_ms']:,.1f} ms"
            if row["step_ms"]
            else "by arithmetic | not run"
        )
        lines.append(f"| {row['context']:,} | {row['way']} | {kept} | {found} |")
    return "\n".join(lines)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def _wait(xp: ModuleType) -> None:
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


if __name__ == "__main__":
    sys.exit(main())
