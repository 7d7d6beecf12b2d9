"""cupyflash behind torch's own `scaled_dot_product_attention`, through torch's registry of flash attentions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cupyflash._attention import Attention, attention_of

Tensor = torch.Tensor


def register_with_torch(name: str = "cupyflash") -> None:
    """Add cupyflash to the flash attentions that torch knows; nothing changes before one of them is activated.

    From then on `torch.nn.functional.scaled_dot_product_attention` on a GPU computes by cupyflash wherever it would
    take its flash backend, until `torch.nn.attention.restore_flash_attention_impl()`. Needs a torch with that registry.

    Parameters
    ----------
    name : str, default "cupyflash"
        What is activated.

    Examples
    --------
    >>> import torch
    >>> from cupyflash.torch import register_with_torch
    >>> register_with_torch()
    >>> torch.nn.attention.activate_flash_attention_impl("cupyflash")
    >>> torch.nn.attention.restore_flash_attention_impl()
    """
    from torch.nn import attention

    attention.register_flash_attention_impl(name, register_fn=lambda: override("CUDA"))


@dataclass
class Override:
    """Torch's operators for flash attention, ours as long as this holds the library of them."""

    library: Any

    def remove(self) -> None:
        self.library = None


def override(key: str) -> Override:
    """Our functions for torch's two operators under a dispatch key."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", _forward, key)
    library.impl("_scaled_dot_product_flash_attention_backward", _backward, key)
    return Override(library)


def _options(is_causal: bool, dropout_p: float, scale: float | None) -> Attention:
    causal = "top-left" if is_causal else False
    deterministic = torch.are_deterministic_algorithms_enabled()
    return attention_of("bhsd", scale, causal, None, None, dropout_p, deterministic, None, None, False, 0, None, False)


@torch.no_grad()  # torch records its graph around this, and leaves grad mode on
def _forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Torch expects out with query's strides. Of what it keeps for the backward the seed alone is needed here."""
    seed = query.new_empty(2, dtype=torch.int64)
    if dropout_p:  # otherwise torch's generator is not to move
        seed.random_()
    seed = seed.view(torch.uint64)
    attention = _options(is_causal, dropout_p, scale)
    out, lse = attention.fwd(query, key, value, seed=seed[:1] if dropout_p else None, out=torch.empty_like(query))
    no_offset, no_probabilities = seed.new_empty(()), query.new_empty(0)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, no_offset, no_probabilities


@torch.no_grad()
def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor,
    philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    attention = _options(is_causal, dropout_p, scale)
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (query, key, value))
    seed = philox_seed[:1] if dropout_p else None
    return tuple(attention.bwd(query, key, value, out, logsumexp, grad_out, seed=seed, dq=dq, dk=dk, dv=dv))
