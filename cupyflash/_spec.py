"""What one call asks, without frameworks.

`Spec` holds what may change the kernel; `Call` holds everything that changes from call to call. Both speak one
canonical form, whatever layout the caller used:

    q, dq            [B, Nq, Hq, D]        k, dk   [B, Nk, Hkv, D]      v, dv   [B, Nk, Hkv, Dv]
    out, dout        [B, Nq, Hq, Dv]       lse, delta, dlse             [B, Hq, Nq]
    bias, dbias      [B|1, Hq|1, Nq|1, Nk|1]                            alibi_slopes [B, Hq] (stride 0 when shared)
    packed           a leading axis of one: q [1, Tq, Hq, D], lse [1, Hq, Tq]
    paged            k, v are pools [pages, page_size, Hkv, D|Dv]

Backends see `Spec`, `Call` and `View`, never options or frameworks. The Call of an attention is its *form*: a `Blank`
stands for every number that only one call knows, so that what follows from the form is worked out once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Blank(int):
    """The address of an argument, or its value where it is an int: to be filled in. As an int, what is added to it."""

    name: str

    def __new__(cls, name: str, offset: int = 0) -> Blank:
        blank = super().__new__(cls, offset)
        blank.name = name
        return blank

    def __add__(self, offset: int) -> Blank:
        return Blank(self.name, int(self) + offset)


class View(NamedTuple):  # made in a third of a frozen dataclass's time, several times a call
    """Memory as a kernel sees it: a pointer with shape, strides in elements and a dtype name."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    array: Any  # a NumPy array of exactly this shape on the CPU; on a GPU whatever keeps it alive; None in a form


class Mask(enum.Enum):
    """Causal masks and windows are one thing: bounds on r_j - p_i (contract, Forward step 5)."""

    NONE = "none"
    BAND = "band"


SMALL_SOFTCAP = 50.0  # exponentials lie within 2 * 50 log2(e) = 144 powers of two, which a float has


@dataclass(frozen=True, slots=True)
class Features:
    """Score changes that cost instructions, hence compile-time switches in the kernels."""

    softcap: bool = False
    small_softcap: bool = False  # at most SMALL_SOFTCAP
    alibi: bool = False
    bias: bool = False
    dropout: bool = False
    negative_scale: bool = False

    @property
    def differ_by_head(self) -> bool:
        """Whether scores of one query change in another way for each head."""
        return self.alibi or self.bias or self.dropout


@dataclass(frozen=True, slots=True)
class Spec:
    """What is asked, as far as it may choose a kernel. Hashable; lengths, strides and values are not in it."""

    dtype: str  # of q, k, v
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    mask: Mask
    features: Features
    packed: bool
    paged: bool
    out_dtype: str  # of out: the forward's result, the backward's input
    dout_dtype: str | None  # backward only
    grad_dtype: str | None  # backward only: dq, dk and dv
    bias_dtype: str | None
    dbias_dtype: str | None  # backward only
    accumulate: bool
    deterministic: bool
    split: bool  # num_splits > 1, or split_len
    allow_tf32: bool
    align: int  # bytes, at most 16: every pointer and outer stride is a multiple of it
    has_boxes: bool  # the copy engine can walk every array of rows
    size_class: str  # "short" (len_k <= 256), "few keys" (<= 1024), "normal"; forward: those of tiles.FWD_FEW too


@dataclass(slots=True)
class Call:
    """Everything that may change from call to call, in the canonical form above."""

    function: str  # the public name, for messages
    batch: int  # sequences when packed
    len_q: int  # Tq when packed
    len_k: int  # Tk when packed, max_pages * page_size when paged
    scale: float
    softcap: float = 0.0  # 0: off
    window_left: int | None = None  # visible iff p_i - left <= r_j <= p_i + right, causal folded in
    window_right: int | None = None
    q_start: int | View | None = None  # None: live keys - Nq of each sequence
    k_start: int | View = 0
    dropout_p: float = 0.0
    seed: int | View = 0
    offset: int | View = 0
    num_splits: int = 0
    split_len: int | None = None
    max_seqlen_q: int | None = None  # hints: no value of them changes a result
    max_seqlen_k: int | None = None

    q: View | None = None
    k: View | None = None
    v: View | None = None
    out: View | None = None
    lse: View | None = None
    bias: View | None = None
    alibi_slopes: View | None = None
    sink: View | None = None
    cu_seqlens_q: View | None = None
    cu_seqlens_k: View | None = None
    seqused_k: View | None = None
    block_table: View | None = None
    beside_out: View | None = None  # a state of other keys, which partial results are merged with too; like out
    beside_lse: View | None = None

    dout: View | None = None
    delta: View | None = None  # given by the caller; None: computed from out, dout and dlse
    dlse: View | None = None
    dq: View | None = None
    dk: View | None = None
    dv: View | None = None
    dbias: View | None = None
    dsink: View | None = None

    workspace: View | None = None
    device: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class AppendCall:
    """The form of an append of new rows k and v to pools, in the canonical form above."""

    function: str
    k_pages: View
    v_pages: View
    k: View
    v: View
    block_table: View
    seqused_k: View
    cu_seqlens_k: View | None = None
    align: int = 1  # bytes, at most 16: every row of the four begins and ends at a multiple of it
    device: int = 0


FilledIn = Mapping[str, View | int]  # what a call fills into the blanks of its form, by the names of Call's fields
Work = Callable[[FilledIn, int], None]  # a form made ready by its backend: to be run with what is given, on a stream


def filled(call: Call, given: FilledIn) -> Call:
    """The form with what is given in its blanks."""
    return replace(call, **given)
