"""The transformer: forward, backward, loss. Parameters and their gradients are dictionaries under the same names."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from . import layers, standard
from .data import VOCABULARY
from .layers import Array

# Central differences in float64: truncation ~ step² and rounding ~ 2⁻⁵²/step are both near 1e-10. The second derivative
# of the squared ReLU jumps at zero, which costs up to step/2 where a step crosses it. A wrong term costs far more.
GRADCHECK_STEP = 1e-5
GRADCHECK_RTOL = 1e-5  # of the largest gradient in the array


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    num_layers: int = 2
    width: int = 128
    heads: int = 8
    hidden: int = 512
    vocabulary: int = VOCABULARY

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Keep:
    """What a step keeps of its forward for its backward; the rest is computed again there."""

    p: bool = False  # attention's N x N probabilities: never with cupyflash's attention, which keeps lse
    feed_forward: bool = True  # the inside of the feed-forward block; its input is kept always

    def bytes_per_layer(self, config: Config, batch: int, length: int, itemsize: int = 4) -> int:
        """Of the arrays in a `Block`, where attention has the model's dtype."""
        widths = 7 * config.width + 1  # x, norm_1, qkv, out, middle; inverse_rms_1
        if self.feed_forward:
            widths += config.width + config.hidden + 1
        widths += config.heads * (length if self.p else 1)
        return batch * length * widths * itemsize


@dataclass
class FeedForward:
    """What the feed-forward block computes on its way from `middle`."""

    norm_2: Array
    inverse_rms_2: Array
    hidden: Array


@dataclass
class Block:
    """What one layer keeps from its forward for its backward."""

    x: Array
    norm_1: Array
    inverse_rms_1: Array
    qkv: Array
    out: Array
    row: Array  # lse [B, H, N], or P [B, H, N, N]
    middle: Array
    feed_forward: FeedForward | None


