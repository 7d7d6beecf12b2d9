"""The only place where user input is judged: options, then arrays, then their values.

`checked_options` serves `Attention.__post_init__`; `checked_call` turns a call's arguments into a `Checked`, or raises
before anything is allocated. What the form of a call decides, that is all but addresses, values and the stream, is
judged once and remembered (`_judge`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyflash import _interop
from cupyflash._errors import refusal
from cupyflash._interop import Adopted, Place, contiguous, has_unit_stride
from cupyflash._overlap import are_apart, byte_range, is_injective
from cupyflash._spec import SMALL_SOFTCAP, AppendCall, Blank, Call, Features, FilledIn, Mask, Spec, View

if TYPE_CHECKING:
    from cupyflash._attention import Attention

FLOATS = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = ("bshd", "bhsd", "thd")
CAUSAL = (False, True, "bottom-right", "top-left")

# Positions fit int64 with room for their differences; a window bound of UNBOUNDED or more reaches past any key.
POSITION_LIMIT = 2**60
UNBOUNDED = 2**62

# The axes of every array, by layout, as the contract's table names them.
AXES = {
    "bshd": ("B Nq Hq {}", "B Nk Hkv {}", "B Hq Nq"),
    "bhsd": ("B Hq Nq {}", "B Hkv Nk {}", "B Hq Nq"),
    "thd": ("Tq Hq {}", "Tk Hkv {}", "Hq Tq"),
}
# Forwards whose keys are split, as they would not fill a GPU: of few queries each, or few tiles of 128 queries in all
# and at least four times as many keys, which are many.
FEW_QUERIES = 16
MANY_KEYS, FEW_TILES = 2048, 88
# Of few queries: blocks that have a multiprocessor each, keys for which such blocks may come in more than two rounds,
# and small blocks, of which more come one behind the other.
AT_ONCE, LONG_KEYS, MANY_BLOCKS = 132, 4096, 768
_POOLS = {"bshd": "pages page_size Hkv {}", "bhsd": "pages Hkv page_size {}", "thd": "pages page_size Hkv {}"}
_QUERY_ROWS = {"q": "D", "out": "Dv", "beside_out": "Dv", "dout": "Dv", "dq": "D"}
_KEY_ROWS = {"k": "D", "v": "Dv", "dk": "D", "dv": "Dv"}
_PER_ROW = ("lse", "beside_lse", "delta", "dlse")

# Caller's axes for each canonical axis; None is the packed form's leading axis of one.
_ORDER = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "thd": (None, 0, 1, 2)}

_GRADIENT_OF = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsink": "sink"}
_ALIGNED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "k_pages", "v_pages")
_LARGEST_STEP = 2**36  # elements
FORMS = 512  # that are remembered
_WRITTEN_POOLS = ("k_pages", "v_pages")  # by an append
_ANY_STRIDE = ("cu_seqlens_q", "cu_seqlens_k")  # read element by element, wherever those lie
_WITH_VALUES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "seed", "offset")  # that `check_values` looks at
# Name to default, bounds and what is accepted.
INT_OR_ARRAY: dict[str, tuple[int | None, int, int, str]] = {
    "q_start": (None, -POSITION_LIMIT, POSITION_LIMIT, "an int or an int32 array [B]"),
    "k_start": (0, -POSITION_LIMIT, POSITION_LIMIT, "an int or an int32 array [B]"),
    "seed": (None, 0, 2**64, "an int in [0, 2**64) or a one-element int64 or uint64 array"),
    "offset": (0, 0, 2**32, "an int in [0, 2**32) or a one-element int64 or uint64 array"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What the form of a call decides. Shared by all calls of this form, so nothing in it is changed."""

    spec: Spec
    call: Call  # with a Blank for every address and for the ints that were given
    backward: bool
    place: Place
    layout: str
    outputs: dict[str, tuple[tuple[int, ...], str]]  # to allocate: name, shape and dtype, in the caller's layout
    written: tuple[str, ...]  # given by the caller to be written
    copies: tuple[str, ...]  # inputs that a kernel cannot read in place
    is_canonical: bool  # the arrays fill the blanks as they come
    has_values: bool  # there are arrays that `check_values` looks at


class Checked(NamedTuple):
    """A call that nothing is wrong with: its form, and what is given to fill it."""

    judged: Judged
    adopted: Adopted
    ints: dict[str, int]
    validates: bool  # whether the values of offsets, lengths, pages and seeds are looked at, and there are any


