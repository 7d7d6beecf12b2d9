"""The same model, its first weights and its optimizer in JAX: gradients and Adam are each one jitted function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cupyflash.jax import attention

from . import layers
from .differentiated import Attention, logits
from .layers import Array
from .model import Config, Transformer
from .optim import BETAS, EPS


def cupyflash_attention(q: Array, k: Array, v: Array, slopes: Array) -> Array:
    out, _ = attention(q, k, v, causal=True, alibi_slopes=slopes, out_dtype="float32")
    return out


class InJax:
    """A `train.Learner` on JAX's default device; q, k and v are rounded to `attention_dtype`."""

    def __init__(
        self, config: Config, rng: np.random.Generator, attention: Attention, attention_dtype: str = "float32"
    ) -> None:
        start = Transformer(config, np, rng)
        slopes = jnp.asarray(start.slopes)
        self.params = {name: jnp.asarray(value) for name, value in start.params.items()}
        self.mean = jax.tree.map(jnp.zeros_like, self.params)
        self.square = jax.tree.map(jnp.zeros_like, self.params)
        self.num_steps = 0

        def rounded(q: Array, k: Array, v: Array) -> Array:
            return attention(q.astype(attention_dtype), k.astype(attention_dtype), v.astype(attention_dtype), slopes)

        def loss_of(params: dict[str, Array], tokens: Array, targets: Array) -> Array:
            with jax.default_matmul_precision("highest"):  # float32 is TF32 on a GPU otherwise
                guesses = logits(params, tokens, config, rounded)
            return layers.cross_entropy(jnp, guesses, targets.reshape(-1))[0]

        self.loss_and_grads: Any = jax.jit(jax.value_and_grad(loss_of))
        self._loss: Any = jax.jit(loss_of)
        self._adam: Any = jax.jit(_adam)

    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        return float(self._loss(self.params, tokens, targets))

    def step(self, tokens: np.ndarray, targets: np.ndarray, rate: float) -> float:
        self.num_steps += 1
        loss, grads = self.loss_and_grads(self.params, tokens, targets)
        corrections = [1 - beta**self.num_steps for beta in BETAS]
        self.params, self.mean, self.square = self._adam(self.params, grads, self.mean, self.square, rate, *corrections)
        return float(loss)


def _adam(
    params: Any, grads: Any, mean: Any, square: Any, rate: Array, correct_1: Array, correct_2: Array
) -> tuple[Any, Any, Any]:
    """`optim.Adam` as a function from old values to new ones."""
    beta_1, beta_2 = BETAS
    mean = jax.tree.map(lambda m, g: m + (1 - beta_1) * (g - m), mean, grads)
    square = jax.tree.map(lambda s, g: s + (1 - beta_2) * (g * g - s), square, grads)

    def updated(value: Array, m: Array, s: Array) -> Array:
        return value - (rate / correct_1) * m / (jnp.sqrt(s / correct_2) + EPS)

    return jax.tree.map(updated, params, mean, square), mean, square
