"""The same small model on the same text, trained four ways: `python -m benchmarks.training --backend cupy --json FILE`.

The transformer of `examples/train_text` by hand-written backpropagation over `attn_fwd` and `attn_bwd`, by torch with
its own attention, by torch with `cupyflash.torch`, and by JAX with `cupyflash.jax`: first weights, batches and their
order, optimizer and learning rates are the same. The first of them runs with other seeds too: how far those end apart
is the noise that the four are held to. All must end at least a tenth below the bigram model on the held-out text.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import stamp, training_plot
from examples.train_text import data
from examples.train_text.__main__ import array_module
from examples.train_text.model import Config, Transformer
from examples.train_text.report import Progress
from examples.train_text.train import ByHand, History, Learner, Settings, train

# By backend: the model, the run, and what q, k and v are rounded to; all else is float32.
SIZES = {
    "numpy": (Config(), Settings(num_evaluations=12), "float32"),
    "cupy": (
        Config(num_layers=4, width=256, heads=4, hidden=1024),
        Settings(num_steps=400, batch=16, context=256, peak_rate=2e-3, num_evaluations=16),
        "bfloat16",
    ),
}
TARGET = 0.9  # of the bigram's nats per byte
OTHER_SEEDS = 1, 2, 3

Row = dict[str, Any]


class Absent(Exception):
    """Why a way to train cannot run here."""


def by_hand(backend: str, config: Config, rng: np.random.Generator, dtype: str) -> Learner:
    return ByHand(Transformer(config, array_module(backend), rng, attention_dtype=dtype))


def torch_sdpa(backend: str, config: Config, rng: np.random.Generator, dtype: str) -> Learner:
    in_torch, device = _torch(backend)
    return in_torch.InTorch(config, rng, in_torch.sdpa_attention, device, dtype)


def torch_cupyflash(backend: str, config: Config, rng: np.random.Generator, dtype: str) -> Learner:
    in_torch, device = _torch(backend)
    return in_torch.InTorch(config, rng, in_torch.cupyflash_attention, device, dtype)


def jax_cupyflash(backend: str, config: Config, rng: np.random.Generator, dtype: str) -> Learner:
    jax = _imported("jax")
    try:
        [device, *_] = jax.devices("gpu" if backend == "cupy" else "cpu")
    except RuntimeError as error:
        raise Absent(str(error)) from None
    _imported("cupyflash.jax")
    jax.config.update("jax_default_device", device)
    in_jax = _imported("examples.train_text.in_jax")
    return in_jax.InJax(config, rng, in_jax.cupyflash_attention, dtype)


WAYS: dict[str, Callable[[str, Config, np.random.Generator, str], Learner]] = {
    "by hand, cupyflash": by_hand,
    "torch, its own attention": torch_sdpa,
    "torch, cupyflash": torch_cupyflash,
    "JAX, cupyflash": jax_cupyflash,
}


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(str(error)) from None


def _torch(backend: str) -> tuple[Any, str]:
    device = "cuda" if backend == "cupy" else "cpu"
    if device == "cuda" and not _imported("torch").cuda.is_available():
        raise Absent("this torch finds no GPU")
    return _imported("examples.train_text.in_torch"), device


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all that run here end where the docstring above says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description="One model, trained four ways.")
    parser.add_argument("--backend", choices=list(SIZES), default="numpy", help="numpy: all on the CPU; cupy: a GPU")
    parser.add_argument("--steps", type=int, help="of the optimizer; default: by backend")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run here as one line of JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the curves")
    parser.add_argument("--draw", type=Path, metavar="FILE.json", help="train nothing; show this stored run")
    options = parser.parse_args(arguments)
    if options.draw:
        head, *rows = map(json.loads, options.draw.read_text("utf-8").splitlines())
    else:
        head, *rows = measure(options.backend, options.steps)
        head["command"] = " ".join(
            ["python -m benchmarks.training", *(sys.argv[1:] if arguments is None else arguments)]
        )
    print(table(head, rows))
    if options.json:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in [head, *rows]), "utf-8")
    if options.plot:
        training_plot.draw(head, rows, TARGET, options.plot)
    return 0 if verdict(head, rows)[0] else 1


def measure(backend: str, num_steps: int | None = None) -> list[Row]:
    """What the runs have in common, then a row for each run."""
    config, settings, dtype = SIZES[backend]
    if num_steps is not None:
        settings = Settings(**{**vars(settings), "num_steps": num_steps})
    fit, held = data.split(data.load(None))
    rows: list[Row] = []
    absent: dict[str, str] = {}
    first = next(iter(WAYS))
    for way, seed in [*((way, 0) for way in WAYS), *((first, seed) for seed in OTHER_SEEDS)]:
        rng = np.random.default_rng(seed)  # of the weights, then of the batches
        try:
            learner = WAYS[way](backend, config, rng, dtype)
        except Absent as why:
            absent[way] = str(why)
            print(f"{way}: absent: {why}")
            continue
        print(f"{way}, seed {seed}")
        history = train(learner, fit, held, settings, rng, Progress(settings.num_steps))
        rows.append({"way": way, "seed": seed, **_rounded(history)})
    versions = {name: sys.modules[name].__version__ for name in ("torch", "jax") if sys.modules.get(name)}
    head = stamp.record(
        backend=backend,
        config=vars(config),
        settings=vars(settings),
        attention_dtype=dtype,
        bigram=data.bigram_nats(fit, held),
        versions=versions,
        absent=absent,
    )
    return [head, *rows]


def _rounded(history: History) -> Row:
    return {
        "train": [round(loss, 5) for loss in history.train],
        "held": [(step, round(nats, 6)) for step, nats in history.held],
    }


def verdict(head: Row, rows: Sequence[Row]) -> tuple[bool, str]:
    """Whether all end a tenth below the bigram or lower, and the ways no further apart than seeds do; and in words."""
    ends = {(row["way"], row["seed"]): row["held"][-1][1] for row in rows}
    of_ways = [end for (_, seed), end in ends.items() if seed == 0]
    of_seeds = [end for (way, _), end in ends.items() if way == rows[0]["way"]]
    apart, noise = (max(found) - min(found) for found in (of_ways, of_seeds))
    is_low, is_close = all(end <= TARGET * head["bigram"] for end in ends.values()), apart <= noise
    return is_low and is_close, (
        f"{'All' if is_low else 'NOT all'} runs end at least a tenth below the bigram's {head['bigram']:.3f}. The "
        f"{len(of_ways)} ways end {apart:.2g} apart, {len(of_seeds)} seeds of one way {noise:.2g}: "
        f"{'within' if is_close else 'BEYOND'} seed noise."
    )


def table(head: Row, rows: Sequence[Row]) -> str:
    """Markdown: where each run ends, when it was first a tenth below the bigram, and the verdict."""
    lines = [
        "| way | seed | held out, nats per byte | below the bigram | a tenth below at step |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        end = row["held"][-1][1]
        reached = [f"{step:,}" for step, nats in row["held"] if nats <= TARGET * head["bigram"]] or ["never"]
        below = 100 * (1 - end / head["bigram"])
        lines.append(f"| {row['way']} | {row['seed']} | {end:.4f} | {below:.1f} % | {reached[0]} |")
    lines += [f"| {way} | | not run: {why} | | |" for way, why in head["absent"].items()]
    return "\n".join([*lines, "", verdict(head, rows)[1]])


if __name__ == "__main__":
    sys.exit(main())
