"""Register spills that are known and accepted."""

from __future__ import annotations

_BOOKKEEPING = "fragments fill all 255 registers; some addresses and bounds are reloaded once a tile"
_WIDE_ROWS = "a warp's output rows alone take half the registers or more"
_WIDE_DOUBLES = "a warp's rows of 256 doubles exceed a lane's registers: correct, and slow"
_ROLES = "a warpgroup has little more than its accumulators; some addresses and factors wait on the stack"
_WIDE_BIAS = "a tile's float64 bias passes through four registers an element pair"
_ADDRESSES = "addresses of three strided arrays, in a kernel that waits for memory"

# (constants, element, larger head-dim tile) -> (bytes, reason), the largest of any architecture and feature under NVRTC
# 12.9. The 16-bit types share a figure.
SPILLS: dict[tuple[str, str, int], tuple[int, str]] = {
    ("FwdGeneric", "16-bit", 32): (64, _BOOKKEEPING),
    ("FwdGeneric", "16-bit", 64): (40, _BOOKKEEPING),
    ("FwdGeneric", "16-bit", 96): (124, _BOOKKEEPING),
    ("FwdGeneric", "16-bit", 128): (76, _BOOKKEEPING),
    ("FwdGeneric", "16-bit", 256): (64, _BOOKKEEPING),
    ("FwdGeneric", "float32", 64): (16, _BOOKKEEPING),
    ("FwdGeneric", "float32", 128): (208, _WIDE_ROWS),
    ("FwdGeneric", "float32", 192): (76, _WIDE_ROWS),
    ("FwdGeneric", "float32", 256): (96, _WIDE_ROWS),
    ("FwdGeneric", "float64", 256): (2832, _WIDE_DOUBLES),
    ("FwdSm90", "16-bit", 64): (168, _WIDE_BIAS),
    ("FwdSm90", "16-bit", 128): (76, _WIDE_BIAS),  # with one of 16 bits 8
    ("FwdSm90", "16-bit", 192): (140, _WIDE_BIAS),
    ("FwdSm90", "16-bit", 256): (36, _WIDE_BIAS),
    ("FwdCombine", "any", 64): (16, _ADDRESSES),
    ("FwdCombine", "any", 96): (4, _ADDRESSES),
    ("FwdCombine", "any", 128): (4, _ADDRESSES),
    ("FwdCombine", "any", 256): (8, _ADDRESSES),
    ("BwdPreprocess", "16-bit", 0): (16, _ADDRESSES),
    ("BwdGeneric", "16-bit", 32): (16, _BOOKKEEPING),
    ("BwdGeneric", "16-bit", 64): (16, _BOOKKEEPING),
    ("BwdGeneric", "16-bit", 96): (32, _BOOKKEEPING),
    ("BwdGeneric", "16-bit", 128): (16, _BOOKKEEPING),
    ("BwdGeneric", "16-bit", 192): (64, _BOOKKEEPING),
    ("BwdGeneric", "16-bit", 256): (96, _BOOKKEEPING),
    ("BwdGeneric", "float32", 32): (12, _BOOKKEEPING),
    ("BwdGeneric", "float32", 64): (96, _BOOKKEEPING),
    ("BwdGeneric", "float32", 96): (96, _BOOKKEEPING),
    ("BwdGeneric", "float32", 128): (116, _BOOKKEEPING),
    ("BwdGeneric", "float32", 192): (48, _BOOKKEEPING),
    ("BwdGeneric", "float32", 256): (160, _BOOKKEEPING),
    ("BwdGeneric", "float64", 256): (2528, _WIDE_DOUBLES),
    ("BwdSm90", "16-bit", 64): (20, _ROLES),
    ("BwdSm90", "16-bit", 128): (4, _ROLES),
    ("BwdSm90 stored", "16-bit", 64): (52, _ROLES),
    ("BwdSm90 stored", "16-bit", 128): (124, _ROLES),
    ("BwdSm90 of changed scores", "16-bit", 64): (320, _ROLES),
    ("BwdSm90 of changed scores", "16-bit", 128): (236, _ROLES),
    ("BwdSm90 stored of changed scores", "16-bit", 64): (380, _ROLES),
    ("BwdSm90 stored of changed scores", "16-bit", 128): (248, _ROLES),
    ("BwdDkvSm90", "16-bit", 192): (20, _ROLES),
    ("BwdDkvSm90", "16-bit", 256): (20, _ROLES),
    ("BwdDqSm90", "16-bit", 256): (132, _BOOKKEEPING),
    ("BwdDqGeneric", "16-bit", 32): (192, _BOOKKEEPING),
    ("BwdDqGeneric", "float32", 96): (32, _BOOKKEEPING),
    ("BwdDqGeneric", "float32", 128): (48, _BOOKKEEPING),
    ("BwdDbiasGeneric", "16-bit", 192): (64, _BOOKKEEPING),
    ("BwdDbiasGeneric", "16-bit", 256): (80, _BOOKKEEPING),
    ("BwdDbiasGeneric", "float32", 96): (4, _BOOKKEEPING),
    ("BwdDbiasGeneric", "float32", 128): (16, _BOOKKEEPING),
    ("BwdDbiasGeneric", "float32", 192): (128, _BOOKKEEPING),
    ("BwdDbiasGeneric", "float64", 256): (688, _WIDE_DOUBLES),
}
