"""Sequences that begin alike decode a token each: `python -m benchmarks.cascade --json FILE`.

As a cascade, which reads the shared keys once, beside a call on every sequence's keys written out, which is all that
other libraries have. Both are CUDA graphs where there is a GPU, so that launches count and the host does not. Results
are held to each other before the clock runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import torch

import cupyflash as cf
from benchmarks.cases import Case
from benchmarks.decode import DIM, HEADS_KV, HEADS_Q, LEAST_BYTES, Rotating
from benchmarks.run import add_common, save, times

SEQUENCES, SHARED, OWN = 64, 8192, 256  # keys of all sequences, and of each
LEAST = 8.0  # times as fast as with the keys written out
PACKED = cf.Attention(layout="thd", causal=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cascade", description="A shared prefix, attended once.")
    add_common(parser)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    row = measure(options.reps, torch.device(options.device))
    print(
        "{sequences} sequences, {shared:,} shared and {own:,} own keys: written out {flat_ms:.3f} ms, "
        "cascade {cascade_ms:.3f} ms: {speed:.1f} times as fast, {least:.0f} wanted".format(**row)
    )
    if options.json:
        save(options.json, [row], options.commit, torch.device(options.device))
    return int(row["speed"] < row["least"])


def measure(reps: int, device: Any) -> dict[str, Any]:
    def draw(*shape: int) -> Any:
        return torch.randn(shape, device=device).to(torch.bfloat16)

    def ends(*bounds: int) -> Any:
        return torch.tensor(bounds, dtype=torch.int32, device=device)

    q = draw(SEQUENCES, HEADS_Q, DIM)
    moved = 4 * HEADS_KV * DIM * (SHARED + SEQUENCES * OWN)  # bytes of keys and values that a cascade reads
    sets = [
        [[draw(keys, HEADS_KV, DIM) for _ in "kv"] for keys in (SHARED, SEQUENCES * OWN)]
        for _ in range(-(-LEAST_BYTES // moved))
    ]
    calls = []
    for shared, own in sets:
        levels = [
            cf.CascadeLevel(*shared, groups=[SEQUENCES], cu_seqlens_k=ends(0, SHARED), max_seqlen_k=SHARED),
            cf.CascadeLevel(*own, cu_seqlens_k=ends(*range(0, SEQUENCES * OWN + 1, OWN)), max_seqlen_k=OWN),
        ]
        calls.append(cascade(q, levels, ends(*range(SEQUENCES + 1))))
    whole = [
        torch.cat([one.expand(SEQUENCES, -1, -1, -1), each.unflatten(0, (SEQUENCES, OWN))], 1)
        for one, each in zip(*sets[-1], strict=True)
    ]
    flat = captured(lambda: cf.attn_fwd(q[:, None], *whole, causal=True)[0][:, 0], device)
    torch.testing.assert_close(calls[-1](), flat(), rtol=2**-7, atol=2e-3)
    case = Case("cascade", "", SEQUENCES, SHARED + OWN, HEADS_Q, HEADS_KV, DIM, is_causal=True)
    contestants = {name: Rotating(cycle(those), nullcontext) for name, those in (("flat", [flat]), ("cascade", calls))}
    measured = times(case, contestants, "forward", reps, device)
    taken = {name: Rotating.ms(quartiles) for name, quartiles in measured.items()}
    return {
        "sequences": SEQUENCES,
        "shared": SHARED,
        "own": OWN,
        "flat_ms": taken["flat"],
        "cascade_ms": taken["cascade"],
        "speed": taken["flat"] / taken["cascade"],
        "least": LEAST,
    }


def cascade(q: Any, levels: list[cf.CascadeLevel], ends: Any) -> Callable[[], Any]:
    def call() -> Any:
        return cf.attn_cascade(q, levels, attention=PACKED, cu_seqlens_q=ends, max_seqlen_q=1).out

    return captured(call, q.device)


def captured(call: Callable[[], Any], device: Any) -> Callable[[], Any]:
    """The call as a CUDA graph, which gives its result; on the CPU the call itself."""
    return Replay(call) if device.type == "cuda" else call


class Replay:
    """A CUDA graph of a call, and what it reads: a graph knows addresses, and keeps no array alive."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        call()  # compiles
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = call()

    def __call__(self) -> Any:
        self._graph.replay()
        return self._result


if __name__ == "__main__":
    sys.exit(main())
