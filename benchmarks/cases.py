"""The shapes that are timed, as data, each with its reason.

Every row of a series has 16,384 tokens and 2,048 query channels, so that all rows move the same bytes and differ only
in the arithmetic: batch = 16,384 / N, heads = 2,048 / D.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

TOKENS = 16_384
CHANNELS = 2_048
GRID_LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
GRID_HEAD_DIMS = (64, 128, 256)
STANDARD_LENGTHS = (128, 256, *GRID_LENGTHS)
FLOAT32_LENGTHS = (1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: q [B, N, Hq, D], k [B, N, Hkv, D] and v [B, N, Hkv, Dv], contiguous."""

    name: str
    reason: str
    batch: int
    length: int
    heads_q: int
    heads_kv: int
    head_dim: int
    is_causal: bool
    head_dim_v: int | None = None  # D unless given
    window: tuple[int, int] | None = None
    dtype: str = "bfloat16"
    series: str | None = None  # the curve over N that this row is a point of
    host: bool = False  # time the host's side of a call, not the GPU's
    against: str | None = None  # the row whose time this one is held to ...
    limit: float | None = None  # ... and the largest ratio to it that is acceptable

    @property
    def dv(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


def _row(head_dim: int, is_causal: bool, length: int, dtype: str = "bfloat16") -> Case:
    heads = CHANNELS // head_dim
    return Case(
        name=f"{'' if dtype == 'bfloat16' else f'{dtype}-'}d{head_dim}-{'causal' if is_causal else 'full'}-{length}",
        reason="training shape",
        batch=TOKENS // length,
        length=length,
        heads_q=heads,
        heads_kv=heads,
        head_dim=head_dim,
        is_causal=is_causal,
        dtype=dtype,
        series=f"D {head_dim}{', causal' if is_causal else ''}",
    )


def _rows(head_dims: Iterable[int], lengths: Iterable[int], dtype: str = "bfloat16") -> tuple[Case, ...]:
    return tuple(_row(d, causal, n, dtype) for d in head_dims for causal in (False, True) for n in lengths)


PEERS = _rows(GRID_HEAD_DIMS, GRID_LENGTHS)
QUICK = _rows((64, 128), (1024, 4096))
STANDARD = _rows((64, 128), STANDARD_LENGTHS)
FLOAT32 = _rows((64, 128), FLOAT32_LENGTHS, "float32")


def _dim(head_dim: int, against: str | None = None, head_dim_v: int | None = None) -> Case:
    return Case(
        name=f"dim-{head_dim}" if head_dim_v is None else f"dim-{head_dim}-{head_dim_v}",
        reason="a head dim between two tiles costs no more than 1.1 times the next tile" if against else "whole tile",
        batch=4,
        length=4096,
        heads_q=16,
        heads_kv=16,
        head_dim=head_dim,
        is_causal=True,
        head_dim_v=head_dim_v,
        against=against,
        limit=1.1 if against else None,
    )


_UNBOUNDED = Case("window-none", "what the window is held to", 2, 8192, 16, 16, 128, is_causal=True)
EXTRA = (
    _dim(64),
    _dim(96),
    _dim(128),
    _dim(192),
    _dim(192, head_dim_v=128),
    _dim(40, against="dim-64"),
    _dim(72, against="dim-96"),
    _dim(80, against="dim-96"),
    _UNBOUNDED,
    replace(
        _UNBOUNDED,
        name="window-128",
        reason="tiles outside the window are skipped",
        window=(128, 0),
        against="window-none",
        limit=0.15,
    ),
    replace(_UNBOUNDED, name="window-1024", reason="a window wider than a tile", window=(1024, 0)),
    replace(
        _dim(128), name="float16", reason="no slower than bfloat16", dtype="float16", against="dim-128", limit=1.03
    ),
    *(
        Case(f"short-{n}", "a head's keys fit into one tile or two", 16384 // n, n, 16, 16, 128, is_causal=False)
        for n in (64, 128, 256)
    ),
    Case("gqa-2048", "32 query heads over 8", 8, 2048, 32, 8, 128, is_causal=True),
    Case("gqa-8192", "32 query heads over 8", 2, 8192, 32, 8, 128, is_causal=True),
    Case("host", "what one tiny call costs the host", 1, 16, 1, 1, 64, is_causal=True, host=True),
)

GRIDS = {"peers": PEERS, "quick": QUICK, "standard": STANDARD, "float32": FLOAT32, "extra": EXTRA}
