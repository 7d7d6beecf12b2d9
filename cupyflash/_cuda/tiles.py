"""Tile tables: data and provenance, no logic. `plan.py` takes the first row of a list that the device can hold.

Tables are keyed by an element's bytes, then by the head-dim tile (the larger of D's and Dv's).
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Room(enum.IntEnum):
    """What a tile's registers leave room for."""

    RAW = 0  # scores as the product makes them
    ONE = 1  # softcap or a negative scale
    ALIBI = 2  # those too
    MORE = 3  # a bias or dropout, alone
    ANY = 4  # all together


class DqTile(NamedTuple):
    query_tile: int
    key_tile: int
    stages: int
    warps: int
    blocks_per_sm: int


class DbiasTile(NamedTuple):
    query_tile: int
    key_tile: int
    warps: int


class FwdTile(NamedTuple):
    query_tile: int
    key_tile: int
    warps: int
    blocks_per_sm: int
    room: Room = Room.ANY
    key_groups: int = 1  # of so many warps each


class Sm90Tile(NamedTuple):
    query_tile: int
    key_tile: int
    query_stages: int
    stages: int
    warps: int  # the producers' four too
    room: Room = Room.ANY


class Sm90BwdTile(NamedTuple):
    query_tile: int
    key_tile: int
    stages: int
    warps: int  # the producers' four too


class Sm90DqTile(NamedTuple):
    query_tile: int
    key_tile: int
    stages: int
    value_stages: int
    warps: int  # the producers' four too
    room: Room = Room.ANY


class BwdTile(NamedTuple):
    query_tile: int
    key_tile: int
    stages: int
    warps: int
    score_warps: int  # along the queries, of s and dp
    key_warps: int  # along the keys, of dk and dv
    query_warps: int  # along the queries, of dq
    blocks_per_sm: int
    room: Room = Room.ANY


def _few(narrow: FwdTile, wide: FwdTile) -> dict[int, list[FwdTile]]:
    return {dim: [narrow if dim <= 128 else wide] for dim in (32, 64, 96, 128, 192, 256)}


# Swept on an H200 (CUDA 13.0, 2026-11-29), bfloat16, N = 4,096, B N = 16,384, H D = 2,048. Beside a row stand the times
# of FlashAttention-2 (torch 2.11) over ours, full and causal. Later rows are for less shared memory, unmeasured.
# What a comment compares a row with was partly measured on the kernels just before, which were 3 to 10 % slower.
FWD: dict[int, dict[int, list[FwdTile]]] = {
    2: {
        32: [FwdTile(128, 128, 4, 2, Room.RAW), FwdTile(128, 64, 4, 2)],  # 0.94, 0.92; 128x64 0.92, 0.70
        # 1.08, 1.00; 128x112 1.05, 1.00; 128x96 1.01, 0.97
        64: [FwdTile(128, 128, 4, 2, Room.RAW), FwdTile(128, 64, 4, 2)],
        96: [FwdTile(128, 80, 4, 2, Room.RAW), FwdTile(128, 48, 4, 2)],  # 0.95, 0.96; 128x96 0.93, 0.93
        # 1.03, 1.01; 128x48 0.85, 0.82; 8 warps 0.77, 0.76
        128: [FwdTile(128, 64, 4, 2, Room.RAW), FwdTile(128, 32, 4, 2)],
        192: [FwdTile(128, 64, 8, 1), FwdTile(64, 64, 4, 1)],
        256: [FwdTile(64, 64, 4, 2), FwdTile(64, 32, 4, 1)],  # 0.93, 0.95; 128x64 with 8 warps 0.86, 0.85
    },
    4: {  # beside a row: the memory-efficient kernel of torch 2.11, TF32 off, over ours, N = 2,048
        32: [FwdTile(128, 32, 4, 2)],
        64: [FwdTile(128, 32, 4, 2)],  # 1.74, 1.63
        96: [FwdTile(64, 32, 4, 1)],
        128: [FwdTile(128, 32, 4, 2), FwdTile(64, 32, 4, 1)],  # 1.35, 1.13; 64x64 lower by 0.08
        192: [FwdTile(64, 32, 4, 1), FwdTile(32, 16, 2, 1)],
        256: [FwdTile(64, 32, 4, 1), FwdTile(32, 16, 2, 1)],
    },
    8: {
        32: [FwdTile(64, 32, 4, 1)],
        64: [FwdTile(64, 32, 4, 1)],
        96: [FwdTile(64, 16, 4, 1)],
        128: [FwdTile(32, 16, 2, 1)],
        192: [FwdTile(16, 16, 1, 1)],
        256: [FwdTile(16, 16, 1, 1)],
    },
}
# The same for few queries, by the rows of a KV head: small blocks, of which several share a multiprocessor, so that
# copies of some are under way while others multiply. Beside a row, D 128, an H200 on 2026-11-30: the rate of keys and
# values over that of a copy, B 1 x 131,072, 16 x 8,192, 64 x 8,192 and 128 x 2,048 keys.
FWD_FEW: dict[str, dict[int, dict[int, list[FwdTile]]]] = {
    "16 rows": {
        # 0.90, 0.92, 1.01, 0.93; 128 keys, 3 blocks 0.90, 0.91, 1.00, 0.91; 48, 8 0.76, 0.79, 0.87, 0.81
        2: _few(FwdTile(16, 64, 1, 6), FwdTile(16, 64, 1, 3)),
        4: _few(FwdTile(16, 32, 1, 6), FwdTile(16, 32, 1, 3)),
        8: _few(FwdTile(16, 16, 1, 6), FwdTile(16, 16, 1, 3)),
    },
    "32 rows": {
        2: _few(FwdTile(32, 64, 2, 4), FwdTile(32, 64, 2, 2)),
        4: _few(FwdTile(32, 32, 2, 4), FwdTile(32, 32, 2, 2)),
        8: _few(FwdTile(16, 16, 1, 6), FwdTile(16, 16, 1, 3)),
    },
    "64 rows": {
        2: _few(FwdTile(64, 64, 4, 3), FwdTile(64, 64, 4, 1)),
        4: _few(FwdTile(64, 32, 4, 2), FwdTile(64, 32, 4, 1)),
        8: _few(FwdTile(16, 16, 1, 6), FwdTile(16, 16, 1, 3)),
    },
    "few tiles": FWD,
    "few tiles, packed": FWD,
}


