"""A training step packed once and run many times: on a GPU with CuPy, else on NumPy.

`prepare` checks, plans and allocates; a run of what it returns reads the arrays as they are by then and writes the same
outputs. Every run is compared with plain calls, bit for bit.
"""

from __future__ import annotations

import importlib
import sys
import time
from types import ModuleType
from typing import Any

import numpy as np

import cupyflash

ATTENTION = cupyflash.Attention(causal=True, deterministic=True)
NUM_STEPS = 20


def array_module() -> ModuleType:
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return np
    return cupy if cupy.cuda.is_available() else np


def main() -> int:
    xp: Any = array_module()
    rng = np.random.default_rng(0)
    q, k, v, dout = arrays = [xp.zeros((1, 200, heads, 64), np.float32) for heads in (4, 2, 2, 4)]

    forward = ATTENTION.prepare(q, k, v)
    out, lse = forward()  # the arrays that every run writes
    backward = ATTENTION.prepare(q, k, v, backward=True, out=out, lse=lse, dout=dout)

    is_equal, times = True, {"prepared": list[float](), "plain": list[float]()}
    for _ in range(NUM_STEPS):
        for array in arrays:
            array[...] = xp.asarray(rng.standard_normal(array.shape, dtype=np.float32))
        begin = time.perf_counter()
        prepared = [*forward(), *backward()]
        middle = time.perf_counter()
        saved = ATTENTION.fwd(q, k, v)
        plain = [*saved, *ATTENTION.bwd(q, k, v, *saved, dout)]
        times["prepared"].append(middle - begin)
        times["plain"].append(time.perf_counter() - middle)
        is_equal &= all(bool((ours == theirs).all()) for ours, theirs in zip(prepared, plain, strict=True))

    if xp is not np:  # a GPU computes after a call has returned, so that this is what the call itself takes
        print(", ".join(f"{name} {1e6 * min(took):.0f} µs" for name, took in times.items()), "until both calls return")
    print(f"{xp.__name__}, {NUM_STEPS} steps on new contents: {'the same bits' if is_equal else 'NOT THE SAME BITS'}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
