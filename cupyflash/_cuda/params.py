"""The run-time arguments of each job: a NumPy struct dtype and a packer that mirror `cuda_src/include/params.cuh`.

`struct.Struct` packs in native alignment, which is C's; a test holds names, order, types and sizes equal to the header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

# Pointer fields are P: an address, 0 for null.
TENSOR = (("data", "P"), ("stride_b", "q"), ("stride_n", "q"), ("stride_h", "q"))
PROBLEM = (
    ("cu_seqlens_q", "P"),
    ("cu_seqlens_k", "P"),
    ("seqused_k", "P"),
    ("q_start", "P"),
    ("k_start", "P"),
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
    ),
    "BwdPreprocessParams": (
        ("problem", PROBLEM),
        ("out", TENSOR),
        ("dout", TENSOR),
        ("lse", TENSOR),
        ("dlse", TENSOR),
        ("delta_in", TENSOR),
        ("delta_out", TENSOR),
        ("stats", "P"),
        ("dq_accum", "P"),
        ("dout_rounded", "P"),
        ("sink", "P"),
        ("dsink_parts", "P"),
        ("accum_cols", "i"),
        ("rounded_cols", "i"),
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
}
PARAMS = {
    "fwd_generic": "FwdParams",
    "bwd_preprocess": "BwdPreprocessParams",
    "bwd_generic": "BwdParams",
    "bwd_dq_generic": "BwdParams",
    "bwd_dbias_generic": "BwdBiasParams",
    "bwd_finish": "BwdFinishParams",
    "merge_states": "MergeParams",
    "merge_states_bwd": "MergeBwdParams",
}


def _format(fields: Fields) -> str:
    codes = ""
    for _, kind in fields:
        if isinstance(kind, str):
            codes += kind
        elif isinstance(kind[1], int):
            codes += _format(kind[0]) * kind[1]
        else:
            codes += _format(kind)
    return codes


def _dtype(fields: Fields) -> np.dtype:
    numpy_codes = {"P": "u8", "q": "i8", "Q": "u8", "i": "i4", "I": "u4", "d": "f8"}
    described: list[Any] = []
    for name, kind in fields:
        if isinstance(kind, str):
            described.append((name, numpy_codes[kind]))
        elif isinstance(kind[1], int):
            described.append((name, _dtype(kind[0]), (kind[1],)))
        else:
            described.append((name, _dtype(kind)))
    return np.dtype(described, align=True)


DTYPES = {name: _dtype(fields) for name, fields in STRUCTS.items()}
_PACKERS = {kernel: struct.Struct(_format(STRUCTS[name])) for kernel, name in PARAMS.items()}
# CuPy asks an argument for its dtype's description, which for bytes without fields is short.
_BYTES = {kernel: np.dtype((np.void, packer.size)) for kernel, packer in _PACKERS.items()}


def packer(kernel: str) -> struct.Struct:
    """What packs `kernel`'s struct from its flat field values."""
    return _PACKERS[kernel]


def pack(kernel: str, values: Iterable[Any]) -> np.void:
    """The flat field values of `kernel`'s struct, in order, as the one by-value argument of its launch."""
    return np.frombuffer(_PACKERS[kernel].pack(*values), _BYTES[kernel])[0]
