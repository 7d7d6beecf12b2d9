"""The same model for libraries that differentiate by themselves: its forward alone, over any library's arrays."""

from __future__ import annotations

from collections.abc import Callable

from . import layers
from .layers import Array
from .model import Config

Attention = Callable[[Array, Array, Array, Array], Array]
"""(q, k, v, slopes) -> out, each but the slopes [B, N, H, D]: causal, with ALiBi. out has the dtype of the slopes."""


def logits(
    params: dict[str, Array], tokens: Array, config: Config, attention: Callable[[Array, Array, Array], Array]
) -> Array:
    """[B * N, vocabulary] for tokens [B, N] and the parameters of a `Transformer`."""
    x = layers.embedding(tokens.reshape(-1), params["embed"])
    for i in range(config.num_layers):
        norm, _ = layers.rms_norm(x, params[f"{i}.gain_1"])
        qkv = layers.linear(norm, params[f"{i}.qkv"]).reshape(*tokens.shape, 3, config.heads, config.head_dim)
        out = attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        x = x + layers.linear(out.reshape(x.shape), params[f"{i}.project"])
        norm, _ = layers.rms_norm(x, params[f"{i}.gain_2"])
        hidden = layers.linear(norm, params[f"{i}.up"])
        x = x + layers.linear(layers.relu_squared(hidden), params[f"{i}.down"])
    norm, _ = layers.rms_norm(x, params["gain"])
    return layers.linear(norm, params["head"])
