"""XLA's buffers as arrays of a library, for the plain functions: what a callback is given, and what it writes to."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import _interop
from cupyflash._interop import NOWHERE, Place
from cupyflash._spec import View

Form = tuple[tuple[int, ...], str]  # shape and dtype, all that tracing knows of an array


def form_of(kind: Any) -> Form:
    """Of an array of JAX's or of its type; NumPy does not know the dtypes of keys."""
    return tuple(kind.shape), kind.dtype.name


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A dense array in memory of XLA's, or nowhere."""

    view: View
    place: Place

    def as_word(self) -> Memory:
        """Two 32-bit words, the low one first, as the 64-bit one that they are in memory."""
        words = self.view.array
        return Memory(
            View(self.view.ptr, (1,), (1,), "uint64", None if words is None else words.view("u8")), self.place
        )


def formless(form: Form, place: Place = NOWHERE) -> Memory:
    """An array without an address, to ask what a call would do with its like."""
    shape, dtype = form
    return Memory(View(0, shape, _interop.contiguous(shape), dtype, None), place)


def place_of(buffer: Any) -> Place:
    """Where a callback's buffer lies."""
    kind, ordinal = buffer.__dlpack_device__()
    return ("cpu", 0) if kind == 1 else ("cuda", ordinal)


def adopt(buffer: Any, form: Form, place: Place) -> Memory:
    """A callback's buffer. Its own dtype is not asked for: `__cuda_array_interface__` has no word for bfloat16."""
    shape, dtype = form
    array = np.asarray(buffer) if place[0] == "cpu" else None
    interface = array.__array_interface__ if array is not None else buffer.__cuda_array_interface__
    return Memory(View(interface["data"][0], shape, _interop.contiguous(shape), dtype, array), place)


class _Running(threading.local):
    """The callback that runs on this thread."""

    stream: int = 0
    outputs: list[Memory] | None = None  # that are left; None where none runs


_running = _Running()


def run(work: Any, inputs: list[Memory], outputs: list[Memory], stream: int) -> None:
    """Call `work` on the inputs; what it allocates are the outputs, in their order, and it works on this stream."""
    _running.stream, _running.outputs = stream, outputs[::-1]
    try:
        work(inputs)
    finally:
        _running.outputs = None


class _Xla:
    """What `_interop` asks of a library. Nothing is allocated: XLA has done so before a callback begins, and outside of
    one it is only asked what a call would make."""

    kind = name = "xla"

    def place(self, raw: Memory) -> Place:
        return raw.place

    def glance(self, raw: Memory) -> tuple[Any, ...] | None:
        return (*raw.view[:4], raw.place) if raw.place[0] == "cuda" else None

    def view(self, raw: Memory) -> tuple[View, str]:
        return raw.view, ""

    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> Memory:
        form = tuple(shape), dtype
        return formless(form, place) if _running.outputs is None else _next_output(_running.outputs, form)

    def memory(self, raw: Memory) -> View:
        return raw.view

    def address(self, raw: Memory) -> int:
        return raw.view.ptr

    def stream(self, place: Place) -> int:
        return _running.stream

    def contiguous(self, view: View) -> View:
        raise AssertionError(f"XLA's buffers are dense; got strides {view.strides} of shape {view.shape}")

    def host(self, view: View) -> np.ndarray:
        return view.array

    def give(self, raw: Memory, given: dict[str, Any]) -> Memory:
        return raw


def _next_output(outputs: list[Memory], form: Form) -> Memory:
    shape, dtype = form
    if not outputs:
        raise AssertionError(f"XLA was told of nothing more, and the call makes {dtype}{list(shape)}")
    output = outputs.pop()
    view = output.view
    if dtype == "uint8" and view.dtype == dtype and shape <= view.shape:  # a workspace, which may be longer
        return Memory(view._replace(shape=shape), output.place)
    if (view.shape, view.dtype) != (shape, dtype):
        raise AssertionError(f"XLA was told of {view.dtype}{list(view.shape)}, and the call makes {dtype}{list(shape)}")
    return output


_interop.register(Memory, _Xla())
