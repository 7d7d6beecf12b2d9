"""`Attention`: the options, said once, and the path of a call through check, plan, allocation and backend."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from cupyflash import _check, _interop
from cupyflash._check import Checked, Judged
from cupyflash._errors import refusal
from cupyflash._spec import View, Work


class AttnOutput(NamedTuple):
    """What a forward returns: `out` as q but with v's head_dim, and `lse` (natural log) per query head and row.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> x = np.zeros((1, 3, 2, 8), np.float32)
    >>> state = cf.attn_fwd(x, x, x)
    >>> state.out.shape, state.lse.shape
    ((1, 3, 2, 8), (1, 2, 3))
    >>> out, lse = state
    """

    out: Any
    lse: Any


class AttnGrads(tuple):
    """What a backward returns: a named tuple (dq, dk, dv[, dbias][, dsink]), a field for each array given.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> x, sink = np.ones((1, 3, 2, 8), np.float32), np.zeros(2, np.float32)
    >>> out, lse = cf.attn_fwd(x, x, x, sink=sink)
    >>> grads = cf.attn_bwd(x, x, x, out, lse, x, sink=sink)
    >>> isinstance(grads, cf.AttnGrads), grads._fields
    (True, ('dq', 'dk', 'dv', 'dsink'))
    """

    __slots__ = ()
    _fields: ClassVar[tuple[str, ...]]
    dq: Any
    dk: Any
    dv: Any


# One class per set of fields, by name in this module, so that results can be pickled.
class AttnGradsPlain(namedtuple("AttnGrads", "dq dk dv"), AttnGrads):
    __slots__ = ()


class AttnGradsBias(namedtuple("AttnGrads", "dq dk dv dbias"), AttnGrads):
    __slots__ = ()


class AttnGradsSink(namedtuple("AttnGrads", "dq dk dv dsink"), AttnGrads):
    __slots__ = ()


class AttnGradsBiasSink(namedtuple("AttnGrads", "dq dk dv dbias dsink"), AttnGrads):
    __slots__ = ()


_GRADS: dict[tuple[bool, bool], Any] = {
    (False, False): AttnGradsPlain,
    (True, False): AttnGradsBias,
    (False, True): AttnGradsSink,
    (True, True): AttnGradsBiasSink,
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Attention:
    """What attention computes, said once for the forward and the backward.

        x = scale · (q_i · k_j), softcapped, minus ALiBi, plus bias, masked;   lse_i = log Σ_j exp(x_ij) [+ exp(sink)]
        P_ij = exp(x_ij − lse_i);   out_i = Σ_j P_ij · keep_ij/(1−p) · v_j

    Frozen, hashable and picklable; `replace` makes a changed copy. Both directions take every option; one that concerns
    the other direction only is checked and has no effect.

    Parameters
    ----------
    layout : "bshd" | "bhsd" | "thd", default "bshd"
        Axes of q: [B, Nq, Hq, D], [B, Hq, Nq, D], or packed sequences [Tq, Hq, D] with cu_seqlens.
        lse is [B, Hq, Nq], or [Hq, Tq] when packed.
    scale : float, default 1/sqrt(D)
        Multiplies q·k before every other score change; any finite number. Dimensionless.
    causal : False | True | "bottom-right" | "top-left", default False
        Query i sees keys at positions up to its own. True means "bottom-right": the last query sees the last key.
        "top-left" is the rule of PyTorch's SDPA and of JAX: the first query sees the first key.
    window : (left, right), default None
        Visible iff p_i − left ≤ r_j ≤ p_i + right, in keys. None or -1 leaves a side unbounded.
    softcap : float, default None
        c > 0 replaces x by c·tanh(x/c); None or 0 is off.
    dropout_p : float in [0, 1), default 0
        Needs a `seed` in each call; the same seed and offset give the same mask on every backend, forward and backward.
    deterministic : bool, default False
        Backward only: gradients are bitwise equal from run to run on one GPU and plan.
    out_dtype : dtype, default q's
        Forward only: dtype of `out`; "float32" for partial states that will be merged.
    grad_dtype : dtype, default each input's
        Backward only: dtype of dq, dk, dv and dbias.
    bias_grad : bool, default True
        Backward only: False leaves out dbias, which costs a kernel of its own on a GPU; for a bias that is a mask.
    num_splits : int, default 0
        Forward only: parts the keys are split into; 0 lets the plan choose, 1 is none.
    split_len : int, default None
        Forward only: keys per split instead, so that a row's bits do not depend on its batch.
    allow_tf32 : bool, default False
        float32 products may be rounded to TF32 (11 significant bits): on CUDA they are, NumPy has no use for it.

    Raises
    ------
    ValueError for values, TypeError for kinds and dtypes.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> attn = cf.Attention(causal=True, window=(4, 0))
    >>> attn
    Attention(causal=True, window=(4, 0))
    >>> x = np.ones((1, 6, 2, 8), np.float32)
    >>> out, lse = attn.fwd(x, x, x)
    >>> attn.bwd(x, x, x, out, lse, np.ones_like(out)).dv.shape
    (1, 6, 2, 8)
    """

    layout: str = "bshd"
    scale: float | None = None
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    out_dtype: Any = None
    grad_dtype: Any = None
    bias_grad: bool = True
    num_splits: int = 0
    split_len: int | None = None
    allow_tf32: bool = False

    def __post_init__(self) -> None:
        for name, value in _check.checked_options(self).items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        changed = (
            (f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        )
        return f"Attention({', '.join(f'{name}={value!r}' for name, value in changed)})"

    def replace(self, **changes: Any) -> Attention:
        """A copy with some options changed."""
        return dataclasses.replace(self, **changes)

    def fwd(
        self, q: Any, k: Any, v: Any, *,
        bias: Any = None, alibi_slopes: Any = None, sink: Any = None, seqused_k: Any = None, block_table: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None, q_start: Any = None, k_start: Any = 0, seed: Any = None, offset: Any = 0,
        out: Any = None, lse: Any = None, workspace: Any = None, check: bool = False, plan: Any = None,
    ) -> AttnOutput:  # fmt: skip
        """`attn_fwd` with these options; see there for the arguments."""
        return _call("attn_fwd", self, _arguments(locals()), backward=False)

    def bwd(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *,
        delta: Any = None, dlse: Any = None,
        bias: Any = None, alibi_slopes: Any = None, sink: Any = None, seqused_k: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None, q_start: Any = None, k_start: Any = 0, seed: Any = None, offset: Any = 0,
        dq: Any = None, dk: Any = None, dv: Any = None, dbias: Any = None, dsink: Any = None, accumulate: bool = False,
        workspace: Any = None, check: bool = False, plan: Any = None,
    ) -> Any:  # fmt: skip
        """`attn_bwd` with these options; see there for the arguments. Returns `AttnGrads`."""
        return _call("attn_bwd", self, _arguments(locals()), backward=True)

    def plan(
        self, q: Any, k: Any, v: Any, backward: bool = False, *,
        bias: Any = None, alibi_slopes: Any = None, sink: Any = None, seqused_k: Any = None, block_table: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None, q_start: Any = None, k_start: Any = 0, seed: Any = None, offset: Any = 0,
        out: Any = None, lse: Any = None, dout: Any = None, delta: Any = None, dlse: Any = None,
        dq: Any = None, dk: Any = None, dv: Any = None, dbias: Any = None, dsink: Any = None, accumulate: bool = False,
        workspace: Any = None, check: bool = False, plan: Any = None,
    ) -> Any:  # fmt: skip
        """Which kernel such a call would use, and why: printable, and accepted as `plan=` by the call itself.

        Takes the arguments of `fwd`, or of `bwd` with `backward=True`; only q, k, v and what switches a feature on need
        be given. Nothing is compiled or launched. Raises UnsupportedError when no kernel serves it.
        """
        checked, backend = _plannable("Attention.plan", self, _arguments(locals()), backward)
        judged = checked.judged
        return backend.plan(judged.spec, judged.call, backward=backward, override=plan)

    def workspace_size(
        self, q: Any, k: Any, v: Any, backward: bool = False, *,
        bias: Any = None, alibi_slopes: Any = None, sink: Any = None, seqused_k: Any = None, block_table: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None, q_start: Any = None, k_start: Any = 0, seed: Any = None, offset: Any = 0,
        out: Any = None, lse: Any = None, dout: Any = None, delta: Any = None, dlse: Any = None,
        dq: Any = None, dk: Any = None, dv: Any = None, dbias: Any = None, dsink: Any = None, accumulate: bool = False,
        workspace: Any = None, check: bool = False, plan: Any = None,
    ) -> int:  # fmt: skip
        """Bytes of `workspace` that such a call needs, by its shapes, dtypes and options; takes what `plan` takes."""
        checked, backend = _plannable("Attention.workspace_size", self, _arguments(locals()), backward)
        judged = checked.judged
        chosen = backend.plan(judged.spec, judged.call, backward=backward, override=plan)
        needed = backend.workspace_bytes(judged.spec, judged.call, backward=backward)
        return max(needed, backend.plan_bytes(judged.spec, judged.call, chosen))

    def prepare(
        self, q: Any, k: Any, v: Any, backward: bool = False, *,
        bias: Any = None, alibi_slopes: Any = None, sink: Any = None, seqused_k: Any = None, block_table: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None, q_start: Any = None, k_start: Any = 0, seed: Any = None, offset: Any = 0,
        out: Any = None, lse: Any = None, dout: Any = None, delta: Any = None, dlse: Any = None,
        dq: Any = None, dk: Any = None, dv: Any = None, dbias: Any = None, dsink: Any = None, accumulate: bool = False,
        workspace: Any = None, check: bool = False, plan: Any = None,
    ) -> PreparedCall:  # fmt: skip
        """A call packed once, outputs and workspace included, to be run again and again on the arrays it was given.

        Takes the arguments of `fwd`, or of `bwd` with `backward=True`. Each run reads the arrays as they are by then,
        works on the stream that is current by then, and writes the same outputs: not for two threads at once. An input
        that could only be adopted as a copy (a pending negation or conjugation of torch's, NumPy strides that are no
        multiples of the element size) is read once, here.
        """
        arguments = _of_direction("Attention.prepare", _arguments(locals()), backward)
        return PreparedCall("Attention.prepare", self, arguments, backward=backward)


class _Ready(NamedTuple):
    """A form of call that nothing is left to decide about."""

    plan: Any
    workspace_bytes: int  # that a caller's must have, wherever arrays lie
    used_bytes: int
    work: Work
    results: Any  # the named tuple to return


def _make_ready(judged: Judged, override: Any) -> _Ready:
    spec, call, backward = judged.spec, judged.call, judged.backward
    backend = _interop.backend(judged.place)
    plan = backend.plan(spec, call, backward=backward, override=override)
    work = (backend.backward if backward else backend.forward)(spec, call, plan)
    results = grads_of(has_bias=call.dbias is not None, has_sink=call.dsink is not None) if backward else AttnOutput
    used = backend.plan_bytes(spec, call, plan)
    return _Ready(plan, max(backend.workspace_bytes(spec, call, backward=backward), used), used, work, results)


@functools.lru_cache(maxsize=_check.FORMS)
def _ready(judged: Judged) -> _Ready:
    return _make_ready(judged, None)


class PreparedCall:
    """Checked, planned and allocated; `run` computes and returns the outputs, and so does calling it again."""

    __slots__ = ("checked", "ready")

    def __init__(self, function: str, attention: Attention, arguments: dict[str, Any], *, backward: bool) -> None:
        override = arguments.pop("plan")
        checked = _check.checked_call(function, attention, arguments, backward=backward, planning=False)
        judged, adopted, views = checked.judged, checked.adopted, checked.adopted.views
        ready = _ready(judged) if override is None else _make_ready(judged, override)
        if "workspace" in views:
            _check.check_workspace(adopted, ready.workspace_bytes)
        for name, (shape, dtype) in judged.outputs.items():
            views[name] = adopted.empty(shape, dtype)
        if ready.used_bytes and "workspace" not in views:
            views["workspace"] = adopted.empty((ready.used_bytes,), "uint8")
        self.checked, self.ready = checked, ready

    def __call__(self) -> Any:
        """Run once more: on the stream that is current now, with values looked at again where they were before."""
        self.checked.adopted.refresh_stream()
        if self.checked.validates:
            _check.check_values(self.checked)
        return self.run()

    def run(self) -> Any:
        """Compute; the outputs in the caller's kind."""
        checked, ready = self.checked, self.ready
        adopted = checked.adopted
        ready.work(_check.given(checked), adopted.stream)
        views, give, results = adopted.views, adopted.give, ready.results
        return results(*[give(views[name]) for name in results._fields])

    @property
    def plan(self) -> Any:
        """What `Attention.plan` says of such a call."""
        return self.ready.plan

    def __repr__(self) -> str:
        return f"PreparedCall({'backward' if self.checked.judged.backward else 'forward'}, {self.plan!r})"


