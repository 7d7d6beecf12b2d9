"""A call described by words instead of arrays, and the kernels that it gets: no GPU is asked, unless for what it is."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyflash import _environment, _interop
from cupyflash._attention import Attention
from cupyflash._check import FLOATS, LAYOUTS, Judged
from cupyflash._cli._say import UsageError
from cupyflash._memory import judged_of

if TYPE_CHECKING:
    from cupyflash._cuda.device import Device
    from cupyflash._cuda.plan import Plan

_SIZES = ("batch", "len_q", "len_k", "heads_q", "heads_kv", "dim", "dim_v")
_SHAPES = ("q", "k", "v")
_FLAGS = {name: f"--{name.replace('_', '-')}" for name in (*_SIZES, *_SHAPES, "cu_seqlens_q", "cu_seqlens_k")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What describes a call; names and meanings are those of `Attention` and its methods."""
    shape = ints("2,4096,16,128")
    add = parser.add_argument_group(
        "the call, by shapes or by sizes", "of arrays that lie without gaps, from a multiple of 16 bytes on"
    ).add_argument
    add("--q", type=shape, metavar="SIZES", help="shape in the layout, as 2,4096,16,128")
    add("--k", type=shape, metavar="SIZES", help="default: as --q")
    add("--v", type=shape, metavar="SIZES", help="default: as --k")
    for name, default in (
        ("batch", "1"),
        ("len_q", ""),
        ("len_k", "as --len-q"),
        ("heads_q", ""),
        ("heads_kv", "as --heads-q"),
        ("dim", ""),
        ("dim_v", "as --dim"),
    ):
        add(_FLAGS[name], type=int, metavar="N", help=f"default: {default}" if default else "needed without --q")
    add("--dtype", choices=FLOATS, default="bfloat16", help="of q, k and v; default: bfloat16")
    add("--layout", choices=LAYOUTS, default="bshd", help="default: bshd")
    offsets = ints("0,100,256")
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        add(_FLAGS[name], type=offsets, metavar="OFFSETS", help="with --layout thd and --q, as 0,100,256")
    add = parser.add_argument_group("its options").add_argument
    corner = "bottom-right"
    add("--causal", nargs="?", const=corner, default=False, choices=(corner, "top-left"), help=f"alone: {corner}")
    add("--window", type=_window, metavar="LEFT,RIGHT", help="keys, or none for an unbounded side, as 128,0 or none,0")
    add("--scale", type=float, metavar="X", help="default: 1/sqrt(D)")
    add("--softcap", type=float, metavar="X")
    add("--alibi", action="store_true")
    add("--bias", nargs="?", const=True, choices=FLOATS, help="of --dtype, or of another")
    add("--sink", action="store_true")
    add("--dropout", type=float, default=0.0, metavar="P")
    add("--page-size", type=int, metavar="N", help="keys lie in pages of so many; forward only")
    add("--splits", type=int, default=0, metavar="N", help="forward only; default: the plan chooses")
    add("--split-len", type=int, metavar="N", help="forward only: keys per split instead")
    add("--out-dtype", choices=FLOATS, help="forward only; default: as --dtype")
    add("--grad-dtype", choices=FLOATS, help="backward only; default: as --dtype")
    add("--no-bias-grad", action="store_true", help="backward only: without dbias")
    add("--accumulate", action="store_true", help="backward only: gradients are added to what is there")
    add("--deterministic", action="store_true", help="backward only")
    add("--tf32", action="store_true", help="float32 products may be rounded to TF32")
    add("--arch", type=_arch, metavar="NN", help="compute capability times ten, as 90; default: this machine's GPU")


def judge(options: argparse.Namespace, *, backward: bool) -> Judged:
    """The described call, as every call is judged. Raises UsageError."""
    try:
        attention = Attention(
            layout=options.layout, scale=options.scale, causal=options.causal, window=options.window,
            softcap=options.softcap, dropout_p=options.dropout, deterministic=options.deterministic,
            out_dtype=options.out_dtype, grad_dtype=options.grad_dtype,
            bias_grad=not options.no_bias_grad, num_splits=options.splits, split_len=options.split_len,
            allow_tf32=options.tf32,
        )  # fmt: skip
        arguments = _arrays(options) | {"accumulate": backward and options.accumulate}
        return judged_of(options.command, attention, arguments, backward=backward)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None


def device(options: argparse.Namespace) -> Device:
    """The GPU that is planned for. Raises UsageError where none is named and none is here."""
    from cupyflash._cuda.device import KNOWN, of

    if options.arch is not None:
        return KNOWN[options.arch]
    obstacle = _environment.why_no_cuda()
    if obstacle:
        accepted = f"{', '.join(map(str, KNOWN))} is accepted"
        raise UsageError(f"{options.command}: `--arch` is missing, and no GPU runs here ({obstacle}); {accepted}.")
    return of(0)


def kernels(judged: Judged, target: Device) -> list[Plan[Any]]:
    """Every kernel that the call launches, in order. Raises UnsupportedError."""
    from cupyflash._cuda.plan import backward, forward, refuse_values

    refuse_values(judged.call)
    choose = backward if judged.backward else forward
    return [*choose(judged.spec, target).kernels]


def main_kernel(judged: Judged, found: list[Plan[Any]]) -> str:
    """The name of the kernel that does the work."""
    return found[1 if judged.backward else 0].kernel


# Words to values.


