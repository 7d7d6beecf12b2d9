"""Spec and Device to Plan: pure, host-only, no CuPy.

`legal` yields the candidates that the device can hold, in the tile tables' order of preference; the first is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from .._errors import UnsupportedError
from .._spec import Call, Mask, Spec
from . import tiles
from .constants import HEAD_DIMS, ITEM_BYTES, KERNELS, BwdFinish, BwdGeneric, BwdPreprocess, Constants, FwdGeneric
from .device import Device

MAX_HEAD_DIM = HEAD_DIMS[-1]
MAX_LENGTH = 2**30 - 1  # rows of one sequence axis: kernels keep row numbers and distances in 32 bits
MAX_BLOCKS = 2**31 - 1  # of a one-dimensional grid
_CPU = "the NumPy backend does this"
_WRITTEN = "float16, bfloat16 and float32 are written on the GPU"


C = TypeVar("C", bound=Constants, covariant=True)


@dataclass(frozen=True, slots=True)
class Plan(Generic[C]):
    """One kernel as it will be launched; grid and workspace follow from it and the lengths."""

    constants: C
    arch: int
    why: str

    @property
    def kernel(self) -> str:
        return KERNELS[type(self.constants)]

    @property
    def binary(self) -> tuple[str, int, Constants]:
        """All that reaches the compiler."""
        return self.kernel, self.arch, self.constants

    @property
    def threads(self) -> int:
        return 32 * self.constants.warps

    @property
    def smem_bytes(self) -> int:
        return self.constants.smem_bytes

    def __str__(self) -> str:
        c = self.constants
        values = ", ".join(f"{f.name}={getattr(c, f.name)}" for f in fields(c))
        size = f"{self.threads} threads, {self.smem_bytes} bytes of shared memory"
        return f"{self.kernel} for sm_{self.arch}: {size}\n  {values}\n  {self.why}"


class BackwardPlan(NamedTuple):
    """The kernels of a backward, run in this order."""

    preprocess: Plan[BwdPreprocess]
    main: Plan[BwdGeneric]
    finish: Plan[BwdFinish]

    def __str__(self) -> str:
        return "\n".join(str(plan) for plan in self)


def head_dim_tile(head_dim: int) -> int:
    """The head dim that a tile spends: the next of HEAD_DIMS; the rest is filled with zeros on chip."""
    return next(tile for tile in HEAD_DIMS if head_dim <= tile)


def refuse(spec: Spec, *, backward: bool) -> None:
    """Raise UnsupportedError for what these kernels cannot serve; the message says what can."""
    features = spec.features
    reasons = (
        (spec.dtype == "float64", "float64 inputs", f"float16, bfloat16 and float32 run on the GPU; {_CPU}"),
        (max(spec.head_dim, spec.head_dim_v) > MAX_HEAD_DIM, f"head_dim {max(spec.head_dim, spec.head_dim_v)}",
         f"the CUDA kernels take at most {MAX_HEAD_DIM}; the NumPy backend takes any"),
        (features.bias, "`bias`", f"no CUDA kernel adds a bias yet; {_CPU}"),
        (features.dropout, "`dropout_p` above 0", f"no CUDA kernel drops out yet; {_CPU}"),
        (spec.deterministic and backward, "`deterministic`", f"the CUDA backward sums dq by atomics so far; {_CPU}"),
        (spec.paged, "`block_table`", f"no CUDA kernel reads pages yet; {_CPU}"),
        (spec.split, "`num_splits` or `split_len`", f"no CUDA kernel splits keys yet; {_CPU}"),
        (spec.out_dtype not in ITEM_BYTES, f"out in {spec.out_dtype}", _WRITTEN),
        (spec.grad_dtype is not None and spec.grad_dtype not in ITEM_BYTES, f"{spec.grad_dtype} gradients", _WRITTEN),
    )  # fmt: skip
    for applies, given, accepted in reasons:
        if applies:
            raise UnsupportedError(f"cupyflash on CUDA: {given} is not supported; {accepted}.")


def refuse_sizes(call: Call) -> None:
    """Raise UnsupportedError for lengths beyond 32-bit row numbers."""
    for name, length in (("len_q", call.len_q), ("len_k", call.len_k)):
        if length > MAX_LENGTH:
            accepted = f"the CUDA kernels take at most {MAX_LENGTH}"
            raise UnsupportedError(f"{call.function}: {length} rows ({name}); {accepted}.")


def _copy_bytes(spec: Spec) -> int:
    """Bytes that one copy moves: 16 where every row allows it, else 4, else one element."""
    return 16 if spec.align == 16 else 4 if spec.align >= 4 else ITEM_BYTES[spec.dtype]


def _score_switches(spec: Spec) -> dict[str, bool]:
    features = spec.features
    changes_scores = features.softcap or features.alibi
    return {
        "is_masked": spec.mask is not Mask.NONE,
        "has_softcap": features.softcap,
        "has_alibi": features.alibi,
        "is_scale_negative": features.negative_scale and not changes_scores,  # else the scale itself is multiplied
    }


def legal_forward(spec: Spec, device: Device) -> Iterator[Plan[FwdGeneric]]:
    """Candidates of `fwd_generic`, best first."""
    head_dim, head_dim_v = head_dim_tile(spec.head_dim), head_dim_tile(spec.head_dim_v)
    table = tiles.FWD_16BIT if ITEM_BYTES[spec.dtype] == 2 else tiles.FWD_32BIT
    for rank, tile in enumerate(table[max(head_dim, head_dim_v)]):
        constants = FwdGeneric(
            element=spec.dtype,
            out_element=spec.out_dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            copy_bytes=_copy_bytes(spec),
            **tile._asdict(),
            **_score_switches(spec),
        )
        if constants.smem_bytes <= device.smem_bytes:
            yield Plan(constants, device.arch, _why(rank, device))


def legal_backward(spec: Spec, device: Device) -> Iterator[BackwardPlan]:
    """Candidates of the backward, best first."""
    assert spec.grad_dtype is not None
    assert spec.dout_dtype is not None
    head_dim, head_dim_v = head_dim_tile(spec.head_dim), head_dim_tile(spec.head_dim_v)
    table = tiles.BWD_16BIT if ITEM_BYTES[spec.dtype] == 2 else tiles.BWD_32BIT
    for rank, tile in enumerate(table[max(head_dim, head_dim_v)]):
        constants = BwdGeneric(
            element=spec.dtype,
            grad_element=spec.grad_dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            copy_bytes=_copy_bytes(spec),
            accumulate=spec.accumulate,
            **tile._asdict(),
            **_score_switches(spec),
        )
        if constants.smem_bytes > device.smem_bytes or not _divides(constants):
            continue
        preprocess = BwdPreprocess(spec.dtype, spec.out_dtype, spec.dout_dtype, _copy_bytes(spec))
        finish = BwdFinish(spec.grad_dtype, constants.copy_bytes, spec.accumulate)
        yield BackwardPlan(
            Plan(preprocess, device.arch, "delta, and dq zeroed"),
            Plan(constants, device.arch, _why(rank, device)),
            Plan(finish, device.arch, "dq to its type"),
        )


def _divides(c: BwdGeneric) -> bool:
    """Whether the warps' shares are whole: two 16x8 tiles side by side for tensor cores, one for float."""
    columns = 16 if ITEM_BYTES[c.element] == 2 else 8
    rest = {warps: c.warps // warps for warps in (c.score_warps, c.key_warps, c.query_warps)}
    return (
        c.query_tile % (16 * c.score_warps) == 0
        and c.key_tile % (columns * rest[c.score_warps]) == 0
        and c.key_tile % (16 * c.key_warps) == 0
        and c.head_dim % (columns * rest[c.key_warps]) == 0
        and c.head_dim_v % (columns * rest[c.key_warps]) == 0
        and c.query_tile % (16 * c.query_warps) == 0
        and c.head_dim % (columns * rest[c.query_warps]) == 0
    )


def _why(rank: int, device: Device) -> str:
    return f"row {rank} of the tile table: the first whose tiles fit {device.smem_bytes} bytes of shared memory"


@lru_cache(maxsize=1024)
def forward(spec: Spec, device: Device) -> Plan[FwdGeneric]:
    """The kernel of a forward. Raises UnsupportedError."""
    refuse(spec, backward=False)
    return next(legal_forward(spec, device))


@lru_cache(maxsize=1024)
def backward(spec: Spec, device: Device) -> BackwardPlan:
    """The kernels of a backward. Raises UnsupportedError."""
    refuse(spec, backward=True)
    return next(legal_backward(spec, device))


def validate(override: Any, chosen: Plan | BackwardPlan) -> Any:
    """A caller's plan, used as given or refused: it may differ from the chosen one in its tiles alone.

    Raises TypeError for another kind of value, ValueError for other constants than the call needs.
    """
    if type(override) is not type(chosen):
        given, wanted = type(override).__name__, type(chosen).__name__
        raise TypeError(f"`plan` is a {given}; a {wanted} is accepted, as `Attention.plan` returns.")
    pairs = zip(override, chosen, strict=True) if isinstance(chosen, BackwardPlan) else ((override, chosen),)
    for given, wanted in pairs:
        tile_names = tiles.BwdTile._fields if isinstance(wanted.constants, BwdGeneric) else tiles.FwdTile._fields
        same_tiles = {name: getattr(given.constants, name) for name in tile_names if hasattr(wanted.constants, name)}
        if given.arch != wanted.arch or given.constants != replace(wanted.constants, **same_tiles):
            raise ValueError(f"`plan` names {given}; this call needs, its tiles apart, {wanted}.")
    return override
