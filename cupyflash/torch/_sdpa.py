"""`scaled_dot_product_attention` with the meaning that torch gives it."""

from __future__ import annotations

import math

import torch

from cupyflash._errors import refusal
from cupyflash.torch._attention import attention

Tensor = torch.Tensor
_NAME = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.scaled_dot_product_attention`, computed by cupyflash.

        out = dropout(softmax(scale · query keyᵀ + attn_mask)) value

    Parameters
    ----------
    query : tensor [..., H, L, E], float16 | bfloat16 | float32 | float64
        [..., L, E] too. Axes before the last two are broadcast between query, key and value.
    key, value : tensor [..., H, S, E] and [..., H, S, Ev], query's dtype
    attn_mask : tensor that broadcasts to [..., H, L, S], bool or any float dtype
        Bool: True takes part. Float: added to the scores, and has a gradient.
    dropout_p : float in [0, 1)
        Always on when not 0, as torch's. The default generator of the data's device decides what is dropped, but not
        the same elements as in torch.
    is_causal : bool
        Query i sees keys 0 to i: the top left corners are aligned. Not with attn_mask.
    scale : float, default 1/sqrt(E)
    enable_gqa : bool
        Query head h reads KV head h // (H // Hkv); key and value may have fewer heads, a divisor of H.

    Returns
    -------
    out : tensor [..., H, L, Ev], query's dtype
        0 for a row that sees no key, as torch's.

    Raises
    ------
    ValueError for shapes and values, TypeError for dtypes, where torch raises a RuntimeError.

    Examples
    --------
    >>> import torch
    >>> from cupyflash.torch import scaled_dot_product_attention
    >>> x = torch.arange(6.0).reshape(1, 1, 3, 2)
    >>> scaled_dot_product_attention(torch.zeros_like(x), x, x, is_causal=True)
    tensor([[[[0., 1.],
              [1., 2.],
              [2., 3.]]]])
    """
    if is_causal and attn_mask is not None:
        raise ValueError(refusal(_NAME, "attn_mask", "is given", "None is accepted with is_causal=True"))
    rows = {"query": query, "key": key, "value": value}
    for name, tensor in rows.items():
        if tensor.dim() < 2:
            given = f"has shape {list(tensor.shape)}"
            raise ValueError(refusal(_NAME, name, given, "at least the two axes of rows and head_dim are accepted"))
    batch = _common(rows, slice(None, -3))
    heads = None if enable_gqa else _common(rows, slice(-3, -2))
    q, k, v = (_four_axes(tensor, batch, heads) for tensor in rows.values())
    if enable_gqa and k.shape[1] != v.shape[1]:  # torch repeats each by itself
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    bias = None if attn_mask is None else _bias(attn_mask, (*batch, *q.shape[1:3], k.shape[2]), q.dtype)
    causal = "top-left" if is_causal else False
    out, _ = attention(q, k, v, layout="bhsd", bias=bias, scale=scale, dropout_p=dropout_p, causal=causal)
    out = out.reshape(*batch, *out.shape[1:])
    return out[0] if all(tensor.dim() == 2 for tensor in rows.values()) else out


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a bool mask is True and −inf elsewhere; any other as it is."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask


def _common(rows: dict[str, Tensor], axes: slice) -> tuple[int, ...]:
    """What these axes of query, key and value broadcast to."""
    try:
        return tuple(torch.broadcast_shapes(*(tensor.shape[axes] for tensor in rows.values())))
    except RuntimeError as error:
        given = f"has shape {list(rows['key'].shape)}"
        others = f"query {list(rows['query'].shape)} and value {list(rows['value'].shape)}"
        accepted = f"axes before the last two that broadcast to those of {others} are accepted"
        advice = "Fewer heads than query's need enable_gqa=True."
        raise ValueError(refusal(_NAME, "key", given, accepted, advice)) from error


def _four_axes(tensor: Tensor, batch: tuple[int, ...], heads: tuple[int, ...] | None) -> Tensor:
    tensor = tensor.unsqueeze(0) if tensor.dim() == 2 else tensor
    heads = tensor.shape[-3:-2] if heads is None else heads or (1,)
    return tensor.expand(*batch, *heads, *tensor.shape[-2:]).reshape(math.prod(batch), *heads, *tensor.shape[-2:])


def _bias(mask: Tensor, scores: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The mask as what is added to scores of this shape, in at most four axes."""
    fits = mask.dim() <= len(scores) and all(
        given in (1, full) for given, full in zip(reversed(mask.shape), reversed(scores), strict=False)
    )
    if not fits:
        accepted = f"what broadcasts to {list(scores)} is accepted"
        raise ValueError(refusal(_NAME, "attn_mask", f"has shape {list(mask.shape)}", accepted))
    if mask.dtype != torch.bool and not mask.is_floating_point():
        given = f"is of {mask.dtype}"
        raise TypeError(refusal(_NAME, "attn_mask", given, "torch.bool or a float dtype is accepted"))
    mask = additive_mask(mask, dtype)
    if mask.dim() <= 3:
        return mask
    rows, batch = mask.shape[-3:], scores[:-3]
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(rows)
    return mask.expand(*batch, *rows).reshape(math.prod(batch), *rows)
