"""How near merging states comes to the rate of a copy: `python -m benchmarks.merge --json FILE`.

A merge reads every state once and writes the result once, so a copy of as many bytes is its ceiling. Each result is
held to float64 before the clock runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cupyflash as cf
from benchmarks.run import call_ms, ceilings, machine

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
    records: list[dict[str, Any]] = [{"machine": machine(options.commit)}]
    for dtype in (torch.bfloat16, torch.float32):
        for count in STATES:
            records.append(measure(count, dtype, copy, device))
            print("{merge}: {tb_s:.2f} TB/s, {of_copy:.2f} of a copy".format(**records[-1]))
    records.append({"ceilings": {"after": ceilings(device)}})
    if options.json:
        options.json.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return int(any(record.get("of_copy", 1) < LEAST_SHARE for record in records))


def measure(count: int, dtype: Any, copy: float, device: Any) -> dict[str, Any]:
    """One row: bytes over the median time of a merge of `count` states, and that over the copy's rate."""
    batch, length, heads, _ = SHAPE
    outs = [torch.randn(SHAPE, device=device).to(dtype) for _ in range(count)]
    lses = [2 * torch.randn(batch, heads, length, device=device) for _ in range(count)]
    merged: dict[str, Any] = {"out": torch.full_like(outs[0], torch.nan), "lse": torch.full_like(lses[0], torch.nan)}
    cf.merge_states(outs, lses, **merged)
    weights = torch.stack(lses).double().softmax(0).transpose(2, 3)[..., None]
    exact = sum(weight * out.double() for weight, out in zip(weights, outs, strict=True))
    torch.testing.assert_close(merged["out"].double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    moved = (count + 1) * (outs[0].nbytes + lses[0].nbytes)
    rate = moved / call_ms(lambda: cf.merge_states(outs, lses, **merged)) / 1e9
    name = f"{count} states, {str(dtype).removeprefix('torch.')}"
    return {"merge": name, "bytes": moved, "tb_s": rate, "of_copy": rate / copy}


if __name__ == "__main__":
    sys.exit(main())