class _Accepted(NamedTuple):
    """What is left to do of a call whose like was taken, and of whose arrays nothing but the addresses is its own."""

    ready: _Ready
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]
    library: Any
    place: _interop.Place

    def run(self, addresses: dict[str, int], ints: dict[str, int]) -> Any:
        ready, outputs, library, place = self
        given = {**addresses, **ints}
        made: list[Any] = []
        for name, shape, dtype in outputs:
            raw = library.empty(shape, dtype, place)
            given[name] = library.address(raw)
            made.append(raw)
        if ready.used_bytes:
            workspace = library.empty((ready.used_bytes,), "uint8", place)
            given["workspace"] = library.address(workspace)
        ready.work(given, library.stream(place))
        return ready.results(*made)


_accepted: dict[tuple[Any, ...], _Accepted] = {}


def grads_of(*, has_bias: bool, has_sink: bool) -> Any:
    """The named tuple of the gradients of such a call."""
    return _GRADS[has_bias, has_sink]


def _call(function: str, attention: Attention, arguments: dict[str, Any], *, backward: bool) -> Any:
    """Check, plan, allocate and compute: the first two once, where a glance at the arguments tells it all.

    It does not where outputs are given, which must overlap nothing, where values are looked at, and where an array is
    read through a copy.
    """
    glance = _interop.glance(arguments, _check.INT_OR_ARRAY)
    if glance is None:
        if _interop.has_jax(arguments.values()):
            from cupyflash.jax import _plain

            return _plain.call(function, attention, arguments, backward=backward)
        return PreparedCall(function, attention, arguments, backward=backward).run()
    key = function, attention, glance.form
    accepted = _accepted.get(key)
    if accepted is not None:
        return accepted.run(glance.addresses, glance.ints)
    call = PreparedCall(function, attention, arguments, backward=backward)
    judged, adopted = call.checked.judged, call.checked.adopted
    lies_there = all(adopted.views[name].ptr == address for name, address in glance.addresses.items())
    if lies_there and not (judged.written or judged.copies or call.checked.validates):
        if len(_accepted) >= _check.FORMS:
            _accepted.clear()
        outputs = tuple((name, *output) for name, output in judged.outputs.items())
        _accepted[key] = _Accepted(call.ready, outputs, adopted.library, adopted.place)
    return call.run()


