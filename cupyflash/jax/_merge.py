"""`merge_states`, with its gradient for JAX's reverse mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from cupyflash import _check
from cupyflash._attention import AttnOutput
from cupyflash.jax import _arguments, _primitive, _varying
from cupyflash.jax._calls import MergeCall


def merge_states(outs: Any, lses: Any, *, layout: str = "bshd", out_dtype: Any = None) -> AttnOutput:
    """`cupyflash.merge_states` of JAX arrays, which `jax.grad` goes through.

    Parameters
    ----------
    outs : list of arrays [B, N, H, Dv], or one array with a leading axis of states
        See `cupyflash.merge_states` for this and every other argument.
    lses : list of arrays [B, H, N], or one array with a leading axis of states

    Returns
    -------
    out, lse : array
        As there.

    Raises
    ------
    As there.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cupyflash.jax import merge_states
    >>> outs, lses = jnp.ones((2, 1, 3, 1, 4)), jnp.zeros((2, 1, 1, 3))
    >>> jax.grad(lambda outs: merge_states(outs, lses).out.sum())(outs)[:, 0, 0, 0, 0].tolist()
    [0.5, 0.5]
    """
    return merged("merge_states", outs, lses, layout, out_dtype)


def merged(function: str, outs: Any, lses: Any, layout: str, out_dtype: Any) -> AttnOutput:
    """The same under another name."""
    call, arrays = call_of(function, outs, lses, layout, _check.dtype_option(function, "out_dtype", out_dtype))
    return AttnOutput(*_merge(call, tuple(arrays)))


def call_of(function: str, outs: Any, lses: Any, layout: str, out_dtype: str | None) -> tuple[MergeCall, list[Any]]:
    """The call on these families, and their arrays one after the other."""
    numbers: list[int | None] = []
    arrays: dict[str, Any] = {}
    for name, family in (("outs", outs), ("lses", lses)):
        is_listed = isinstance(family, (list, tuple))
        numbers.append(len(family) if is_listed else None)
        arrays |= {f"{name}[{i}]": array for i, array in enumerate(family)} if is_listed else {name: family}
    _arguments.require(function, arrays)
    num_outs, num_lses = numbers
    return MergeCall(layout, out_dtype, num_outs, num_lses), _varying.alike(list(arrays.values()))


def _compute(call: MergeCall, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
    out, lse = _primitive.bind(call, arrays)
    return out, lse


def _forward(call: MergeCall, arrays: tuple[Any, ...]) -> tuple[tuple[Any, Any], Any]:
    out, lse = _merge(call, arrays)
    return (out, lse), (arrays, out, lse)


def _backward(call: MergeCall, saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any]:
    arrays, out, lse = saved
    return (tuple(_primitive.bind(replace(call, out_dtype=None, backward=True), (*arrays, out, lse, *cotangents))),)


_merge: Any = jax.custom_vjp(_compute, nondiff_argnums=(0,))
_merge.defvjp(_forward, _backward)
