"""Spec and Device to Plan: pure, host-only, no CuPy.

`legal_forward` and `legal_gradients` yield the candidates that the device can hold, in the tile tables' order of
preference; the first is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from .._errors import UnsupportedError
from .._spec import Call, Mask, Spec
from . import tiles
from .constants import (
    HEAD_DIMS,
    ITEM_BYTES,
    KERNELS,
    SM90_HEAD_DIMS,
    SM90_KEY_TILES,
    SM90_PANEL,
    SM90_ROWS,
    BwdDbiasGeneric,
    BwdDkvSm90,
    BwdDqGeneric,
    BwdDqSm90,
    BwdFinish,
    BwdGeneric,
    BwdPreprocess,
    BwdSm90,
    Constants,
    FwdCombine,
    FwdGeneric,
    FwdSm90,
    MergeStates,
    accum_of,
)
from .device import Device

MAX_HEAD_DIM = HEAD_DIMS[-1]
MAX_LENGTH = 2**30 - 1  # rows of one sequence axis: kernels keep row numbers and distances in 32 bits
ROW_PAD = 128  # kRowPad of attn/sequence.cuh: rows of per-row workspaces, a sequence
TURN_ROWS = 64  # kTurnRows of attn/sequence.cuh: for so many rows of dq there is a counter
LARGEST_OPTION = 2.0**100  # of a scale, a softcap and its inverse
MAX_BLOCKS = 2**31 - 1  # of a one-dimensional grid
_CPU = "the NumPy backend does this"
TileTable = dict[int, dict[int, list[Any]]]  # by an element's bytes, then by the head-dim tile, as in tiles.py
_TILES: dict[type, Any] = {
    FwdGeneric: tiles.FwdTile,
    FwdSm90: tiles.Sm90Tile,
    BwdGeneric: tiles.BwdTile,
    BwdSm90: tiles.Sm90BwdTile,
    BwdDkvSm90: tiles.Sm90BwdTile,
    BwdDqGeneric: tiles.DqTile,
    BwdDqSm90: tiles.Sm90DqTile,
    BwdDbiasGeneric: tiles.DbiasTile,
}


C = TypeVar("C", bound=Constants, covariant=True)
T = TypeVar("T")


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
    def target(self) -> str:
        """What is compiled for: Hopper's own instructions are of sm_90a."""
        return "sm_90a" if self.kernel.endswith("_sm90") else f"sm_{self.arch}"

    @property
    def block(self) -> tuple[int, int]:
        """Threads along x and y."""
        return 32 * self.constants.warps, getattr(self.constants, "key_groups", 1)

    @property
    def threads(self) -> int:
        return math.prod(self.block)

    @property
    def smem_bytes(self) -> int:
        return self.constants.smem_bytes

    @property
    def is_always_early(self) -> bool:
        """Whether it starts early as a call's first kernel too."""
        return isinstance(self.constants, MergeStates) or getattr(self.constants, "is_split", False)

    @property
    def combine(self) -> Plan[FwdCombine] | None:
        """The kernel that merges partial results, if this one leaves some."""
        c = self.constants
        if not isinstance(c, (FwdGeneric, FwdSm90)) or not c.is_split:
            return None
        return Plan(
            FwdCombine(accum_of(c.element), c.out_element, c.head_dim_v), self.arch, "out and lse of all splits"
        )

    @property
    def kernels(self) -> tuple[Plan[Any], ...]:
        """All that a forward launches, in order."""
        return (self,) if self.combine is None else (self, self.combine)

    def __str__(self) -> str:
        c = self.constants
        values = ", ".join(f"{f.name}={getattr(c, f.name)}" for f in fields(c))
        size = f"{self.threads} threads, {self.smem_bytes} bytes of shared memory"
        text = f"{self.kernel} for {self.target}: {size}\n  {values}\n  {self.why}"
        return text if self.combine is None else f"{text}\n{self.combine}"


class BackwardPlan(NamedTuple):
    """The kernels of a backward, run in this order; None is not needed."""

    preprocess: Plan[BwdPreprocess]
    main: Plan[BwdGeneric | BwdSm90 | BwdDkvSm90]
    dq: Plan[BwdDqGeneric | BwdDqSm90] | None  # of its own: where sums are in order, or it is faster
    dbias: Plan[BwdDbiasGeneric] | None
    finish: Plan[BwdFinish]

    @property
    def sums_dq(self) -> bool:
        """Whether dq is summed in the workspace, block by block."""
        return self.dq is None

    @property
    def takes_turns(self) -> bool:
        """Whether blocks do so in order."""
        return isinstance(self.main.constants, BwdSm90) and self.main.constants.is_ordered

    @property
    def has_sums(self) -> bool:
        """Whether sums are zeroed before, and brought home by `finish`; else the last who adds to them writes dq."""
        return self.sums_dq and not (isinstance(self.main.constants, BwdSm90) and self.main.constants.stores_dq)

    @property
    def kernels(self) -> tuple[Plan[Any], ...]:
        """All that it may launch, in order."""
        return tuple(plan for plan in self if plan is not None)

    def __str__(self) -> str:
        return "\n".join(map(str, self.kernels))


