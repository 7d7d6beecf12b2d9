"""The public functions, thin over `Attention`, and the converters of foreign log-sum-exps."""

from __future__ import annotations

import math
from typing import Any

from cupyflash import _attention, _interop
from cupyflash._attention import AttnOutput, attention_of


def attn_fwd(
    q: Any, k: Any, v: Any, *,
    layout: str = "bshd", scale: float | None = None, causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, dropout_p: float = 0.0,
    deterministic: bool = False, out_dtype: Any = None, grad_dtype: Any = None, bias_grad: bool = True,
    num_splits: int = 0, split_len: int | None = None, allow_tf32: bool = False,
    bias: Any = None, alibi_slopes: Any = None, sink: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, seqused_k: Any = None, block_table: Any = None,
    q_start: Any = None, k_start: Any = 0, seed: Any = None, offset: Any = 0,
    out: Any = None, lse: Any = None, workspace: Any = None, check: bool = False, plan: Any = None,
) -> AttnOutput:  # fmt: skip
    """Attention and its log-sum-exp.

        x_ij = scale · (q_i · k_j);  x ← softcap · tanh(x / softcap);  x ← x − slope_h · |p_i − r_j| + bias_ij
        x_ij = −inf where the mask hides key j from query i
        lse_i = log( Σ_j exp(x_ij) [+ exp(sink_h)] )
        out_i = Σ_j exp(x_ij − lse_i) · keep_ij/(1 − dropout_p) · v_j

    Query i stands at p_i = q_start + i, key j at r_j = k_start + j; query head h reads KV head h // (Hq // Hkv).

    Parameters
    ----------
    q : array [B, Nq, Hq, D], float16 | bfloat16 | float32 | float64
        Any strides with a unit last stride are read in place; others are copied once on a GPU. The axes are those of
        layout "bshd"; see `Attention` for this and every other option up to `allow_tf32`. Hq is a multiple of Hkv.
    k, v : array [B, Nk, Hkv, D] and [B, Nk, Hkv, Dv], q's dtype
        With `block_table`: pools of pages, [pages, page_size, Hkv, D] and [.., Dv].
    bias : array that broadcasts to [B, Hq, Nq, Nk], any float dtype
        Added to the scores; −inf masks. Not with layout "thd".
    alibi_slopes : array [Hq] or [B, Hq], float32 (float64 with float64)
        Without a gradient.
    sink : array [Hq], float32 (float64 with float64)
        One more logit per query head, without a value; −inf is none.
    cu_seqlens_q, cu_seqlens_k : array [B+1], int32 | int64
        Prefix sums of the lengths of packed sequences, from 0; with layout "thd" only, which needs them.
    max_seqlen_q, max_seqlen_k : int
        Longest sequence, a hint for speed. No value changes a result.
    seqused_k : array [B], int32
        Live keys of each row or sequence; the ones beyond never reach a result, and alignment is to the last live one.
    block_table : array [B, max_pages], int32
        Key j of row b lies in page block_table[b, j // page_size]. Needs seqused_k.
    q_start, k_start : int or array [B], int32, default (live keys − Nq) and 0
        Positions of the first query and key; q_start defaults to 0 under causal="top-left".
    seed, offset : int or array of one element, int64 | uint64
        Of the dropout mask: seed in [0, 2**64), offset in [0, 2**32). Without effect when dropout_p is 0.
    out, lse : array
        Where to write: right in shape and dtype, unit last stride, overlapping nothing.
    workspace : array [bytes], uint8
        At least `Attention.workspace_size(...)` long. With it, out and lse the call allocates nothing.
    check : bool, default False
        Also look at the values of offsets, lengths and pages on a GPU, which waits for it. The CPU always does.
    plan : optional
        What `Attention.plan` returned, to be used as it is or refused. On CUDA also a kernel's name: "fwd_generic".

    Returns
    -------
    out : array [B, Nq, Hq, Dv], q's dtype or `out_dtype`
        C-contiguous, of the caller's library. 0 for a row with no visible key.
    lse : array [B, Hq, Nq], float32 (float64 with float64)
        Natural log; −inf (or the sink) for a row with no visible key. Of the undropped row.

    Raises
    ------
    ValueError for shapes and values, TypeError for kinds and dtypes, UnsupportedError for what this backend or GPU
    cannot do, CompileError when a kernel does not compile. All before anything is written.

    Notes
    -----
    Works on the data's device and the current stream of its library. A torch tensor that requires grad is refused while
    grad mode is on: no graph is recorded here.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> q = np.zeros((1, 4, 2, 8), np.float32)
    >>> v = np.arange(64, dtype=np.float32).reshape(1, 4, 2, 8)
    >>> out, lse = cf.attn_fwd(q, q, v, causal=True)
    >>> bool(np.allclose(out[0, -1], v[0].mean(axis=0))), bool(np.allclose(lse[0, 0], np.log([1, 2, 3, 4])))
    (True, True)
    """
    attention = attention_of(
        layout, scale, causal, window, softcap, dropout_p, deterministic, out_dtype, grad_dtype, bias_grad, num_splits,
        split_len, allow_tf32,
    )  # fmt: skip
    return attention.fwd(
        q, k, v, bias=bias, alibi_slopes=alibi_slopes, sink=sink, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k, block_table=block_table,
        q_start=q_start, k_start=k_start, seed=seed, offset=offset, out=out, lse=lse, workspace=workspace, check=check,
        plan=plan,
    )  # fmt: skip


