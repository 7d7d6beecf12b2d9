"""Operators of torch's: `torch.ops.cupyflash.attn_fwd`, `attn_bwd`, and `kv_append`, which alone writes to its inputs.

For torch an operator is a name, a schema, and functions for the keys that its dispatcher goes through: what computes
(CPU and CUDA: the plain calls), what says the shapes of results (for torch.compile), what records a graph, and what
casts inputs under autocast. The dispatcher turns every argument of a call into its own and back, but hands on none that
is its default: so what is not given is left out all the way.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from cupyflash import _append
from cupyflash._attention import Attention, attention_of
from cupyflash._errors import UnsupportedError, refusal

Tensor = torch.Tensor

# The first two have gradients, as q, k and v before them have.
_ARRAYS = (
    "bias", "sink", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "q_start", "k_start",
    "seed", "offset",
)  # fmt: skip
HINTS = ("max_seqlen_q", "max_seqlen_k")
_DIFFERENTIABLE = 5
_PAGES = 3 + _ARRAYS.index("block_table")
_INPUTS = ", ".join(["Tensor q", "Tensor k", "Tensor v", *(f"Tensor? {name}=None" for name in _ARRAYS)])
_OPTIONS = (
    'str layout="bshd", float? scale=None, str causal="none", int? window_left=None, int? window_right=None, '
    "float? softcap=None, float dropout_p=0.0, bool deterministic=False, ScalarType? out_dtype=None, int num_splits=0, "
    "int? split_len=None, bool allow_tf32=False, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None"
)

_library = torch.library.Library("cupyflash", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_library.define(f"attn_fwd({_INPUTS}, *, {_OPTIONS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_SAVED = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse"
_library.define(f"attn_bwd({_SAVED}, {_INPUTS}, *, {_OPTIONS}, bool bias_grad=True) -> Tensor[]", tags=_TAGS)
_library.define(
    "kv_append(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor k, Tensor v, Tensor block_table, Tensor seqused_k) -> ()",
    tags=_TAGS,
)
attn_fwd: Any = torch.ops.cupyflash.attn_fwd.default
attn_bwd: Any = torch.ops.cupyflash.attn_bwd.default
kv_append: Any = torch.ops.cupyflash.kv_append.default
_DEFAULTS = {x.name: x.default_value for x in attn_bwd._schema.arguments if x.kwarg_only}


# What computes.


def _call(given: tuple[Tensor | None, ...], options: dict[str, Any]) -> tuple[Attention, dict[str, Any]]:
    """What is to be computed, and the arguments beside q, k and v that are there."""
    options = _DEFAULTS | options
    arguments = _there(given)
    for name in HINTS:
        if options[name] is not None:
            arguments[name] = options[name]
    window = options["window_left"], options["window_right"]
    causal = options["causal"]
    attention = attention_of(
        options["layout"], options["scale"], False if causal == "none" else causal, window, options["softcap"],
        options["dropout_p"], options["deterministic"], options["out_dtype"], None, options["bias_grad"],
        options["num_splits"], options["split_len"], options["allow_tf32"],
    )  # fmt: skip
    return attention, arguments


def _there(given: tuple[Tensor | None, ...]) -> dict[str, Any]:
    return {name: x for name, x in zip(_ARRAYS, given, strict=False) if x is not None}


def _forward(q: Tensor, k: Tensor, v: Tensor, *given: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    attention, arguments = _call(given, options)
    out, lse = attention.fwd(q, k, v, **arguments)
    return out, lse


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    *given: Tensor | None, **options: Any,
) -> list[Tensor]:  # fmt: skip
    attention, arguments = _call(given, options)
    return list(attention.bwd(q, k, v, out, lse, dout, dlse=dlse, **arguments))


def _append_rows(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, block_table: Tensor, seqused_k: Tensor
) -> None:
    _append.kv_append(k_pages, v_pages, k, v, block_table=block_table, seqused_k=seqused_k)


def _append_and_count(keys: Any, k_pages: Tensor, v_pages: Tensor, *given: Tensor) -> None:
    """A graph that saved the pools learns that they were written."""
    torch.autograd.graph.increment_version((k_pages, v_pages))
    with torch._C._AutoDispatchBelowADInplaceOrView():
        kv_append.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, k_pages, v_pages, *given)


# What results look like.


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    heads, rows = (-3, -2) if options.get("layout") == "bhsd" else (-2, -3)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=options.get("out_dtype") or q.dtype)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty((*q.shape[:-3], q.shape[heads], q.shape[rows]), dtype=dtype)


def _backward_shapes(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    bias: Tensor | None = None, sink: Tensor | None = None, *given: Tensor | None, **options: Any,
) -> list[Tensor]:  # fmt: skip
    bias = bias if options.get("bias_grad", True) else None
    return [like.new_empty(like.shape) for like in (q, k, v, bias, sink) if like is not None]


# What records a graph. `torch.library.register_autograd` would, and look at the schema of 28 arguments each time.


def dispatched(given: tuple[Tensor | None, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """`attn_fwd` of all its inputs and options."""
    return attn_fwd(*_stated(given), **{name: value for name, value in options.items() if value != _DEFAULTS[name]})


def direct(given: tuple[Tensor | None, ...], attention: Attention, hints: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same where nobody but autograd listens to it, past the dispatcher."""
    if not _is_recorded(given):
        return _attend(attention, hints, *given)
    attend, options = functools.partial(_attend, attention, hints), functools.partial(_options_of, attention, hints)
    return _apply(attend, options, *_stated(given))


