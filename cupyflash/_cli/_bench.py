"""`bench`: how fast this machine is, beside torch's attention where torch is installed."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyflash import _environment, _interop
from cupyflash._api import attn_bwd, attn_fwd
from cupyflash._check import FLOATS
from cupyflash._cli import _call, _picture, _say
from cupyflash._cli._say import UsageError
from cupyflash._errors import UnsupportedError
from cupyflash.testing import flops, time_gpu

OURS = "cupyflash"
PASSES = ("forward", "backward")
_ROUNDS = {"numpy": 7, "cuda": 30}
_DEFAULTS = {"numpy": ("float32", (256, 512, 1024)), "cuda": ("bfloat16", (1024, 2048, 4096, 8192))}


class Contestant(NamedTuple):
    """Two calls on arrays of its own, and what brings their results to the host as [B, N, H, D]."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    host: Callable[[Any], list[np.ndarray]]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="time forward and backward here, beside torch where it is installed")
    parser.add_argument("--backend", choices=_DEFAULTS, help="default: cuda where it runs, else numpy")
    parser.add_argument("--lengths", type=_call.ints("256,1024"), metavar="N,N", help="of queries and keys")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--heads", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--dim", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--dtype", choices=FLOATS, help="default: bfloat16 on cuda, else float32")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it too, as .png or .svg; needs matplotlib")
    _say.add_json(parser)
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    obstacle = "" if options.backend == "numpy" else _environment.why_no_cuda()
    if options.backend == "cuda" and obstacle:
        raise UnsupportedError(f"the CUDA backend does not run here: {obstacle}.")
    backend = options.backend or ("numpy" if obstacle else "cuda")
    usual_dtype, usual_lengths = _DEFAULTS[backend]
    dtype, lengths = options.dtype or usual_dtype, options.lengths or usual_lengths
    sizes = {"lengths": min(lengths), "batch": options.batch, "heads": options.heads, "dim": options.dim}
    for flag, value in sizes.items():
        if value < 1:
            raise UsageError(f"bench: `--{flag}` is {value}; 1 and more is accepted.")
    if options.plot is not None:
        _picture.require(options.plot)
    makers: dict[str, Any] = {OURS: _ours}
    if importlib.util.find_spec("torch") is not None:
        makers["torch SDPA"] = _sdpa
    rows: list[dict[str, Any]] = []
    with _say.Progress(len(lengths)) as progress:
        for length in lengths:
            shape = options.batch, length, options.heads, options.dim
            rows += _measured(makers, backend, shape, dtype, causal=options.causal)
            progress.step(f"N = {length}")
    found = {
        "backend": backend,
        "machine": {fact.label: fact.text for fact in _environment.facts()},
        "dtype": dtype,
        "batch": options.batch,
        "heads": options.heads,
        "head_dim": options.dim,
        "causal": options.causal,
        "runs": _ROUNDS[backend],
        "rows": rows,
    }
    if options.plot is not None:
        _picture.draw(found, _title(found), options.plot)
    _say.say(_table(found, [*makers]), found, as_json=options.json)
    return 0


def _title(found: dict[str, Any]) -> str:
    """What was measured, in one line."""
    mask = ", causal" if found["causal"] else ""
    sizes = f"batch {found['batch']}, {found['heads']} heads, head dim {found['head_dim']}{mask}"
    return f"{found['backend']} backend, {found['dtype']}, {sizes}"


