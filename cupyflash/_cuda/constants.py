"""Compile-time constants: one frozen dataclass per kernel, and the one function that turns them into C++.

What stands here, and nothing else, decides which binary is used. A kernel's name is its file's name in `cuda_src`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # what a tile's head dim is rounded up to
SM90_HEAD_DIMS = (64, 128, 192, 256)  # the same for fwd_sm90
SM90_KEY_TILES = (32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 256)  # the widths of ptx/wgmma.cuh
SM90_ROWS = 64  # of a consumer warpgroup
SM90_WARP_ROWS = 16
SM90_PANEL = 64  # columns of a box


def accum_of(element: str) -> str:
    """What sums and row statistics are kept in."""
    return "float64" if element == "float64" else "float32"


def _stats_bytes(element: str, rows: int) -> int:
    """(lse, delta) of each row, as one member of a shared-memory struct: a multiple of 128 bytes."""
    return -(-rows * 2 * ITEM_BYTES[accum_of(element)] // 128) * 128


@dataclass(frozen=True, slots=True)
class _Scores:
    """What every kernel that makes scores is specialised on."""

    element: str
    head_dim: int
    head_dim_v: int
    query_tile: int
    key_tile: int
    warps: int
    copy_bytes: int
    bias_element: str
    is_masked: bool
    has_softcap: bool
    has_alibi: bool
    has_bias: bool
    has_dropout: bool
    is_scale_negative: bool
    is_tf32: bool  # float32 products may be rounded to TF32


@dataclass(frozen=True, slots=True)
class FwdGeneric(_Scores):
    """`fwd_generic.cu`."""

    out_element: str
    packs_heads: bool  # rows are (query, head): all heads of a KV head in one tile
    is_split: bool  # over blocks, whose partial results fwd_combine merges
    is_paged: bool
    blocks_per_sm: int
    key_groups: int  # of `warps` warps each, which divide a block's keys

    @property
    def smem_bytes(self) -> int:
        item = ITEM_BYTES[self.element]
        page_rows = -(-2 * 16 * self.key_tile // 128) * 128 if self.is_paged else 0
        tiles = self.query_tile * self.head_dim + self.key_tile * (self.head_dim + self.head_dim_v)
        probabilities = self.query_tile * self.key_tile if item == 8 else 0  # else P stays in registers
        return self.key_groups * (item * (tiles + probabilities) + page_rows)

    @property
    def has_room_for_groups(self) -> bool:
        """Whether what a group has found fits where its tiles were, and there is a barrier for each."""
        item = ITEM_BYTES[accum_of(self.element)]
        found = self.query_tile * (
            item * (self.head_dim_v + 2) + 32
        )  # sizeof(Found) of attn/found.cuh, but for its padding
        fits = -(-found // 128) * 128 <= self.smem_bytes // self.key_groups
        return fits and (self.warps == 1 or self.key_groups < 16)


def _statistics_bytes(rows: int) -> int:
    """sizeof(Statistics) of attn/key_tile.cuh: two floats a row, two words, aligned to 16 bytes."""
    return -(-(8 * rows + 8) // 16) * 16


# Of what fwd_sm90 publishes at a time: its kTiles, and sizeof(Tile), of packed heads too.
_TILES, _TILE_BYTES = 4, (136, 144)


@dataclass(frozen=True, slots=True)
class FwdSm90(_Scores):
    """`fwd_sm90.cu`."""

    out_element: str
    packs_heads: bool  # rows are (query, head): all heads of a KV head in one tile
    is_split: bool  # over blocks, whose partial results fwd_combine merges
    is_bounded: bool  # softcap keeps scores so close that a row's first maximum serves all of it
    query_stages: int
    stages: int

    @property
    def smem_bytes(self) -> int:
        q = self.query_stages * self.query_tile * self.head_dim
        out = self.query_tile * self.head_dim_v if self.passes_out else 0
        tiles = q + self.stages * self.key_tile * (self.head_dim + self.head_dim_v) + out
        bias = ITEM_BYTES[self.bias_element] * self.query_tile * self.key_tile if self.has_bias else 0
        barriers, published = 8 * (2 * self.query_stages + 4 * self.stages + 2 * _TILES), _TILE_BYTES[self.packs_heads]
        return -(-(2 * tiles + bias + barriers + published * _TILES) // 1024) * 1024

    @property
    def blocks_per_sm(self) -> int:
        """One, whose warpgroups divide all registers."""
        return 1

    @property
    def passes_out(self) -> bool:
        """Whether `out` leaves through shared memory, in boxes."""
        return not self.is_split and self.out_element == self.element and self.head_dim_v <= 128


@dataclass(frozen=True, slots=True)
class FwdCombine:
    """`fwd_combine.cu`."""

    accum_element: str
    out_element: str
    head_dim_v: int
    warps: int = 8

    @property
    def smem_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class BwdPreprocess:
    """`bwd_preprocess.cu`."""

    element: str
    out_element: str
    dout_element: str
    copy_bytes: int
    query_tile: int = 128  # kRowPad: every row that any main kernel's tile may read is written
    warps: int = 8

    @property
    def smem_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class BwdGeneric(_Scores):
    """`bwd_generic.cu`."""

    grad_element: str
    accumulate: bool
    sums_dq: bool  # else dq is bwd_dq_generic's
    stages: int
    score_warps: int
    key_warps: int
    query_warps: int
    blocks_per_sm: int

    @property
    def smem_bytes(self) -> int:
        item, both_dims = ITEM_BYTES[self.element], self.head_dim + self.head_dim_v
        stage = item * self.query_tile * both_dims + _stats_bytes(self.element, self.query_tile)
        return item * (self.key_tile * both_dims + 2 * self.query_tile * self.key_tile) + self.stages * stage


@dataclass(frozen=True, slots=True)
class BwdSm90(_Scores):
    """`bwd_sm90.cu`."""

    grad_element: str
    accumulate: bool
    is_ordered: bool  # dq is summed in the order of the keys
    stores_dq: bool  # and written by the last who adds to it
    stages: int

    @property
    def smem_bytes(self) -> int:
        keys = 2 * self.key_tile * self.head_dim
        stage = 2 * self.query_tile * self.head_dim
        ds = _DS_STAGES * self.query_tile * self.key_tile
        dq = 4 * self.query_tile * self.head_dim
        adders = 1 if self.has_bias else 2
        barriers = 8 * (2 + 5 * self.stages + 2 * _DS_STAGES + _CONSUMERS + 2 * adders)
        statistics = self.stages * _statistics_bytes(self.query_tile)
        bias = _bias_bytes(self.key_tile) if self.has_bias else 0
        rest = statistics + _JOB_BYTES + barriers + _DROPOUT_BYTES + _FACTOR_BYTES
        total = 2 * (keys + self.stages * stage + ds) + dq + bias + rest
        return -(-total // 1024) * 1024


_JOB_BYTES = 96  # of attn/key_tile.cuh and of bwd_dq_sm90: sizeof(Job)
_DS_STAGES, _CONSUMERS = 2, 2  # of bwd_sm90
_DROPOUT_BYTES = 32  # of attn/dropout.cuh: sizeof(Dropout)
_FACTOR_BYTES = 32  # of bwd_sm90: sizeof(Factors)


def _bias_bytes(key_tile: int) -> int:
    """Of a BiasRing of attn/key_scores.cuh, but for its padding: two pieces, beside each two barriers."""
    return 2 * (128 * key_tile + 16)


@dataclass(frozen=True, slots=True)
class BwdDkvSm90(_Scores):
    """`bwd_dkv_sm90.cu`."""

    grad_element: str
    accumulate: bool
    stages: int

    @property
    def smem_bytes(self) -> int:
        tiles = (self.key_tile + self.stages * self.query_tile) * (self.head_dim + self.head_dim_v)
        p = _P_PLACES * self.query_tile * self.key_tile
        barriers = 8 * (2 + 5 * self.stages + 2 * _P_PLACES)
        bias = _bias_bytes(self.key_tile) if self.has_bias else 0
        statistics = self.stages * _statistics_bytes(self.query_tile)
        total = 2 * (tiles + p) + bias + statistics + _JOB_BYTES + barriers + _DROPOUT_BYTES
        return -(-total // 1024) * 1024


_P_PLACES = 2  # of bwd_dkv_sm90: its kPlaces


@dataclass(frozen=True, slots=True)
class BwdDqSm90(_Scores):
    """`bwd_dq_sm90.cu`."""

    grad_element: str
    accumulate: bool
    stages: int
    value_stages: int

    @property
    def smem_bytes(self) -> int:
        rows_k, rows_v = (self.query_tile + stages * self.key_tile for stages in (self.stages, self.value_stages))
        barriers = 8 * (2 + 2 * (self.stages + self.value_stages))
        total = 2 * (rows_k * self.head_dim + rows_v * self.head_dim_v) + 8 * self.query_tile + _JOB_BYTES + barriers
        return -(-total // 1024) * 1024


@dataclass(frozen=True, slots=True)
class BwdDqGeneric(_Scores):
    """`bwd_dq_generic.cu`."""

    grad_element: str
    accumulate: bool
    stages: int
    blocks_per_sm: int

    @property
    def smem_bytes(self) -> int:
        item, both_dims = ITEM_BYTES[self.element], self.head_dim + self.head_dim_v
        scores = self.query_tile * self.key_tile if item == 8 else 0  # else dS stays in registers
        tiles = (self.query_tile + self.stages * self.key_tile) * both_dims
        return item * (tiles + scores) + _stats_bytes(self.element, self.query_tile)


@dataclass(frozen=True, slots=True)
class BwdDbiasGeneric(_Scores):
    """`bwd_dbias_generic.cu`."""

    grad_element: str
    accumulate: bool

    @property
    def smem_bytes(self) -> int:
        tiles = ITEM_BYTES[self.element] * (self.query_tile + self.key_tile) * (self.head_dim + self.head_dim_v)
        sums = ITEM_BYTES[accum_of(self.element)] * self.query_tile * self.key_tile
        return tiles + _stats_bytes(self.element, self.query_tile) + sums


@dataclass(frozen=True, slots=True)
class BwdFinish:
    """`bwd_finish.cu`."""

    accum_element: str
    grad_element: str
    copy_bytes: int
    accumulate: bool
    query_tile: int = 64
    warps: int = 4

    @property
    def smem_bytes(self) -> int:
        return 0


ROW_GROUP = 8  # lanes of a row: kGroup of attn/row.cuh


@dataclass(frozen=True, slots=True)
class _Merges:
    """What both merging kernels are specialised on."""

    accum_element: str
    state_element: str  # of the states and their gradients, if they are uniform
    result_element: str  # of the merged result and its gradient, likewise
    columns: int  # that a lane reads at once
    is_uniform: bool  # else types are looked up element by element
    warps: int = 8

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def rows(self) -> int:
        """(row, head) pairs of a block."""
        return 32 * self.warps // ROW_GROUP


@dataclass(frozen=True, slots=True)
class MergeStates(_Merges):
    """`merge_states.cu`."""


@dataclass(frozen=True, slots=True)
class MergeStatesBwd(_Merges):
    """`merge_states_bwd.cu`."""


@dataclass(frozen=True, slots=True)
class KvAppend:
    """`kv_append.cu`, which moves bytes of any type."""

    copy_bytes: int  # at once: every row and every step between rows is a multiple of it
    warps: int = 4

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def rows(self) -> int:
        """(row, head) pairs of a block."""
        return 32 * self.warps // ROW_GROUP


KERNELS: dict[type, str] = {
    FwdGeneric: "fwd_generic",
    FwdSm90: "fwd_sm90",
    FwdCombine: "fwd_combine",
    BwdPreprocess: "bwd_preprocess",
    BwdGeneric: "bwd_generic",
    BwdSm90: "bwd_sm90",
    BwdDkvSm90: "bwd_dkv_sm90",
    BwdDqGeneric: "bwd_dq_generic",
    BwdDqSm90: "bwd_dq_sm90",
    BwdDbiasGeneric: "bwd_dbias_generic",
    BwdFinish: "bwd_finish",
    MergeStates: "merge_states",
    MergeStatesBwd: "merge_states_bwd",
    KvAppend: "kv_append",
}
Constants = (
    FwdGeneric
    | FwdSm90
    | FwdCombine
    | BwdPreprocess
    | BwdGeneric
    | BwdSm90
    | BwdDkvSm90
    | BwdDqGeneric
    | BwdDqSm90
    | BwdDbiasGeneric
    | BwdFinish
    | MergeStates
    | MergeStatesBwd
    | KvAppend
)


def camel(name: str) -> str:
    """`head_dim_v` -> `HeadDimV`."""
    return "".join(word.capitalize() for word in name.split("_"))


def render(constants: Constants) -> str:
    """The constants as C++: `using Element = ...;` and typed `constexpr` values in namespace cf."""
    lines = []
    for field in fields(constants):
        value = getattr(constants, field.name)
        if field.name.endswith("element"):
            lines.append(f"using {camel(field.name)} = {ELEMENTS[value]};")
        elif isinstance(value, bool):
            lines.append(f"[[maybe_unused]] constexpr bool k{camel(field.name)} = {str(value).lower()};")
        else:
            lines.append(f"[[maybe_unused]] constexpr int k{camel(field.name)} = {value};")
    lines.append(f"[[maybe_unused]] constexpr int kSmemBytes = {constants.smem_bytes};")
    return "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\nnamespace cf {\n" + "\n".join(lines) + "\n}\n"
