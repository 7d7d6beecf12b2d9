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
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, Protocol

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
_CPU: Place = ("cpu", 0)
NOWHERE: Place = ("nowhere", 0)  # of arrays that are shape and dtype alone, while a call is traced


class _Library(Protocol):
    """What `Adopted` asks of an array library. `raw` is its own array, never a View."""

    kind: str
    name: str  # arrays of different names do not mix

    def place(self, raw: Any) -> Place: ...
    def glance(self, raw: Any) -> tuple[Any, ...] | None: ...  # its address, then all else that matters
    def view(self, raw: Any) -> tuple[View, str]: ...  # and why it may not be written, or ""
    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> Any: ...  # C-contiguous
    def memory(self, raw: Any) -> View: ...  # of what `empty` made
    def address(self, raw: Any) -> int: ...  # of that too, on a GPU
    def stream(self, place: Place) -> int: ...
    def contiguous(self, view: View) -> View: ...
    def host(self, view: View) -> np.ndarray: ...
    def give(self, raw: Any, given: dict[str, Any]) -> Any: ...  # in the kind of what was given


@dataclass(slots=True)
class Adopted:
    """The arrays of one call as Views, with the library, device and stream they belong to."""

    function: str
    library: _Library
    place: Place
    stream: int
    given: dict[str, Any]  # the caller's arrays
    views: dict[str, View]  # of them, in the caller's own axis order
    unwritable: dict[str, str]  # name: why nothing may be written there
    _made: dict[int, tuple[View, Any]] = field(default_factory=dict)  # by id(view); holding the view keeps the id

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
        view = self.library.memory(raw)
        self._made[id(view)] = view, raw
        return view

    def give(self, view: View) -> Any:
        """The very array the caller passed, or the caller's kind of array for a View that `empty` made.

        To be asked for after the work is queued: an export through DLPack waits for what its stream holds by then.
        """
        made = self._made.get(id(view))
        if made is not None:
            return self.library.give(made[1], self.given)
        return next(self.given[name] for name, own in self.views.items() if own is view)

    def host(self, name: str) -> np.ndarray:
        """The values on the host; on a GPU this waits for the stream."""
        return self.library.host(self.views[name])

    def refresh_stream(self) -> int:
        """The stream that is current now, for calls that are packed once and run later; 0 on the CPU."""
        if self.place[0] == "cuda":
            self.stream = self.library.stream(self.place)
        return self.stream


def adopt(function: str, arrays: dict[str, Any]) -> Adopted:
    """Views of all arrays that are not None. They must be of one library and on one device; the first one sets both."""
    library: _Library | None = None
    place = _CPU
    given: dict[str, Any] = {}
    for name, raw in arrays.items():
        if raw is None:
            continue
        its_library = _libraries.get(type(raw)) or _library(function, name, raw)
        its_place = its_library.place(raw)
        if library is None:
            library, place = its_library, its_place
        elif its_place != place or its_library.name != library.name:
            first = f"`{next(iter(given))}` is {_owner(library, place)}"
            accepted = "all arrays of a call must be of one library and on one device"
            raise TypeError(refusal(function, name, f"is {_owner(its_library, its_place)} and {first}", accepted))
        given[name] = raw
    if library is None:
        raise AssertionError(f"{function} adopted no array")
    if place[0] == "cuda":
        require_cupy(function)
    elif place not in (_CPU, NOWHERE):
        accepted = "arrays in CPU or CUDA memory are accepted"
        raise UnsupportedError(refusal(function, next(iter(given)), f"is {_owner(library, place)}", accepted))
    views: dict[str, View] = {}
    unwritable: dict[str, str] = {}
    for name, raw in given.items():
        try:
            views[name], why_not = library.view(raw)
        except _Unreadable as error:
            raise TypeError(refusal(function, name, error.given, error.accepted, error.advice)) from error.__cause__
        if why_not:
            unwritable[name] = why_not
    stream = library.stream(place) if place[0] == "cuda" else 0
    return Adopted(function, library, place, stream, given, views, unwritable)


class Glance(NamedTuple):
    """What tells the form of one call from that of another, and what a call fills into its form."""

    form: tuple[Any, ...]  # hashable
    addresses: dict[str, int]  # of arrays
    ints: dict[str, int]  # that a form leaves open


def glance(arguments: dict[str, Any], open_ints: dict[str, tuple[int | None, int, int, str]]) -> Glance | None:
    """The arguments as far as a look at GPU arrays, ints and bools goes; None where it takes more to know them.

    `open_ints` names the ints whose value is no part of a form, each with its default, which is, and its bounds.
    """
    form: list[Any] = []
    addresses: dict[str, int] = {}
    ints: dict[str, int] = {}
    for name, value in arguments.items():
        if value is None:
            continue
        kind = type(value)
        library = _libraries.get(kind)
        if library is not None:
            seen = library.glance(value)
            if seen is None:
                return None
            addresses[name] = address = seen[0]
            form += name, kind, seen[1:], address & 15
        elif kind is int and name in open_ints and value != open_ints[name][0]:
            _, low, high, _ = open_ints[name]
            if not low <= value < high:
                return None
            ints[name] = value
            form += name, kind
        elif kind is int or kind is bool:
            form += name, kind, value  # by kind too: True equals 1
        else:
            return None
    return Glance(tuple(form), addresses, ints)