def head_dim_tile(head_dim: int) -> int:
    """The head dim that a tile spends: the next of HEAD_DIMS; the rest is filled with zeros on chip."""
    return next(tile for tile in HEAD_DIMS if head_dim <= tile)


def refuse(spec: Spec) -> None:
    """Raise UnsupportedError for what these kernels cannot serve; the message says what can."""
    narrower = f"1 to {MAX_HEAD_DIM} are accepted on CUDA; the NumPy backend takes any"
    reasons = (
        (spec.head_dim > MAX_HEAD_DIM, "q", f"has head_dim {spec.head_dim}", narrower),
        (spec.head_dim_v > MAX_HEAD_DIM, "v", f"has head_dim {spec.head_dim_v}", narrower),
    )
    for applies, argument, given, accepted in reasons:
        if applies:
            raise UnsupportedError(f"`{argument}` {given}; {accepted}.")


def refuse_values(call: Call) -> None:
    """Raise UnsupportedError for lengths beyond 32-bit row numbers, and for options whose products leave float32."""
    for name, value in (
        ("scale", abs(call.scale)),
        ("softcap", call.softcap),
        ("1 / softcap", 1 / (call.softcap or 1)),
    ):
        if value > LARGEST_OPTION:
            accepted = f"the CUDA kernels take at most {LARGEST_OPTION}; {_CPU}"
            raise UnsupportedError(f"{call.function}: {name} is {value}; {accepted}.")
    for name, length in (("len_q", call.len_q), ("len_k", call.len_k)):
        if length > MAX_LENGTH:
            accepted = f"the CUDA kernels take at most {MAX_LENGTH}"
            raise UnsupportedError(f"{call.function}: {length} rows ({name}); {accepted}.")


def _copy_bytes(spec: Spec) -> int:
    """Bytes that one copy moves: 16 where every row allows it, else 4, or one element if that is another size."""
    item = ITEM_BYTES[spec.dtype]
    return 16 if spec.align == 16 else max(item, 4) if spec.align >= 4 else item


def _score_constants(spec: Spec) -> dict[str, Any]:
    """The constants that all kernels with scores share, their tiles apart."""
    features = spec.features
    changes_scores = features.softcap or features.alibi or features.bias
    return {
        "element": spec.dtype,
        "head_dim": head_dim_tile(spec.head_dim),
        "head_dim_v": head_dim_tile(spec.head_dim_v),
        "copy_bytes": _copy_bytes(spec),
        "bias_element": spec.bias_dtype or accum_of(spec.dtype),
        "is_masked": spec.mask is not Mask.NONE,
        "has_softcap": features.softcap,
        "has_alibi": features.alibi,
        "has_bias": features.bias,
        "has_dropout": features.dropout,
        "is_scale_negative": features.negative_scale and not changes_scores,  # else the scale itself is multiplied
        "is_tf32": spec.allow_tf32 and spec.dtype == "float32",
    }


def _fitting(
    kind: type[Any], rows: list[Any], spec: Spec, device: Device, note: str = "", **more: Any
) -> Iterator[Plan[Any]]:
    """Plans of the table's rows that the device can hold, in order."""
    shared = _score_constants(spec) | more
    needed = _room(shared)
    for rank, tile in enumerate(rows):
        sizes = tile._asdict()
        if sizes.pop("room", needed) < needed:
            continue
        constants = kind(**shared, **sizes)
        if constants.smem_bytes <= device.smem_bytes and _is_whole(constants):
            why = f"row {rank} of the tile table: the first whose tiles fit {device.smem_bytes} bytes of shared memory"
            yield Plan(constants, device.arch, why + note)


def _room(constants: dict[str, Any]) -> tiles.Room:
    has_little = constants["has_softcap"] or constants["is_scale_negative"]
    much = constants["has_bias"] + constants["has_dropout"]
    if much:
        return tiles.Room.ANY if much == 2 or has_little or constants["has_alibi"] else tiles.Room.MORE
    if constants["has_alibi"]:
        return tiles.Room.ALIBI
    return tiles.Room.ONE if has_little else tiles.Room.RAW