def leaves_parts(attention: Attention, arguments: dict[str, Any]) -> bool:
    """Whether such a forward ends with merging what it has of parts of its keys."""
    checked, backend = _plannable("attn_fwd", attention, _defaults(Attention.fwd) | arguments, backward=False)
    spec, call = checked.judged.spec, checked.judged.call
    return backend.plan_bytes(spec, call, backend.plan(spec, call, backward=False)) > 0


def forward_beside(attention: Attention, state: AttnOutput, arguments: dict[str, Any]) -> Any:
    """Such a forward that also merges the state of other keys, of `Attention.fwd`'s sums' dtype."""
    beside = {"beside_out": state.out, "beside_lse": state.lse}
    return _call("attn_fwd", attention, _defaults(Attention.fwd) | arguments | beside, backward=False)


@functools.cache
def _defaults(method: Any) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


def planned(function: str, attention: Attention, given: dict[str, Any], *, backward: bool) -> tuple[Any, int]:
    """The plan of a call with these arguments, under its own name in messages, and the bytes of workspace it needs."""
    arguments = _defaults(Attention.bwd if backward else Attention.fwd) | given
    checked, backend = _plannable(function, attention, arguments, backward)
    spec, call = checked.judged.spec, checked.judged.call
    return backend.plan(spec, call, backward=backward), backend.workspace_bytes(spec, call, backward=backward)


