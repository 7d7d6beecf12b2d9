"""Train a small language model on real text and see whether it beats a bigram model: python -m examples.train_text"""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType

import numpy as np

from . import data
from .model import Config, Keep, Transformer
from .report import Progress, draw_curve
from .train import ByHand, Settings, sample, train

SAMPLE_BYTES = 240
ASK_INFO = "`python -m cupyflash info` says what runs here and why not"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.train_text", description=__doc__)
    parser.add_argument("--backend", choices=["numpy", "cupy"], default="numpy", help="where the arrays live")
    parser.add_argument("--text", metavar="FILE", help="train on this file; default: the texts of Python's help()")
    parser.add_argument("--steps", type=int, default=Settings.num_steps, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=Settings.context, help="bytes seen; default: %(default)s")
    parser.add_argument("--batch", type=int, default=Settings.batch, help="windows a step; default: %(default)s")
    parser.add_argument("--recompute", choices=["ffn"], help="compute the feed-forward blocks again in the backward")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; default: %(default)s")
    parser.add_argument("--plot", metavar="FILE", default="train_text.png", help="the loss curve; default: %(default)s")
    arguments = parser.parse_args(argv)
    for name in ("steps", "context", "batch"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: at least 1")
    return arguments


def array_module(name: str) -> ModuleType:
    """NumPy, or CuPy where it finds a GPU."""
    try:
        xp = importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"--backend {name}: {error}; {ASK_INFO}")
    if name == "cupy" and not xp.cuda.is_available():
        sys.exit(f"--backend {name}: CuPy is here, but no GPU that it can use; {ASK_INFO}")
    return xp


def printable(text: bytes) -> str:
    """The text with nothing in it that would steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "." for c in text.decode(errors="backslashreplace"))


def main(argv: list[str] | None = None) -> int:
    """0 if the model beats the bigram on the held-out text, else 1."""
    arguments = parse(argv)
    xp = array_module(arguments.backend)
    settings = Settings(num_steps=arguments.steps, context=arguments.context, batch=arguments.batch)
    config, keep = Config(), Keep(feed_forward=arguments.recompute != "ffn")
    rng = np.random.default_rng(arguments.seed)

    text = data.load(arguments.text)
    fit, held = data.split(text)
    if len(fit) <= settings.context or len(held) < 2:
        sys.exit(f"{arguments.text}: {len(text)} bytes of distinct paragraphs; need {2 * settings.context} or more")
    bigram = data.bigram_nats(fit, held)
    model = Transformer(config, xp, rng, keep=keep)
    num_params = sum(value.size for value in model.params.values())
    source = arguments.text or "Python's help() texts"
    print(f"text       {source}: {len(fit):,} bytes to learn from, {len(held):,} held out")
    print(f"bigram     {bigram:.3f} nats/byte ({data.bits(bigram):.3f} bits/byte) on the held-out bytes: to be beaten")
    print(
        f"model      {num_params:,} parameters, {config.num_layers} layers, {config.heads} heads, context "
        f"{settings.context}; arrays and attention on {arguments.backend}"
    )

    kept = config.num_layers * keep.bytes_per_layer(config, settings.batch, settings.context)
    again = "P and the feed-forward blocks are" if arguments.recompute else "P alone is"
    print(f"memory     layers keep {kept / 2**20:,.1f} MiB a step; {again} computed again")

    history = train(ByHand(model), fit, held, settings, rng, Progress(settings.num_steps))
    nats = history.held[-1][1]
    is_better = nats < bigram

    tokens, _ = data.random_windows(fit, settings.batch, settings.context, rng)
    lse_bytes, p_bytes = model.attention_bytes(xp.asarray(tokens))
    print(
        f"attention  a step keeps {lse_bytes >> 10:,} KiB of LSE where P would take {p_bytes >> 10:,} KiB, "
        f"{p_bytes // lse_bytes} times as much"
    )
    if draw_curve(arguments.plot, history, bigram):
        print(f"curve      {arguments.plot}")
    else:
        print("curve      not drawn: matplotlib is missing; python -m pip install 'cupyflash[plot]'")
    written = sample(model, held[:64].tobytes(), SAMPLE_BYTES, settings.context, rng)[64:]
    print("sample     what the model writes after the first held-out bytes:")
    print("           | " + printable(written).replace("\n", "\n           | "))

    verdict, side = ("BEATS", "below") if is_better else ("DOES NOT BEAT", "above")
    print(
        f"verdict    {verdict} the bigram model: {nats:.3f} nats/byte ({data.bits(nats):.3f} bits/byte) held out, "
        f"{abs(1 - nats / bigram):.1%} {side} its {bigram:.3f}"
    )
    return 0 if is_better else 1


if __name__ == "__main__":
    sys.exit(main())