class Given(NamedTuple):
    """An array as far as the pure checks look at it."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    misalignment: int  # address modulo 16


class _Plain(NamedTuple):
    """The arguments of a call that are no arrays."""

    check: bool
    accumulate: bool
    ints: dict[str, int]  # by name: what may be an array too, where it is not the default
    max_seqlen_q: int | None
    max_seqlen_k: int | None


# Options.


def checked_options(attention: Attention) -> dict[str, Any]:
    """The static options in normal form, or an error."""
    name = "Attention"
    softcap = _number(name, "softcap", attention.softcap, "None, 0 or a positive finite number") or None
    if softcap is not None and softcap < 0:
        raise ValueError(refusal(name, "softcap", f"is {softcap}", "None, 0 or a positive finite number is accepted"))
    dropout_p = _number(name, "dropout_p", attention.dropout_p, "a number in [0, 1)", is_optional=False)
    if dropout_p is None or not 0 <= dropout_p < 1:
        raise ValueError(refusal(name, "dropout_p", f"is {dropout_p}", "a number in [0, 1) is accepted"))
    num_splits = integer(name, "num_splits", attention.num_splits, 0, None)
    split_len = None if attention.split_len is None else integer(name, "split_len", attention.split_len, 1, None)
    if num_splits and split_len is not None:
        given = f"is {split_len} while `num_splits` is {num_splits}"
        raise ValueError(refusal(name, "split_len", given, "only one of the two is accepted"))
    causal = one_of(name, "causal", attention.causal, CAUSAL)
    return {
        "layout": one_of(name, "layout", attention.layout, LAYOUTS),
        "scale": _number(name, "scale", attention.scale, "None or a finite number"),
        "causal": True if causal == "bottom-right" else causal,
        "window": _window(name, attention.window),
        "softcap": softcap,
        "dropout_p": dropout_p,
        "deterministic": _boolean(name, "deterministic", attention.deterministic),
        "out_dtype": dtype_option(name, "out_dtype", attention.out_dtype),
        "grad_dtype": dtype_option(name, "grad_dtype", attention.grad_dtype),
        "bias_grad": _boolean(name, "bias_grad", attention.bias_grad),
        "num_splits": num_splits,
        "split_len": split_len,
        "allow_tf32": _boolean(name, "allow_tf32", attention.allow_tf32),
    }


def one_of(function: str, name: str, value: Any, accepted: tuple[Any, ...]) -> Any:
    value = bool(value) if isinstance(value, np.bool_) else value
    for choice in accepted:
        if isinstance(value, type(choice)) and value == choice:
            return choice
    raise ValueError(refusal(function, name, f"is {value!r}", f"{_listed(map(repr, accepted))} is accepted"))


def _boolean(function: str, name: str, value: Any) -> bool:
    if value is not True and value is not False and not isinstance(value, np.bool_):
        raise TypeError(refusal(function, name, f"is {value!r}", "True or False is accepted"))
    return bool(value)


def _number(function: str, name: str, value: Any, accepted: str, *, is_optional: bool = True) -> float | None:
    if value is None and is_optional:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(refusal(function, name, f"is {value!r}", f"{accepted} is accepted"))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(refusal(function, name, f"is {value!r}", f"{accepted} is accepted"))
    return number + 0.0  # never -0.0, so that equal options are the same in every bit


def integer(function: str, name: str, value: Any, low: int, high: int | None, accepted: str = "") -> int:
    accepted = accepted or (f"an int of at least {low}" if high is None else f"an int in [{low}, {high})")
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
        raise TypeError(refusal(function, name, f"is {value!r}", f"{accepted} is accepted"))
    if value < low or (high is not None and value >= high):
        raise ValueError(refusal(function, name, f"is {value}", f"{accepted} is accepted"))
    return int(value)


def _window(function: str, value: Any) -> tuple[int | None, int | None] | None:
    accepted = "None or a pair (left, right) of ints of at least 0, with None or -1 for an unbounded side"
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(refusal(function, "window", f"is {value!r}", f"{accepted} is accepted"))
    sides = [None if side is None else integer(function, "window", side, -1, None, accepted) for side in value]
    left, right = (None if side == -1 else side for side in sides)
    return None if left is None and right is None else (left, right)


def dtype_option(function: str, name: str, value: Any) -> str | None:
    if value is None:
        return None
    dtype = _interop.dtype_name(value)
    if dtype not in FLOATS:
        raise TypeError(refusal(function, name, f"is {value!r}", f"None or {_listed(FLOATS)} is accepted"))
    return dtype


def _listed(choices: Iterable[str]) -> str:
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else last


# Calls.


def checked_call(
    function: str, attention: Attention, arguments: dict[str, Any], *, backward: bool, planning: bool
) -> Checked:
    """Judge a forward or backward call; `planning` lets all but q, k, v be missing.

    `arguments` are all but `plan`, by name; those that are no arrays are taken out.
    """
    plain = _plain(function, arguments)
    required = ("q", "k", "v")
    if backward and not planning:
        required += ("lse", "dout") if arguments["delta"] is not None else ("out", "lse", "dout")
    for name in required:
        if arguments[name] is None:
            advice = "It may be None only when `delta` is given." if name == "out" else ""
            raise TypeError(refusal(function, name, "is None", _interop.ACCEPTED_ARRAYS, advice))
    if plain.accumulate and not planning:
        differentiable = ("bias", "sink") if attention.bias_grad else ("sink",)
        for name in ("dq", "dk", "dv", *(f"d{name}" for name in differentiable if arguments[name] is not None)):
            if arguments[name] is None:
                accepted = "an array is needed: with accumulate=True every gradient is added into what is given"
                raise ValueError(refusal(function, name, "is None", accepted))
    if attention.dropout_p and "seed" not in plain.ints and arguments["seed"] is None and not planning:
        given = f"is None while `dropout_p` is {attention.dropout_p}"
        raise ValueError(refusal(function, "seed", given, f"{INT_OR_ARRAY['seed'][-1]} is accepted"))
    adopted = _interop.adopt(function, arguments)
    views = adopted.views
    judged = _judge(
        function,
        attention,
        backward,
        adopted.place,
        tuple([(name, v.shape, v.strides, v.dtype, v.ptr & 15) for name, v in views.items()]),
        tuple(plain.ints),
        plain.accumulate,
        plain.max_seqlen_q,
        plain.max_seqlen_k,
    )
    if judged.written:
        check_writing(adopted, judged.written)
    validates = judged.has_values and (adopted.backend == "cpu" or plain.check)
    checked = Checked(judged, adopted, plain.ints, validates)
    if validates:
        check_values(checked)
    return checked


def given(checked: Checked) -> FilledIn:
    """What a backend fills into the form: ints, and arrays in canonical form, copied where a kernel needs it."""
    judged, adopted = checked.judged, checked.adopted
    filling: dict[str, View | int] = {**adopted.views, **checked.ints}
    for name in judged.copies:
        filling[name] = adopted.library.contiguous(adopted.views[name])
    if not judged.is_canonical:
        batch, is_paged = judged.call.batch, judged.spec.paged
        for name, view in adopted.views.items():
            filling[name] = canonical(judged.layout, name, view, batch, is_paged)
    return filling


def check_workspace(adopted: Adopted, needed: int) -> None:
    """The caller's workspace must hold what the plan needs."""
    view = adopted.views["workspace"]
    if adopted.backend == "cuda" and view.ptr % 16:
        given = f"starts {view.ptr % 16} bytes past a multiple of 16"
        raise ValueError(refusal(adopted.function, "workspace", given, "a 16-byte aligned start is accepted"))
    if view.shape[0] < needed:
        accepted = f"at least {needed} are needed for this call (workspace_size)"
        raise ValueError(refusal(adopted.function, "workspace", f"has {view.shape[0]} bytes", accepted))