def is_array(value: Any) -> bool:
    """Whether `adopt` may take it, as far as its type tells."""
    return type(value) in _libraries or isinstance(value, np.ndarray) or hasattr(value, "__dlpack__")


def has_jax(arrays: Iterable[Any]) -> bool:
    """Whether one of them is JAX's: an array, or what stands for one while JAX traces."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(array, jax.Array) for array in arrays)


def permute(view: View, axes: tuple[int | None, ...]) -> View:
    """The same memory with its axes in this order; None puts in an axis of one."""
    array = view.array
    if isinstance(array, np.ndarray):
        array = array.transpose([axis for axis in axes if axis is not None])
        if None in axes:
            array = array[tuple([None if axis is None else slice(None) for axis in axes])]
    shape, strides = _reordered(view.shape, view.strides, axes)
    return View(view.ptr, shape, strides, view.dtype, array)


@functools.lru_cache(maxsize=4096)
def _reordered(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int | None, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (
        tuple([1 if axis is None else shape[axis] for axis in axes]),
        tuple([0 if axis is None else strides[axis] for axis in axes]),
    )


def broadcast(view: View, shape: tuple[int, ...]) -> View:
    """The same memory read with stride 0 along every axis that `shape` adds in front."""
    array = np.broadcast_to(view.array, shape) if isinstance(view.array, np.ndarray) else view.array
    strides = (0,) * (len(shape) - len(view.shape)) + view.strides
    return View(view.ptr, shape, strides, view.dtype, array)


def has_unit_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a kernel can read the last axis as it lies; an axis of one, or of no elements, has no stride to heed."""
    return not shape or shape[-1] <= 1 or strides[-1] == 1 or 0 in shape


@functools.lru_cache(maxsize=4096)
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a C-contiguous array."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))


def require_unit_stride(adopted: Adopted, name: str) -> View:
    """The View of this name, or of a copy by the caller's library when a kernel could not read it in place."""
    view = adopted.views[name]
    if adopted.backend == "cuda" and not has_unit_stride(view.shape, view.strides):
        return adopted.library.contiguous(view)
    return view


def backend(place: Place) -> Any:
    """The module that computes where the data lives."""
    if place[0] == "cpu":
        from cupyflash import _cpu

        return _cpu
    if place == NOWHERE:
        from cupyflash import _nowhere

        return _nowhere
    from cupyflash import _cuda

    return _cuda


def dtype_name(value: Any) -> str | None:
    """`"float32"` for its spellings as a string, a NumPy or JAX dtype or scalar type, or a torch dtype; else None."""
    if isinstance(value, str):
        return value if value in NUMPY_DTYPES else None
    if type(value).__module__ == "torch":
        return _torch_dtype_name(value)
    own = getattr(value, "dtype", None) if isinstance(value, type) else None
    if isinstance(own, np.dtype):  # of jax.numpy.float32 and its like
        return _numpy_dtype_name(own)
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