def attention_of(
    layout: Any, scale: Any, causal: Any, window: Any, softcap: Any, dropout_p: Any, deterministic: Any, out_dtype: Any,
    grad_dtype: Any, bias_grad: Any, num_splits: Any, split_len: Any, allow_tf32: Any,
) -> Attention:  # fmt: skip
    """The `Attention` of these options, made and checked when they are first said in these types."""
    options = (
        layout, scale, causal, window, softcap, dropout_p, deterministic, out_dtype, grad_dtype, bias_grad, num_splits,
        split_len, allow_tf32,
    )  # fmt: skip
    try:
        return _remembered(None if window is None else tuple(map(type, window)), *options)
    except TypeError:  # wrong, or right and not hashable, as a window in a list is
        pass
    return _new(*options)


def _new(*options: Any) -> Attention:
    return Attention(**dict(zip(_OPTIONS, options, strict=True)))


_OPTIONS = tuple(option.name for option in dataclasses.fields(Attention))


@functools.lru_cache(maxsize=512, typed=True)  # by type too: 1 is refused where True is accepted, though they are equal
def _remembered(_types_of_window: tuple[type, ...] | None, *options: Any) -> Attention:
    return _new(*options)


def preprocess(function: str, layout: str, out: Any, dout: Any, dlse: Any) -> Any:
    """delta = rowsum(dout · out) − dlse, made by the caller's library."""
    if _interop.has_jax((out, dout, dlse)):
        from cupyflash.jax import _plain

        return _plain.preprocess(function, layout, out, dout, dlse)
    adopted, delta, work = ready_preprocess(function, layout, out, dout, dlse)
    work({}, adopted.stream)
    return adopted.give(delta)