def canonical(layout: str, name: str, view: View, batch: int, is_paged: bool) -> View:
    """A View in the axis order of `_spec`: see the table in its docstring."""
    if name in _QUERY_ROWS or name in _KEY_ROWS:
        if is_paged and name in ("k", "v"):
            return view if layout != "bhsd" else _interop.permute(view, _ORDER["bhsd"])
        return view if layout == "bshd" else _interop.permute(view, _ORDER[layout])
    if name in _PER_ROW:
        return view if layout != "thd" else _interop.permute(view, (None, 0, 1))
    if name in ("bias", "dbias") and len(view.shape) < 4:
        missing = 4 - len(view.shape)
        return _interop.permute(view, (None,) * missing + tuple(range(len(view.shape))))
    if name == "alibi_slopes" and len(view.shape) == 1:
        return _interop.broadcast(view, (batch, view.shape[0]))
    return view


def _plain(function: str, arguments: dict[str, Any]) -> _Plain:
    """Take what is no array out of a call's arguments, checked."""
    check, accumulate = arguments.pop("check"), arguments.pop("accumulate", False)
    hint_q, hint_k = arguments.pop("max_seqlen_q"), arguments.pop("max_seqlen_k")
    ints: dict[str, int] = {}
    for name, (default, low, high, accepted) in INT_OR_ARRAY.items():
        value = arguments[name]
        if type(value) is type(default) and value == default:
            arguments[name] = None
        elif type(value) is int or not _interop.is_array(value):
            ints[name] = integer(function, name, arguments.pop(name), low, high, accepted)
    return _Plain(
        _boolean(function, "check", check),
        _boolean(function, "accumulate", accumulate),
        ints,
        None if hint_q is None else integer(function, "max_seqlen_q", hint_q, 0, None),
        None if hint_k is None else integer(function, "max_seqlen_k", hint_k, 0, None),
    )


