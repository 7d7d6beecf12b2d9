"""How near merging states comes to the rate of a copy: `python -m benchmarks.merge --json FILE`.

A merge reads every state once and writes the result once; its gradient reads the states, the result and the result's
gradient, and writes one gradient a state. A copy of as many bytes is the ceiling. Each result is held to float64 before
the clock runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cupyflash as cf
from benchmarks.run import call_ms, ceilings, save

SHAPE = (8, 8192, 16, 128)  # of a state's out, [B, N, H, D]: one is far larger than any L2
STATES = (2, 3, 8)
LEAST_SHARE = 0.85  # of the copy's rate


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merge", description="Merges beside a copy.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row here as one line of JSON")
    parser.add_argument("--commit", help="what to stamp where git does not know")
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    copy = ceilings(device)["copy_tb_s"]
    rows: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        for count in STATES:
            rows += measure(count, dtype, copy, device)
            for row in rows[-2:]:
                print("{merge}: {tb_s:.2f} TB/s, {of_copy:.2f} of a copy".format(**row))
    if options.json:
        save(options.json, rows, options.commit, device)
    return int(any(row["of_copy"] < LEAST_SHARE for row in rows))


def measure(count: int, dtype: Any, copy: float, device: Any) -> list[dict[str, Any]]:
    """Of `count` states, their merge and its gradient: bytes over the median time, and that over the copy's rate."""
    batch, length, heads, _ = SHAPE

    def draw() -> tuple[Any, Any]:
        return torch.randn(SHAPE, device=device).to(dtype), 2 * torch.randn(batch, heads, length, device=device)

    outs, lses = map(list, zip(*(draw() for _ in range(count)), strict=True))
    dout, dlse = draw()
    out, lse = torch.full_like(dout, torch.nan), torch.full_like(dlse, torch.nan)

    def merge() -> Any:
        return cf.merge_states(outs, lses, out=out, lse=lse)

    def differentiate() -> Any:
        return cf.merge_states_bwd(outs, lses, out, lse, dout, dlse)

    merge()
    weights = [_per_row(weight) for weight in torch.stack(lses).double().softmax(0)]
    exact = sum(weight * state.double() for weight, state in zip(weights, outs, strict=True))
    close: dict[str, Any] = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(out.double(), exact, **close)
    for weight, state, dout_s, dlse_s in zip(weights, outs, *differentiate(), strict=True):
        torch.testing.assert_close(dout_s.double(), weight * dout.double(), **close)
        inner = (dout.double() * (state.double() - out.double())).sum(-1, keepdim=True)
        torch.testing.assert_close(_per_row(dlse_s.double()), weight * (inner + _per_row(dlse)), rtol=1e-4, atol=1e-3)

    one, name = out.nbytes + lse.nbytes, f"{count} states, {str(dtype).removeprefix('torch.')}"
    rows = (name, merge, (count + 1) * one), (f"{name}, its gradient", differentiate, (2 * count + 2) * one)
    return [
        {"merge": what, "bytes": moved, "tb_s": (rate := moved / call_ms(call) / 1e9), "of_copy": rate / copy}
        for what, call, moved in rows
    ]


def _per_row(rows: Any) -> Any:
    """[B, H, N] as [B, N, H, 1]."""
    return rows.transpose(1, 2)[..., None]


if __name__ == "__main__":
    sys.exit(main())
