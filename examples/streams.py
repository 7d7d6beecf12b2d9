"""Forwards and backwards from many threads, each on a stream of its own, and on a device that is not current.

Needs a GPU; the last part needs two. A call works on the current stream of the device where its arrays lie. What comes
out is compared with the same calls made one after the other on the current device, bit for bit.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import cupyflash

ATTENTION = cupyflash.Attention(causal=True, deterministic=True)
NUM_THREADS, NUM_JOBS = 4, 24

Arrays = list[Any]


def inputs(cupy: Any, job: int) -> Arrays:
    rng = np.random.default_rng(job)
    return [cupy.asarray(rng.standard_normal((1, 200 + job, n, 64)).astype(np.float16)) for n in (4, 2, 2, 4)]


def step(q: Any, k: Any, v: Any, dout: Any) -> Arrays:
    out, lse = ATTENTION.fwd(q, k, v)
    return [out, lse, *ATTENTION.bwd(q, k, v, out, lse, dout)]


def on_a_stream_of_its_own(cupy: Any, job: int) -> list[np.ndarray]:
    with cupy.cuda.Stream(non_blocking=True):
        return [array.get() for array in step(*inputs(cupy, job))]


def on_device_1(cupy: Any, job: int, current: int) -> list[np.ndarray]:
    """The arrays are on device 1, whichever is current where the calls are made."""
    with cupy.cuda.Device(1):
        arrays = inputs(cupy, job)
    with cupy.cuda.Device(current):
        results = step(*arrays)
    with cupy.cuda.Device(1):
        return [array.get() for array in results]


def is_same(ones: list[list[np.ndarray]], others: list[list[np.ndarray]]) -> bool:
    pairs = zip(ones, others, strict=True)
    return all(np.array_equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def main() -> int:
    try:
        import cupy
    except ImportError:
        cupy = None
    if cupy is None or not cupy.cuda.is_available():
        sys.exit("needs a GPU that CuPy can use: `python -m cupyflash info` says why there is none")
    jobs = range(NUM_JOBS)
    in_turn = [[array.get() for array in step(*inputs(cupy, job))] for job in jobs]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        together = list(pool.map(lambda job: on_a_stream_of_its_own(cupy, job), jobs))
    found = {f"{NUM_JOBS} steps on {NUM_THREADS} threads and as many streams": is_same(together, in_turn)}
    if cupy.cuda.runtime.getDeviceCount() > 1:
        there, elsewhere = ([on_device_1(cupy, job, current) for job in jobs] for current in (1, 0))
        found[f"{NUM_JOBS} steps on device 1 while device 0 is current"] = is_same(elsewhere, there)
    else:
        print("one GPU here: the part with two is left out")
    for what, is_equal in found.items():
        print(f"{what}: {'the same bits' if is_equal else 'NOT THE SAME BITS'}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
