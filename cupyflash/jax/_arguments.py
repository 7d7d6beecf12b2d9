"""Arguments made plain for a primitive: arrays of JAX's alone, ints among them, and dropout's 64-bit words as two."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from cupyflash import _check
from cupyflash._errors import UnsupportedError, refusal
from cupyflash.jax._memory import form_of

_STARTS = {"q_start": None, "k_start": 0}  # and what is the same as none
_INTEGERS = ("int32", "uint32", "int64", "uint64")


def plain(function: str, arguments: dict[str, Any], required: Iterable[str], dropout_p: float) -> dict[str, Any]:
    """The arrays of a forward or backward by name, without those that are None or say nothing."""
    given = {name: value for name, value in arguments.items() if value is not None or name in required}
    starts = {name: given.pop(name) for name in _STARTS if name in given}
    words = {name: given.pop(name) for name in ("seed", "offset") if name in given}
    numbers = starts | (words if dropout_p else {})
    require(function, given | {name: number for name, number in numbers.items() if _is_placed(number)})
    if "alibi_slopes" in given:
        given["alibi_slopes"] = _constant(function, given["alibi_slopes"])
    for name, value in starts.items():
        start = _start(function, name, value, _sequences(given))
        given |= {} if start is None else {name: start}
    if dropout_p:
        if "seed" not in words:
            accepted = "an int in [0, 2**64), a key of jax.random or an integer array of one element is accepted"
            raise ValueError(refusal(function, "seed", f"is None while `dropout_p` is {dropout_p}", accepted))
        given["seed"] = _seed(function, words["seed"])
        given["offset"] = _word(function, "offset", words.get("offset", 0))
    return given


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(function: str, slopes: Any) -> Any:
    """The same, which has no derivative."""
    return slopes


@_constant.defjvp
def _refuse_derivative(function: str, primals: Any, tangents: Any) -> Any:
    accepted = "what has no gradient is accepted there: jax.lax.stop_gradient(alibi_slopes)"
    raise UnsupportedError(refusal(function, "alibi_slopes", "is differentiated", accepted))


def hint(function: str, name: str, value: Any) -> int | None:
    """An int, which may not be traced: it may choose a kernel."""
    return None if value is None else _check.integer(function, name, value, 0, None)


def require(function: str, arrays: dict[str, Any]) -> None:
    """All must be JAX's, and those that hold values already on one device."""
    devices: dict[str, set[Any]] = {}
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            advice = f"Pass jax.numpy.asarray({name})." if isinstance(array, np.ndarray) else ""
            given = "is None" if array is None else f"is of type {type(array).__name__}"
            raise TypeError(refusal(function, name, given, "among JAX arrays only JAX arrays are accepted", advice))
        if not isinstance(array, Tracer):
            devices[name] = array.devices()
    for name, own in devices.items():
        if own != next(iter(devices.values())):
            first = f"`{next(iter(devices))}` on {_named(next(iter(devices.values())))}"
            given = f"is on {_named(own)} and {first}"
            raise TypeError(refusal(function, name, given, "all arrays of a call must be on one device"))
        if len(own) > 1:
            accepted = "inside jax.shard_map, where each device sees its own part, it is accepted"
            raise TypeError(refusal(function, name, f"lies on {len(own)} devices", accepted))


def _is_placed(number: Any) -> bool:
    """Whether somebody has put it on a device; any other goes where the data is."""
    return isinstance(number, jax.Array) and not isinstance(number, Tracer) and number.committed


def _named(devices: set[Any]) -> str:
    return ", ".join(sorted(map(str, devices)))


def _sequences(arrays: dict[str, Any]) -> int:
    """How many there are; 0 where a wrong array does not tell, which is refused later."""
    if "cu_seqlens_q" in arrays:
        return max(arrays["cu_seqlens_q"].size - 1, 0)
    return arrays["q"].shape[0] if arrays["q"].ndim else 0


def _start(function: str, name: str, value: Any, sequences: int) -> Any:
    """An array of as many; None where the value says nothing."""
    if isinstance(value, jax.Array):
        return jnp.broadcast_to(value, (sequences,)) if value.ndim == 0 else value
    accepted = "an int that fits int32 or an int32 array [B] or []"
    if hasattr(value, "shape"):
        raise TypeError(refusal(function, name, f"is of type {type(value).__name__}", f"{accepted} is accepted"))
    value = _check.integer(function, name, value, -(2**31), 2**31, accepted)
    return None if value == _STARTS[name] else jnp.full((sequences,), value, jnp.int32)


def _seed(function: str, value: Any) -> Any:
    """As two words: an int's or an array's own, or drawn from a key."""
    if isinstance(value, jax.Array):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        if (is_key and value.ndim == 0) or (not is_key and form_of(value) == ((2,), "uint32")):
            return jax.random.bits(value, (2,), jnp.uint32)
    return _word(function, "seed", value)


def _word(function: str, name: str, value: Any) -> Any:
    """A 64-bit number as its two 32-bit words, the low one first: JAX has no 64-bit arrays unless it is told to."""
    _, low, high, _ = _check.INT_OR_ARRAY[name]
    accepted = f"an int in [0, 2**{high.bit_length() - 1}) or an array of one element of {', '.join(_INTEGERS)}"
    if not isinstance(value, jax.Array):
        number = _check.integer(function, name, value, low, high, accepted)
        return jnp.array([number & 0xFFFFFFFF, number >> 32], jnp.uint32)
    shape, dtype = form_of(value)
    if dtype not in _INTEGERS or value.size != 1:
        error = TypeError if dtype not in _INTEGERS else ValueError
        raise error(refusal(function, name, f"is an array {dtype}{list(shape)}", f"{accepted} is accepted"))
    value = value.reshape(())
    high_word = value >> 32 if value.dtype.itemsize == 8 else jnp.where(value < 0, -1, 0)
    return jnp.stack([value.astype(jnp.uint32), high_word.astype(jnp.uint32)])
