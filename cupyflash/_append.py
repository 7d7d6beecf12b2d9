"""New keys and values written into the pages that a block table names."""

from __future__ import annotations

import functools
from typing import Any

from cupyflash import _check, _interop
from cupyflash._interop import Place
from cupyflash._spec import AppendCall, Work


def kv_append(
    k_pages: Any, v_pages: Any, k: Any, v: Any, *,
    block_table: Any, seqused_k: Any, cu_seqlens_k: Any = None, layout: str = "bshd", check: bool = False,
) -> None:  # fmt: skip
    """New keys and values into their pages, in place, before an `attn_fwd` with the same `block_table` and `seqused_k`.

        row i of a sequence's n new rows becomes its key j = seqused_k − n + i:
        k_pages[block_table[b, j // page_size], j % page_size] = k[b, i];  v_pages likewise

    Parameters
    ----------
    k_pages, v_pages : array [pages, page_size, Hkv, D] and [pages, page_size, Hkv, Dv]
        float16 | bfloat16 | float32 | float64. Pools of pages, written in place: unit last stride, overlapping nothing.
        [pages, Hkv, page_size, D] with layout "bhsd".
    k, v : array [B, Nk, Hkv, D] and [B, Nk, Hkv, Dv], the pools' dtype
        The new rows, in the axes of `layout`. Any strides with a unit last stride are read in place; others are copied
        once on a GPU.
    block_table : array [B, max_pages], int32
        Key j of sequence b lies in page block_table[b, j // page_size]. Only the pages of the new keys are looked at.
    seqused_k : array [B], int32
        Live keys of each sequence *after* this call: the new rows are counted already, as in the `attn_fwd` that
        follows.
    cu_seqlens_k : array [B+1], int32 | int64
        Prefix sums of how many new rows each sequence has, from 0; with layout "thd" only, which needs them.
    layout : "bshd" | "bhsd" | "thd", default "bshd"
        As in `Attention`.
    check : bool, default False
        Also look at the values of offsets, lengths and pages on a GPU, which waits for it. The CPU always does.

    Raises
    ------
    ValueError for shapes and values, TypeError for kinds and dtypes, CompileError when the kernel does not compile. All
    before anything is written.

    Notes
    -----
    Without `check` nothing is read back from a GPU: a new row whose key is negative or past its table, or whose page is
    not in the pool, is not written there, so a sequence whose seqused_k is 0 takes no part. A slot that two new rows
    share may hold parts of either. Works on the data's device and the current stream of its library; can be captured in
    a CUDA graph once a call has compiled the kernel.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> k_pages, v_pages = np.zeros((2, 3, 16, 1, 4), np.float32)  # three pages of 16 keys
    >>> live = np.array([15], np.int32)  # keys of the only sequence before the step
    >>> q, k, v = np.ones((3, 1, 2, 1, 4), np.float32)  # two new tokens
    >>> live += 2
    >>> pages = {"block_table": np.array([[2, 0]], np.int32), "seqused_k": live}
    >>> cf.kv_append(k_pages, v_pages, k, v, **pages)
    >>> np.argwhere(k_pages[:, :, 0, 0]).tolist()  # keys 15 and 16: the end of page 2, the beginning of page 0
    [[0, 0], [2, 15]]
    >>> cf.attn_fwd(q, k_pages, v_pages, causal=True, **pages).out.shape
    (1, 2, 1, 4)
    """
    arguments = {
        "k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v,
        "block_table": block_table, "seqused_k": seqused_k, "cu_seqlens_k": cu_seqlens_k,
    }  # fmt: skip
    call, adopted, given = _check.checked_append("kv_append", layout, arguments, check)
    _ready(call, adopted.place)(given, adopted.stream)


@functools.lru_cache(maxsize=_check.FORMS)
def _ready(call: AppendCall, place: Place) -> Work:
    """What a form's calls run; the checks give one object for a form."""
    return _interop.backend(place).append(call)
