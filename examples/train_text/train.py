"""Training, the judgement on held-out text, and a sample of what was learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from . import data
from .model import Transformer
from .optim import Adam, learning_rate


@dataclass(frozen=True)
class Settings:
    """What a run does; with the defaults it takes about a minute on two cores."""

    num_steps: int = 600
    batch: int = 8
    context: int = 128
    peak_rate: float = 3e-3
    num_evaluations: int = 6


@dataclass
class History:
    """Nats per byte: of every step's batch, and of the whole held-out text at some steps."""

    train: list[float] = field(default_factory=list)
    held: list[tuple[int, float]] = field(default_factory=list)


class Learner(Protocol):
    """A model and its optimizer in any library; tokens and targets [B, N] come as NumPy arrays."""

    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Mean nats per byte."""
        ...

    def step(self, tokens: np.ndarray, targets: np.ndarray, rate: float) -> float:
        """One step of the optimizer; returns the loss before it."""
        ...


class ByHand:
    """The transformer with hand-written backpropagation, and its Adam."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.optimizer = model, Adam(model.xp, model.params)

    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        return float(self.model.loss(self.model.xp.asarray(tokens), self.model.xp.asarray(targets)))

    def step(self, tokens: np.ndarray, targets: np.ndarray, rate: float) -> float:
        loss, grads = self.model.loss_and_grads(self.model.xp.asarray(tokens), self.model.xp.asarray(targets))
        self.optimizer.step(grads, rate)
        return float(loss)


def held_out_nats(learner: Learner, held: np.ndarray, settings: Settings) -> float:
    """Nats per byte over the held-out text: all but its first byte, each from at most `context` bytes before it."""
    total = 0.0
    for tokens, targets in data.every_window(held, settings.batch, settings.context):
        total += learner.loss(tokens, targets) * targets.size
    return total / (len(held) - 1)


def train(
    learner: Learner,
    text: np.ndarray,
    held: np.ndarray,
    settings: Settings,
    rng: np.random.Generator,
    report: Callable[[History], None],
) -> History:
    """Fits a model to the text. The held-out text is only looked at: it changes no parameter and picks no step."""
    history = History()
    parts = settings.num_evaluations
    evaluate_at = {settings.num_steps * part // parts for part in range(1, parts + 1)}
    for step in range(settings.num_steps):
        tokens, targets = data.random_windows(text, settings.batch, settings.context, rng)
        rate = learning_rate(step, settings.num_steps, settings.peak_rate)
        history.train.append(learner.step(tokens, targets, rate))
        if step + 1 in evaluate_at:
            history.held.append((step + 1, held_out_nats(learner, held, settings)))
        report(history)
    return history


def sample(
    model: Transformer, prompt: bytes, num_bytes: int, context: int, rng: np.random.Generator, temperature: float = 0.7
) -> bytes:
    """The prompt and what follows it. The largest of logits / temperature + Gumbel noise draws from their softmax."""
    text = list(prompt)
    for _ in range(num_bytes):
        logits = model.logits(model.xp.asarray([text[-context:]]))[0, -1]
        noise = model.xp.asarray(rng.gumbel(size=len(logits)))
        text.append(int((logits / temperature + noise).argmax()))
    return bytes(text)
