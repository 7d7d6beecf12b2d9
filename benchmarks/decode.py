"""One query against long keys, beside torch's kernels and a copy: `python -m benchmarks.decode --json FILE`.

Such a call reads every key and value once and hardly multiplies, so its measure is their bytes over its time, as a
share of the rate of a copy. Keys and values are rotated through more memory than any L2 holds. All contestants take
turns in one process, ten calls a turn, one behind the other as those of a model's layers are; our results are held to
float32 arithmetic before the clock runs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupyflash as cf
from benchmarks.cases import Case
from benchmarks.run import add_common, ceilings, save, times

HEADS_Q, HEADS_KV, DIM = 32, 8, 128
BATCH_AND_KEYS = ((1, 131_072), (16, 8_192), (64, 8_192), (128, 2_048), (1, 8_192))
PAGE_SIZES = (64, 16)
LEAST_BYTES = 200 * 2**20  # of keys and values in rotation
CALLS = 10  # of a turn
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}


class Rotating(NamedTuple):
    """A contestant of `benchmarks.run.times`: CALLS of its calls at a time, on one set of arrays after the other."""

    calls: Any  # an endless iterator
    around: Callable[[], Any]

    def context(self) -> Any:
        return self.around()

    def forward(self) -> None:
        for _ in range(CALLS):
            next(self.calls)()

    @staticmethod
    def ms(quartiles: list[float]) -> float:
        """The median of one call."""
        return quartiles[1] / CALLS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description="Decoding beside a copy.")
    add_common(parser)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    copy = ceilings(device).get("copy_tb_s", math.nan)
    rows: list[dict[str, Any]] = []
    for batch, keys in BATCH_AND_KEYS:
        rows += measure(batch, keys, copy, options.reps, device)
    if options.json:
        save(options.json, rows, options.commit, device)
    return 0


def measure(batch: int, keys: int, copy: float, reps: int, device: Any) -> list[dict[str, Any]]:
    """Everybody's rate, and that over the copy's."""

    def draw(*shape: int) -> Any:
        return torch.randn(shape, device=device).to(torch.bfloat16)

    moved = 2 * batch * keys * HEADS_KV * DIM * 2
    q = draw(batch, 1, HEADS_Q, DIM)
    sets = [[draw(batch, keys, HEADS_KV, DIM) for _ in "kv"] for _ in range(-(-LEAST_BYTES // moved))]
    exact = torch.cat([reference(q[b], *(x[b] for x in sets[0])) for b in range(batch)])
    attention = cf.Attention()
    contestants: dict[str, Any] = {"cupyflash": prepared(attention, q, sets, {}, exact)}
    for page_size in PAGE_SIZES:
        pools = [[x.view(-1, page_size, HEADS_KV, DIM) for x in pair] for pair in sets]
        pages = torch.randperm(batch * keys // page_size, device=device, dtype=torch.int32)
        pools = [[pool[torch.argsort(pages)] for pool in pair] for pair in pools]  # page i of the keys is pages[i]
        table = {"block_table": pages.view(batch, -1)}
        table["seqused_k"] = torch.full((batch,), keys, device=device, dtype=torch.int32)
        contestants[f"cupyflash, pages of {page_size}"] = prepared(attention, q, pools, table, exact)
    for name, backend in PEERS.items():
        calls = [peer(q, *pair) for pair in sets]
        contestants[name] = Rotating(cycle(calls), lambda backend=backend: sdpa_kernel(backend))
    case = Case("decode", "", batch, keys, HEADS_Q, HEADS_KV, DIM, is_causal=False)
    rows = []
    for name, quartiles in times(case, contestants, "forward", reps, device).items():
        ms = Rotating.ms(quartiles)
        row = {"batch": batch, "keys": keys, "contestant": name, "ms": ms, "tb_s": moved / ms / 1e9}
        rows.append(row | {"of_copy": row["tb_s"] / copy})
        print(
            "B{batch} x {keys:6}  {contestant:26} {tb_s:.2f} TB/s  {of_copy:.2f} of a copy".format(**rows[-1]),
            flush=True,
        )
    return rows


def prepared(attention: cf.Attention, q: Any, sets: list[Any], arguments: dict[str, Any], exact: Any) -> Rotating:
    out = torch.full_like(q, torch.nan)
    calls = [attention.prepare(q, *pair, **arguments, out=out) for pair in sets]
    calls[0]()
    torch.testing.assert_close(out.float(), exact, rtol=2**-7, atol=2e-3)
    return Rotating(cycle(calls), nullcontext)


def peer(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    views = [x.transpose(1, 2) for x in (q, k, v)]
    return lambda: scaled_dot_product_attention(*views, enable_gqa=True)


def reference(q: Any, k: Any, v: Any) -> Any:
    """Of one row [1, H, D], in float32."""
    k, v = (x.float().repeat_interleave(HEADS_Q // HEADS_KV, 1) for x in (k, v))
    weights = torch.softmax(torch.einsum("qhd,khd->hqk", q.float(), k) / DIM**0.5, -1)
    return torch.einsum("hqk,khd->qhd", weights, v)[None]


if __name__ == "__main__":
    sys.exit(main())
