"""The same model, its first weights and its optimizer in torch: attention by torch's own operator or by cupyflash's."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import cupyflash.torch

from .differentiated import Attention, logits
from .model import Config, Transformer
from .optim import BETAS, EPS

Tensor = torch.Tensor


def cupyflash_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    return cupyflash.torch.attention(q, k, v, causal=True, alibi_slopes=slopes, out_dtype=slopes.dtype).out


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Torch's own operator, with ALiBi and the causal mask as a mask [H, N, N]."""
    position = torch.arange(q.shape[1], device=q.device)
    distance = position[:, None] - position
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
    return out.transpose(1, 2).to(slopes.dtype)


class InTorch:
    """A `train.Learner`; q, k and v are rounded to `attention_dtype`."""

    def __init__(
        self,
        config: Config,
        rng: np.random.Generator,
        attention: Attention,
        device: str = "cpu",
        attention_dtype: str = "float32",
    ) -> None:
        start = Transformer(config, np, rng)
        self.config, self.device, self.attention = config, device, attention
        self.attention_dtype: torch.dtype = getattr(torch, attention_dtype)
        self.slopes = torch.tensor(start.slopes, device=device)
        self.params = {name: torch.tensor(value, device=device) for name, value in start.params.items()}
        for value in self.params.values():
            value.requires_grad_()
        self.optimizer = torch.optim.Adam(self.params.values(), betas=BETAS, eps=EPS)

    def forward(self, tokens: np.ndarray, targets: np.ndarray) -> Tensor:
        """Mean nats per byte, a scalar with a graph."""

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            dtype = self.attention_dtype
            return self.attention(q.to(dtype), k.to(dtype), v.to(dtype), self.slopes)

        guesses = logits(self.params, torch.tensor(tokens, device=self.device), self.config, attention)
        return cross_entropy(guesses, torch.tensor(targets, device=self.device).flatten())

    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        with torch.no_grad():
            return self.forward(tokens, targets).item()

    def step(self, tokens: np.ndarray, targets: np.ndarray, rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = self.forward(tokens, targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()
