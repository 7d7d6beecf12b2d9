"""The run-time arguments of each job: structs that mirror `cuda_src/include/params.cuh`, and templates that pack them.

`struct.Struct` packs in native alignment, which is C's; a test holds names, order, types and sizes equal to the header.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .._spec import Blank, FilledIn

# Pointer fields are P: an address, 0 for null.
TENSOR = (("data", "P"), ("stride_b", "q"), ("stride_n", "q"), ("stride_h", "q"))
PROBLEM = (
    ("cu_seqlens_q", "P"),
    ("cu_seqlens_k", "P"),
    ("seqused_k", "P"),
    ("q_start", "P"),
    ("k_start", "P"),
    ("cu_seqlens_q_stride", "q"),
    ("cu_seqlens_k_stride", "q"),
    ("q_start_value", "q"),
    ("k_start_value", "q"),
    ("window_left", "q"),
    ("window_right", "q"),
    ("batch", "i"),
    ("len_q", "i"),
    ("len_k", "i"),
    ("heads_q", "i"),
    ("heads_kv", "i"),
    ("head_dim", "i"),
    ("head_dim_v", "i"),
    ("tiles_q", "i"),
    ("tiles_k", "i"),
    ("is_cu_seqlens_q_64", "i"),
    ("is_cu_seqlens_k_64", "i"),
    ("is_q_start_given", "i"),
)
SCORES = (
    ("alibi_slopes", "P"),
    ("sink", "P"),
    ("bias", "P"),
    ("seed", "P"),
    ("offset", "P"),
    ("alibi_stride_b", "q"),
    ("alibi_stride_h", "q"),
    ("bias_stride_b", "q"),
    ("bias_stride_h", "q"),
    ("bias_stride_q", "q"),
    ("bias_stride_k", "q"),
    ("seed_value", "Q"),
    ("offset_value", "Q"),
    ("scale", "d"),
    ("fold", "d"),
    ("softcap", "d"),
    ("softcap_scale", "d"),
    ("keep_scale", "d"),
    ("keep_threshold", "I"),
    ("padding", "i"),
)
STATE = (
    ("out", "P"),
    ("lse", "P"),
    ("out_stride_b", "q"),
    ("out_stride_n", "q"),
    ("out_stride_h", "q"),
    ("lse_stride_b", "q"),
    ("lse_stride_n", "q"),
    ("lse_stride_h", "q"),
    ("out_type", "i"),
    ("lse_type", "i"),
)
MERGE_STATES = 24  # of one launch, kMergeStates
MERGE_SIZES = tuple((name, "i") for name in ("num_states", "batch", "len", "heads", "head_dim", "padding"))
MAP_WORDS = 15  # of a tensor map, behind its address
TENSOR_MAP = (("address", "P"), ("words", ("Q", MAP_WORDS)))

Fields = tuple[tuple[str, Any], ...]
STRUCTS: dict[str, Fields] = {
    "Tensor": TENSOR,
    "Problem": PROBLEM,
    "Scores": SCORES,
    "State": STATE,
    "FwdParams": (
        ("problem", PROBLEM),
        ("scores", SCORES),
        ("q", TENSOR),
        ("k", TENSOR),
        ("v", TENSOR),
        ("out", TENSOR),
        ("lse", TENSOR),
        ("block_table", "P"),
        ("table_stride", "q"),
        ("out_stride_split", "q"),
        ("lse_stride_split", "q"),
        ("page_size", "i"),
        ("pages", "i"),
        ("num_splits", "i"),
        ("split_len", "i"),
    ),
    "FwdCombineParams": (
        ("partial_out", TENSOR),
        ("partial_lse", TENSOR),
        ("out", TENSOR),
        ("lse", TENSOR),
        ("beside_out", TENSOR),
        ("beside_lse", TENSOR),
        ("out_stride_split", "q"),
        ("lse_stride_split", "q"),
        ("num_splits", "i"),
        ("group", "i"),
        ("rows", "i"),
        ("heads", "i"),
        ("head_dim_v", "i"),
        ("all_rows", "i"),
    ),
    "TensorMap": TENSOR_MAP,
    "FwdSm90Params": (
        ("q", TENSOR_MAP),
        ("k", TENSOR_MAP),
        ("v", TENSOR_MAP),
        ("out_boxes", TENSOR_MAP),
        ("problem", PROBLEM),
        ("scores", SCORES),
        ("out", TENSOR),
        ("lse", TENSOR),
        ("out_stride_split", "q"),
        ("lse_stride_split", "q"),
        ("num_splits", "i"),
        ("places", "i"),
        ("paired_heads", "i"),
        ("heads_at_a_time", "i"),
        ("staying_blocks", "i"),
        ("padding", "i"),
    ),
    "BwdPreprocessParams": (
        ("problem", PROBLEM),
        ("out", TENSOR),
        ("dout", TENSOR),
        ("lse", TENSOR),
        ("dlse", TENSOR),
        ("delta_in", TENSOR),
        ("delta_out", TENSOR),
        ("dq", TENSOR),
        ("stats", "P"),
        ("dq_accum", "P"),
        ("turns", "P"),
        ("dout_rounded", "P"),
        ("sink", "P"),
        ("dsink_parts", "P"),
        ("accum_cols", "i"),
        ("rounded_cols", "i"),
        ("dq_item_bytes", "i"),
        ("padding", "i"),
    ),
    "BwdParams": (
        ("problem", PROBLEM),
        ("scores", SCORES),
        ("q", TENSOR),
        ("k", TENSOR),
        ("v", TENSOR),
        ("dout", TENSOR),
        ("dq", TENSOR),
        ("dk", TENSOR),
        ("dv", TENSOR),
        ("stats", "P"),
        ("dq_accum", "P"),
    ),
    "BwdSm90Params": (
        ("q", TENSOR_MAP),
        ("k", TENSOR_MAP),
        ("v", TENSOR_MAP),
        ("dout", TENSOR_MAP),
        ("problem", PROBLEM),
        ("scores", SCORES),
        ("dq", TENSOR),
        ("dk", TENSOR),
        ("dv", TENSOR),
        ("stats", "P"),
        ("dq_accum", "P"),
        ("turns", "P"),
    ),
    "BwdBiasParams": (
        ("problem", PROBLEM),
        ("scores", SCORES),
        ("q", TENSOR),
        ("k", TENSOR),
        ("v", TENSOR),
        ("dout", TENSOR),
        ("stats", "P"),
        ("dbias", "P"),
        ("dbias_stride_b", "q"),
        ("dbias_stride_h", "q"),
        ("dbias_stride_q", "q"),
        ("dbias_stride_k", "q"),
        ("dbias_batch", "i"),
        ("dbias_heads", "i"),
        ("dbias_len_q", "i"),
        ("dbias_len_k", "i"),
    ),
    "BwdFinishParams": (
        ("problem", PROBLEM),
        ("dq", TENSOR),
        ("dq_accum", "P"),
        ("dsink_parts", "P"),
        ("dsink", "P"),
        ("scale", "d"),
        ("accum_cols", "i"),
        ("parts", "i"),
    ),
    "MergeParams": (("states", (STATE, MERGE_STATES)), ("merged", STATE), *MERGE_SIZES),
    "MergeBwdParams": (
        ("states", (STATE, MERGE_STATES)),
        ("grads", (STATE, MERGE_STATES)),
        ("merged", STATE),
        ("dmerged", STATE),
        *MERGE_SIZES,
    ),
    "AppendParams": (
        ("k", TENSOR),
        ("v", TENSOR),
        ("k_pages", TENSOR),
        ("v_pages", TENSOR),
        ("block_table", "P"),
        ("seqused_k", "P"),
        ("cu_seqlens_k", "P"),
        ("block_table_stride", "q"),
        ("batch", "i"),
        ("len_k", "i"),
        ("heads", "i"),
        ("head_dim", "i"),
        ("head_dim_v", "i"),
        ("pages", "i"),
        ("page_size", "i"),
        ("max_pages", "i"),
        ("is_cu_seqlens_k_64", "i"),
        ("padding", "i"),
    ),
}
PARAMS = {
    "fwd_generic": "FwdParams",
    "fwd_sm90": "FwdSm90Params",
    "fwd_combine": "FwdCombineParams",
    "bwd_preprocess": "BwdPreprocessParams",
    "bwd_generic": "BwdParams",
    "bwd_sm90": "BwdSm90Params",
    "bwd_dkv_sm90": "BwdSm90Params",
    "bwd_dq_generic": "BwdParams",
    "bwd_dq_sm90": "BwdSm90Params",
    "bwd_dbias_generic": "BwdBiasParams",
    "bwd_finish": "BwdFinishParams",
    "merge_states": "MergeParams",
    "merge_states_bwd": "MergeBwdParams",
    "kv_append": "AppendParams",
}


_ALIGN = 64  # bytes, of a struct with tensor maps: CUDA reads whole multiples of it


def _format(fields: Fields) -> str:
    codes = ""
    for _, kind in fields:
        if isinstance(kind, str):
            codes += kind
        elif isinstance(kind[1], int):
            codes += (kind[0] if isinstance(kind[0], str) else _format(kind[0])) * kind[1]
        else:
            codes += _format(kind)
    return codes


_PACKERS = {kernel: struct.Struct(_format(STRUCTS[name])) for kernel, name in PARAMS.items()}


def packer(kernel: str) -> struct.Struct:
    """What packs `kernel`'s struct from its flat field values."""
    return _PACKERS[kernel]


