"""What a call costs the host, in units of torch's own attention: `python -m benchmarks.host --json FILE`.

Calls so small that the GPU never holds one up, queued and not awaited, all kinds in turns. An operator that records a
graph is held to an empty one that records a graph too, and our forward beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import cupyflash as cf
from benchmarks.cases import Case
from benchmarks.features import Calls
from benchmarks.run import add_common, save, times
from cupyflash.torch import attention

CASE = Case("host", "", 1, 300, 2, 2, 64, is_causal=True, host=True)
SHORT = 100  # keys, whose backward is one kernel behind its preparation
# Of the time of torch's own forward.
LIMITS = {
    "forward, CuPy arrays": 1.5,
    "forward, torch tensors": 2.5,
    "forward, prepared": 0.6,
    "backward, CuPy arrays": 2.0,
    "short backward, CuPy arrays": 1.3,
    "torch operator": 2.7,
}
RECORDED, EMPTY = "torch operator, a graph recorded", "an empty operator, a graph recorded"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description="The host's time of tiny calls.")
    add_common(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    rows = measure(CASE, device, options.reps)
    for row in rows:
        print("{call}: {us:.1f} us, {ratio:.2f} of torch's own, limit {limit:.2f}".format(**row))
    if options.json:
        save(options.json, rows, options.commit, device)
    return int(any(row["ratio"] > row["limit"] for row in rows))


def measure(case: Case, device: Any, reps: int) -> list[dict[str, Any]]:
    found = _calls(case, device)
    taken = times(case, {name: Calls(call) for name, call in found.items()}, "forward", reps, device)
    us = {name: quartiles[1] * 1e3 for name, quartiles in taken.items()}
    unit = us.pop("torch's own")
    limits = LIMITS | {RECORDED: (us.pop(EMPTY) + us["forward, torch tensors"]) / unit}
    return [{"call": name, "us": us[name], "ratio": us[name] / unit, "limit": limits[name]} for name in us]


def _calls(case: Case, device: Any) -> dict[str, Callable[[], Any]]:
    def draw(length: int, **options: Any) -> Any:
        shape = case.batch, length, case.heads_q, case.head_dim
        return torch.randn(shape, device=device, dtype=torch.bfloat16, **options)

    q, k, v, dout = (draw(case.length) for _ in range(4))
    short = [draw(SHORT) for _ in range(4)]
    recorded = draw(case.length, requires_grad=True)
    plain = cf.Attention(causal=case.is_causal)
    flipped = [x.transpose(1, 2) for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Callable[[], Any]] = {
        "torch's own": lambda: theirs(*flipped, is_causal=case.is_causal),
        "forward, torch tensors": lambda: plain.fwd(q, k, v),
        "forward, prepared": plain.prepare(q, k, v),
        "torch operator": lambda: attention(q, k, v, causal=case.is_causal),
        RECORDED: lambda: attention(recorded, k, v, causal=case.is_causal),
        EMPTY: lambda: torch.ops.cupyflash_empty.attend.default(recorded, k, v),
    }
    if device.type == "cuda":
        import cupy

        for name, arrays in (("", (q, k, v, dout)), ("short ", short)):
            calls |= _on_cupy(name, plain, *map(cupy.from_dlpack, arrays))
    for call in calls.values():
        call()
    return calls


def _on_cupy(name: str, attention: cf.Attention, q: Any, k: Any, v: Any, dout: Any) -> dict[str, Callable[[], Any]]:
    out, lse = attention.fwd(q, k, v)
    forward = {} if name else {"forward, CuPy arrays": lambda: attention.fwd(q, k, v)}
    return {**forward, f"{name}backward, CuPy arrays": lambda: attention.bwd(q, k, v, out, lse, dout)}


# An operator that does nothing, registered as torch's documentation has it.
_library = torch.library.Library("cupyflash_empty", "DEF")
_library.define("attend(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
for _device in ("CPU", "CUDA"):
    _library.impl("attend", lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[:-1])), _device)
torch.library.register_autograd(
    "cupyflash_empty::attend",
    lambda ctx, *grads: (None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
    lib=_library,
)

if __name__ == "__main__":
    sys.exit(main())
