"""Philox4x32-10 and the dropout mask that every backend shares.

The generator is a pure function of a 128-bit counter and a 64-bit key (Salmon, Moraes, Dror, Shaw: "Parallel random
numbers: as easy as 1, 2, 3", 2011). The counter is made of positions, so a tile, a shard or a GPU needs no state to
agree with the others.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

UInt64 = NDArray[np.uint64]


def philox4x32(counter: tuple[UInt64, UInt64, UInt64, UInt64], key: int) -> tuple[UInt64, UInt64, UInt64, UInt64]:
    """Four 32-bit words, held in uint64 arrays, for each counter; the counter's words broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c2 = (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c1, c3 = product1 & _WORD, product0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_mask(
    streams: NDArray[np.integer],
    q_positions: NDArray[np.int64],
    k_positions: NDArray[np.int64],
    *,
    dropout_p: float,
    seed: int,
    offset: int,
) -> NDArray[np.bool_]:
    """True where an entry is kept: [*streams.shape, len(q_positions), len(k_positions)].

    `streams` holds b * Hq + h. One Philox call serves the set {i, i + 8} x {j, j + 8}, so the words are drawn once for
    each distinct pair of counters and then dealt out.
    """
    row, row_half = _split(q_positions)
    col, col_half = _split(k_positions)
    rows, row_at = np.unique(row, return_inverse=True)
    cols, col_at = np.unique(col, return_inverse=True)
    stream = np.asarray(streams, np.uint64)[..., None, None]
    words = np.stack(philox4x32((rows[:, None], cols[None, :], stream, np.full((1, 1), offset, np.uint64)), seed), -1)
    drawn = words[..., row_at[:, None], col_at[None, :], 2 * row_half[:, None] + col_half[None, :]]
    return drawn >= np.uint64(math.floor(dropout_p * 2**32 + 0.5))


def _split(positions: NDArray[np.int64]) -> tuple[UInt64, NDArray[np.int64]]:
    """A position's share of the counter, and which half of its sixteen it lies in."""
    wrapped = positions % 2**32
    return (wrapped // 16 * 8 + wrapped % 8).astype(np.uint64), wrapped % 16 // 8
