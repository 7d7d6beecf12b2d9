"""How arrays vary over the devices of a `jax.shard_map`: what a call reads must vary alike, and so do its results.

JAX tracks this in the types of arrays. Where one array is the same on all devices and another is not, the first is
said to vary too, by an operation whose transpose sums gradients over the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, each varying over every axis that one of them varies over."""
    axes = [_axes(array) for array in arrays]
    union = frozenset().union(*axes)
    return [_vary(array, union - own) for array, own in zip(arrays, axes, strict=True)]


def _axes(array: Any) -> frozenset[Any]:
    kind: Any = jax.typeof(array)
    if hasattr(kind, "vma"):  # before JAX 0.10
        return kind.vma
    return kind.manual_axis_type.varying


def _vary(array: Any, axes: frozenset[Any]) -> Any:
    if not axes:
        return array
    lax: Any = jax.lax
    if hasattr(lax, "pcast"):
        return lax.pcast(array, tuple(axes), to="varying")
    return lax.pvary(array, tuple(axes))  # before JAX 0.9