class Template:
    """A kernel's struct, packed once but for its blanks: between them lie bytes, so that a call packs few values."""

    __slots__ = ("_blanks", "_dtype", "_pack", "_parts")

    def __init__(self, kernel: str, values: tuple[Any, ...]) -> None:
        codes, packed = _format(STRUCTS[PARAMS[kernel]]), packer(kernel).pack(*values)
        self._parts: list[Any] = []
        self._blanks: list[tuple[int, str, int]] = []  # which part, the name of what fills it, and what is added
        form, end = "=", 0
        for at, value in enumerate(values):
            if isinstance(value, Blank):
                code = codes[at].replace("P", "Q")  # sizes are spelled out, and so is an address's
                begin, end = end, struct.calcsize(codes[: at + 1])
                constant = packed[begin : end - struct.calcsize(code)]
                form += f"{len(constant)}s{code}"
                self._blanks.append((len(self._parts) + 1, value.name, int(value)))
                self._parts += [constant, 0]
        packed += bytes(-len(packed) % _ALIGN)
        self._parts.append(packed[end:])
        self._pack = struct.Struct(f"{form}{len(packed) - end}s").pack
        self._dtype = np.dtype((np.void, len(packed)))  # without fields: CuPy is slow to copy those

    def packed(self, given: FilledIn) -> bytes:
        """The one by-value argument of the kernel's launch."""
        parts = self._parts.copy()  # another thread may be filling this too
        for at, name, offset in self._blanks:
            value = given[name]
            parts[at] = offset + (value if isinstance(value, int) else value.ptr)
        return self._pack(*parts)

    def filled(self, given: FilledIn) -> np.void:
        """The same as CuPy takes it."""
        return np.frombuffer(self.packed(given), self._dtype)[0]