class Transformer:
    """Pre-norm decoder over bytes: RMSNorm, causal attention with ALiBi, squared-ReLU MLP.

    `attention_dtype` is what q, k and v are rounded to; everything else has `dtype`.
    """

    def __init__(
        self,
        config: Config,
        xp: ModuleType,
        rng: np.random.Generator,
        dtype: str = "float32",
        keep: Keep | None = None,
        attention_dtype: str | None = None,
    ) -> None:
        self.config, self.xp, self.keep = config, xp, keep or Keep()
        self.attention_dtype = np.dtype(attention_dtype or dtype)
        slopes = 2.0 ** (-8 * np.arange(1, config.heads + 1) / config.heads)  # a reach from 4 bytes to 256
        self.slopes = xp.asarray(slopes, dtype)
        self.params: dict[str, Array] = {}

        def add(name: str, *shape: int, scale: float) -> None:
            self.params[name] = xp.asarray(scale * rng.standard_normal(shape), dtype)

        width, hidden = config.width, config.hidden
        residual_scale = (2 * config.num_layers) ** -0.5  # so that the sum over all layers has unit size
        add("embed", config.vocabulary, width, scale=1.0)
        for i in range(config.num_layers):
            self.params[f"{i}.gain_1"] = xp.ones(width, dtype)
            add(f"{i}.qkv", width, 3 * width, scale=width**-0.5)
            add(f"{i}.project", width, width, scale=residual_scale * width**-0.5)
            self.params[f"{i}.gain_2"] = xp.ones(width, dtype)
            add(f"{i}.up", width, hidden, scale=width**-0.5)
            add(f"{i}.down", hidden, width, scale=residual_scale * hidden**-0.5)
        self.params["gain"] = xp.ones(width, dtype)
        add("head", width, config.vocabulary, scale=0.1 * width**-0.5)  # small: the first guess is near uniform

    def _block(self, i: int, x: Array, shape: tuple[int, int]) -> tuple[Array, Block]:
        p, config = self.params, self.config
        norm_1, inverse_rms_1 = layers.rms_norm(x, p[f"{i}.gain_1"])
        qkv = layers.linear(norm_1, p[f"{i}.qkv"]).reshape(*shape, 3, config.heads, config.head_dim)
        qkv = qkv.astype(self.attention_dtype, copy=False)
        out, row = self._attention(qkv)
        middle = x + layers.linear(out.reshape(x.shape), p[f"{i}.project"])
        inside = self._feed_forward(i, middle)
        y = middle + layers.linear(layers.relu_squared(inside.hidden), p[f"{i}.down"])
        kept = inside if self.keep.feed_forward else None
        return y, Block(x, norm_1, inverse_rms_1, qkv, out, row, middle, kept)

    def _attention(self, qkv: Array) -> tuple[Array, Array]:
        return standard.attention(self.xp, qkv, self.slopes) if self.keep.p else layers.attention(qkv, self.slopes)

    def _attention_bwd(self, dout: Array, kept: Block) -> Array:
        if self.keep.p:
            return standard.attention_bwd(self.xp, dout, kept.qkv, kept.out, kept.row)
        return layers.attention_bwd(self.xp, dout, kept.qkv, self.slopes, kept.out, kept.row)

    def _feed_forward(self, i: int, middle: Array) -> FeedForward:
        """Up to its widest activation: all that its backward reads, so that a backward computes no more than this."""
        norm_2, inverse_rms_2 = layers.rms_norm(middle, self.params[f"{i}.gain_2"])
        return FeedForward(norm_2, inverse_rms_2, layers.linear(norm_2, self.params[f"{i}.up"]))

    def _feed_forward_bwd(self, i: int, dy: Array, kept: Block, grads: dict[str, Array]) -> Array:
        """dmiddle, the way past the block included."""
        p = self.params
        inside = kept.feed_forward or self._feed_forward(i, kept.middle)
        active = layers.relu_squared(inside.hidden)
        dactive, grads[f"{i}.down"] = layers.linear_bwd(dy, active, p[f"{i}.down"])
        dhidden = layers.relu_squared_bwd(dactive, inside.hidden)
        dnorm_2, grads[f"{i}.up"] = layers.linear_bwd(dhidden, inside.norm_2, p[f"{i}.up"])
        dx, grads[f"{i}.gain_2"] = layers.rms_norm_bwd(dnorm_2, kept.middle, p[f"{i}.gain_2"], inside.inverse_rms_2)
        return dy + dx

    def _block_bwd(self, i: int, dy: Array, kept: Block, grads: dict[str, Array]) -> Array:
        p = self.params
        dmiddle = self._feed_forward_bwd(i, dy, kept, grads)
        dout, grads[f"{i}.project"] = layers.linear_bwd(dmiddle, kept.out.reshape(dy.shape), p[f"{i}.project"])
        dqkv = self._attention_bwd(dout.reshape(kept.out.shape), kept)
        dnorm_1, grads[f"{i}.qkv"] = layers.linear_bwd(dqkv.reshape(len(dy), -1), kept.norm_1, p[f"{i}.qkv"])
        dx, grads[f"{i}.gain_1"] = layers.rms_norm_bwd(dnorm_1, kept.x, p[f"{i}.gain_1"], kept.inverse_rms_1)
        return dmiddle + dx

    def _forward(self, tokens: Array) -> tuple[Array, list[Block], tuple[Array, Array, Array]]:
        """Logits [B * N, vocabulary] for tokens [B, N], what each layer kept, and what the head kept."""
        x = layers.embedding(tokens.reshape(-1), self.params["embed"])
        blocks: list[Block] = []
        for i in range(self.config.num_layers):
            x, kept = self._block(i, x, tokens.shape)
            blocks.append(kept)
        norm, inverse_rms = layers.rms_norm(x, self.params["gain"])
        return layers.linear(norm, self.params["head"]), blocks, (x, norm, inverse_rms)

    def logits(self, tokens: Array) -> Array:
        """[B, N, vocabulary] for tokens [B, N]"""
        return self._forward(tokens)[0].reshape(*tokens.shape, self.config.vocabulary)

    def loss(self, tokens: Array, targets: Array) -> Array:
        """Mean nats per byte, a scalar array."""
        return layers.cross_entropy(self.xp, self._forward(tokens)[0], targets.reshape(-1))[0]

    def attention_bytes(self, tokens: Array) -> tuple[int, int]:
        """Of one step, all layers: the LSE [B, H, N] kept for the backward, and the P [B, H, N, N] never kept."""
        lses = [kept.row for kept in self._forward(tokens)[1]]
        return sum(lse.nbytes for lse in lses), sum(lse.nbytes * tokens.shape[1] for lse in lses)

    def loss_and_grads(self, tokens: Array, targets: Array) -> tuple[Array, dict[str, Array]]:
        """The loss, and its gradient to every parameter, under the parameter's name."""
        p, grads = self.params, dict[str, Any]()
        logits, blocks, (x, norm, inverse_rms) = self._forward(tokens)
        loss, log_p = layers.cross_entropy(self.xp, logits, targets.reshape(-1))
        dlogits = layers.cross_entropy_bwd(self.xp, targets.reshape(-1), log_p)
        dnorm, grads["head"] = layers.linear_bwd(dlogits, norm, p["head"])
        dx, grads["gain"] = layers.rms_norm_bwd(dnorm, x, p["gain"], inverse_rms)
        for i in reversed(range(self.config.num_layers)):
            dx = self._block_bwd(i, dx, blocks.pop(), grads)  # what a layer kept is free after it
        grads["embed"] = layers.embedding_bwd(self.xp, dx, tokens.reshape(-1), p["embed"])
        return loss, grads