@functools.lru_cache(maxsize=4096)
def _form(strides: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[tuple[int, ...] | None, str]:
    """Byte strides as element strides, None when they are no multiples (fields of records), and the dtype's name."""
    itemsize = dtype.itemsize
    elements = tuple([stride // itemsize for stride in strides]) if itemsize else strides
    return elements if strides == tuple([stride * itemsize for stride in elements]) else None, _numpy_dtype_name(dtype)


class _NumPy:
    kind = name = "numpy"

    def place(self, raw: np.ndarray) -> Place:
        return _CPU

    def glance(self, raw: np.ndarray) -> None:
        return None  # the NumPy backend needs more than addresses

    def view(self, raw: np.ndarray) -> tuple[View, str]:
        array = raw if type(raw) is np.ndarray else raw.view(np.ndarray)
        strides, dtype = _form(array.strides, array.dtype)
        if strides is None:
            return self.memory(array.copy()), _ODD_STRIDES
        view = View(array.__array_interface__["data"][0], array.shape, strides, dtype, array)
        return view, "" if array.flags.writeable else "is read-only"

    def memory(self, raw: np.ndarray) -> View:
        return self.view(raw)[0]

    def address(self, raw: np.ndarray) -> int:
        return self.memory(raw).ptr

    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> np.ndarray:
        return np.empty(shape, NUMPY_DTYPES[dtype])

    def stream(self, place: Place) -> int:
        return 0

    def contiguous(self, view: View) -> View:
        return self.memory(np.ascontiguousarray(view.array))

    def host(self, view: View) -> np.ndarray:
        return view.array

    def give(self, raw: Any, given: dict[str, Any]) -> Any:
        return raw


class _Torch:
    kind = name = "torch"

    def __init__(self, torch: ModuleType) -> None:
        self.torch: Any = torch
        self.strided = self.torch.strided
        self.places: dict[Any, Place] = {}  # by torch.device, which is slow to ask for its type
        self.devices: dict[Place, Any] = {}
        # What code from torch.compile calls for its launches; current_stream makes a Stream object each time.
        self.raw_stream = getattr(self.torch._C, "_cuda_getCurrentRawStream", None)

    def place(self, raw: Any) -> Place:
        device = raw.device
        place = self.places.get(device)
        if place is None:
            place = self.places[device] = device.type, device.index or 0
            self.devices[place] = device
        return place

    def glance(self, raw: Any) -> tuple[Any, ...] | None:
        if not raw.is_cuda or raw.is_neg() or raw.is_conj() or raw.layout is not self.strided:
            return None
        if raw.requires_grad and self.torch.is_grad_enabled():
            return None
        try:
            return raw.data_ptr(), raw.shape, raw.stride(), raw.dtype, raw.device
        except RuntimeError:  # no memory, which `view` says better
            return None

    def view(self, raw: Any) -> tuple[View, str]:
        if raw.layout is not self.strided:
            raise _Unreadable(f"is a tensor of layout {raw.layout}, without strides")
        if raw.requires_grad:
            if self.torch.is_grad_enabled():
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
            return self.memory(raw), why_not
        except RuntimeError as error:
            raise _Unreadable(f"has no memory to read ({error})") from error

    def memory(self, raw: Any) -> View:
        dtype = _torch_dtype_name(raw.dtype)
        array = raw
        if not raw.is_cuda:
            if dtype == "bfloat16":
                array = raw.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
            elif dtype in NUMPY_DTYPES:
                array = raw.numpy()
        return View(raw.data_ptr(), raw.shape, raw.stride(), dtype, array)

    def address(self, raw: Any) -> int:
        return raw.data_ptr()

    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> Any:
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=self.devices[place])

    def stream(self, place: Place) -> int:
        if self.raw_stream is None:
            return self.torch.cuda.current_stream(place[1]).cuda_stream
        return self.raw_stream(place[1])

    def contiguous(self, view: View) -> View:
        return self.memory(view.array.contiguous())

    def host(self, view: View) -> np.ndarray:
        return view.array if isinstance(view.array, np.ndarray) else view.array.cpu().numpy()

    def give(self, raw: Any, given: dict[str, Any]) -> Any:
        return raw


class _CuPy:
    kind = name = "cupy"

    def __init__(self) -> None:
        import cupy

        self.cupy: Any = cupy

    def place(self, raw: Any) -> Place:
        return "cuda", raw.data.device_id

    def glance(self, raw: Any) -> tuple[Any, ...]:
        memory = raw.data
        return memory.ptr, raw.shape, raw.strides, raw.dtype, memory.device_id

    def view(self, raw: Any) -> tuple[View, str]:
        strides, dtype = _form(raw.strides, raw.dtype)
        if strides is None:
            with raw.device:
                return self.memory(raw.copy()), _ODD_STRIDES
        return View(raw.data.ptr, raw.shape, strides, dtype, raw), ""

    def memory(self, raw: Any) -> View:
        return self.view(raw)[0]

    def address(self, raw: Any) -> int:
        return raw.data.ptr

    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> Any:
        cuda = self.cupy.cuda
        if cuda.runtime.getDevice() == place[1]:  # entering a device takes longer than the allocation
            return self.cupy.empty(shape, NUMPY_DTYPES[dtype])
        with cuda.Device(place[1]):
            return self.cupy.empty(shape, NUMPY_DTYPES[dtype])

    def stream(self, place: Place) -> int:
        return self.cupy.cuda.get_current_stream(place[1]).ptr

    def contiguous(self, view: View) -> View:
        with view.array.device:
            return self.memory(self.cupy.ascontiguousarray(view.array))

    def host(self, view: View) -> np.ndarray:
        with view.array.device:
            return view.array.get()

    def give(self, raw: Any, given: dict[str, Any]) -> Any:
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

    def glance(self, raw: Any) -> None:
        return None

    def view(self, raw: Any) -> tuple[View, str]:
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

    def memory(self, raw: Any) -> View:
        return (_NumPy() if isinstance(raw, np.ndarray) else _CuPy()).memory(raw)

    def address(self, raw: Any) -> int:
        return self.memory(raw).ptr

    def stream(self, place: Place) -> int:
        return self._through(place).stream(place)

    def contiguous(self, view: View) -> View:
        return (_NumPy() if isinstance(view.array, np.ndarray) else _CuPy()).contiguous(view)

    def host(self, view: View) -> np.ndarray:
        return view.array if isinstance(view.array, np.ndarray) else _CuPy().host(view)

    def give(self, raw: Any, given: dict[str, Any]) -> Any:
        like = next(iter(given.values()))
        if not hasattr(like, "__array_namespace__"):
            return raw
        return like.__array_namespace__().from_dlpack(raw)


_libraries: dict[type, _Library] = {}  # by exact type; holds supported types only


def register(kind: type, library: _Library) -> None:
    """Take arrays of exactly this type, seen through this library."""
    _libraries[kind] = library


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
        accepted = "JAX arrays are accepted by the plain forward, backward, preprocess and merges, and by cupyflash.jax"
        raise UnsupportedError(refusal(function, name, "is a JAX array", accepted))
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