def _call(
    attention: Attention,
    arrays: Arrays,
    views: dict[str, View],
    place: Place,
    ints: tuple[str, ...],
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Call:
    sizes, blanks = arrays.sizes, {name: Blank(name) for name in ints}
    left, right = attention.window or (None, None)
    left, right = (None if side is not None and side >= UNBOUNDED else side for side in (left, right))
    if attention.causal:
        right = 0  # bounds are never negative, so min(right, 0)
    fields: dict[str, Any] = {"q_start": 0 if attention.causal == "top-left" else None, **blanks, **views}
    return Call(
        function=arrays.function,
        batch=sizes["B"],
        len_q=sizes["Tq" if arrays.layout == "thd" else "Nq"],
        len_k=_len_k(arrays),
        scale=_scale(attention, sizes["D"]),
        softcap=attention.softcap or 0.0,
        window_left=left,
        window_right=right,
        dropout_p=attention.dropout_p,
        num_splits=attention.num_splits,
        split_len=attention.split_len,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        device=place[1],
        **fields,
    )


def _blank_views(
    arrays: Arrays, outputs: dict[str, tuple[tuple[int, ...], str]], copies: tuple[str, ...], is_paged: bool
) -> dict[str, View]:
    """The arrays of the call, those to be made and the copies included, in canonical form and without addresses."""
    given = {name: View(Blank(name), a.shape, a.strides, a.dtype, None) for name, a in arrays.by_name.items()}
    forms = {name: (view.shape, view.dtype) for name, view in given.items() if name in copies} | outputs
    made = {name: View(Blank(name), shape, contiguous(shape), dtype, None) for name, (shape, dtype) in forms.items()}
    batch = arrays.sizes["B"]
    return {name: canonical(arrays.layout, name, view, batch, is_paged) for name, view in (given | made).items()}


def _scale(attention: Attention, head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if attention.scale is None else attention.scale


# Shapes and dtypes.


class Arrays:
    """The arrays of a call by name, with what every message about them shares."""

    def __init__(self, function: str, layout: str, given: tuple[Given, ...]) -> None:
        self.function = function
        self.layout = layout
        self.by_name = {array.name: array for array in given}
        self.sizes: dict[str, int] = {}
        self._origin: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def __getitem__(self, name: str) -> Given:
        return self.by_name[name]

    def refuse(self, error: type[Exception], name: str, given: str, accepted: str) -> Exception:
        shown = ", ".join(
            f"{n} {list(self[n].shape)}" for n in dict.fromkeys(("q", "k", "v", "out", "dout", name)) if n in self
        )
        return error(refusal(self.function, name, given, accepted, f"Got {shown}, layout {self.layout!r}."))

    def match(self, name: str, axes: str) -> None:
        """Bind the sizes that this array is the first to have; compare the others."""
        if name not in self:
            return
        names, shape = axes.split(), self[name].shape
        if len(shape) != len(names):
            given = f"has {len(shape)} axes, {list(shape)}"
            raise self.refuse(ValueError, name, given, f"{len(names)} are accepted, [{', '.join(names)}]")
        for axis, (size, extent) in enumerate(zip(names, shape, strict=True)):
            if self.sizes.setdefault(size, extent) != extent:
                given = f"has {extent} in axis {axis}, {size}"
                accepted = f"{self.sizes[size]} is accepted there, as in `{self._origin[size]}`"
                raise self.refuse(ValueError, name, given, accepted)
            self._origin.setdefault(size, name)

    def require(self, name: str, size: str, accepted: str) -> None:
        if self.sizes[size] < 1:
            raise self.refuse(ValueError, name, f"has {size} = {self.sizes[size]}", accepted)

    def check_dtype(self, name: str, accepted: tuple[str, ...], why: str = "") -> None:
        if name in self and self[name].dtype not in accepted:
            given = f"is {self[name].dtype}"
            raise TypeError(refusal(self.function, name, given, f"{_listed(accepted)} is accepted{why}"))


def adopted_arrays(adopted: Adopted, layout: str) -> Arrays:
    """The arrays of a call whose form is not remembered."""
    given = tuple(Given(name, v.shape, v.strides, v.dtype, v.ptr & 15) for name, v in adopted.views.items())
    arrays = Arrays(adopted.function, layout, given)
    if adopted.backend == "cuda":
        _check_elements(arrays)
    return arrays


@functools.lru_cache(maxsize=FORMS)
def _judge(
    function: str,
    attention: Attention,
    backward: bool,
    place: Place,
    given: tuple[tuple[str, tuple[int, ...], tuple[int, ...], str, int], ...],  # fields of Given
    ints: tuple[str, ...],  # names of what is given as an int and not as an array
    accumulate: bool,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Judged:
    """Everything that the form of a call decides; its arguments are the form, nothing less."""
    arrays = Arrays(function, attention.layout, tuple(Given(*fields) for fields in given))
    if place[0] == "cuda":
        _check_elements(arrays)
    _check_company(arrays, attention.bias_grad)
    _check_shapes(arrays)
    dtypes = _check_dtypes(arrays, attention, backward, accumulate)
    results = _check_outputs(arrays, dtypes)
    spec = _describe(arrays, attention, dtypes, results, backward, accumulate, max_seqlen_q, max_seqlen_k)
    outputs = {name: output for name, output in results.items() if name not in arrays}
    written = tuple(name for name in (*results, "workspace") if name in arrays)
    copies = tuple(
        name
        for name, a in arrays.by_name.items()
        if place[0] == "cuda" and name not in (*written, *_ANY_STRIDE) and not has_unit_stride(a.shape, a.strides)
    )
    views = _blank_views(arrays, outputs, copies, spec.paged)
    return Judged(
        spec,
        _call(attention, arrays, views, place, ints, max_seqlen_q, max_seqlen_k),
        backward,
        place,
        attention.layout,
        outputs,
        written,
        copies,
        # On a GPU an address is all that is filled in.
        is_canonical=place[0] == "cuda" or (attention.layout == "bshd" and not {"bias", "alibi_slopes"} & {*views}),
        has_values=any(name in arrays for name in _WITH_VALUES),
    )


def _check_company(arrays: Arrays, bias_grad: bool) -> None:
    """Which arrays need or exclude which."""
    is_packed, is_paged = arrays.layout == "thd", "block_table" in arrays
    needs = [
        ("seqused_k", is_paged, "`block_table` needs the live lengths"),
        ("cu_seqlens_q", is_packed, "layout 'thd' needs the offsets of its sequences"),
        ("cu_seqlens_k", is_packed and not is_paged, "layout 'thd' needs the offsets of its sequences"),
        ("bias", "dbias" in arrays, "`dbias` is its gradient"),
        ("sink", "dsink" in arrays, "`dsink` is its gradient"),
    ]
    for name, applies, why in needs:
        if applies and name not in arrays:
            raise ValueError(refusal(arrays.function, name, "is None", f"an array is needed: {why}"))
    excludes = [
        ("cu_seqlens_q", not is_packed, f"offsets need layout 'thd', and the layout is {arrays.layout!r}"),
        ("cu_seqlens_k", not is_packed, f"offsets need layout 'thd', and the layout is {arrays.layout!r}"),
        ("cu_seqlens_k", is_paged, "with `block_table` the keys lie in pages, not packed, so None is accepted"),
        ("bias", is_packed, "None is accepted with layout 'thd'"),
        ("dlse", "delta" in arrays, "None is accepted with `delta`, which already contains it"),
        ("dbias", not bias_grad, "None is accepted with bias_grad=False"),
    ]
    for name, applies, why in excludes:
        if applies and name in arrays:
            raise ValueError(refusal(arrays.function, name, "is given", why))


def _check_shapes(arrays: Arrays) -> None:
    layout, sizes = arrays.layout, arrays.sizes
    query, key, row = AXES[layout]
    if "block_table" in arrays:
        key = _POOLS[layout]
    for name in ("q", "k", "v", "out", "beside_out", "dout", "dq", "dk", "dv"):
        axes, head_dim = (query, _QUERY_ROWS[name]) if name in _QUERY_ROWS else (key, _KEY_ROWS[name])
        arrays.match(name, axes.format(head_dim))
    for name in _PER_ROW:
        arrays.match(name, row)
    if "k" in arrays:
        arrays.require("q", "D", "a head_dim of at least 1 is accepted")
        arrays.require("v", "Dv", "a head_dim of at least 1 is accepted")
        arrays.require("k", "Hkv", "at least one head is accepted")
        arrays.require("q", "Hq", "at least one head is accepted")
        if sizes["Hq"] % sizes["Hkv"]:
            given = f"has {sizes['Hkv']} heads and `q` has {sizes['Hq']}"
            raise arrays.refuse(ValueError, "k", given, "`q`'s heads must be a multiple of `k`'s")
    if layout == "thd":
        _check_offsets(arrays)
    arrays.match("seqused_k", "B")
    arrays.match("block_table", "B max_pages")
    if "block_table" in arrays:
        arrays.require("k", "page_size", "pages of at least one key are accepted")
    arrays.match("q_start", "B")
    arrays.match("k_start", "B")
    arrays.match("sink", "Hq")
    arrays.match("dsink", "Hq")
    arrays.match(
        "alibi_slopes", "Hq" if "alibi_slopes" in arrays and len(arrays["alibi_slopes"].shape) == 1 else "B Hq"
    )
    arrays.match("workspace", "bytes")
    for name in ("seed", "offset"):
        if name in arrays and math.prod(arrays[name].shape) != 1:
            raise ValueError(
                refusal(
                    arrays.function,
                    name,
                    f"has shape {list(arrays[name].shape)}",
                    "an array of one element is accepted",
                )
            )
    if "bias" in arrays:
        _check_bias(arrays)


def _check_offsets(arrays: Arrays) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        arrays.match(name, "B+1")
    if "cu_seqlens_q" in arrays:
        arrays.require("cu_seqlens_q", "B+1", "at least one offset, [B+1], is accepted")
        arrays.sizes["B"] = arrays.sizes["B+1"] - 1
        arrays._origin["B"] = "cu_seqlens_q"


def _check_bias(arrays: Arrays) -> None:
    shape, full = arrays["bias"].shape, [arrays.sizes[size] for size in ("B", "Hq", "Nq")] + [_len_k(arrays)]
    if len(shape) > 4 or any(
        have not in (1, want) for have, want in zip(reversed(shape), reversed(full), strict=False)
    ):
        accepted = f"a shape that broadcasts to [B, Hq, Nq, Nk] = {full} is accepted"
        raise arrays.refuse(ValueError, "bias", f"has shape {list(shape)}", accepted)
    if "dbias" in arrays and arrays["dbias"].shape != shape:
        given = f"has shape {list(arrays['dbias'].shape)}"
        raise ValueError(refusal(arrays.function, "dbias", given, f"`bias`'s shape {list(shape)} is accepted"))


def _len_k(arrays: Arrays) -> int:
    sizes = arrays.sizes
    if "block_table" in arrays:
        return sizes["max_pages"] * sizes["page_size"]
    return sizes["Tk" if arrays.layout == "thd" else "Nk"]


def _check_unit_stride(arrays: Arrays, name: str) -> None:
    if name in arrays and not has_unit_stride(arrays[name].shape, arrays[name].strides):
        given = f"has stride {arrays[name].strides[-1]} along its last axis"
        raise ValueError(refusal(arrays.function, name, given, "stride 1 is accepted there"))


@dataclass(frozen=True, slots=True)
class _Dtypes:
    out: str
    dout: str | None
    grad: str | None
    results: dict[str, str]  # of everything that the call writes


def _check_dtypes(arrays: Arrays, attention: Attention, backward: bool, accumulate: bool) -> _Dtypes:
    arrays.check_dtype("q", FLOATS)
    dtype = arrays["q"].dtype
    for name in ("k", "v"):
        arrays.check_dtype(name, (dtype,), " as in `q`")
    rows = "float64" if dtype == "float64" else "float32"
    for name in ("lse", "beside_out", "beside_lse", "delta", "dlse", "sink", "alibi_slopes"):
        arrays.check_dtype(name, (rows,), f" with {dtype} inputs")
    arrays.check_dtype("bias", FLOATS)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        arrays.check_dtype(name, ("int32", "int64"))
    for name in ("seqused_k", "block_table", "q_start", "k_start"):
        arrays.check_dtype(name, ("int32",))
    for name in ("seed", "offset"):
        arrays.check_dtype(name, ("int64", "uint64"))
    arrays.check_dtype("workspace", ("uint8", "int8"))
    if not backward:
        out = attention.out_dtype or dtype
        arrays.check_dtype("out", (out,), f" ({'out_dtype' if attention.out_dtype else 'as in `q`'})")
        return _Dtypes(out, None, None, {"out": out, "lse": rows})
    for name in ("out", "dout"):
        arrays.check_dtype(name, tuple(dict.fromkeys((dtype, "float32"))), f" with {dtype} inputs")
    out = arrays["out"].dtype if "out" in arrays else attention.out_dtype or dtype
    dout = arrays["dout"].dtype if "dout" in arrays else out
    grad = attention.grad_dtype or dtype
    results = {"dq": grad, "dk": grad, "dv": grad}
    if "bias" in arrays and attention.bias_grad:
        results["dbias"] = attention.grad_dtype or arrays["bias"].dtype
    if "sink" in arrays:
        results["dsink"] = rows
    for name, want in results.items():
        if accumulate and want not in ("float32", "float64"):
            given = f"is {want}, which loses what is added with accumulate=True"
            accepted = "float32 or float64 is accepted (grad_dtype='float32')"
            raise TypeError(refusal(arrays.function, name, given, accepted))
        arrays.check_dtype(name, (want,), f" ({'grad_dtype' if attention.grad_dtype else 'as in its input'})")
    return _Dtypes(out, dout, grad, results)


def _check_outputs(arrays: Arrays, dtypes: _Dtypes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Given outputs must be writable as they lie; returns shape and dtype of all."""
    query, _, row = AXES[arrays.layout]
    for name in (*dtypes.results, "workspace"):
        _check_unit_stride(arrays, name)
    outputs = {}
    for name, dtype in dtypes.results.items():
        if name in _GRADIENT_OF:
            shape = tuple(arrays[_GRADIENT_OF[name]].shape)
        else:
            axes = row if name == "lse" else query.format("Dv")
            shape = tuple(arrays.sizes[size] for size in axes.split())
        outputs[name] = shape, dtype
    return outputs


def _describe(
    arrays: Arrays,
    attention: Attention,
    dtypes: _Dtypes,
    outputs: dict[str, tuple[tuple[int, ...], str]],
    backward: bool,
    accumulate: bool,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Spec:
    sizes, is_packed = arrays.sizes, arrays.layout == "thd"
    len_q, len_k = sizes["Tq" if is_packed else "Nq"], _len_k(arrays)
    typical_q = len_q if max_seqlen_q is None or not is_packed else max_seqlen_q
    typical_k = len_k if max_seqlen_k is None or not is_packed else max_seqlen_k
    is_masked = bool(attention.causal) or attention.window is not None
    features = Features(
        softcap=attention.softcap is not None,
        small_softcap=attention.softcap is not None and attention.softcap <= SMALL_SOFTCAP,
        alibi="alibi_slopes" in arrays,
        bias="bias" in arrays,
        dropout=attention.dropout_p > 0,
        negative_scale=_scale(attention, sizes["D"]) < 0,
    )
    size_class = _size_class(typical_k)
    if not backward and (size_class != "short" or "block_table" in arrays or 32 * typical_q <= typical_k):
        group = 1 if features.differ_by_head else sizes["Hq"] // sizes["Hkv"]
        is_fixed = attention.split_len is not None  # so that a row's bits do not depend on the batch
        if typical_q <= FEW_QUERIES:
            heads = sizes["B"] * sizes["Hq"] // group
            size_class = _few_rows(typical_q * group, None if is_fixed else heads, typical_k)
        elif typical_k >= max(MANY_KEYS, 4 * typical_q) and not is_fixed and attention.num_splits != 1:
            size_class = _few_tiles(typical_q, group, sizes["B"] * sizes["Hq"]) or size_class
    # Options of the other direction only are left out, so that no backend refuses a call for what it will not do.
    return Spec(
        dtype=arrays["q"].dtype,
        heads_q=sizes["Hq"],
        heads_kv=sizes["Hkv"],
        head_dim=sizes["D"],
        head_dim_v=sizes["Dv"],
        mask=Mask.BAND if is_masked else Mask.NONE,
        features=features,
        packed=is_packed,
        paged="block_table" in arrays,
        out_dtype=dtypes.out,
        dout_dtype=dtypes.dout,
        grad_dtype=dtypes.grad,
        bias_dtype=arrays["bias"].dtype if "bias" in arrays else None,
        dbias_dtype=_dbias_dtype(arrays, outputs),
        accumulate=accumulate,
        deterministic=backward and attention.deterministic,
        split=not backward and (attention.num_splits > 1 or attention.split_len is not None),
        allow_tf32=attention.allow_tf32,
        align=_alignment(arrays, outputs),
        has_boxes=_has_boxes(arrays),
        size_class=size_class,
    )


def _size_class(len_k: int) -> str:
    if len_k <= 1024:
        return "short" if len_k <= 256 else "few keys"
    return "normal"


def _few_rows(rows: int, heads: int | None, len_k: int) -> str:
    """The class of a forward of few queries, by the rows of one KV head, and how many there are of those."""
    if rows > 32:
        return "64 rows"
    name = "16 rows" if rows <= 16 else "32 rows"
    if heads is None:
        return name
    rounds = -(-heads // AT_ONCE)  # of blocks that take a multiprocessor each
    is_even = 10 * heads >= 9 * rounds * AT_ONCE
    if rounds <= 1 or (is_even and (rounds == 2 or len_k >= LONG_KEYS)):
        return f"{name}, in groups"
    return f"{name}, many times" if rows <= 16 and heads > MANY_BLOCKS else name


def _few_tiles(len_q: int, group: int, heads: int) -> str | None:
    """The class of a forward of few tiles, if these are: heads packed where that leaves fewer."""
    tiles = -(-len_q // 128)
    if heads * tiles > FEW_TILES:
        return None
    if len_q * group <= 64:
        return "64 rows"
    return "few tiles, packed" if -(-len_q * group // 128) < group * tiles else "few tiles"


def _dbias_dtype(arrays: Arrays, outputs: dict[str, tuple[tuple[int, ...], str]]) -> str | None:
    if "dbias" in arrays:
        return arrays["dbias"].dtype
    return outputs["dbias"][1] if "dbias" in outputs else None


def _alignment(arrays: Arrays, outputs: dict[str, tuple[tuple[int, ...], str]]) -> int:
    """The largest power of two, at most 16, that divides every address and outer stride in bytes, results included.

    The stride along an axis of one counts where the axis is that of rows: kernels step over rows that are not there.
    """
    bits = 16
    rows = _ORDER[arrays.layout][1]
    for name in _ALIGNED:
        if name in arrays:
            shape, strides, dtype = arrays[name].shape, arrays[name].strides, arrays[name].dtype
            if not has_unit_stride(shape, strides):
                strides = contiguous(shape)
            else:
                bits |= arrays[name].misalignment
        elif name in outputs:
            shape, dtype = outputs[name]
            strides = contiguous(shape)
        else:
            continue
        itemsize = _interop.NUMPY_DTYPES[dtype].itemsize
        for axis, (extent, stride) in enumerate(zip(shape[:-1], strides[:-1], strict=True)):
            if extent > 1 or axis == rows:
                bits |= stride * itemsize
    return bits & -bits


def _has_boxes(arrays: Arrays) -> bool:
    """No array of rows that boxes may move is empty or walked backwards, or by steps that a tensor map cannot hold."""
    rows = (arrays[name] for name in (*_QUERY_ROWS, *_KEY_ROWS) if name in arrays and name != "beside_out")
    return all(
        extent > 0 and (extent == 1 or 0 <= stride < _LARGEST_STEP)
        for array in rows
        for extent, stride in zip(array.shape, array.strides, strict=True)
    )


# Memory.


def _check_elements(arrays: Arrays) -> None:
    """A GPU faults where an element does not lie at a multiple of its size."""
    for name, array in arrays.by_name.items():
        dtype = _interop.NUMPY_DTYPES.get(array.dtype)
        if dtype is not None and array.misalignment % dtype.itemsize:
            given = f"starts {array.misalignment % dtype.itemsize} bytes past a multiple of its element size"
            accepted = "arrays of aligned elements are accepted in GPU memory"
            raise ValueError(refusal(arrays.function, name, given, accepted))


def check_writing(adopted: Adopted, outputs: Iterable[str]) -> None:
    """Every given output can be written, and shares no byte with another array or with itself."""
    outputs = [name for name in outputs if name in adopted.views]
    for name in outputs:
        if name in adopted.unwritable:
            given = adopted.unwritable[name]
            raise ValueError(
                refusal(adopted.function, name, given, "an array that can be written in place is accepted")
            )
        if not is_injective(adopted.views[name]):
            given = f"has strides {list(adopted.views[name].strides)}, so that elements share memory"
            raise ValueError(refusal(adopted.function, name, given, "an array whose elements are apart is accepted"))
    ranges = {name: byte_range(view) for name, view in adopted.views.items()} if outputs else {}
    for position, name in enumerate(outputs):
        begin, end = ranges[name]
        for other, (other_begin, other_end) in ranges.items():
            if other in outputs[: position + 1] or end <= other_begin or other_end <= begin:
                continue
            if not are_apart(adopted.views[name], adopted.views[other]):
                accepted = "outputs must share no memory with another array of the call"
                raise ValueError(refusal(adopted.function, name, f"overlaps `{other}`", accepted))


# Values.


def check_values(checked: Checked) -> None:
    """Offsets, lengths, pages and seeds by value, where reading them costs nothing or the caller asked for it."""
    adopted, call = checked.adopted, checked.judged.call
    function = call.function
    views = adopted.views
    for name, total in (("cu_seqlens_q", call.len_q), ("cu_seqlens_k", call.len_k)):
        if name in views:
            _check_offset_values(function, name, adopted.host(name), total)
    if "seqused_k" in views:
        used = adopted.host("seqused_k").astype(np.int64)
        limit = np.diff(adopted.host("cu_seqlens_k")) if "cu_seqlens_k" in views else np.full(call.batch, call.len_k)
        _check_range(function, "seqused_k", used, limit + 1, "the keys of its row")
        if "block_table" in views:
            assert call.k is not None
            _check_pages(function, adopted.host("block_table"), used, pages=call.k.shape[0], page_size=call.k.shape[1])
    for name in ("seed", "offset"):
        if name in views:
            value = int(adopted.host(name).reshape(-1)[0])
            _, low, high, accepted = INT_OR_ARRAY[name]
            if not low <= value < high:
                raise ValueError(refusal(function, name, f"holds {value}", f"{accepted} is accepted"))


def _check_offset_values(function: str, name: str, offsets: np.ndarray, total: int) -> None:
    accepted = f"offsets that start at 0, never fall, and end at or below {total} are accepted"
    if offsets[0] != 0:
        raise ValueError(refusal(function, name, f"starts at {offsets[0]}", accepted))
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        at = int(falls[0])
        raise ValueError(
            refusal(function, name, f"falls from {offsets[at]} to {offsets[at + 1]} at index {at + 1}", accepted)
        )
    if offsets[-1] > total:
        raise ValueError(refusal(function, name, f"ends at {offsets[-1]}", accepted))


def _check_range(function: str, name: str, values: np.ndarray, limit: np.ndarray, what: str) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if wrong.size:
        at = int(wrong[0])
        accepted = f"0 to {int(limit[at]) - 1}, {what}, is accepted there"
        raise ValueError(refusal(function, name, f"is {values[at]} at index {at}", accepted))


def _check_pages(
    function: str, table: np.ndarray, used: np.ndarray, *, pages: int, page_size: int, first: np.ndarray | int = 0
) -> None:
    """Of the keys from `first` to `used`."""
    begin = np.arange(table.shape[1]) * page_size
    is_live = np.maximum(begin, np.reshape(first, (-1, 1))) < np.minimum(begin + page_size, used[:, None])
    wrong = np.argwhere(is_live & ((table < 0) | (table >= pages)))
    if wrong.size:
        row, page = (int(index) for index in wrong[0])
        given = f"is {table[row, page]} at [{row}, {page}], a live page"
        raise ValueError(refusal(function, "block_table", given, f"0 to {pages - 1} is accepted there"))


# Preprocess.


def checked_preprocess(
    function: str, layout: str, out: Any, dout: Any, dlse: Any
) -> tuple[Call, Adopted, tuple[int, ...], str]:
    """The call for delta, with the shape and dtype of delta in the caller's layout."""
    layout = one_of(function, "layout", layout, LAYOUTS)
    arguments = {"out": out, "dout": dout, "dlse": dlse}
    for name in ("out", "dout"):
        if arguments[name] is None:
            raise TypeError(refusal(function, name, "is None", _interop.ACCEPTED_ARRAYS))
    adopted = _interop.adopt(function, arguments)
    views = adopted.views
    arrays = adopted_arrays(adopted, layout)
    query, _, row = AXES[layout]
    for name, axes in (("out", query.format("Dv")), ("dout", query.format("Dv")), ("dlse", row)):
        arrays.match(name, axes)
    arrays.require("out", "Dv", "a head_dim of at least 1 is accepted")
    arrays.check_dtype("out", FLOATS)
    arrays.check_dtype(
        "dout", tuple(dict.fromkeys((views["out"].dtype, "float32"))) if views["out"].dtype != "float32" else FLOATS
    )
    dtype = "float64" if "float64" in (views["out"].dtype, views["dout"].dtype) else "float32"
    arrays.check_dtype("dlse", (dtype,), " with these `out` and `dout`")
    sizes = arrays.sizes
    call = Call(
        function,
        sizes.get("B", 1),
        sizes["Tq" if layout == "thd" else "Nq"],
        0,
        1.0,
        device=adopted.device,
    )
    for name in views:
        setattr(call, name, canonical(layout, name, _interop.require_unit_stride(adopted, name), 1, False))
    return call, adopted, tuple(sizes[size] for size in row.split()), dtype


# Append.


def checked_append(
    function: str, layout: str, arguments: dict[str, Any], check: bool
) -> tuple[AppendCall, Adopted, FilledIn]:
    """The form of an append, and what fills it; `arguments` are its arrays by name."""
    layout, check = one_of(function, "layout", layout, LAYOUTS), _boolean(function, "check", check)
    for name, array in arguments.items():
        if array is None and name != "cu_seqlens_k":
            raise TypeError(refusal(function, name, "is None", _interop.ACCEPTED_ARRAYS))
    adopted = _interop.adopt(function, arguments)
    given = tuple([(name, v.shape, v.strides, v.dtype, v.ptr & 15) for name, v in adopted.views.items()])
    call = _judge_append(function, layout, adopted.place, given)
    check_writing(adopted, _WRITTEN_POOLS)
    if check or adopted.backend == "cpu":
        _check_append_values(call, adopted)
    readable = {name: _interop.require_unit_stride(adopted, name) for name in adopted.views}
    return call, adopted, {name: _canonical_append(layout, name, view) for name, view in readable.items()}


@functools.lru_cache(maxsize=FORMS)
def _judge_append(
    function: str,
    layout: str,
    place: Place,
    given: tuple[tuple[str, tuple[int, ...], tuple[int, ...], str, int], ...],  # fields of Given
) -> AppendCall:
    """Everything that the form of an append decides; its arguments are the form, nothing less."""
    arrays = Arrays(function, layout, tuple(Given(*fields) for fields in given))
    if place[0] == "cuda":
        _check_elements(arrays)
    _check_append_shapes(arrays)
    arrays.check_dtype("k_pages", FLOATS)
    dtype = arrays["k_pages"].dtype
    for name in ("v_pages", "k", "v"):
        arrays.check_dtype(name, (dtype,), " as in `k_pages`")
    for name in ("block_table", "seqused_k"):
        arrays.check_dtype(name, ("int32",))
    arrays.check_dtype("cu_seqlens_k", ("int32", "int64"))
    for name in _WRITTEN_POOLS:
        _check_unit_stride(arrays, name)
    views: dict[str, View] = {}
    for name, a in arrays.by_name.items():  # on a GPU the others are copied
        strides = a.strides if has_unit_stride(a.shape, a.strides) else contiguous(a.shape)
        views[name] = _canonical_append(layout, name, View(Blank(name), a.shape, strides, a.dtype, None))
    row_bytes = [arrays.sizes[dim] * _interop.NUMPY_DTYPES[dtype].itemsize for dim in ("D", "Dv")]
    align = math.gcd(_alignment(arrays, {}), *row_bytes)
    return AppendCall(function, **views, align=align, device=place[1])


def _check_append_shapes(arrays: Arrays) -> None:
    is_packed = arrays.layout == "thd"
    if is_packed and "cu_seqlens_k" not in arrays:
        accepted = "an array is needed: layout 'thd' needs the offsets of its sequences"
        raise ValueError(refusal(arrays.function, "cu_seqlens_k", "is None", accepted))
    if not is_packed and "cu_seqlens_k" in arrays:
        why = f"offsets need layout 'thd', and the layout is {arrays.layout!r}; None is accepted"
        raise ValueError(refusal(arrays.function, "cu_seqlens_k", "is given", why))
    pools, rows = _POOLS[arrays.layout], AXES[arrays.layout][1]
    for name, axes in (("k_pages", pools), ("v_pages", pools), ("k", rows), ("v", rows)):
        arrays.match(name, axes.format("D" if name.startswith("k") else "Dv"))
    for name, size, accepted in (
        ("k_pages", "D", "a head_dim of at least 1 is accepted"),
        ("v_pages", "Dv", "a head_dim of at least 1 is accepted"),
        ("k_pages", "Hkv", "at least one head is accepted"),
        ("k_pages", "page_size", "pages of at least one key are accepted"),
    ):
        arrays.require(name, size, accepted)
    arrays.match("block_table", "B max_pages")
    arrays.match("seqused_k", "B")
    arrays.sizes["B+1"], arrays._origin["B+1"] = arrays.sizes["B"] + 1, "block_table"
    arrays.match("cu_seqlens_k", "B+1")


def _canonical_append(layout: str, name: str, view: View) -> View:
    is_pool = name in _WRITTEN_POOLS  # of the axes that a forward's k has beside a block table
    return canonical(layout, "k" if is_pool else name, view, 0, is_pool)


def _check_append_values(call: AppendCall, adopted: Adopted) -> None:
    """Every new row has a slot."""
    function, used = call.function, adopted.host("seqused_k").astype(np.int64)
    table, new = adopted.host("block_table"), np.full(used.shape, call.k.shape[1])
    if call.cu_seqlens_k is not None:
        offsets = adopted.host("cu_seqlens_k")
        _check_offset_values(function, "cu_seqlens_k", offsets, call.k.shape[1])
        new = np.diff(offsets)
    pages, page_size = call.k_pages.shape[:2]
    reach = np.full(used.shape, table.shape[1] * page_size)
    _check_range(function, "seqused_k", used, reach + 1, "the keys that `block_table` has pages for")
    short = np.flatnonzero(used < new)
    if short.size:
        at = int(short[0])
        given = f"is {used[at]} at index {at}, and {new[at]} new rows are to be counted in it"
        raise ValueError(refusal(function, "seqused_k", given, f"at least {new[at]} is accepted there"))
    _check_pages(function, table, used, pages=pages, page_size=page_size, first=used - new)