def _measured(
    makers: dict[str, Any], backend: str, shape: tuple[int, ...], dtype: str, *, causal: bool
) -> list[dict[str, Any]]:
    """A row for each pass: milliseconds by contestant, and how far their results are from ours."""
    batch, length, heads, dim = shape
    drawn = np.random.default_rng(0).standard_normal((4, *shape), np.float32).astype(_interop.NUMPY_DTYPES[dtype])
    contestants = {name: make(drawn, backend, causal) for name, make in makers.items()}
    rows = []
    for one_pass in PASSES:
        calls = {name: getattr(contestant, one_pass) for name, contestant in contestants.items()}
        results = {name: contestants[name].host(call()) for name, call in calls.items()}
        work = flops(
            batch=batch,
            len_q=length,
            len_k=length,
            heads_q=heads,
            head_dim=dim,
            causal=causal,
            backward=one_pass == "backward",
        )
        rows.append(
            {
                "length": length,
                "pass": one_pass,
                "flops": work,
                "ms": _times(calls, backend),
                "apart": {name: _apart(results[OURS], theirs) for name, theirs in results.items() if name != OURS},
            }
        )
    return rows


def _times(calls: dict[str, Callable[[], Any]], backend: str) -> dict[str, dict[str, float]]:
    """Milliseconds by contestant; on the CPU they take turns, so that a slow minute of the machine's hits all."""
    rounds = _ROUNDS[backend]
    if backend == "cuda":
        timed = {name: time_gpu(call, repeats=rounds) for name, call in calls.items()}
        return {name: {"median": median, "spread": spread} for name, (median, spread) in timed.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - began))
    quartiles = {name: np.percentile(values, (25, 50, 75)) for name, values in times.items()}
    return {name: {"median": float(q[1]), "spread": float(q[2] - q[0])} for name, q in quartiles.items()}


def _apart(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest difference of two results, as a part of the largest value."""
    largest = max(float(np.abs(a).max()) for a in ours)
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True)) / largest


def _table(found: dict[str, Any], names: Sequence[str]) -> str:
    ours, *peers = names
    beside = [cell for peer in peers for cell in (f"{peer}, ms", "our speed", "apart")]
    lines = [["N", "pass", f"{ours}, ms", "GFLOP/s", *beside]]
    for row in found["rows"]:
        ms = row["ms"]
        cells = [f"{row['length']}", row["pass"], _ms(ms[ours]), f"{row['flops'] / ms[ours]['median'] / 1e6:.1f}"]
        for peer in peers:
            cells += [_ms(ms[peer]), f"{ms[peer]['median'] / ms[ours]['median']:.2f}", f"{row['apart'][peer]:.0e}"]
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    legend = f"{_title(found)}; medians of {found['runs']} runs ± the distance of their quartiles"
    remark = "our speed: as a share of theirs; apart: our results and theirs, as a share of the largest number"
    return "\n".join([legend, *table, remark if peers else "no peer: torch is not installed"])


def _ms(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ± {found['spread']:.2f}"


# Contestants.


def _ours(drawn: np.ndarray, backend: str, causal: bool) -> Contestant:
    xp: Any = np if backend == "numpy" else importlib.import_module("cupy")
    q, k, v, dout = (xp.asarray(array) for array in drawn)
    out, lse = attn_fwd(q, k, v, causal=causal)

    def host(results: Any) -> list[np.ndarray]:
        return [np.asarray(x if backend == "numpy" else x.get()).astype(np.float32) for x in results]

    return Contestant(
        lambda: attn_fwd(q, k, v, causal=causal)[:1],
        lambda: attn_bwd(q, k, v, out, lse, dout, causal=causal),
        host,
    )


def _sdpa(drawn: np.ndarray, backend: str, causal: bool) -> Contestant:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attention

    place = "cpu" if backend == "numpy" else "cuda"
    dtype = getattr(torch, drawn.dtype.name)
    wide = torch.from_numpy(drawn.astype(np.float64))
    q, k, v, dout = (x.to(place, dtype).transpose(1, 2).contiguous() for x in wide)
    leaves: list[Any] = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(leaves[0], leaves[1], leaves[2], is_causal=causal)

    def host(results: Any) -> list[np.ndarray]:
        return [x.detach().transpose(1, 2).float().cpu().numpy() for x in results]

    return Contestant(
        lambda: (attention(q, k, v, is_causal=causal),),
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        host,
    )
