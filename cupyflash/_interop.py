"""Arrays of any library, seen as memory.

`adopt` turns the caller's arrays into `View`s of the same memory and remembers whose they are; `Adopted` allocates in
the caller's library and gives results back in its kind. A library is found by the type of the array, through
`sys.modules`: nothing is imported for an array that is not there. NumPy, CuPy and torch are read by attributes; DLPack
serves unknown producers only, whose results come back through their own `from_dlpack` when `__array_namespace__` offers
one, and as NumPy or CuPy arrays otherwise.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from cupyflash._errors import UnsupportedError, refusal
from cupyflash._spec import View

ACCEPTED_ARRAYS = "arrays of NumPy, CuPy, torch or another library that exports DLPack are accepted"

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64")
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}

Place = tuple[str, int]  # device type as the library spells it, and ordinal


class _Library(Protocol):
    """What `Adopted` asks of an array library. `raw` is its own array, never a View."""

    kind: str
    name: str  # arrays of different names do not mix

    def place(self, raw: Any) -> Place: ...
    def view(self, raw: Any) -> tuple[View, str]: ...  # and why it may not be written, or ""
    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> Any: ...
    def stream(self, place: Place) -> int: ...
    def contiguous(self, view: View) -> View: ...
    def host(self, view: View) -> np.ndarray: ...
    def give(self, raw: Any, like: Any) -> Any: ...


@dataclass(slots=True)
class Adopted:
    """The arrays of one call as Views, with the library, device and stream they belong to."""

    function: str
    library: _Library
    place: Place
    stream: int
    views: dict[str, View] = field(default_factory=dict)  # in the caller's own axis order
    unwritable: dict[str, str] = field(default_factory=dict)  # name: why nothing may be written there
    like: Any = None
    _given: dict[int, tuple[View, Any]] = field(default_factory=dict)  # by id(view); holding the view keeps the id
    _made: dict[int, tuple[View, Any]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.library.kind

    @property
    def backend(self) -> str:
        return self.place[0]

    @property
    def device(self) -> int:
        return self.place[1]

    def empty(self, shape: tuple[int, ...], dtype: str) -> View:
        """A C-contiguous array of the caller's library on its device and current stream."""
        raw = self.library.empty(shape, dtype, self.place)
        view, _ = self.library.view(raw)
        self._made[id(view)] = view, raw
        return view

    def give(self, view: View) -> Any:
        """The very array the caller passed, or the caller's kind of array for a View that `empty` made.

        To be asked for after the work is queued: an export through DLPack waits for what its stream holds by then.
        """
        if id(view) in self._given:
            return self._given[id(view)][1]
        return self.library.give(self._made[id(view)][1], self.like)

    def host(self, name: str) -> np.ndarray:
        """The values on the host; on a GPU this waits for the stream."""
        return self.library.host(self.views[name])

    def refresh_stream(self) -> int:
        """The stream that is current now, for calls that are packed once and run later."""
        self.stream = self.library.stream(self.place)
        return self.stream


def adopt(function: str, arrays: dict[str, Any]) -> Adopted:
    """Views of all arrays that are not None. They must be of one library and on one device; the first one sets both."""
    adopted: Adopted | None = None
    first = ""
    for name, raw in arrays.items():
        if raw is None:
            continue
        library = _library(function, name, raw)
        place = library.place(raw)
        if adopted is None:
            adopted, first = Adopted(function, library, place, 0, like=raw), name
        elif library.name != adopted.library.name or place != adopted.place:
            given = f"is {_owner(library, place)} and `{first}` is {_owner(adopted.library, adopted.place)}"
            raise TypeError(
                refusal(function, name, given, "all arrays of a call must be of one library and on one device")
            )
    if adopted is None:
        raise AssertionError(f"{function} adopted no array")
    if adopted.backend not in ("cpu", "cuda"):
        given = f"is {_owner(adopted.library, adopted.place)}"
        raise UnsupportedError(refusal(function, first, given, "arrays in CPU or CUDA memory are accepted"))
    if adopted.backend == "cuda":
        require_cupy(function)
    for name, raw in arrays.items():
        if raw is None:
            continue
        try:
            view, why_not = adopted.library.view(raw)
        except _Unreadable as error:
            raise TypeError(refusal(function, name, error.given, error.accepted, error.advice)) from error.__cause__
        adopted.views[name] = view
        adopted._given[id(view)] = view, raw
        if why_not:
            adopted.unwritable[name] = why_not
    if adopted.backend == "cuda":
        adopted.refresh_stream()
    return adopted


