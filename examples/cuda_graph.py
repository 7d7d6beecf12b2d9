"""A forward and a backward in a CUDA graph, replayed on new contents. Needs a GPU.

With outputs and workspace given, a call allocates nothing and waits for nothing, so a graph can hold it. Every replay
is compared with ordinary calls, bit for bit.
"""

from __future__ import annotations

import sys
from typing import Any

import cupyflash

ATTENTION = cupyflash.Attention(causal=True, deterministic=True)
NUM_REPLAYS = 5


def replays_are_equal(cupy: Any, stream: Any) -> bool:
    """Whether every replay had the bits of the calls; `stream` is current."""
    q, k, v, dout = arrays = [cupy.empty((2, 300, heads, 64), cupy.float16) for heads in (4, 2, 2, 4)]

    def draw() -> None:
        for array in arrays:
            array[...] = cupy.random.standard_normal(array.shape, cupy.float32)

    def step(out: Any, lse: Any, dq: Any, dk: Any, dv: Any) -> None:
        ATTENTION.fwd(q, k, v, out=out, lse=lse, workspace=forward_space)
        ATTENTION.bwd(q, k, v, out, lse, dout, dq=dq, dk=dk, dv=dv, workspace=backward_space)

    draw()
    saved = ATTENTION.fwd(q, k, v)
    outputs = [*saved, *ATTENTION.bwd(q, k, v, *saved, dout)]
    others = [cupy.empty_like(output) for output in outputs]
    sizes = [ATTENTION.workspace_size(q, k, v, backward) for backward in (False, True)]
    forward_space, backward_space = (cupy.empty(max(size, 1), cupy.uint8) for size in sizes)

    step(*others)  # compiles whatever is not compiled yet, which no recording may do
    stream.begin_capture()
    step(*outputs)
    graph = stream.end_capture()

    is_equal = True
    for _ in range(NUM_REPLAYS):
        draw()
        graph.launch(stream)
        step(*others)
        is_equal &= all(bool((a == b).all()) for a, b in zip(outputs, others, strict=True))
    return is_equal


def main() -> int:
    try:
        import cupy
    except ImportError:
        cupy = None
    if cupy is None or not cupy.cuda.is_available():
        sys.exit("needs a GPU that CuPy can use: `python -m cupyflash info` says why there is none")
    with cupy.cuda.Stream(non_blocking=True) as stream:  # the default stream cannot be recorded
        is_equal = replays_are_equal(cupy, stream)
    print(f"{NUM_REPLAYS} replays on new contents: {'the same bits' if is_equal else 'NOT THE SAME BITS'} as calls")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
