"""`dot_product_attention` with the meaning that `jax.nn` gives it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cupyflash import _check
from cupyflash._errors import refusal
from cupyflash.jax._attention import attention

Array = jax.Array
_NAME = "dot_product_attention"


def dot_product_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *,
    scale: float | None = None, is_causal: bool = False, query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None, local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
) -> Any:  # fmt: skip
    """`jax.nn.dot_product_attention`, computed by cupyflash.

        out = softmax(scale · query keyᵀ + bias, where mask) value

    Parameters
    ----------
    query : array [B, T, N, H], float16 | bfloat16 | float32 | float64
        [T, N, H] too. This and the other arrays may be whatever `jax.numpy.asarray` takes.
    key, value : array [B, S, K, H] and [B, S, K, Hv], query's dtype
        N is a multiple of K. [S, K, H] beside a query of three axes.
    bias : array that broadcasts to [B, N, T, S], any float dtype
        Added to the scores, and has a gradient.
    mask : array that broadcasts to [B, N, T, S], bool
        True takes part.
    scale : float, default 1/sqrt(H)
    is_causal : bool
        Query i sees keys 0 to i: the top left corners are aligned.
    query_seq_lengths, key_value_seq_lengths : array [B], int32
        Rows of query from there on are 0; keys from there on take no part.
    local_window_size : (left, right) or int
        Query i sees keys i − left to i + right; an int is both.
    return_residual : bool
        Also return the log-sum-exp, as JAX does: [B, T, N] in query's dtype and without a gradient.

    Returns
    -------
    out : array [B, T, N, Hv], query's dtype
        0 for a row that sees no key, where JAX's is the mean of all values.

    Raises
    ------
    As `cupyflash.jax.attention`, with these names for the arguments that only this function has.

    Notes
    -----
    A mask is a bias here, so a backward with one computes a gradient for it too: where `is_causal`, a window or lengths
    say the same, those are faster. Keys that only a mask hides must be finite.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from cupyflash.jax import dot_product_attention
    >>> value = jnp.arange(3.0).reshape(3, 1, 1) * jnp.ones((3, 1, 4))
    >>> dot_product_attention(jnp.zeros((3, 1, 4)), jnp.ones((3, 1, 4)), value, is_causal=True)[:, 0, 0].tolist()
    [0.0, 0.5, 1.0]
    """
    shape = jnp.shape(query)
    q, k, v = (_with_batch(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    live_q, live_k = (_lengths(name, given, q.shape[0]) for name, given in lengths.items())
    out, lse = attention(
        q, k, v, scale=scale, causal="top-left" if _flag(is_causal) else False, window=_window(local_window_size),
        bias=_bias(bias, mask, q.dtype), bias_grad=bias is not None, seqused_k=live_k, q_start=0,
    )  # fmt: skip
    if live_q is not None:
        is_live = jnp.arange(q.shape[1]) < live_q[:, None]
        out = jnp.where(is_live[:, :, None, None], out, jnp.zeros((), out.dtype))
    out = out.reshape(*shape[:-1], out.shape[-1])
    if not return_residual:
        return out
    residual = jnp.swapaxes(lse, 1, 2).astype(q.dtype).reshape(shape[:-1])
    return out, jax.lax.stop_gradient(residual)


def _with_batch(name: str, array: Any) -> Array:
    array = jnp.asarray(array)
    if array.ndim not in (3, 4):
        given, accepted = f"has {array.ndim} axes, {list(array.shape)}", "[B, T, N, H] or [T, N, H] is accepted"
        raise ValueError(refusal(_NAME, name, given, accepted))
    return array if array.ndim == 4 else array[None]


def _lengths(name: str, lengths: Any, batch: int) -> Array | None:
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        given, accepted = f"is {lengths.dtype}{list(lengths.shape)}", f"int32[{batch}] is accepted"
        raise (ValueError if lengths.dtype == jnp.int32 else TypeError)(refusal(_NAME, name, given, accepted))
    return lengths


def _flag(is_causal: Any) -> bool:
    if not isinstance(is_causal, bool):
        raise TypeError(refusal(_NAME, "is_causal", f"is {is_causal!r}", "True or False is accepted"))
    return is_causal


def _window(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    accepted = "None, an int or a pair (left, right) of ints of at least 0"
    if len(sides) != 2:
        raise ValueError(refusal(_NAME, "local_window_size", f"is {size!r}", f"{accepted} is accepted"))
    left, right = (_check.integer(_NAME, "local_window_size", side, 0, None, accepted) for side in sides)
    return left, right


def _bias(bias: Any, mask: Any, dtype: Any) -> Array | None:
    """The two as one that is added."""
    bias = None if bias is None else jnp.asarray(bias)
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(refusal(_NAME, "bias", f"is {bias.dtype}", "a float dtype is accepted"))
    if mask is None:
        return bias
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        accepted = "bool is accepted; what is to be added to scores is `bias`"
        raise TypeError(refusal(_NAME, "mask", f"is {mask.dtype}", accepted))
    added = jnp.zeros((), dtype) if bias is None else bias
    return jnp.where(mask, added, jnp.array(-jnp.inf, added.dtype))
