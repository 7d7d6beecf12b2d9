"""The functions of the flash-attn package, by its names and signatures."""

from __future__ import annotations

from typing import Any

import torch

from cupyflash._errors import UnsupportedError, refusal
from cupyflash.torch._attention import attention

Tensor = torch.Tensor


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash-attn's function for batches of sequences of one length, computed by cupyflash.

    Parameters
    ----------
    q : tensor [B, Nq, Hq, D], float16 | bfloat16 | float32 | float64
    k, v : tensor [B, Nk, Hkv, D] and [B, Nk, Hkv, Dv], q's dtype
        Query head h reads KV head h // (Hq // Hkv).
    dropout_p : float in [0, 1)
        0 in evaluation. The default generator of the data's device decides what is dropped.
    softmax_scale : float, default 1/sqrt(D)
    causal : bool
        The last query sees the last key: the bottom right corners are aligned.
    window_size : (left, right)
        Keys that a query sees to either side of its own position; -1 is unbounded.
    softcap : float
        c > 0 replaces scores x by c·tanh(x/c).
    alibi_slopes : tensor [Hq] or [B, Hq], float32
        Scores lose slope · |distance|. Without a gradient.
    deterministic : bool
        The backward's gradients are bitwise equal from run to run.
    return_attn_probs : bool
        Also return the log-sum-exp, and None in place of the probabilities, which are never stored: with dropout an
        UnsupportedError.

    Returns
    -------
    out : tensor [B, Nq, Hq, Dv]
        0 for a row that sees no key.
    lse, None : tensor [B, Hq, Nq], float32 (float64 with float64)
        With return_attn_probs only. It has a gradient; −inf for a row that sees no key.

    Raises
    ------
    As `cupyflash.attn_fwd`.

    Examples
    --------
    >>> import torch
    >>> from cupyflash.torch import flash_attn_func
    >>> v = torch.arange(3.0).reshape(1, 3, 1, 1)
    >>> flash_attn_func(torch.zeros(1, 2, 1, 1), torch.zeros_like(v), v, causal=True).flatten()
    tensor([0.5000, 1.0000])
    """
    _refuse_probabilities("flash_attn_func", return_attn_probs, dropout_p)
    out, lse = attention(
        q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of q, k and v in one tensor, [B, N, 3, H, D], which is read where it lies.

    Examples
    --------
    >>> import torch
    >>> from cupyflash.torch import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.ones(1, 4, 3, 2, 8), causal=True).shape
    torch.Size([1, 4, 2, 8])
    """
    q, k, v = _parts("flash_attn_qkvpacked_func", "qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of k and v in one tensor, [B, Nk, 2, Hkv, D], which is read where it lies.

    Examples
    --------
    >>> import torch
    >>> from cupyflash.torch import flash_attn_kvpacked_func
    >>> flash_attn_kvpacked_func(torch.ones(1, 4, 2, 8), torch.ones(1, 5, 2, 1, 8)).shape
    torch.Size([1, 4, 2, 8])
    """
    k, v = _parts("flash_attn_kvpacked_func", "kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """flash-attn's function for packed sequences, computed by cupyflash.

    Parameters
    ----------
    q : tensor [Tq, Hq, D], float16 | bfloat16 | float32 | float64
    k, v : tensor [Tk, Hkv, D] and [Tk, Hkv, Dv], q's dtype
        With block_table: pools of pages, [pages, page_size, Hkv, D] and [.., Dv], and no input may require grad.
    cu_seqlens_q, cu_seqlens_k : tensor [B+1], int32 | int64
        Prefix sums of the lengths, from 0.
    max_seqlen_q, max_seqlen_k : int
        Longest sequence: hints that change no result.
    block_table : tensor [B, max_pages], int32
        Key j of sequence b lies in page block_table[b, j // page_size].

    Every other argument as in `flash_attn_func`.

    Returns
    -------
    out : tensor [Tq, Hq, Dv]
    lse, None : tensor [Hq, Tq], float32 (float64 with float64)
        With return_attn_probs only.

    Raises
    ------
    As `cupyflash.attn_fwd`.

    Examples
    --------
    >>> import torch
    >>> from cupyflash.torch import flash_attn_varlen_func
    >>> v = torch.arange(5.0).reshape(5, 1, 1)
    >>> offsets = torch.tensor([0, 2, 5])
    >>> flash_attn_varlen_func(torch.zeros_like(v), torch.zeros_like(v), v, offsets, offsets, 3, 3).flatten()
    tensor([0.5000, 0.5000, 3.0000, 3.0000, 3.0000])
    """
    _refuse_probabilities("flash_attn_varlen_func", return_attn_probs, dropout_p)
    keys: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k}
    if block_table is not None:
        keys = {"block_table": block_table, "seqused_k": cu_seqlens_k.diff().to(torch.int32)}
    out, lse = attention(
        q, k, v, layout="thd", cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **keys,
        dropout_p=dropout_p, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def _refuse_probabilities(function: str, return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p:
        given = f"is True while `dropout_p` is {dropout_p}"
        accepted = "with dropout only False is accepted: probabilities are never stored"
        advice = "`cupyflash.torch.attention` returns the log-sum-exp with dropout too."
        raise UnsupportedError(refusal(function, "return_attn_probs", given, accepted, advice))


def _parts(function: str, name: str, packed: Tensor, parts: int) -> tuple[Tensor, ...]:
    if packed.dim() != 5 or packed.shape[2] != parts:
        accepted = f"[B, N, {parts}, H, D] is accepted"
        raise ValueError(refusal(function, name, f"has shape {list(packed.shape)}", accepted))
    return packed.unbind(2)