def _grouped(
    rows: int, warps: int, groups: dict[int, tuple[int, int]], others: dict[int, dict[int, list[FwdTile]]]
) -> dict[int, dict[int, list[FwdTile]]]:
    """By head dim the keys of a tile of 16 bits, and the groups; else, and for less shared memory, what others are."""
    grouped = {
        item: {
            dim: [FwdTile(rows, keys * 2 // item, warps, 1, Room.ANY, count)] for dim, (keys, count) in groups.items()
        }
        for item in (2, 4)
    }
    return {
        item: {dim: [*grouped.get(item, {}).get(dim, []), *tiles] for dim, tiles in table.items()}
        for item, table in others.items()
    }


# One block to a multiprocessor, where each has one, or long keys: no merging, or less of it. What stands beside: µs
# without groups and with them, H200, 2026-12-01. D 128: 16 x 8,192 keys 127.3, 123.0; 1 x 131,072 127.4, 125.5;
# 64 x 8,192 482, 477; 1 x 8,192 15.3, 14.7; 16 x 1,024 22.7, 19.0. Where blocks have no multiprocessor each and keys
# are short they lose: 64 x 256 20.5, 26.8.
_GROUPS = {
    32: (128, 8),
    64: (64, 8),  # 16 x 8,192 68.3, 64.3; 128 keys, 4 groups the same
    96: (64, 4),  # 108.8, 99.2; 5 groups 102.2
    128: (64, 4),  # 5 groups 124.2; 32 keys, 8 groups 122.9, but 128.3 and 15.1 of one sequence
    192: (64, 3),  # 188.7, 184.7; 32 keys, 5 groups 186.4
    256: (64, 2),  # 245.0, 241.6; 32 keys, 4 groups 241.1
}
FWD_FEW["16 rows, in groups"] = _grouped(16, 1, _GROUPS, FWD_FEW["16 rows"])
# 8 queries of 4 heads, 16 x 8,192 134.6, 126.4; 1 x 8,192 18.5, 17.7; of 64 rows they gain nothing.
_GROUPS_32 = {64: (128, 4), 96: (64, 4), 128: (64, 4), 192: (64, 3), 256: (64, 2)}
FWD_FEW["32 rows, in groups"] = _grouped(32, 2, _GROUPS_32, FWD_FEW["32 rows"])
# Small ones where they are many, so that all have a place at once: 128 x 2,048 keys 1.03 times the speed.
FWD_FEW["16 rows, many times"] = FWD_FEW["16 rows"] | {2: _few(FwdTile(16, 32, 1, 10), FwdTile(16, 32, 1, 5))}
# And where keys lie in pages, whose addresses need room: pages of 64, beside which those of 16 are slower by 0.01.
# 0.87, 0.90, 0.98, 0.91; in groups 16 x 8,192 130.9, 126.0; 1 x 131,072 132.5, 130.7; 64 keys, 4 groups 165
_PAGED_GROUPS = {32: (128, 8), 64: (64, 8), 96: (32, 8), 128: (32, 8), 192: (32, 5), 256: (32, 4)}
FWD_PAGES: dict[str, dict[int, dict[int, list[FwdTile]]]] = FWD_FEW | {
    "16 rows": FWD_FEW["16 rows, many times"],
    "16 rows, in groups": _grouped(16, 1, _PAGED_GROUPS, FWD_FEW["16 rows, many times"]),
    "32 rows, in groups": FWD_FEW["32 rows"],
}
# The same for fwd_sm90, by the larger of the head dims alone. What it holds of scores, out and P fills the registers.
FWD_SM90: dict[int, list[Sm90Tile]] = {
    64: [
        Sm90Tile(192, 128, 2, 3, 16, Room.RAW),
        Sm90Tile(128, 128, 2, 3, 12, Room.ALIBI),
        Sm90Tile(128, 96, 2, 3, 12, Room.MORE),
        Sm90Tile(128, 80, 2, 3, 12),
    ],
    128: [
        Sm90Tile(128, 128, 2, 2, 12, Room.ALIBI),
        Sm90Tile(128, 96, 2, 2, 12, Room.MORE),
        Sm90Tile(128, 64, 2, 2, 12),
    ],
    192: [
        Sm90Tile(128, 112, 1, 2, 12, Room.RAW),
        Sm90Tile(128, 80, 1, 2, 12, Room.ALIBI),
        Sm90Tile(128, 48, 1, 2, 12),
    ],
    256: [
        Sm90Tile(128, 80, 1, 2, 12, Room.RAW),
        Sm90Tile(128, 64, 1, 2, 12, Room.ONE),
        Sm90Tile(128, 48, 1, 2, 12, Room.ALIBI),
        Sm90Tile(128, 32, 1, 2, 12),
    ],
}
# What comes first where there are few keys or queries. At D 64 three consumers' rows meet more of the diagonal, and of
# what is not there; at D 256 fewer keys lie beyond it.
FWD_SM90_SMALL: dict[int, list[Sm90Tile]] = {
    64: [Sm90Tile(128, 128, 2, 3, 12, Room.ALIBI)],
    256: [Sm90Tile(128, 64, 1, 2, 12, Room.ONE)],
}
# The same for bwd_sm90. Beside a row: cuDNN's time over ours (H200, CUDA 13.0, 2026-11-30, N = 4,096), full and causal,
# of the stored runs; of other tiles in single runs while one was chosen.
BWD_SM90: dict[int, list[Sm90BwdTile]] = {
    64: [Sm90BwdTile(128, 128, 2, 16)],  # 1.24, 1.29
    128: [Sm90BwdTile(64, 128, 2, 16)],  # 1.08, 1.10; three stages the same
}
# The same for dk and dv alone, of bwd_dkv_sm90, beside a kernel for dq.
DKV_SM90: dict[int, list[Sm90BwdTile]] = {
    192: [Sm90BwdTile(64, 64, 2, 12)],  # -, 1.30; with Dv 128 -, 0.92
    256: [Sm90BwdTile(64, 64, 2, 12)],  # 1.26, 1.18
}
# And for dq alone, of bwd_dq_sm90; beside a row the speed of other tiles over its own.
DQ_SM90: dict[int, list[Sm90DqTile]] = {
    192: [  # 64 keys 0.99
        Sm90DqTile(128, 80, 2, 2, 12, Room.ONE),
        Sm90DqTile(128, 64, 2, 2, 12, Room.ALIBI),
        Sm90DqTile(128, 48, 2, 2, 12),
    ],
    256: [  # 48 keys with two places for v 0.83
        Sm90DqTile(128, 64, 2, 1, 12, Room.ONE),
        Sm90DqTile(128, 48, 2, 1, 12, Room.ALIBI),
        Sm90DqTile(128, 32, 2, 1, 12),
    ],
}
BWD: dict[int, dict[int, list[BwdTile]]] = {
    2: {
        # 0.83, 0.87; 64x128 0.68, 0.69
        32: [BwdTile(128, 128, 2, 8, 4, 4, 4, 1, Room.RAW), BwdTile(64, 128, 2, 8, 2, 4, 4, 1)],
        # 0.99, 1.01; 64x128 0.74, 0.75; one stage 0.82, 0.84
        64: [BwdTile(128, 128, 2, 8, 4, 4, 4, 1, Room.RAW), BwdTile(64, 128, 1, 8, 2, 4, 4, 1)],
        96: [BwdTile(64, 128, 2, 8, 2, 4, 4, 1), BwdTile(64, 64, 2, 8, 2, 4, 4, 1)],
        # 0.98, 0.96; 4 query warps 0.94, 0.90; one stage 0.82, 0.84; 64x64 0.65 to 0.71
        128: [
            BwdTile(64, 128, 2, 8, 2, 4, 2, 1),
            BwdTile(64, 128, 2, 8, 2, 4, 4, 1),
            BwdTile(64, 64, 1, 8, 2, 4, 4, 1),
        ],
        192: [BwdTile(64, 64, 1, 8, 2, 4, 4, 1), BwdTile(64, 32, 1, 8, 4, 2, 4, 1)],
        256: [BwdTile(64, 64, 1, 8, 2, 4, 2, 1), BwdTile(64, 64, 1, 8, 2, 4, 4, 1), BwdTile(32, 32, 1, 4, 2, 2, 2, 1)],
    },
    4: {
        32: [BwdTile(64, 64, 1, 4, 2, 2, 2, 2)],
        64: [BwdTile(64, 64, 1, 4, 2, 2, 2, 2)],  # 1.68, 1.68; 8 warps lower by 0.2, at causal equal
        96: [BwdTile(64, 64, 1, 8, 4, 4, 4, 1), BwdTile(32, 32, 1, 4, 2, 2, 2, 1)],
        # 1.39, 1.45; 2 score warps higher by 0.02
        128: [BwdTile(64, 64, 1, 8, 4, 4, 4, 1), BwdTile(32, 32, 1, 4, 2, 2, 2, 1)],
        192: [BwdTile(32, 32, 1, 8, 2, 2, 2, 1), BwdTile(16, 32, 1, 4, 1, 2, 1, 1)],
        256: [BwdTile(32, 32, 1, 8, 2, 2, 2, 1), BwdTile(16, 16, 1, 2, 1, 1, 1, 1)],
    },
    8: {  # above 128 there is no row for 99 KiB
        32: [BwdTile(32, 32, 1, 4, 2, 2, 2, 1)],
        64: [BwdTile(32, 32, 1, 4, 2, 2, 2, 1)],
        96: [BwdTile(16, 32, 1, 4, 1, 2, 1, 1)],
        128: [BwdTile(16, 16, 1, 2, 1, 1, 1, 1)],
        192: [BwdTile(16, 16, 1, 2, 1, 1, 1, 1)],
        256: [BwdTile(16, 16, 1, 2, 1, 1, 1, 1)],
    },
}
DQ: dict[int, dict[int, list[DqTile]]] = {
    2: {
        32: [DqTile(128, 64, 2, 4, 2)],
        64: [DqTile(128, 64, 2, 4, 2)],
        96: [DqTile(128, 64, 1, 8, 1)],
        128: [DqTile(128, 64, 2, 8, 1), DqTile(128, 64, 1, 8, 1)],
        192: [DqTile(64, 64, 1, 4, 2)],
        256: [DqTile(64, 64, 1, 4, 1), DqTile(64, 32, 1, 4, 1)],
    },
    4: {
        32: [DqTile(64, 64, 1, 4, 1)],
        64: [DqTile(64, 64, 1, 4, 1)],
        96: [DqTile(64, 32, 1, 4, 1)],
        128: [DqTile(64, 32, 1, 4, 1), DqTile(32, 32, 1, 2, 1)],
        192: [DqTile(32, 16, 1, 2, 1)],
        256: [DqTile(32, 16, 1, 2, 1)],
    },
    8: {  # above 192 there is no row for 99 KiB
        32: [DqTile(32, 32, 1, 2, 1)],
        64: [DqTile(32, 32, 1, 2, 1)],
        96: [DqTile(32, 16, 1, 2, 1)],
        128: [DqTile(16, 16, 1, 1, 1)],
        192: [DqTile(16, 16, 1, 1, 1)],
        256: [DqTile(16, 16, 1, 1, 1)],
    },
}
DBIAS: dict[int, dict[int, list[DbiasTile]]] = {
    2: {
        32: [DbiasTile(64, 64, 4)],
        64: [DbiasTile(64, 64, 4)],
        96: [DbiasTile(64, 64, 4)],
        128: [DbiasTile(64, 64, 4)],
        192: [DbiasTile(32, 64, 4)],
        256: [DbiasTile(32, 32, 2)],
    },
    4: {
        32: [DbiasTile(32, 64, 4)],
        64: [DbiasTile(32, 64, 4)],
        96: [DbiasTile(32, 32, 2)],
        128: [DbiasTile(32, 32, 2)],
        192: [DbiasTile(16, 32, 2)],
        256: [DbiasTile(16, 32, 2)],
    },
    8: {  # above 192 there is no row for 99 KiB
        32: [DbiasTile(32, 32, 2)],
        64: [DbiasTile(32, 32, 2)],
        96: [DbiasTile(16, 16, 1)],
        128: [DbiasTile(16, 16, 1)],
        192: [DbiasTile(16, 16, 1)],
        256: [DbiasTile(16, 16, 1)],
    },
}