def attn_bwd(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *,
    delta: Any = None, dlse: Any = None,
    layout: str = "bshd", scale: float | None = None, causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, dropout_p: float = 0.0,
    deterministic: bool = False, out_dtype: Any = None, grad_dtype: Any = None, bias_grad: bool = True,
    num_splits: int = 0, split_len: int | None = None, allow_tf32: bool = False,
    bias: Any = None, alibi_slopes: Any = None, sink: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, seqused_k: Any = None,
    q_start: Any = None, k_start: Any = 0, seed: Any = None, offset: Any = 0,
    dq: Any = None, dk: Any = None, dv: Any = None, dbias: Any = None, dsink: Any = None, accumulate: bool = False,
    workspace: Any = None, check: bool = False, plan: Any = None,
) -> Any:  # fmt: skip
    """The gradients of `attn_fwd`, from what it returned and the gradient that flows into it.

        D_i = Σ_c dout_ic · out_ic − dlse_i;  P_ij = exp(x_ij − lse_i)
        dV = (P ∘ keep/(1−p))ᵀ dO;  dX = P ∘ ((dO Vᵀ) ∘ keep/(1−p) − D);  dS = dX ∘ (1 − (x_softcapped / softcap)²)
        dQ = scale · dS K;  dK = scale · dSᵀ Q
        dbias = Σ dX over bias's broadcast axes;  dsink_h = − Σ exp(sink_h − lse_i) · D_i

    `out` and `lse` are trusted and nothing is asked of where they came from: with the global ones, and the `q_start`
    and `k_start` of one shard of the keys, the result is that shard's exact dk and dv and its exact share of dq and
    dbias. `sink` goes to exactly one shard.

    Parameters
    ----------
    q, k, v : array
        As in `attn_fwd`, with the same options and the same arrays beside them.
    out : array [B, Nq, Hq, Dv], q's dtype or float32
        May be None when `delta` is given.
    lse : array [B, Hq, Nq], float32 (float64 with float64)
        Natural log; where it is −inf the row has no gradient.
    dout : array [B, Nq, Hq, Dv], q's dtype or float32
        Any strides with a unit last stride.
    delta : array [B, Hq, Nq], float32 (float64 with float64)
        D, from `attn_bwd_preprocess`, computed once for many calls. Not with dlse, which it contains.
    dlse : array [B, Hq, Nq], float32 (float64 with float64)
        The gradient that flows into lse; none by default.
    dq, dk, dv, dbias, dsink : array
        Where to write: the shapes of q, k, v, bias and sink, their dtypes or `grad_dtype` (dsink: sink's), unit last
        stride, overlapping nothing. The slices of one packed buffer are fine.
    accumulate : bool, default False
        Add into dq, dk and dv (and dbias, dsink), which must all be given and be float32 or float64.

    Every other argument as in `attn_fwd` and `Attention`.

    Returns
    -------
    dq, dk, dv[, dbias][, dsink] : named tuple `AttnGrads`
        dbias when `bias` was given and `bias_grad` is True, dsink when `sink` was.

    Raises
    ------
    As `attn_fwd`.

    Notes
    -----
    Without `deterministic=True` dq is summed by atomics on a GPU and its last bits vary.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> q = np.zeros((1, 4, 2, 8), np.float32)
    >>> out, lse = cf.attn_fwd(q, q, q, causal=True)
    >>> grads = cf.attn_bwd(q, q, q, out, lse, np.ones_like(out), causal=True)
    >>> grads._fields
    ('dq', 'dk', 'dv')
    >>> bool(np.allclose(grads.dv[0, 0], 1 + 1 / 2 + 1 / 3 + 1 / 4))
    True
    """
    attention = attention_of(
        layout, scale, causal, window, softcap, dropout_p, deterministic, out_dtype, grad_dtype, bias_grad, num_splits,
        split_len, allow_tf32,
    )  # fmt: skip
    return attention.bwd(
        q, k, v, out, lse, dout, delta=delta, dlse=dlse, bias=bias, alibi_slopes=alibi_slopes, sink=sink,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        seqused_k=seqused_k, q_start=q_start, k_start=k_start, seed=seed, offset=offset, dq=dq, dk=dk, dv=dv,
        dbias=dbias, dsink=dsink, accumulate=accumulate, workspace=workspace, check=check, plan=plan,
    )  # fmt: skip


