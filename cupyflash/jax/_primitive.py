"""One primitive of JAX's for all calls: `cupyflash`, whose parameter says which call it is.

For JAX a primitive is rules: what results look like (tracing), what runs (lowering, by platform), what `vmap` makes of
it, and that it has no derivative of its own: `jax.custom_vjp` stands above it. What runs is a buffer callback: Python
that XLA calls with its own buffers, on its own stream, the workspace among them as one more result, which is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive

from cupyflash._errors import UnsupportedError
from cupyflash._interop import NUMPY_DTYPES, Place
from cupyflash.jax import _memory, _varying
from cupyflash.jax._calls import Call
from cupyflash.jax._memory import Form, form_of

_primitive: Any = Primitive("cupyflash")
_primitive.multiple_results = True
_primitive.def_impl(functools.partial(apply_primitive, _primitive))


def bind(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """The results of the call, computed or traced. Raises what the plain call raises, before anything is computed."""
    return _primitive.bind(*_varying.alike(arrays), call=call)


# What results look like.


@_primitive.def_abstract_eval
def _types(*kinds: Any, call: Call) -> list[Any]:
    for kind in kinds:
        if any(axis is not None for axis in kind.sharding.spec):
            accepted = "inside jax.shard_map, where each device sees its own part, it is accepted"
            raise TypeError(f"{call.function}: an array is sharded as {kind.sharding.spec}; {accepted}")
    return [_typed(kinds[0], form) for form in _results(call, [form_of(kind) for kind in kinds])]


def _results(call: Call, forms: Sequence[Form]) -> list[Form]:
    views = (memory.view for memory in call.compute([_memory.formless(form) for form in forms]))
    return [(tuple(view.shape), view.dtype) for view in views]


def _typed(like: Any, form: Form) -> Any:
    """A type of this form that varies over devices as another one does."""
    shape, dtype = form
    sharding = like.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
    return like.update(shape=shape, dtype=NUMPY_DTYPES[dtype], weak_type=False, sharding=sharding)


# What runs.


def _on_cpu(*arrays: Any, call: Call) -> list[Any]:
    return _callback(call, arrays, 0)


def _on_cuda(*arrays: Any, call: Call) -> list[Any]:
    place: Place = "cuda", jax.local_devices(backend="cuda")[0].local_hardware_id or 0
    workspace_bytes = call.workspace_bytes([_memory.formless(form_of(array), place) for array in arrays])
    return _callback(call, arrays, workspace_bytes)


def _elsewhere(*arrays: Any, call: Call) -> list[Any]:
    raise UnsupportedError(f"{call.function}: JAX arrays on a CPU or an NVIDIA GPU are accepted")


def _callback(call: Call, arrays: Sequence[Any], workspace_bytes: int) -> list[Any]:
    inputs = [form_of(array) for array in arrays]
    results = _results(call, inputs)
    outputs = [*results, ((workspace_bytes,), "uint8")] if workspace_bytes else results
    execute = functools.partial(_execute, call, inputs, outputs)
    specs = [jax.ShapeDtypeStruct(shape, NUMPY_DTYPES[dtype]) for shape, dtype in outputs]
    return buffer_callback(execute, specs)(*arrays)[: len(results)]


def _execute(call: Call, inputs: list[Form], outputs: list[Form], context: Any, made: Any, *given: Any) -> None:
    """The callback: on a thread of XLA's, which has set the device."""
    place = _memory.place_of(made[0])
    own, results = (
        [_memory.adopt(buffer, form, place) for buffer, form in zip(buffers, forms, strict=True)]
        for buffers, forms in ((given, inputs), (made, outputs))
    )
    _memory.run(call.compute, own, results, context.stream if place[0] == "cuda" else 0)


for _platform, _rule in (("cpu", _on_cpu), ("cuda", _on_cuda), (None, _elsewhere)):
    mlir.register_lowering(_primitive, mlir.lower_fun(_rule, multiple_results=True), platform=_platform)


# What vmap makes of it.


def _batched(arrays: Sequence[Any], axes: Sequence[Any], *, call: Call) -> tuple[list[Any], list[int]]:
    """One call over the axis folded into the batch where there is one, else a call after the other."""
    is_mapped = [axis is not None for axis in axes]
    first = [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True)]
    size = next(array.shape[0] for array, mapped in zip(first, is_mapped, strict=True) if mapped)
    forms = [(shape[mapped:], dtype) for (shape, dtype), mapped in zip(map(form_of, first), is_mapped, strict=True)]
    has_batch = call.batched(forms, is_mapped)
    if has_batch is None:
        return _one_by_one(first, is_mapped, call)
    folded = [
        _folded(array if mapped else jnp.broadcast_to(array, (size, *array.shape))) if batch else array
        for array, mapped, batch in zip(first, is_mapped, has_batch, strict=True)
    ]
    results = [
        result.reshape(size, *shape)
        for result, (shape, _) in zip(bind(call, folded), _results(call, forms), strict=True)
    ]
    return results, [0] * len(results)


def _one_by_one(arrays: list[Any], is_mapped: list[bool], call: Call) -> tuple[list[Any], list[int]]:
    def one(mapped: list[Any]) -> list[Any]:
        rest = iter(mapped)
        return bind(call, [next(rest) if m else array for array, m in zip(arrays, is_mapped, strict=True)])

    results = jax.lax.map(one, [array for array, mapped in zip(arrays, is_mapped, strict=True) if mapped])
    return results, [0] * len(results)


def _folded(array: Any) -> Any:
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


batching.primitive_batchers[_primitive] = _batched


# What has no derivative.


def _refuse_derivative(primals: Any, tangents: Any, *, call: Call) -> Any:
    advice = "reverse-mode gradients of cupyflash.jax's attention and merge_states are what there is"
    raise UnsupportedError(f"{call.function}: has no derivative of its own; {advice}")


ad.primitive_jvps[_primitive] = _refuse_derivative
