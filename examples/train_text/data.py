"""The text, its split, and the bigram model to beat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY = 256  # bytes


def load(path: str | None) -> np.ndarray:
    """uint8 [bytes]: the file, or without one the English texts of Python's own `help()`; no paragraph twice.

    Those texts quote one another, and a paragraph on both sides of the split would be known before it is asked for.
    """
    if path is not None:
        text = Path(path).read_bytes()
    else:
        from pydoc_data.topics import topics  # a megabyte of strings: only when wanted

        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    paragraphs = dict.fromkeys(text.split(b"\n\n"))  # keeps the order and the first of each
    return np.frombuffer(b"\n\n".join(paragraphs), np.uint8)


def split(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The text without its last tenth, for fitting; and the last tenth, held out."""
    begin_held = len(text) * 9 // 10
    return text[:begin_held], text[begin_held:]


def random_windows(
    text: np.ndarray, batch: int, context: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, N] from random places in the text, and targets [B, N]: the byte that follows each of them."""
    begin = rng.integers(0, len(text) - context, batch)
    window = text[begin[:, None] + np.arange(context + 1)].astype(np.int64)
    return window[:, :-1], window[:, 1:]


def every_window(text: np.ndarray, batch: int, context: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and targets that ask for every byte of the text but its first, each exactly once."""
    tokens, targets = text[:-1].astype(np.int64), text[1:].astype(np.int64)
    whole = len(tokens) // context * context
    rows = tokens[:whole].reshape(-1, context), targets[:whole].reshape(-1, context)
    for begin in range(0, len(rows[0]), batch):
        yield rows[0][begin : begin + batch], rows[1][begin : begin + batch]
    if whole < len(tokens):
        yield tokens[None, whole:], targets[None, whole:]


def bigram_nats(train: np.ndarray, held: np.ndarray, add: float = 0.01) -> float:
    """Nats per byte, on what `every_window(held)` asks for, of P(b | a) = (count(ab) + add) / (count(a) + 256 add)."""
    counts = np.full((VOCABULARY, VOCABULARY), add)
    np.add.at(counts, (train[:-1], train[1:]), 1)
    log_p = np.log(counts / counts.sum(axis=1, keepdims=True))
    return -float(log_p[held[:-1], held[1:]].mean())


def bits(nats: float) -> float:
    return nats / math.log(2)