def attn_bwd_preprocess(out: Any, dout: Any, dlse: Any = None, *, layout: str = "bshd") -> Any:
    """D, the part of the backward that no key enters: computed once for many calls of `attn_bwd(delta=...)`.

        D_i = Σ_c dout_ic · out_ic − dlse_i

    Parameters
    ----------
    out, dout : array [B, Nq, Hq, Dv], float16 | bfloat16 | float32 | float64
        Of one dtype, or one of them float32.
    dlse : array [B, Hq, Nq], float32 (float64 when out or dout is)
        The gradient that flows into lse; none by default.
    layout : "bshd" | "bhsd" | "thd", default "bshd"
        As in `Attention`; "thd" needs no offsets here.

    Returns
    -------
    delta : array [B, Hq, Nq] or [Hq, Tq], float32 (float64 when out or dout is)

    Raises
    ------
    As `attn_fwd`.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> ones = np.ones((1, 3, 2, 8), np.float32)
    >>> cf.attn_bwd_preprocess(ones, ones, np.full((1, 2, 3), 0.5, np.float32))[0, 1]
    array([7.5, 7.5, 7.5], dtype=float32)
    """
    return _attention.preprocess("attn_bwd_preprocess", layout, out, dout, dlse)


def lse_from_log2(x: Any) -> Any:
    """A log-sum-exp in natural log, from one in base 2 (FlashInfer's): x · ln 2.

    Units only: an lse of shape [T, H] is [H, T] here, so transpose it too.

    Parameters
    ----------
    x : array, any shape and library

    Returns
    -------
    lse : array like x
        Natural log.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> bool(np.isclose(np.exp(cf.lse_from_log2(np.array([3.0]))), 8.0)[0])
    True
    """
    _interop.namespace("lse_from_log2", "x", x)
    return x * math.log(2)


def lse_from_fa2(x: Any) -> Any:
    """A log-sum-exp whose rows without a visible key are −inf, from one where they are +inf (FlashAttention-2's).

    Parameters
    ----------
    x : array, any shape and library
        Natural log.

    Returns
    -------
    lse : array like x
        Natural log, with −inf in place of +inf.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> cf.lse_from_fa2(np.array([0.5, np.inf]))
    array([ 0.5, -inf])
    """
    return _interop.namespace("lse_from_fa2", "x", x).where(x == math.inf, -x, x)