def _rows(table: TileTable, spec: Spec) -> list[Any]:
    return table[ITEM_BYTES[spec.dtype]][head_dim_tile(max(spec.head_dim, spec.head_dim_v))]


def why_not_sm90(spec: Spec) -> str | None:
    """What keeps a call on Hopper from kernels of wgmma and the copy engine."""
    if ITEM_BYTES[spec.dtype] != 2:
        return f"wgmma multiplies 16-bit types, not {spec.dtype}"
    if spec.align < 16:
        return f"an array is aligned to {spec.align} bytes, and the copy engine needs 16"
    if spec.paged:
        return "keys lie in pages, which the copy engine cannot follow"
    if spec.split:
        return "keys are split as the caller says, which fwd_generic does"
    if not spec.has_boxes:
        return "an array is empty or has a negative stride, which the copy engine cannot walk"
    return None


def _is_bounded(spec: Spec) -> bool:
    """Whether softcap alone decides how far scores lie apart, and P's type has float's range."""
    features = spec.features
    return features.small_softcap and not (features.alibi or features.bias) and spec.dtype == "bfloat16"


def legal_forward(spec: Spec, device: Device) -> Iterator[Plan[Any]]:
    """Candidates of the forward, best first: `fwd_sm90` where it can serve, then `fwd_generic`."""
    note = ""
    features = spec.features
    own: dict[str, Any] = {"out_element": spec.out_dtype, "is_paged": spec.paged}
    few = tiles.FWD_PAGES if spec.paged else tiles.FWD_FEW
    if spec.size_class in few:
        if device.arch == 90 and spec.size_class.startswith("few tiles") and why_not_sm90(spec) is None:
            for table in (tiles.FWD_SM90_SMALL, tiles.FWD_SM90):
                plans = _sm90_forwards(spec, device, table, "; of few tiles, whose keys are split", is_split=True)
                yield from (_with_packed_heads(plan, spec) for plan in plans)
        packed = {"packs_heads": not features.differ_by_head, "is_split": True}
        why = "; of few queries, whose keys are split"
        yield from _fitting(FwdGeneric, _rows(few[spec.size_class], spec), spec, device, why, **own, **packed)
    if device.arch == 90:
        why_not = why_not_sm90(spec)
        if why_not is None:
            if spec.size_class in ("short", "few keys"):
                yield from _sm90_forwards(spec, device, tiles.FWD_SM90_SMALL, "; of few keys or queries")
            yield from _sm90_forwards(spec, device, tiles.FWD_SM90)
        else:
            note = f"; not fwd_sm90: {why_not}"
    unpacked = {"packs_heads": False, "is_split": spec.split}
    yield from _fitting(FwdGeneric, _rows(tiles.FWD, spec), spec, device, note, **own, **unpacked)


def _sm90_forwards(
    spec: Spec, device: Device, table: dict[int, list[tiles.Sm90Tile]], note: str = "", is_split: bool = False
) -> Iterator[Plan[Any]]:
    """By fwd_sm90, in the tiles of a table that has a tile for this head dim or none."""
    dim, dim_v = (next(n for n in SM90_HEAD_DIMS if real <= n) for real in (spec.head_dim, spec.head_dim_v))
    sizes: dict[str, Any] = {"head_dim": dim, "head_dim_v": dim_v, "out_element": spec.out_dtype}
    switches = {"is_bounded": _is_bounded(spec), "is_split": is_split, "packs_heads": False}
    yield from _fitting(FwdSm90, table.get(max(dim, dim_v), []), spec, device, note, **sizes, **switches)


def _with_packed_heads(plan: Plan[Any], spec: Spec) -> Plan[Any]:
    """If wanted, where a group's heads share their scores' changes, and whole queries fill a tile."""
    group = spec.heads_q // spec.heads_kv
    packs = spec.size_class == "few tiles, packed" and plan.constants.query_tile % group == 0
    packs = packs and not spec.features.differ_by_head
    return replace(plan, constants=replace(plan.constants, packs_heads=packs))


Gradients = tuple[Plan[Any], Plan[Any] | None]  # the main kernel, and dq's if it has one


