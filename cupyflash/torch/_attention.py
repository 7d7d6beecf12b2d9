"""`attention`: the forward, with its gradient recorded by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from cupyflash import _check
from cupyflash._attention import AttnOutput, attention_of
from cupyflash._errors import UnsupportedError, refusal
from cupyflash.torch import _operators

Tensor = torch.Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    layout: str = "bshd", scale: float | None = None, causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, dropout_p: float = 0.0,
    deterministic: bool = False, out_dtype: Any = None, num_splits: int = 0, split_len: int | None = None,
    allow_tf32: bool = False,
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None, sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    q_start: int | Tensor | None = None, k_start: int | Tensor = 0, seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
) -> AttnOutput:  # fmt: skip
    """Attention and its log-sum-exp as differentiable torch tensors.

    What `cupyflash.attn_fwd` computes, with the same arguments, and `cupyflash.attn_bwd` as its gradient: to q, k, v,
    bias and sink, from out and from lse. Under autocast q, k and v are cast to its dtype, but for float64.

    Parameters
    ----------
    q : tensor [B, Nq, Hq, D], float16 | bfloat16 | float32 | float64
        See `cupyflash.attn_fwd` for this and every other argument; the following differ.
    block_table : tensor [B, max_pages], int32
        Only where no input requires grad.
    q_start, k_start : int or tensor [B], int32
        An int must fit int32.
    seed : int in [0, 2**63) or tensor of one element, int64 | uint64
        By default one drawn from the default generator of the data's device where dropout_p is not 0, so that
        `torch.manual_seed` decides it, and each replay of a CUDA graph draws another.

    Returns
    -------
    out : tensor [B, Nq, Hq, Dv], q's dtype or `out_dtype`
    lse : tensor [B, Hq, Nq], float32 (float64 with float64)

    Raises
    ------
    As `cupyflash.attn_fwd`. UnsupportedError for a gradient of the gradient, and for a forward-mode one.

    Examples
    --------
    >>> import torch
    >>> from cupyflash.torch import attention
    >>> q = torch.zeros(1, 4, 2, 8, requires_grad=True)
    >>> out, lse = attention(q, q, q, causal=True)
    >>> (out.sum() + lse.sum()).backward()
    >>> q.grad[0, :, 0, 0]  # as a value, out of every row that sees it
    tensor([2.0833, 1.0833, 0.5833, 0.2500])
    """
    _require(q=q, k=k, v=v, bias=bias, sink=sink)
    if seed is None and dropout_p:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    given = (
        q, k, v, bias, sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table,
        _tensor("q_start", q_start, q, cu_seqlens_q, None), _tensor("k_start", k_start, q, cu_seqlens_q, 0),
        _tensor("seed", seed, q, None, None), _tensor("offset", offset, q, None, 0),
    )  # fmt: skip
    hints = {
        name: _hint(x) for name, x in zip(_operators.HINTS, (max_seqlen_q, max_seqlen_k), strict=True) if x is not None
    }
    if not torch.compiler.is_compiling():
        chosen = attention_of(
            layout, scale, causal, window, softcap, dropout_p, deterministic, out_dtype, None, True, num_splits,
            split_len, allow_tf32,
        )  # fmt: skip
        if not _operators.is_heard(given):
            return AttnOutput(*_operators.direct(given, chosen, hints))
    left, right = _pair(window)
    options = {
        "layout": layout, "scale": scale, "causal": _corner(causal), "window_left": left, "window_right": right,
        "softcap": softcap, "dropout_p": dropout_p, "deterministic": deterministic, "out_dtype": _dtype(out_dtype),
        "num_splits": num_splits, "split_len": split_len, "allow_tf32": allow_tf32, **hints,
    }  # fmt: skip
    return AttnOutput(*_operators.dispatched(given, options))


def _require(**differentiable: Tensor | None) -> None:
    """Tensors, q, k and v all there; and none of a forward mode, which torch would drop without a word."""
    for name, tensor in differentiable.items():
        if tensor is None and name in ("bias", "sink"):
            continue
        if not isinstance(tensor, torch.Tensor):
            given = "is None" if tensor is None else f"is of type {type(tensor).__name__}"
            raise TypeError(refusal("attention", name, given, "torch tensors are accepted"))
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            accepted = "reverse-mode gradients of attention are what there is"
            raise UnsupportedError(refusal("attention", name, "has a forward-mode tangent", accepted))


def _sequences(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """How many there are; 0 where a wrong tensor does not tell, which is refused later."""
    if cu_seqlens_q is not None:
        return max(cu_seqlens_q.numel() - 1, 0)
    return q.shape[0] if q.dim() else 0


def _hint(value: Any) -> Any:
    """As varlen code has it, an int or a tensor of one element, which is waited for."""
    return int(value) if isinstance(value, torch.Tensor) else value


# Operators take no unions, so what may be one of several kinds is said in one.


def _pair(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        accepted = "None or a pair (left, right) of ints of at least 0, with None or -1 for an unbounded side"
        raise ValueError(refusal("attention", "window", f"is {window!r}", f"{accepted} is accepted"))
    return window[0], window[1]


def _corner(causal: Any) -> str:
    return _operators.corner(_check.one_of("attention", "causal", causal, _check.CAUSAL))


def _dtype(value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    return getattr(torch, _check.dtype_option("attention", "out_dtype", value) or "")


# The dtype of the tensor that an int becomes, its bounds, and what is accepted.
_START = torch.int32, -(2**31), 2**31, "an int that fits int32 or an int32 tensor [B]"
_INTS = {
    "q_start": _START,
    "k_start": _START,
    "seed": (torch.int64, 0, 2**63, "an int in [0, 2**63) or a one-element int64 or uint64 tensor"),
    "offset": (torch.int64, 0, 2**32, "an int in [0, 2**32) or a one-element int64 or uint64 tensor"),
}


def _tensor(name: str, value: int | Tensor | None, q: Tensor, cu_seqlens_q: Tensor | None, absent: int | None) -> Any:
    """The int as a tensor on the data's device, filled there without waiting for it; None when it says nothing."""
    if isinstance(value, torch.Tensor):
        return value
    if value is None or (type(value) is int and value == absent):
        return None
    dtype, low, high, accepted = _INTS[name]
    value = _check.integer("attention", name, value, low, high, accepted)
    length = _sequences(q, cu_seqlens_q) if dtype == torch.int32 else 1
    return torch.full((length,), value, dtype=dtype, device=q.device)