def is_array(value: Any) -> bool:
    """Whether `adopt` may take it, as far as its type tells."""
    return type(value) in _libraries or isinstance(value, np.ndarray) or hasattr(value, "__dlpack__")


def permute(view: View, axes: tuple[int | None, ...]) -> View:
    """The same memory with its axes in this order; None puts in an axis of one."""
    array = view.array
    if isinstance(array, np.ndarray):
        array = array.transpose([axis for axis in axes if axis is not None])
        array = array[tuple(None if axis is None else slice(None) for axis in axes)]
    shape = tuple(1 if axis is None else view.shape[axis] for axis in axes)
    strides = tuple(0 if axis is None else view.strides[axis] for axis in axes)
    return View(view.ptr, shape, strides, view.dtype, array)


def broadcast(view: View, shape: tuple[int, ...]) -> View:
    """The same memory read with stride 0 along every axis that `shape` adds in front."""
    array = np.broadcast_to(view.array, shape) if isinstance(view.array, np.ndarray) else view.array
    strides = (0,) * (len(shape) - len(view.shape)) + view.strides
    return View(view.ptr, shape, strides, view.dtype, array)


def has_unit_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a kernel can read the last axis as it lies; an axis of one, or of no elements, has no stride to heed."""
    return not shape or shape[-1] <= 1 or strides[-1] == 1 or 0 in shape


def require_unit_stride(adopted: Adopted, name: str) -> View:
    """The View of this name, or of a copy by the caller's library when a kernel could not read it in place."""
    view = adopted.views[name]
    if adopted.backend == "cuda" and not has_unit_stride(view.shape, view.strides):
        return adopted.library.contiguous(view)
    return view


def backend(adopted: Adopted) -> Any:
    """The module that computes where the data lives."""
    if adopted.backend == "cpu":
        from cupyflash import _cpu

        return _cpu
    from cupyflash import _cuda

    return _cuda