def legal_gradients(spec: Spec, device: Device) -> Iterator[Gradients]:
    """Candidates of the kernels of dq, dk and dv, best first: Hopper's where they can serve, then generic ones."""
    note = ""
    if device.arch == 90:
        why_not = why_not_sm90(spec)
        if why_not is None:
            yield from _sm90_gradients(spec, device)
        else:
            note = f"; not bwd_sm90: {why_not}"
    gradients = _gradients(spec)
    dq = None
    if spec.deterministic:
        dq = _first(_fitting(BwdDqGeneric, _rows(tiles.DQ, spec), spec, device, **gradients), spec, device)
    gradients["sums_dq"] = dq is None
    for main in _fitting(BwdGeneric, _rows(tiles.BWD, spec), spec, device, note, **gradients):
        yield main, dq


def _sm90_gradients(spec: Spec, device: Device) -> Iterator[Gradients]:
    """One kernel, or two where dq's sums have no room beside those of dk and dv."""
    gradients = _gradients(spec)
    note = "; dbias is bwd_dbias_generic's" if spec.dbias_dtype else ""
    dim, dim_v = (next(n for n in SM90_HEAD_DIMS if real <= n) for real in (spec.head_dim, spec.head_dim_v))
    wider = max(dim, dim_v)
    own, both = {"head_dim": dim, "head_dim_v": dim_v}, {"head_dim": wider, "head_dim_v": wider}
    if wider in tiles.BWD_SM90:
        stores_dq = spec.size_class == "short"  # two key tiles hardly wait for each other
        switches = {"is_ordered": spec.deterministic or stores_dq, "stores_dq": stores_dq}
        for main in _fitting(BwdSm90, tiles.BWD_SM90[wider], spec, device, note, **switches, **both, **gradients):
            yield main, None
        return
    dq = _first(_fitting(BwdDqSm90, tiles.DQ_SM90[wider], spec, device, **own, **gradients), spec, device)
    for main in _fitting(BwdDkvSm90, tiles.DKV_SM90[wider], spec, device, note, **own, **gradients):
        yield main, dq


def _gradients(spec: Spec) -> dict[str, Any]:
    return {"grad_element": spec.grad_dtype, "accumulate": spec.accumulate}