def ready_preprocess(function: str, layout: str, out: Any, dout: Any, dlse: Any) -> tuple[_interop.Adopted, View, Work]:
    """Checked, with delta allocated and the kernel loaded."""
    call, adopted, shape, dtype = _check.checked_preprocess(function, layout, out, dout, dlse)
    delta = adopted.empty(shape, dtype)
    call.delta = _check.canonical(layout, "delta", delta, call.batch, False)
    return adopted, delta, _interop.backend(adopted.place).preprocess(call)


def _arguments(named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call out of its `locals()`."""
    del named["self"]
    named.pop("backward", None)
    return named


def _of_direction(function: str, arguments: dict[str, Any], backward: bool) -> dict[str, Any]:
    """Without the names that only the other direction has; giving one of those is an error."""
    foreign = (
        ("block_table",) if backward else ("dout", "delta", "dlse", "dq", "dk", "dv", "dbias", "dsink", "accumulate")
    )
    for name in foreign:
        given = arguments.get(name)
        if given is not None and given is not False:
            direction = "a backward" if backward else "a forward"
            raise ValueError(refusal(function, name, "is given", f"None is accepted for {direction}"))
    return {name: value for name, value in arguments.items() if name not in foreign}


def _plannable(function: str, attention: Attention, arguments: dict[str, Any], backward: bool) -> tuple[Checked, Any]:
    arguments = _of_direction(function, arguments, backward)
    del arguments["plan"]
    checked = _check.checked_call(function, attention, arguments, backward=backward, planning=True)
    return checked, _interop.backend(checked.adopted.place)
