"""flash-attn's function for decoding: new keys into a cache, then attention over it."""

from __future__ import annotations

from typing import Any

import torch

from cupyflash._errors import UnsupportedError, refusal
from cupyflash.torch._attention import attention
from cupyflash.torch._operators import kv_append

Tensor = torch.Tensor
_NAME = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """flash-attn's function for decoding, computed by cupyflash.

    Parameters
    ----------
    q : tensor [B, Nq, Hq, D], float16 | bfloat16 | float32 | float64
    k_cache, v_cache : tensor [B, S, Hkv, D] and [B, S, Hkv, Dv], q's dtype
        [caches, S, ..] with cache_batch_idx; pools of pages, [pages, page_size, ..], with block_table.
    k, v : tensor [B, new, Hkv, D] and [B, new, Hkv, Dv], q's dtype
        Written into the caches in place, behind each sequence's cache_seqlens, before attention.
    rotary_cos, rotary_sin, cache_leftpad : None
        Nothing else is accepted: rotate q and k before the call.
    cache_seqlens : int or tensor [B], int32
        Keys that are in the cache before this call, which does not change it; default all. Needed with k.
    cache_batch_idx : tensor [B], int32 or int64
        Which cache is each sequence's.
    block_table : tensor [B, max_pages], int32
        Key j of sequence b lies in page block_table[b, j // page_size].
    causal : bool
        The last query sees the last key, new ones included.
    rotary_interleaved : bool
        Without effect.
    num_splits : int
        Parts the keys are split into; 0 lets the plan choose.
    return_softmax_lse : bool
        Also return the log-sum-exp.

    Every other argument as in `flash_attn_func`.

    Returns
    -------
    out : tensor [B, Nq, Hq, Dv]
    lse : tensor [B, Hq, Nq], float32 (float64 with float64)
        With return_softmax_lse only.

    Raises
    ------
    As `cupyflash.attn_fwd`. Where k, cache_batch_idx or block_table is given there is no gradient, and a tensor that
    requires grad is refused while grad mode is on.

    Examples
    --------
    >>> import torch
    >>> from cupyflash.torch import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 1, 16, 1, 4)
    >>> live = torch.tensor([3], dtype=torch.int32)
    >>> new = torch.ones(1, 1, 1, 4)
    >>> flash_attn_with_kvcache(0 * new, k_cache, v_cache, new, new, cache_seqlens=live, causal=True).flatten()
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    >>> v_cache[0, :5, 0, 0]
    tensor([0., 0., 0., 1., 0.])
    """
    for name, given in {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_leftpad": cache_leftpad}.items():
        if given is not None:
            advice = "Rotate q and k before the call." if name != "cache_leftpad" else ""
            raise UnsupportedError(refusal(_NAME, name, "is given", "None is accepted", advice))
    if (k is None) != (v is None):
        raise ValueError(refusal(_NAME, "v", "is given without `k`, or `k` without it", "both or none are accepted"))
    if cache_batch_idx is not None and block_table is not None:
        given = "is given beside `block_table`"
        raise ValueError(refusal(_NAME, "cache_batch_idx", given, "one of the two is accepted"))
    if k is not None and cache_seqlens is None:
        raise ValueError(refusal(_NAME, "cache_seqlens", "is None", "with new keys their place is needed"))

    # A cache without pages is a pool in which each sequence has one page.
    table = cache_batch_idx.to(torch.int32).unsqueeze(1) if cache_batch_idx is not None else block_table
    used = _lengths(q, cache_seqlens)
    if k is not None and v is not None and used is not None:
        used = used + k.shape[1]
        own = torch.arange(q.shape[0], dtype=torch.int32, device=q.device).unsqueeze(1) if table is None else table
        kv_append(k_cache, v_cache, k, v, own, used)
    if table is not None and used is None:
        used = _lengths(q, table.shape[1] * k_cache.shape[1])
    out, lse = attention(
        q, k_cache, v_cache, seqused_k=used, block_table=table, scale=softmax_scale, causal=causal, window=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, num_splits=num_splits,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _lengths(q: Tensor, lengths: int | Tensor | None) -> Tensor | None:
    if isinstance(lengths, int):
        return torch.full((q.shape[0],), lengths, dtype=torch.int32, device=q.device)
    return lengths