def _attend(attention: Attention, hints: dict[str, Any], q: Any, k: Any, v: Any, *given: Tensor | None) -> Any:
    return attention.fwd(q, k, v, **_there(given), **hints)


def _stated(given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    last = len(given)
    while given[last - 1] is None:
        last -= 1
    return given[:last]


def corner(causal: bool | str) -> str:
    """In one type, as operators take no unions."""
    return causal if isinstance(causal, str) else "bottom-right" if causal else "none"


def _options_of(attention: Attention, hints: dict[str, Any]) -> dict[str, Any]:
    """What the operators are told of these options, no defaults among it."""
    options = {name: getattr(attention, name) for name in _DEFAULTS.keys() & attention.__dataclass_fields__.keys()}
    left, right = attention.window or (None, None)
    options |= {"window_left": left, "window_right": right, "causal": corner(attention.causal)} | hints
    if attention.out_dtype is not None:
        options["out_dtype"] = getattr(torch, attention.out_dtype)
    return {name: value for name, value in options.items() if value != _DEFAULTS[name]}


_C: Any = torch._C
_is_dead = _C._functorch.is_dead_tensor_wrapper  # a tensor that has outlived its transform
_USUAL_KINDS = {torch.Tensor, torch.nn.Parameter}


def _dispatch_keys() -> tuple[int, int]:
    """What this thread's modes, transforms, traces and autocasts add to every tensor's keys, and take from them."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return included.raw_repr(), excluded.raw_repr()


with ThreadPoolExecutor(1) as _pool:  # a new thread has no modes, whoever imports this under which
    _USUAL_KEYS = _pool.submit(_dispatch_keys).result()


def is_heard(given: tuple[Any, ...]) -> bool:
    """Whether a call means something of its own to a mode, a transform, a profiler or a tensor's class or device."""
    return (
        _dispatch_keys() != _USUAL_KEYS
        or torch._C._is_torch_function_mode_enabled()
        or torch.autograd.profiler._is_profiler_enabled
        or not (given[0].is_cuda or given[0].is_cpu)
        or any(type(x) not in _USUAL_KINDS or _is_dead(x) for x in given if x is not None)
    )


def _is_recorded(given: tuple[Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def _record_of_keys(keys: Any, *given: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    below = functools.partial(attn_fwd.redispatch, keys & torch._C._after_autograd_keyset, **options)
    return _Recorded.apply(below, lambda: options, *given) if _is_recorded(given) else below(*given)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Any, options: Any, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        if len(given) > _PAGES and given[_PAGES] is not None:
            accepted = "with pages no input may require grad: a gradient to pools of pages does not exist"
            raise UnsupportedError(refusal("attn_fwd", "block_table", "is given", accepted))
        out, lse = compute(*given)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, out, lse)
        ctx.options = options  # a function, as they may never be asked for
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        (dout, dlse), (*given, out, lse) = grad_outputs, ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        wanted = given[:_DIFFERENTIABLE]
        bias_grad = ctx.needs_input_grad[2 + 3] if len(given) > 3 else True
        if not bias_grad:  # a mask needs not the time that dbias takes
            wanted[3] = None
        grads = iter(attn_bwd(dout, dlse, out, lse, *given, **ctx.options(), bias_grad=bias_grad))
        of_given = [None if like is None else next(grads) for like in wanted]
        return (None, None, *of_given, *([None] * (len(given) - len(wanted))))


# Without a look for transforms, of which `is_heard` knows that there are none.
_above_function: Any = super(torch.autograd.Function, _Recorded)
_apply = _above_function.apply


def _save_nothing(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    pass


def _refuse_second_gradient(ctx: Any, grads: Any) -> None:
    raise UnsupportedError("attn_bwd: has no gradient of its own; first derivatives of attention are what there is")


# What casts under autocast.


def _cast_on(device: str, key: str) -> Any:
    own_key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(q: Tensor, k: Tensor, v: Tensor, *given: Tensor | None, **options: Any) -> Any:
        """As torch's own attention: q, k and v in autocast's dtype, but for float64. What is added to scores stays."""
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
        with torch._C._ExcludeDispatchKeyGuard(own_key):
            return attn_fwd(q, k, v, *given, **options)

    return cast


for _device in ("CPU", "CUDA"):
    _library.impl("attn_fwd", _forward, _device)
    _library.impl("attn_bwd", _backward, _device)
    _library.impl("kv_append", _append_rows, _device)
    _library.impl("attn_fwd", _cast_on(_device.lower(), f"Autocast{_device}"), f"Autocast{_device}")
_library.impl("kv_append", _append_and_count, "ADInplaceOrView", with_keyset=True)
torch.library.register_fake("cupyflash::kv_append", lambda *given: None, lib=_library)
torch.library.register_fake("cupyflash::attn_fwd", _forward_shapes, lib=_library)
torch.library.register_fake("cupyflash::attn_bwd", _backward_shapes, lib=_library)
_library.impl("attn_fwd", _record_of_keys, "Autograd", with_keyset=True)
torch.library.register_autograd(
    "cupyflash::attn_bwd", _refuse_second_gradient, setup_context=_save_nothing, lib=_library
)