def _is_whole(c: Any) -> bool:
    """Whether the warps' shares are whole: two 16x8 tiles side by side for tensor cores, one for FMA."""
    if isinstance(c, FwdSm90):
        consumers, rest = divmod(c.query_tile, SM90_ROWS)
        fits = c.key_tile in SM90_KEY_TILES and c.query_stages in (1, 2) and c.stages > 0
        return fits and consumers in (2, 3) and rest == 0 and c.warps == 4 * (1 + consumers)
    if isinstance(c, BwdDkvSm90):
        fits = c.query_tile == c.key_tile == SM90_ROWS
        return fits and c.stages > 1 and c.warps == 12
    if isinstance(c, BwdDqSm90):
        fits = c.query_tile == 2 * SM90_ROWS and c.key_tile in SM90_KEY_TILES
        return fits and c.stages > 1 and c.value_stages > 0 and c.warps == 12
    if isinstance(c, BwdSm90):
        # dq's parts: of the query rows, or of the columns
        is_halved = c.query_tile * c.head_dim == 2 * SM90_ROWS * SM90_PANEL
        fits = c.key_tile == 2 * SM90_ROWS and is_halved
        return fits and c.stages > 1 and c.warps == 16  # one tile is done only after the next one has come
    columns = 16 if ITEM_BYTES[c.element] == 2 else 8
    if c.query_tile % 16 or c.key_tile % 16 or ROW_PAD % c.query_tile:
        return False
    if isinstance(c, BwdDbiasGeneric):
        return c.key_tile % (columns * c.warps) == 0
    if isinstance(c, FwdGeneric) and c.key_groups != 1:
        is_there = c.is_split and c.key_groups > 1 and c.key_groups * c.warps <= 32
        if not is_there or not c.has_room_for_groups:
            return False
    if not isinstance(c, BwdGeneric):
        return c.query_tile % (16 * c.warps) == 0
    if any(c.warps % along for along in (c.score_warps, c.key_warps, c.query_warps)) or c.query_tile > 32 * c.warps:
        return False
    scores, keys, queries = (columns * c.warps // along for along in (c.score_warps, c.key_warps, c.query_warps))
    rows = (c.query_tile, c.score_warps), (c.key_tile, c.key_warps), (c.query_tile, c.query_warps)
    shares = (c.key_tile, scores), (c.head_dim, keys), (c.head_dim_v, keys), (c.head_dim, queries)
    return all(tile % (16 * along) == 0 for tile, along in rows) and all(dim % share == 0 for dim, share in shares)


def _first(plans: Iterator[T], spec: Spec, device: Device) -> T:
    found = next(plans, None)
    if found is None:
        raise UnsupportedError(
            f"`q` is {spec.dtype} with head dims {spec.head_dim} and {spec.head_dim_v}, whose tiles do not fit a block "
            f"on sm_{device.arch} with its {device.smem_bytes} bytes of shared memory; smaller head dims or dtypes are "
            f"accepted, and {_CPU}."
        )
    return found


@lru_cache(maxsize=1024)
def forward(spec: Spec, device: Device) -> Plan[FwdGeneric | FwdSm90]:
    """The kernel of a forward. Raises UnsupportedError with a message that lacks the function's name."""
    refuse(spec)
    return _first(legal_forward(spec, device), spec, device)


@lru_cache(maxsize=1024)
def backward(spec: Spec, device: Device) -> BackwardPlan:
    """The kernels of a backward. Raises UnsupportedError with a message that lacks the function's name."""
    refuse(spec)
    assert spec.dout_dtype is not None
    assert spec.grad_dtype is not None
    copy_bytes = _copy_bytes(spec)
    gradients = _gradients(spec)
    preprocess = BwdPreprocess(spec.dtype, spec.out_dtype, spec.dout_dtype, min(copy_bytes, spec.align))
    finish = BwdFinish(accum_of(spec.dtype), spec.grad_dtype, copy_bytes, spec.accumulate)
    dbias = None
    if spec.dbias_dtype:
        bias_gradients: dict[str, Any] = gradients | {"grad_element": spec.dbias_dtype}
        dbias_rows = _rows(tiles.DBIAS, spec)
        dbias = _first(_fitting(BwdDbiasGeneric, dbias_rows, spec, device, **bias_gradients), spec, device)
    main, dq = _first(legal_gradients(spec, device), spec, device)
    return BackwardPlan(
        Plan(preprocess, device.arch, "delta, and dq's sums zeroed if there are any"),
        main,
        dq,
        dbias,
        Plan(finish, device.arch, "dq from its sums, dsink from its parts, where there are any"),
    )


def named(kernel: str, spec: Spec, device: Device, *, is_backward: bool) -> Plan[Any] | BackwardPlan:
    """The best plan of the kernel of this name, of a backward its main one. ValueError says which serve the call."""
    refuse(spec)
    if is_backward:
        chosen = backward(spec, device)
        pairs = reversed([*legal_gradients(spec, device)])
        found: dict[str, Any] = {main.kernel: chosen._replace(main=main, dq=dq) for main, dq in pairs}
    else:
        found = {plan.kernel: plan for plan in reversed([*legal_forward(spec, device)])}
    if kernel not in found:
        raise ValueError(f"`plan` is {kernel!r}; {' or '.join(map(repr, found))} is accepted for this call.")
    return found[kernel]


def validate(override: Any, chosen: Plan | BackwardPlan, device: Device) -> Any:
    """A caller's plan, used as given or refused: it may differ from the chosen one in its tiles alone.

    Raises TypeError for another kind of value, ValueError for other constants than the call needs.
    """
    if type(override) is not type(chosen):
        given, wanted = type(override).__name__, type(chosen).__name__
        accepted = f"a {wanted}, as `Attention.plan` returns, or a kernel's name is accepted"
        raise TypeError(f"`plan` is a {given}; {accepted}.")
    given_plans = tuple(override) if isinstance(override, BackwardPlan) else (override,)
    wanted_plans = tuple(chosen) if isinstance(chosen, BackwardPlan) else (chosen,)
    for given, wanted in zip(given_plans, wanted_plans, strict=True):
        if given == wanted:
            continue
        if given is None or wanted is None or given.arch != wanted.arch or not _differs_in_tiles_alone(given, wanted):
            raise ValueError(f"`plan` names {given}; this call needs, its tiles apart, {wanted}.")
        if given.smem_bytes > device.smem_bytes or not _is_whole(given.constants):
            tiles_a_warp = "whole 16x8 tiles a warp (and two stages or more in a backward of sm_90)"
            limit = f"{tiles_a_warp} in at most {device.smem_bytes} bytes of shared memory are accepted"
            raise ValueError(f"`plan` has tiles that its warps cannot share, or too many: {given}; {limit}.")
    return override


def _differs_in_tiles_alone(given: Plan[Any], wanted: Plan[Any]) -> bool:
    kind = type(wanted.constants)
    if type(given.constants) is not kind or kind not in _TILES:
        return False
    sizes = {name: getattr(given.constants, name) for name in _TILES[kind]._fields if name != "room"}
    return given.constants == replace(wanted.constants, **sizes)