def ints(example: str) -> Any:
    """A parser of such words."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"is {text!r}; ints like {example} are accepted") from None

    return parse


def _window(text: str) -> tuple[int | None, int | None]:
    try:
        left, right = (None if side == "none" else int(side) for side in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; two ints or none, like 128,0, are accepted") from None
    return left, right


def _arch(text: str) -> int:
    from cupyflash._cuda.device import KNOWN

    named = {str(arch): arch for arch in KNOWN}
    if text.removeprefix("sm_") not in named:
        raise argparse.ArgumentTypeError(f"is {text!r}; {', '.join(named)} is accepted")
    return named[text.removeprefix("sm_")]


def _arrays(options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Arrays that take no memory, but for offsets and lengths, whose values are looked at."""
    by_sizes = [name for name in _SIZES if getattr(options, name) is not None]
    if options.q is None:
        shapes, small = _of_sizes(options)
    elif by_sizes:
        given = f"is given beside {_FLAGS[by_sizes[0]]}"
        raise UsageError(f"{options.command}: `--q` {given}; shapes or sizes are accepted, not both.")
    else:
        shapes, small = _of_shapes(options)
    heads_q = shapes["q"][2 if options.layout == "bshd" else 1]
    arrays = {name: _empty(shape, options.dtype) for name, shape in shapes.items()} | small
    rows = "float64" if options.dtype == "float64" else "float32"
    if options.bias is not None:  # True: alone
        dtype = options.dtype if options.bias is True else options.bias
        arrays["bias"] = _empty((1, 1, 1, 1), dtype)  # no kernel is chosen by its shape
    if options.alibi:
        arrays["alibi_slopes"] = _empty((heads_q,), rows)
    if options.sink:
        arrays["sink"] = _empty((heads_q,), rows)
    return arrays


def _empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.broadcast_to(np.zeros((), _interop.NUMPY_DTYPES[dtype]), shape)


_Described = tuple[dict[str, tuple[int, ...]], dict[str, np.ndarray]]


def _of_shapes(options: argparse.Namespace) -> _Described:
    k = options.k or options.q
    shapes = {"q": options.q, "k": k, "v": options.v or k}
    axes = 3 if options.layout == "thd" else 4
    for name, shape in shapes.items():
        if len(shape) != axes or min(shape) < 0:
            given = f"is {','.join(map(str, shape))}"
            accepted = f"{axes} sizes of at least 0 are accepted with --layout {options.layout}"
            raise UsageError(f"{options.command}: `--{name}` {given}; {accepted}.")
    offsets = {"cu_seqlens_q": options.cu_seqlens_q, "cu_seqlens_k": options.cu_seqlens_k}
    small = {name: np.array(value, np.int64) for name, value in offsets.items() if value is not None}
    if options.page_size is None:
        return shapes, small
    if options.layout == "thd":
        raise UsageError(f"{options.command}: `--page-size` is given with --q and thd; sizes (--len-q) are accepted.")
    return _paged(options, shapes, k[0], k[1 if options.layout == "bshd" else 2])


def _of_sizes(options: argparse.Namespace) -> _Described:
    for name in ("len_q", "heads_q", "dim"):
        if getattr(options, name) is None:
            accepted = "a call is described by --q, or by --len-q, --heads-q and --dim"
            raise UsageError(f"{options.command}: `{_FLAGS[name]}` is missing; {accepted}.")
    for name in ("k", "v", "cu_seqlens_q", "cu_seqlens_k"):
        if getattr(options, name) is not None:
            raise UsageError(f"{options.command}: `{_FLAGS[name]}` is given without --q; it is accepted with it.")
    for name in _SIZES:
        value = getattr(options, name)
        if value is not None and value < 0:
            raise UsageError(f"{options.command}: `{_FLAGS[name]}` is {value}; 0 and more is accepted.")
    batch = 1 if options.batch is None else options.batch
    len_q, heads_q, dim = options.len_q, options.heads_q, options.dim
    len_k = len_q if options.len_k is None else options.len_k
    heads_kv = heads_q if options.heads_kv is None else options.heads_kv
    dim_v = dim if options.dim_v is None else options.dim_v

    def shape(length: int, heads: int, columns: int) -> tuple[int, ...]:
        if options.layout == "thd":
            return batch * length, heads, columns
        return (batch, heads, length, columns) if options.layout == "bhsd" else (batch, length, heads, columns)

    shapes = {"q": shape(len_q, heads_q, dim), "k": shape(len_k, heads_kv, dim), "v": shape(len_k, heads_kv, dim_v)}
    small: dict[str, np.ndarray] = {}
    if options.layout == "thd":
        small = {"cu_seqlens_q": np.arange(batch + 1) * len_q, "cu_seqlens_k": np.arange(batch + 1) * len_k}
    if options.page_size is None:
        return shapes, small
    small.pop("cu_seqlens_k", None)
    shapes, pages = _paged(options, shapes, batch, len_k)
    return shapes, small | pages


def _paged(options: argparse.Namespace, shapes: dict[str, tuple[int, ...]], batch: int, len_k: int) -> _Described:
    """The same keys in as many pages as they need, and where they are."""
    page = options.page_size
    if page < 1:
        raise UsageError(f"{options.command}: `--page-size` is {page}; 1 and more is accepted.")
    table = batch, math.ceil(len_k / page)
    pools = dict(shapes)
    for name in ("k", "v"):
        heads, columns = shapes[name][1 if options.layout != "bshd" else 2], shapes[name][-1]
        rows = (heads, page) if options.layout == "bhsd" else (page, heads)
        pools[name] = math.prod(table), *rows, columns
    return pools, {"block_table": np.zeros(table, np.int32), "seqused_k": np.full(batch, len_k, np.int32)}
