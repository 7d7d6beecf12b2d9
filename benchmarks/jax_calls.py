"""What going through XLA costs on a GPU: `python -m benchmarks.jax_calls --json FILE`.

A jitted call of `cupyflash.jax` and the plain call on CuPy arrays launch the same kernels on the same arrays, so that
only a copy, a wait or the host could make one slower. Inputs are 256 MiB each, once in long sequences and once in short
ones, where a copy would cost more than computing does. The two take turns, each many calls deep; results must be equal
in every bit before the clock runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy allocates beside it

import cupy
import jax
import jax.numpy as jnp

import cupyflash as cf
from benchmarks import stamp
from cupyflash.jax import attention

SHAPES = (4, 8192, 32, 128), (128, 256, 32, 128)  # of q, k and v: 256 MiB of bfloat16 each
OPTIONS: dict[str, Any] = {"causal": True, "deterministic": True}
MOST = 1.1  # of the plain call's time
ROUNDS, DEPTH = 7, 40  # so deep that the first call's way to the GPU, half a millisecond, hardly counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jax_calls", description="JAX beside CuPy.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row here as one line of JSON")
    options = parser.parse_args(arguments)
    rows = [row for shape in SHAPES for row in measure(shape)]
    for row in rows:
        print("{call} of {shape}: {jax_ms:.3f} ms, plain {plain_ms:.3f} ms, {ratio:.3f}, limit {limit}".format(**row))
    if options.json:
        records = [stamp.record(jax=jax.__version__), *rows]
        options.json.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return int(any(row["ratio"] > row["limit"] for row in rows))


def measure(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """A forward, and a forward and backward."""
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)]
    q, k, v, dout = (cupy.from_dlpack(array) for array in jax.block_until_ready(arrays))

    @jax.jit
    def forward(q: Any, k: Any, v: Any) -> Any:
        return tuple(attention(q, k, v, **OPTIONS))

    @jax.jit
    def step(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(lambda *qkv: attention(*qkv, **OPTIONS).out, q, k, v)
        return out, *back(dout)

    def plain_forward() -> Any:
        return cf.attn_fwd(q, k, v, **OPTIONS)

    def plain_step() -> Any:
        out, lse = plain_forward()
        return out, *cf.attn_bwd(q, k, v, out, lse, dout, **OPTIONS)

    pairs = {
        "forward": (lambda: forward(*arrays[:3]), plain_forward),
        "forward and backward": (lambda: step(*arrays), plain_step),
    }
    return [row(name, shape, *calls) for name, calls in pairs.items()]


def row(name: str, shape: tuple[int, ...], by_jax: Callable[[], Any], plain: Callable[[], Any]) -> dict[str, Any]:
    for ours, theirs in zip(by_jax(), plain(), strict=True):
        if not bool((cupy.from_dlpack(ours) == theirs).all()):
            raise AssertionError(f"{name} of {shape}: other bits than the plain call's")
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for taken, call in zip(times, (by_jax, plain), strict=True):
            taken.append(milliseconds(call))
    jax_ms, plain_ms = map(statistics.median, times)
    found = {"call": name, "shape": list(shape), "jax_ms": jax_ms, "plain_ms": plain_ms}
    return found | {"ratio": jax_ms / plain_ms, "limit": MOST}


def milliseconds(call: Callable[[], Any]) -> float:
    """Of one of DEPTH calls that are queued behind each other, by the host's clock."""
    result = jax.block_until_ready(call())
    cupy.cuda.Device().synchronize()
    begin = time.perf_counter()
    for _ in range(DEPTH):
        result = call()
    jax.block_until_ready(result)
    cupy.cuda.Device().synchronize()
    return (time.perf_counter() - begin) / DEPTH * 1e3


if __name__ == "__main__":
    sys.exit(main())