def dtype_name(value: Any) -> str | None:
    """`"float32"` for its spellings as a string, a NumPy dtype or scalar type, or a torch dtype; None for the rest."""
    if isinstance(value, str):
        return value if value in NUMPY_DTYPES else None
    if type(value).__module__ == "torch":
        return _torch_dtype_name(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return _numpy_dtype_name(np.dtype(value))
    return None


def namespace(function: str, name: str, raw: Any) -> Any:
    """The array library's own module of functions."""
    if hasattr(raw, "__array_namespace__"):
        return raw.__array_namespace__()
    library = _library(function, name, raw)
    return sys.modules["torch" if library.kind == "torch" else "cupy" if library.kind == "cupy" else "numpy"]


def require_cupy(function: str) -> None:
    """Data on a GPU needs CuPy; say what to do when it is missing, doubled or cannot work."""
    trouble = _cupy_trouble()
    if trouble:
        raise UnsupportedError(f"{function}: the data is on a GPU and {trouble}")


# Libraries.


@dataclass
class _Unreadable(Exception):
    """What is wrong with an array, for a message that knows its name."""

    given: str
    accepted: str = ACCEPTED_ARRAYS
    advice: str = ""


_ODD_STRIDES = "has strides that are no multiples of its element size"  # such inputs are copied


def _in_elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Byte strides as element strides; None when they are no multiples (fields of records)."""
    if not itemsize:
        return strides
    elements = tuple([stride // itemsize for stride in strides])
    return elements if strides == tuple([stride * itemsize for stride in elements]) else None


class _NumPy:
    kind = name = "numpy"

    def place(self, raw: np.ndarray) -> Place:
        return "cpu", 0

    def view(self, raw: np.ndarray) -> tuple[View, str]:
        array = raw if type(raw) is np.ndarray else raw.view(np.ndarray)
        why_not = "" if array.flags.writeable else "is read-only"
        strides = _in_elements(array.strides, array.itemsize)
        if strides is None:
            return self.view(array.copy())[0], _ODD_STRIDES
        ptr = array.__array_interface__["data"][0]
        return View(ptr, array.shape, strides, _numpy_dtype_name(array.dtype), array), why_not

    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> np.ndarray:
        return np.empty(shape, NUMPY_DTYPES[dtype])

    def stream(self, place: Place) -> int:
        return 0

    def contiguous(self, view: View) -> View:
        return self.view(np.ascontiguousarray(view.array))[0]

    def host(self, view: View) -> np.ndarray:
        return view.array

    def give(self, raw: Any, like: Any) -> Any:
        return raw


class _Torch:
    kind = name = "torch"

    def __init__(self, torch: ModuleType) -> None:
        self.torch: Any = torch

    def place(self, raw: Any) -> Place:
        device = raw.device
        return device.type, device.index or 0

    def view(self, raw: Any) -> tuple[View, str]:
        torch = self.torch
        if raw.layout is not torch.strided:
            raise _Unreadable(f"is a tensor of layout {raw.layout}, without strides")
        if raw.requires_grad:
            if torch.is_grad_enabled():
                raise _Unreadable(
                    "requires grad while grad mode is on, and this function records no graph",
                    "a tensor without grad is accepted",
                    "Pass its .detach(), or call under torch.no_grad() or inside an autograd.Function.",
                )
            raw = raw.detach()
        why_not = ""
        if raw.is_neg() or raw.is_conj():
            raw, why_not = raw.resolve_neg().resolve_conj(), "has a pending negation or conjugation"
        try:
            return self._memory(raw), why_not
        except RuntimeError as error:
            raise _Unreadable(f"has no memory to read ({error})") from error

    def _memory(self, raw: Any) -> View:
        dtype = _torch_dtype_name(raw.dtype)
        array = raw
        if not raw.is_cuda:
            if dtype == "bfloat16":
                array = raw.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
            elif dtype in NUMPY_DTYPES:
                array = raw.numpy()
        return View(raw.data_ptr(), tuple(raw.shape), raw.stride(), dtype, array)

    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> Any:
        device = place[0] if place[0] == "cpu" else f"{place[0]}:{place[1]}"
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=device)

    def stream(self, place: Place) -> int:
        return self.torch.cuda.current_stream(place[1]).cuda_stream

    def contiguous(self, view: View) -> View:
        return self._memory(view.array.contiguous())

    def host(self, view: View) -> np.ndarray:
        return view.array if isinstance(view.array, np.ndarray) else view.array.cpu().numpy()

    def give(self, raw: Any, like: Any) -> Any:
        return raw


class _CuPy:
    kind = name = "cupy"

    def __init__(self) -> None:
        import cupy

        self.cupy: Any = cupy

    def place(self, raw: Any) -> Place:
        return "cuda", raw.device.id

    def view(self, raw: Any) -> tuple[View, str]:
        strides = _in_elements(raw.strides, raw.itemsize)
        if strides is None:
            with raw.device:
                return self.view(raw.copy())[0], _ODD_STRIDES
        return View(raw.data.ptr, raw.shape, strides, _numpy_dtype_name(raw.dtype), raw), ""

    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> Any:
        with self.cupy.cuda.Device(place[1]):
            return self.cupy.empty(shape, NUMPY_DTYPES[dtype])

    def stream(self, place: Place) -> int:
        return self.cupy.cuda.get_current_stream(place[1]).ptr

    def contiguous(self, view: View) -> View:
        with view.array.device:
            return self.view(self.cupy.ascontiguousarray(view.array))[0]

    def host(self, view: View) -> np.ndarray:
        with view.array.device:
            return view.array.get()

    def give(self, raw: Any, like: Any) -> Any:
        return raw


_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}  # kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged


class _DLPack:
    """An unknown producer: its memory through NumPy or CuPy, its results through its own `from_dlpack`."""

    kind = "dlpack"

    def __init__(self, name: str) -> None:
        self.name = name

    def _through(self, place: Place) -> _NumPy | _CuPy:
        return _NumPy() if place[0] == "cpu" else _CuPy()

    def place(self, raw: Any) -> Place:
        device_type, ordinal = raw.__dlpack_device__()
        device = _DLPACK_DEVICES.get(int(device_type), f"DLPack device type {int(device_type)}")
        return device, 0 if device == "cpu" else int(ordinal)

    def view(self, raw: Any) -> tuple[View, str]:
        if isinstance(raw, np.ndarray) or type(raw).__module__.partition(".")[0] == "cupy":  # our own, from `empty`
            return (_NumPy() if isinstance(raw, np.ndarray) else _CuPy()).view(raw)
        place = self.place(raw)
        through = self._through(place)
        try:
            if isinstance(through, _NumPy):
                return through.view(np.from_dlpack(raw))
            with through.cupy.cuda.Device(place[1]):
                return through.view(through.cupy.from_dlpack(raw))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            dtype = getattr(raw, "dtype", "unknown dtype")
            raise _Unreadable(
                f"is a {type(raw).__name__} of {dtype} that cannot be read through DLPack ({error})"
            ) from error

    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> Any:
        return self._through(place).empty(shape, dtype, place)

    def stream(self, place: Place) -> int:
        return self._through(place).stream(place)

    def contiguous(self, view: View) -> View:
        return (_NumPy() if isinstance(view.array, np.ndarray) else _CuPy()).contiguous(view)

    def host(self, view: View) -> np.ndarray:
        return view.array if isinstance(view.array, np.ndarray) else _CuPy().host(view)

    def give(self, raw: Any, like: Any) -> Any:
        if not hasattr(like, "__array_namespace__"):
            return raw
        return like.__array_namespace__().from_dlpack(raw)


_libraries: dict[type, _Library] = {}  # by exact type; holds supported types only


def _library(function: str, name: str, raw: Any) -> _Library:
    library = _libraries.get(type(raw))
    if library is None:
        library = _libraries[type(raw)] = _find_library(function, name, raw)
    return library


def _find_library(function: str, name: str, raw: Any) -> _Library:
    kind, root = type(raw), type(raw).__module__.partition(".")[0]
    if isinstance(raw, np.ma.MaskedArray):
        given = "is a MaskedArray, whose mask would be dropped"
        raise TypeError(refusal(function, name, given, ACCEPTED_ARRAYS, f"Pass `{name}.filled(...)`."))
    if isinstance(raw, np.ndarray):
        return _NumPy()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(raw, getattr(torch, "Tensor", ())):
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            given = f"is a {kind.__name__}, whose memory only torch may read"
            raise TypeError(refusal(function, name, given, "plain torch tensors are accepted"))
        return _Torch(torch)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(raw, getattr(cupy, "ndarray", ())):
        return _CuPy()
    if root in ("jax", "jaxlib"):
        advice = f"Pass numpy.asarray({name}) on the CPU, or cupy.from_dlpack({name}) on a GPU."
        raise UnsupportedError(
            refusal(function, name, "is a JAX array", "JAX arrays are not taken directly yet", advice)
        )
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _DLPack(root)
    given = "is None" if raw is None else f"is of type {kind.__name__}"
    raise TypeError(refusal(function, name, given, ACCEPTED_ARRAYS))


def _owner(library: _Library, place: Place) -> str:
    name = library.name if library.kind != "dlpack" else f"{library.name} (through DLPack)"
    return f"a {name} array on {place[0] if place[0] == 'cpu' else f'{place[0]}:{place[1]}'}"


@functools.cache
def _torch_dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _numpy_dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else dtype.str  # a foreign byte order keeps its '>', which no check accepts


@functools.cache
def _cupy_trouble() -> str:
    """Why CuPy cannot serve here and what to do about it; empty when it can."""
    from cupyflash import _environment

    for fact in (_environment.cupy_wheel(), _environment.cache_folder()):
        if fact.obstacle:
            return fact.obstacle
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # import and driver faults come as many types; each text already names its cause
        return f"CuPy cannot start: {error}; `python -m cupyflash info` says more"
    return ""
