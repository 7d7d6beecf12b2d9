"""The run-time arguments of each job: a NumPy struct dtype and a packer that mirror `cuda_src/include/params.cuh`.

`struct.Struct` packs in native alignment, which is C's; a test holds names, order, types and sizes equal to the header.
"""

from __future__ import annotations

import struct
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
    ("is_cu_seqlens_64", "i"),
    ("is_q_start_given", "i"),
    ("padding", "i"),
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
    ("scale", "f"),
    ("fold", "f"),
    ("softcap", "f"),
    ("softcap_scale", "f"),
    ("keep_threshold", "I"),
    ("keep_scale", "f"),
)
MERGE_STATE = (
    ("out", "P"),
    ("lse", "P"),
    ("out_stride_b", "q"),
    ("out_stride_n", "q"),
    ("out_stride_h", "q"),
    ("lse_stride_b", "q"),
    ("lse_stride_n", "q"),
    ("lse_stride_h", "q"),
    ("out_type", "i"),
    ("padding", "i"),
)
MERGE_STATES = 24  # of one launch, kMergeStates

Fields = tuple[tuple[str, Any], ...]
STRUCTS: dict[str, Fields] = {
    "Tensor": TENSOR,
    "Problem": PROBLEM,
    "Scores": SCORES,
    "MergeState": MERGE_STATE,
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
        ("dsink", "P"),
    ),
    "BwdParams": (
        ("problem", PROBLEM),
        ("scores", SCORES),
        ("q", TENSOR),
        ("k", TENSOR),
        ("v", TENSOR),
        ("dout", TENSOR),
        ("dk", TENSOR),
        ("dv", TENSOR),
        ("stats", "P"),
        ("dq_accum", "P"),
    ),
    "BwdFinishParams": (("problem", PROBLEM), ("dq", TENSOR), ("dq_accum", "P"), ("scale", "f"), ("padding", "i")),
    "MergeParams": (
        ("states", (MERGE_STATE, MERGE_STATES)),
        ("out", TENSOR),
        ("lse", TENSOR),
        ("num_states", "i"),
        ("batch", "i"),
        ("len", "i"),
        ("heads", "i"),
        ("head_dim", "i"),
        ("padding", "i"),
    ),
}
PARAMS = {
    "fwd_generic": "FwdParams",
    "bwd_preprocess": "BwdPreprocessParams",
    "bwd_generic": "BwdParams",
    "bwd_finish": "BwdFinishParams",
    "merge_states": "MergeParams",
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
    numpy_codes = {"P": "u8", "q": "i8", "Q": "u8", "i": "i4", "I": "u4", "f": "f4"}
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


def pack(kernel: str, values: tuple[Any, ...]) -> np.void:
    """The flat field values of `kernel`'s struct, in order, as the one by-value argument of its launch."""
    return np.frombuffer(_PACKERS[kernel].pack(*values), DTYPES[PARAMS[kernel]])[0]
