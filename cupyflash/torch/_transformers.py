"""Models of Hugging Face's transformers, by a name under which they find their attention."""

from __future__ import annotations

from typing import Any

import torch

from cupyflash._errors import UnsupportedError, refusal
from cupyflash.torch._attention import attention
from cupyflash.torch._sdpa import additive_mask

Tensor = torch.Tensor


def register_with_transformers(name: str = "cupy_attention") -> None:
    """Let models of the transformers package find cupyflash under a name; nothing changes for models of other names.

    Masks come as they do for "sdpa". Soft caps and sinks of the model are honoured; attention weights are never stored,
    so that output_attentions=True is an UnsupportedError.

    Parameters
    ----------
    name : str, default "cupy_attention"
        What `attn_implementation` says. Not with "flash" in it, by which transformers knows its own flash-attn kernels.

    Raises
    ------
    ValueError for such a name.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from cupyflash.torch import register_with_transformers
    >>> register_with_transformers()
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 50}
    >>> config = LlamaConfig(num_hidden_layers=1, attn_implementation="cupy_attention", **sizes)
    >>> LlamaForCausalLM(config).config._attn_implementation
    'cupy_attention'
    """
    if "flash" in name:
        accepted = "a name without 'flash' is accepted, which transformers takes for one of its own kernels"
        raise ValueError(refusal("register_with_transformers", "name", f"is {name!r}", accepted))
    from transformers import AttentionInterface, AttentionMaskInterface  # pyright: ignore[reportMissingImports]
    from transformers.masking_utils import sdpa_mask  # pyright: ignore[reportMissingImports]

    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, sdpa_mask)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, position_bias: Tensor | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, output_attentions: bool = False, **_of_others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """[B, H, N, D] in, [B, N, H, D] out. What else transformers passes to all implementations is about other ones."""
    if output_attentions:
        accepted = "False is accepted: attention weights are never stored"
        raise UnsupportedError(refusal("cupyflash's attention", "output_attentions", "is True", accepted))
    # No mask means that queries stand at the end of the keys: as many as there are keys, or one.
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    bias = None if attention_mask is None else additive_mask(attention_mask, query.dtype)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    out, _ = attention(
        query, key, value, layout="bhsd", bias=bias, causal=bool(is_causal) and attention_mask is None, scale=scaling,
        dropout_p=dropout, softcap=softcap, sink=None if s_aux is None else s_aux.float(),
    )  # fmt: skip
    return out.transpose(1, 2), None
