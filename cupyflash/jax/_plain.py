"""The plain functions, when they are called with JAX arrays."""

from __future__ import annotations

from typing import Any

from cupyflash._attention import Attention, AttnOutput, grads_of
from cupyflash._errors import refusal
from cupyflash.jax import _arguments, _attention, _merge, _primitive
from cupyflash.jax._calls import MergeCall, PreprocessCall

_OUTPUTS = ("dq", "dk", "dv", "dbias", "dsink", "workspace", "plan")


def call(function: str, attention: Attention, arguments: dict[str, Any], *, backward: bool) -> Any:
    """`Attention.fwd`, which `jax.grad` goes through, or `Attention.bwd`."""
    arguments = dict(arguments)
    for name in _OUTPUTS if backward else ("out", "lse", *_OUTPUTS):
        _refuse_unless(None, function, name, arguments.pop(name, None))
    for name in ("accumulate", "check"):
        _refuse_unless(False, function, name, arguments.pop(name, False))
    hints = arguments.pop("max_seqlen_q"), arguments.pop("max_seqlen_k")
    if not backward:
        return _attention.forward(function, attention, arguments, *hints)
    required = ("q", "k", "v", "lse", "dout", *(("out",) if arguments["delta"] is None else ()))
    arrays = _arguments.plain(function, arguments, required, attention.dropout_p)
    backwards = _attention.call_of(function, attention, arrays, *hints, backward=True)
    results = _primitive.bind(backwards, list(arrays.values()))
    given = backwards.gradients
    return grads_of(has_bias="bias" in given, has_sink="sink" in given)(*results)


def preprocess(function: str, layout: str, out: Any, dout: Any, dlse: Any) -> Any:
    """`attn_bwd_preprocess`."""
    arrays = {"out": out, "dout": dout} | ({} if dlse is None else {"dlse": dlse})
    _arguments.require(function, arrays)
    [delta] = _primitive.bind(PreprocessCall(layout), list(arrays.values()))
    return delta


def merge_states(function: str, outs: Any, lses: Any, layout: str, out_dtype: Any, out: Any, lse: Any) -> AttnOutput:
    """`merge_states`, which `jax.grad` goes through."""
    for name, given in (("out", out), ("lse", lse)):
        _refuse_unless(None, function, name, given)
    return _merge.merged(function, outs, lses, layout, out_dtype)


def merge_states_bwd(
    function: str, outs: Any, lses: Any, out: Any, lse: Any, dout: Any, dlse: Any, layout: str
) -> tuple[Any, Any]:
    """`merge_states_bwd`."""
    rest = {"out": out, "lse": lse, "dout": dout} | ({} if dlse is None else {"dlse": dlse})
    _arguments.require(function, rest)
    forward, arrays = _merge.call_of(function, outs, lses, layout, None)
    backward = MergeCall(layout, None, forward.num_outs, forward.num_lses, backward=True)
    douts, dlses, _ = backward.families(_primitive.bind(backward, [*arrays, *rest.values()]))
    kinds = (type(family) if isinstance(family, (list, tuple)) else None for family in (outs, lses))
    first, second = (made if kind is None else kind(made) for made, kind in zip((douts, dlses), kinds, strict=True))
    return first, second


def _refuse_unless(nothing: Any, function: str, name: str, given: Any) -> None:
    if given is not nothing:
        accepted = "with JAX arrays, which nobody writes to, XLA makes what is written"
        raise TypeError(refusal(function, name, "is given", f"{nothing} is accepted: {accepted}"))
