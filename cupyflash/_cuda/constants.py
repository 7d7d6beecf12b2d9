"""Compile-time constants: one frozen dataclass per kernel, and the one function that turns them into C++.

What stands here, and nothing else, decides which binary is used. A kernel's name is its file's name in `cuda_src`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # what a tile's head dim is rounded up to


@dataclass(frozen=True, slots=True)
class FwdGeneric:
    """`fwd_generic.cu`."""

    element: str
    out_element: str
    head_dim: int
    head_dim_v: int
    query_tile: int
    key_tile: int
    warps: int
    blocks_per_sm: int
    copy_bytes: int
    is_masked: bool
    has_softcap: bool
    has_alibi: bool
    is_scale_negative: bool

    @property
    def smem_bytes(self) -> int:
        item = ITEM_BYTES[self.element]
        tiles = self.query_tile * self.head_dim + self.key_tile * (self.head_dim + self.head_dim_v)
        probabilities = self.query_tile * self.key_tile if item == 4 else 0  # 16-bit P stays in registers
        return item * (tiles + probabilities)


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
class BwdGeneric:
    """`bwd_generic.cu`."""

    element: str
    grad_element: str
    head_dim: int
    head_dim_v: int
    query_tile: int
    key_tile: int
    stages: int
    warps: int
    score_warps: int
    key_warps: int
    query_warps: int
    blocks_per_sm: int
    copy_bytes: int
    is_masked: bool
    has_softcap: bool
    has_alibi: bool
    is_scale_negative: bool
    accumulate: bool

    @property
    def smem_bytes(self) -> int:
        item = ITEM_BYTES[self.element]
        both_dims = self.head_dim + self.head_dim_v
        stats = -(-self.query_tile * 8 // 128) * 128
        stage = item * self.query_tile * both_dims + stats
        return item * (self.key_tile * both_dims + 2 * self.query_tile * self.key_tile) + self.stages * stage


@dataclass(frozen=True, slots=True)
class BwdFinish:
    """`bwd_finish.cu`."""

    grad_element: str
    copy_bytes: int
    accumulate: bool
    query_tile: int = 64
    warps: int = 4

    @property
    def smem_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class MergeStates:
    """`merge_states.cu`."""

    warps: int = 8

    @property
    def smem_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class MergeStatesBwd:
    """`merge_states_bwd.cu`."""

    warps: int = 8

    @property
    def smem_bytes(self) -> int:
        return 0


Constants = FwdGeneric | BwdPreprocess | BwdGeneric | BwdFinish | MergeStates | MergeStatesBwd
KERNELS: dict[type, str] = {
    FwdGeneric: "fwd_generic",
    BwdPreprocess: "bwd_preprocess",
    BwdGeneric: "bwd_generic",
    BwdFinish: "bwd_finish",
    MergeStates: "merge_states",
    MergeStatesBwd: "merge_states_bwd",
}


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
            lines.append(f"constexpr bool k{camel(field.name)} = {str(value).lower()};")
        else:
            lines.append(f"constexpr int k{camel(field.name)} = {value};")
    lines.append(f"constexpr int kSmemBytes = {constants.smem_bytes};")
    return "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\nnamespace cf {\n" + "\n".join(lines) + "\n}\n"
