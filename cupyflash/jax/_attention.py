"""`attention`: the forward, with its gradient for JAX's reverse mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from cupyflash._attention import Attention, AttnOutput, attention_of
from cupyflash._errors import UnsupportedError, refusal
from cupyflash.jax import _arguments, _primitive, _varying
from cupyflash.jax._calls import AttentionCall

Array = jax.Array


def attention(
    q: Array, k: Array, v: Array, *,
    layout: str = "bshd", scale: float | None = None, causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, dropout_p: float = 0.0,
    deterministic: bool = False, out_dtype: Any = None, bias_grad: bool = True, num_splits: int = 0,
    split_len: int | None = None, allow_tf32: bool = False,
    bias: Array | None = None, alibi_slopes: Array | None = None, sink: Array | None = None,
    cu_seqlens_q: Array | None = None, cu_seqlens_k: Array | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, seqused_k: Array | None = None, block_table: Array | None = None,
    q_start: int | Array | None = None, k_start: int | Array = 0, seed: int | Array | None = None,
    offset: int | Array = 0,
) -> AttnOutput:  # fmt: skip
    """Attention and its log-sum-exp as JAX arrays that `jax.grad` goes through, eager and under every transformation.

    What `cupyflash.attn_fwd` computes, with the same arguments, and `cupyflash.attn_bwd` as its gradient: to q, k, v,
    bias and sink, from out and from lse. Options and the two hints are static, everything else may be traced.

    Parameters
    ----------
    q : array [B, Nq, Hq, D], float16 | bfloat16 | float32 | float64
        See `cupyflash.attn_fwd` for this and every other argument; the following differ.
    block_table : array [B, max_pages], int32
        Only where no gradient is asked for.
    bias_grad : bool, default True
        False: the bias is a mask, and its gradient 0 without being computed.
    alibi_slopes : array [Hq] or [B, Hq], float32
        Without a gradient, so that asking for one is an UnsupportedError.
    q_start, k_start : int or array [B] or [], int32
        An int must fit int32. One number serves all sequences, `jax.lax.axis_index(...) * length` for example.
    seed : int in [0, 2**64), key of jax.random, or array of one element, int32 | uint32 | int64 | uint64
        Needed where dropout_p is not 0. Of a key 64 bits are drawn, by `jax.random.bits(key, (2,), "uint32")`, the low
        word first; so use it for nothing else. A negative number stands for 2**64 more. The same seed drops the same
        elements.
    offset : int in [0, 2**32) or array of one element, int32 | uint32 | int64 | uint64

    Returns
    -------
    out : array [B, Nq, Hq, Dv], q's dtype or `out_dtype`
    lse : array [B, Hq, Nq], float32 (float64 with float64)

    Raises
    ------
    As `cupyflash.attn_fwd`, when the call is traced or, for what only one kind of device cannot do, when it is
    compiled. Values are looked at where the NumPy backend computes: a wrong one is a ValueError, or a JaxRuntimeError
    with the same text where XLA computes on a thread of its own.

    Notes
    -----
    Results and workspace are XLA's buffers, and kernels run on its stream. Under `jax.vmap` the new axis joins the
    batch where a longer batch means the same, and calls follow one another where it does not: packed sequences, pages,
    dropout, and what the rows of a batch share and is mapped or has a gradient (a sink; a bias without the batch).

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cupyflash.jax import attention
    >>> def loss(q):
    ...     out, lse = attention(q, q, q, causal=True)
    ...     return out.sum() + lse.sum()
    >>> dq = jax.jit(jax.grad(loss))(jnp.zeros((1, 4, 2, 8)))
    >>> [round(x, 3) for x in dq[0, :, 0, 0].tolist()]  # as a value, out of every row that sees it
    [2.083, 1.083, 0.583, 0.25]
    """
    options = attention_of(
        layout, scale, causal, window, softcap, dropout_p, deterministic, out_dtype, None, bias_grad, num_splits,
        split_len, allow_tf32,
    )  # fmt: skip
    arrays = {
        "q": q, "k": k, "v": v, "bias": bias, "sink": sink, "alibi_slopes": alibi_slopes, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k, "block_table": block_table, "q_start": q_start,
        "k_start": k_start, "seed": seed, "offset": offset,
    }  # fmt: skip
    return forward("attention", options, arrays, max_seqlen_q, max_seqlen_k)


def forward(
    function: str, options: Attention, arguments: dict[str, Any], max_seqlen_q: int | None, max_seqlen_k: int | None
) -> AttnOutput:
    """The arguments that are or may be arrays in any order; q, k, v, bias and sink have gradients."""
    arrays = _arguments.plain(function, arguments, "qkv", options.dropout_p)
    options = options.replace(grad_dtype=None)  # JAX has gradients in the dtypes of what they are of
    call = call_of(function, options, arrays, max_seqlen_q, max_seqlen_k)
    return AttnOutput(*_attend(call, tuple(_varying.alike(list(arrays.values())))))


def call_of(
    function: str, options: Attention, arrays: dict[str, Array], max_seqlen_q: Any, max_seqlen_k: Any,
    *, backward: bool = False,
) -> AttentionCall:  # fmt: skip
    """The call on these arrays."""
    hint_q = _arguments.hint(function, "max_seqlen_q", max_seqlen_q)
    hint_k = _arguments.hint(function, "max_seqlen_k", max_seqlen_k)
    return AttentionCall(options, tuple(arrays), hint_q, hint_k, backward)


def _compute(call: AttentionCall, arrays: tuple[Array, ...]) -> tuple[Array, Array]:
    out, lse = _primitive.bind(call, arrays)
    return out, lse


def _forward(call: AttentionCall, arrays: tuple[Array, ...]) -> tuple[tuple[Array, Array], Any]:
    if "block_table" in call.names:
        accepted = "with pages no gradient may be asked for: a gradient to pools of pages does not exist"
        raise UnsupportedError(refusal("attention", "block_table", "is given", accepted))
    out, lse = _attend(call, arrays)
    return (out, lse), (arrays, out, lse)


def _backward(call: AttentionCall, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any]:
    arrays, out, lse = saved
    names = (*call.names, "out", "lse", "dout", "dlse")
    backward = replace(call, names=names, backward=True)
    results = _primitive.bind(backward, (*arrays, out, lse, *cotangents))
    given = dict(zip(call.gradients, results, strict=True))
    return (tuple(given.get(name) for name in call.names),)


_attend: Any = jax.custom_vjp(_compute, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)
