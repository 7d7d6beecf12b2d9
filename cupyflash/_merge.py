"""Partial results over disjoint keys made into one, and the gradient of that."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cupyflash import _check, _interop
from cupyflash._attention import AttnOutput
from cupyflash._errors import UnsupportedError, refusal
from cupyflash._interop import Adopted
from cupyflash._spec import FilledIn, View, Work

_LSE_DTYPES = ("float32", "float64")
_LONGEST = 2**31 - 1  # the kernels count in 32 bits


@dataclass(slots=True)
class MergeCall:
    """What a backend merges, in the canonical form of `_spec`: out [B, N, H, Dv] and lse [B, H, N] of each state."""

    function: str
    outs: list[View]
    lses: list[View]
    out: View | None = None  # the merged result: written by merge, where it may be one of the states; read by merge_bwd
    lse: View | None = None
    dout: View | None = None
    dlse: View | None = None
    douts: list[View] = field(default_factory=list)
    dlses: list[View] = field(default_factory=list)
    device: int = 0


def merge_states(
    outs: Any, lses: Any, *, layout: str = "bshd", out_dtype: Any = None, out: Any = None, lse: Any = None
) -> AttnOutput:
    """Attention over the union of disjoint key sets, from the results over each.

        lse = log Σ_s exp(lse_s);   out = Σ_s exp(lse_s − lse) · out_s

    A state whose lse is −inf has no keys, and its `out` is not read. Where all are −inf, out is 0 and lse −inf.

    Parameters
    ----------
    outs : list of arrays [B, N, H, Dv], or one array with a leading axis of states
        float16 | bfloat16 | float32 | float64, also mixed. Axes of `layout`; [T, H, Dv] is always packed.
    lses : list of arrays [B, H, N], or one array with a leading axis of states
        float32 | float64. Natural log; packed [H, T].
    layout : "bshd" | "bhsd" | "thd", default "bshd"
    out_dtype : dtype, default the states' common dtype, float32 when they differ
    out, lse : array
        Where to write. May be the arrays of one of the states: a running merge in place.

    Returns
    -------
    out : array like a state's
    lse : array like a state's, float64 when any is, else float32

    Raises
    ------
    ValueError for shapes and values, TypeError for kinds and dtypes; before anything is written.

    Notes
    -----
    Computed in float32 or better. A sink is a merge with a state whose value is zero and whose lse is the sink.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 8, 2, 4)) for _ in range(3))
    >>> parts = [cf.attn_fwd(q, k[:, part], v[:, part]) for part in (slice(0, 3), slice(3, 8))]
    >>> merged = cf.merge_states(*zip(*parts))
    >>> bool(np.allclose(merged.out, cf.attn_fwd(q, k, v).out))
    True
    """
    function = "merge_states"
    if _interop.has_jax([*_arrays(outs), *_arrays(lses)]):
        from cupyflash.jax import _plain

        return _plain.merge_states(function, outs, lses, layout, out_dtype, out, lse)
    merge = forward(function, outs, lses, layout, out_dtype, out, lse)
    adopted, needed = merge.states.adopted, merge.workspace_bytes
    given: FilledIn = {"workspace": adopted.empty((needed,), "uint8")} if needed else {}
    merge.work(given, adopted.stream)
    return AttnOutput(*[adopted.give(view) for view in merge.results])


def merge_states_bwd(
    outs: Any, lses: Any, out: Any, lse: Any, dout: Any, dlse: Any = None, *, layout: str = "bshd"
) -> tuple[Any, Any]:
    """The gradients of `merge_states` with respect to the states.

        dout_s = exp(lse_s − lse) · dout;   dlse_s = exp(lse_s − lse) · (dout · (out_s − out) + dlse)

    Exact, and 0 for a state without keys. `attn_bwd(..., dlse=dlse_s)` carries it on to q, k and v.

    Parameters
    ----------
    outs, lses : as given to `merge_states`
    out, lse : what it returned
    dout : array like out, any float dtype
    dlse : array like lse, float32 | float64, default zeros

    Returns
    -------
    douts, dlses : in the form, the shapes and the dtypes of outs and lses

    Raises
    ------
    ValueError for shapes, TypeError for kinds and dtypes.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> outs, lses = np.ones((2, 1, 3, 1, 4)), np.zeros((2, 1, 1, 3))
    >>> out, lse = cf.merge_states(outs, lses)
    >>> douts, dlses = cf.merge_states_bwd(outs, lses, out, lse, np.ones_like(out))
    >>> bool(np.allclose(douts, 0.5)), bool(np.allclose(dlses, 0))
    (True, True)
    """
    function = "merge_states_bwd"
    if _interop.has_jax([*_arrays(outs), *_arrays(lses)]):
        from cupyflash.jax import _plain

        return _plain.merge_states_bwd(function, outs, lses, out, lse, dout, dlse, layout)
    for name, array in (("out", out), ("lse", lse), ("dout", dout)):
        if array is None:
            raise TypeError(refusal(function, name, "is None", _interop.ACCEPTED_ARRAYS))
    merge = backward(function, outs, lses, out, lse, dout, dlse, layout)
    adopted = merge.states.adopted
    merge.work({}, adopted.stream)
    douts, dlses = merge.results
    return douts.give(adopted), dlses.give(adopted)


class ReadyMerge(NamedTuple):
    """Checked, its results allocated, its kernels loaded."""

    states: _States
    results: tuple[Any, Any]  # Views of a forward, families of a backward
    work: Work
    workspace_bytes: int


def forward(
    function: str, outs: Any, lses: Any, layout: str, out_dtype: Any, out: Any = None, lse: Any = None
) -> ReadyMerge:
    """`merge_states` up to its work."""
    states = _States(function, layout, outs, lses, {"out": out, "lse": lse})
    forms = states.results(out_dtype)
    for name, (_, dtype) in forms.items():
        states.check(name, (dtype,))
    states.check_writing()

    adopted = states.adopted
    results = {name: adopted.views.get(name) or adopted.empty(*form) for name, form in forms.items()}
    call, backend = states.call(results), _interop.backend(adopted.place)
    return ReadyMerge(states, (results["out"], results["lse"]), backend.merge(call), backend.merge_bytes(call))


def backward(function: str, outs: Any, lses: Any, out: Any, lse: Any, dout: Any, dlse: Any, layout: str) -> ReadyMerge:
    """`merge_states_bwd` up to its work."""
    states = _States(function, layout, outs, lses, {"out": out, "lse": lse, "dout": dout, "dlse": dlse})
    for name in ("out", "dout"):
        states.check(name, _check.FLOATS)
    for name in ("lse", "dlse"):
        states.check(name, _LSE_DTYPES)

    adopted = states.adopted
    douts, dlses = states.outs.empty_like(adopted), states.lses.empty_like(adopted)
    given = [name for name in ("out", "lse", "dout", "dlse") if name in adopted.views]
    call = states.call({name: _interop.require_unit_stride(adopted, name) for name in given})
    call.douts = [states.canonical("out", view) for view in douts.states]
    call.dlses = [states.canonical("lse", view) for view in dlses.states]
    return ReadyMerge(states, (douts, dlses), _interop.backend(adopted.place).merge_bwd(call), 0)


@dataclass(frozen=True, slots=True)
class _Family:
    """All `outs`, or all `lses`: arrays in a list or tuple, or states stacked in one array."""

    name: str
    arrays: tuple[View, ...]
    sequence: type | None  # list or tuple; None when stacked

    @classmethod
    def adopted(cls, name: str, given: Any, adopted: Adopted) -> _Family:
        return cls(name, tuple(adopted.views[key] for key in _named(name, given)), _sequence_type(given))

    @property
    def names(self) -> list[str]:
        """Of the arrays."""
        return [self.name] if self.sequence is None else [f"{self.name}[{i}]" for i in range(len(self.arrays))]

    @property
    def states(self) -> list[View]:
        if self.sequence is not None:
            return list(self.arrays)
        return [_leading(self.arrays[0], i) for i in range(self.arrays[0].shape[0])]

    def readable(self, adopted: Adopted) -> _Family:
        arrays = tuple(_interop.require_unit_stride(adopted, name) for name in self.names)
        return replace(self, arrays=arrays)

    def empty_like(self, adopted: Adopted) -> _Family:
        return replace(self, arrays=tuple(adopted.empty(view.shape, view.dtype) for view in self.arrays))

    def give(self, adopted: Adopted) -> Any:
        arrays = [adopted.give(view) for view in self.arrays]
        return arrays[0] if self.sequence is None else self.sequence(arrays)


class _States:
    """What both functions take, judged: the states agree in number and shapes, the others are like one of them."""

    def __init__(self, function: str, layout: str, outs: Any, lses: Any, others: dict[str, Any]) -> None:
        layout = _check.one_of(function, "layout", layout, _check.LAYOUTS)
        for name, given in (("outs", outs), ("lses", lses)):
            if given is None or (_sequence_type(given) is not None and not len(given)):
                accepted = "a list of at least one array, or an array with a leading axis of states, is accepted"
                error = TypeError if given is None else ValueError
                raise error(refusal(function, name, "is None" if given is None else "is empty", accepted))
        states = _named("outs", outs) | _named("lses", lses)
        for name, array in states.items():
            if array is None:
                raise TypeError(refusal(function, name, "is None", _interop.ACCEPTED_ARRAYS))
        self.adopted = _interop.adopt(function, states | others)
        self.outs, self.lses = (
            _Family.adopted(name, given, self.adopted) for name, given in (("outs", outs), ("lses", lses))
        )
        is_packed = len(self.outs.arrays[0].shape) == (4 if self.outs.sequence is None else 3)
        self.layout = "thd" if is_packed else layout
        self.arrays = _check.adopted_arrays(self.adopted, self.layout)
        for family, dtypes in ((self.outs, _check.FLOATS), (self.lses, _LSE_DTYPES)):
            for name in family.names:
                axes = self.axes(family.name)
                self.arrays.match(name, axes if family.sequence is not None else f"states {axes}")
                self.arrays.check_dtype(name, dtypes)
        count, count_lses = len(self.outs.states), len(self.lses.states)
        if count != count_lses or not count:
            given = f"holds {count_lses} states and `outs` {count}"
            raise ValueError(refusal(function, "lses", given, "as many as in `outs`, and at least one, are accepted"))
        for size in ("Hq", "Dv"):
            self.arrays.require(self.outs.names[0], size, "at least 1 is accepted there")
        if self.adopted.backend == "cuda" and max(self.arrays.sizes.values()) > _LONGEST:
            given = f"has shape {list(self.outs.arrays[0].shape)}"
            accepted = f"axes of at most {_LONGEST} are accepted on CUDA"
            raise UnsupportedError(refusal(function, self.outs.names[0], given, accepted))

    def axes(self, name: str) -> str:
        """Of one state, or of an array like it, as the contract's table names them."""
        query, _, row = _check.AXES[self.layout]
        return row if "lse" in name else query.format("Dv")

    def check(self, name: str, dtypes: tuple[str, ...]) -> None:
        """An array that is like one state."""
        self.arrays.match(name, self.axes(name))
        self.arrays.check_dtype(name, dtypes)

    def check_writing(self) -> None:
        """Results can be written as they lie; they overlap nothing, or are the array of one state of their kind."""
        views = {name: view for name, view in self.adopted.views.items() if name in ("out", "lse")}
        for name, own in views.items():
            if not _interop.has_unit_stride(own.shape, own.strides):
                given = f"has stride {own.strides[-1]} along its last axis"
                raise ValueError(refusal(self.adopted.function, name, given, "stride 1 is accepted there"))
        for name, family in (("out", self.outs), ("lse", self.lses)):
            own = self.adopted.views.get(name)
            for i, view in enumerate(family.states):
                if own is None or not _is_same_memory(view, own):
                    views[f"{family.name}[{i}]"] = view
        _check.check_writing(replace(self.adopted, views=views), ("out", "lse"))

    def results(self, out_dtype: Any) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of the merged out and lse."""
        common = {view.dtype for view in self.outs.arrays}
        out = _check.dtype_option(self.adopted.function, "out_dtype", out_dtype)
        out = out or (common.pop() if len(common) == 1 else "float32")
        lse = "float64" if any(view.dtype == "float64" for view in self.lses.arrays) else "float32"
        return {
            name: (tuple(self.arrays.sizes[size] for size in self.axes(name).split()), dtype)
            for name, dtype in (("out", out), ("lse", lse))
        }

    def canonical(self, name: str, view: View) -> View:
        return _check.canonical(self.layout, name, view, 0, False)

    def call(self, others: dict[str, View]) -> MergeCall:
        """Of the states and of what is like one of them."""
        like_states: dict[str, Any] = {name: self.canonical(name, view) for name, view in others.items()}
        return MergeCall(
            self.adopted.function,
            outs=[self.canonical("out", view) for view in self.outs.readable(self.adopted).states],
            lses=[self.canonical("lse", view) for view in self.lses.readable(self.adopted).states],
            device=self.adopted.device,
            **like_states,
        )


def _sequence_type(given: Any) -> type | None:
    return next((kind for kind in (list, tuple) if isinstance(given, kind)), None)


def _arrays(given: Any) -> list[Any]:
    return [given] if _sequence_type(given) is None else list(given)


def _named(name: str, given: Any) -> dict[str, Any]:
    """The arrays of a family by the names that messages use."""
    if _sequence_type(given) is None:
        return {name: given}
    return {f"{name}[{i}]": array for i, array in enumerate(given)}


def _leading(view: View, index: int) -> View:
    """One state of a stacked array."""
    ptr = view.ptr + index * view.strides[0] * _interop.NUMPY_DTYPES[view.dtype].itemsize
    array = view.array[index] if isinstance(view.array, np.ndarray) else view.array
    return View(ptr, view.shape[1:], view.strides[1:], view.dtype, array)


def _is_same_memory(a: View, b: View) -> bool:
    return (a.ptr, a.shape, a.strides, a.dtype) == (b.ptr, b.shape, b.strides, b.dtype)
