"""What changes of scores cost, gradients in order, and packed sequences: `python -m benchmarks.features --json FILE`.

Each takes turns with a call of the same shape that is plain and dense. Before the clock runs its result is held to that
of the generic kernels, which the GPU suite holds to float64: out directly, gradients by their errors beside float32's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import cupyflash as cf
from benchmarks.cases import Case
from benchmarks.run import add_common, inputs, save, times

PLAIN = Case("plain", "what a feature is held to", 2, 8192, 16, 16, 128, is_causal=True)
PACKED_ROWS = (100, 4000)  # of a sequence


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    limits: tuple[float | None, float | None]  # of its time over plain's, forward and backward; None: it is not there
    options: dict[str, Any]
    arrays: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Calls:
    """A contestant."""

    forward: Callable[[], Any]
    backward: Callable[[], Any] | None = None

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.features", description="Features beside a plain call.")
    add_common(parser, reps=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    rows: list[dict[str, Any]] = []
    for row in measure(PLAIN, device, options.reps):
        print("{feature}: {ratio:.2f} of plain, limit {limit:.2f}".format(**row), flush=True)
        rows.append(row)
    if options.json:
        save(options.json, rows, options.commit, device)
    return int(any(row["ratio"] > row["limit"] for row in rows))


def measure(case: Case, device: Any, reps: int) -> Iterator[dict[str, Any]]:
    q, k, v, dout = inputs(case, device)
    arrays = {"q": q, "k": k, "v": v}
    plain = _calls({}, arrays, case, dout)
    for feature in features(case, device):
        both = feature.limits[1] is not None
        call = _calls(feature.options, {**arrays, **feature.arrays}, case, dout if both else None)
        for one_pass, limit in zip(("forward", "backward"), feature.limits, strict=True):
            if limit is not None:
                taken = times(case, {"plain": plain, "feature": call}, one_pass, reps, device)
                yield _record(f"{feature.name}, {one_pass}", limit, taken)
    lengths = packed_lengths(case)
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    rows = {name: x.flatten(0, 1)[: sum(lengths)].contiguous() for name, x in (("q", q), ("k", k), ("v", v))}
    packed = _calls({"layout": "thd"}, {**rows, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}, case)
    pairs = sum(n * (n + 1) / 2 for n in lengths) / (case.batch * case.length * (case.length + 1) / 2)
    name = f"packed, {min(lengths):,} to {max(lengths):,} rows, per visible pair"
    taken = times(case, {"plain": plain, "feature": packed}, "forward", reps, device)
    yield _record(name, 1 / 0.9, taken, pairs)


def features(case: Case, device: Any) -> Iterator[Feature]:
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device)

    yield Feature("softcap 30", (1.25, 1.3), {"softcap": 30.0}, {})
    yield Feature("ALiBi", (1.15, 1.15), {}, {"alibi_slopes": normal(case.heads_q).abs()})
    yield Feature("a sink", (1.15, 1.15), {}, {"sink": normal(case.heads_q)})
    yield Feature("dropout", (1.8, 1.8), {"dropout_p": 0.1}, {"seed": 1})
    yield Feature("gradients in order", (None, 1.08), {"deterministic": True}, {})
    yield Feature("gradients in float32", (None, 1.05), {"grad_dtype": "float32"}, {})
    for dtype in (torch.bfloat16, torch.float32):
        bias = normal(1, case.heads_q, case.length, case.length).to(dtype)
        name = f"a {str(dtype).removeprefix('torch.')} bias, the same in every batch row"
        yield Feature(name, (1.6, 1.6), {"bias_grad": False}, {"bias": bias})


def packed_lengths(case: Case) -> list[int]:
    """As many sequences as fit the rows of a batch, in no order."""
    generator = torch.Generator().manual_seed(1)
    low, high = (min(rows, case.length) for rows in PACKED_ROWS)
    lengths: list[int] = []
    while True:
        more = int(torch.randint(low, high + 1, (1,), generator=generator))
        if sum(lengths) + more > case.batch * case.length:
            return lengths
        lengths.append(more)


def _calls(options: dict[str, Any], arrays: dict[str, Any], case: Case, dout: Any = None) -> Calls:
    """Prepared, and right; without dout a forward alone."""
    attention = cf.Attention(causal=case.is_causal, **options)
    out, lse = attention.fwd(**arrays)
    forward = attention.prepare(**arrays, out=out, lse=lse)
    if out.is_cuda:
        torch.testing.assert_close(out, attention.fwd(**arrays, plan="fwd_generic").out, rtol=2**-6, atol=2**-6)
    if dout is None:
        return Calls(forward)
    saved = {"out": out, "lse": lse, "dout": dout}
    if out.is_cuda:
        wide: dict[str, Any] = {name: x.float() if torch.is_tensor(x) else x for name, x in arrays.items()}
        exactly = attention.replace(grad_dtype=None)
        wide_out, wide_lse = exactly.fwd(**wide)
        exact = exactly.bwd(**wide, out=wide_out, lse=wide_lse, dout=dout.float())
        both = (attention.bwd(**arrays, **saved, plan=plan) for plan in (None, "bwd_generic"))
        for mine, other, reference in zip(*both, exact, strict=True):
            error, usual = ((x.float() - reference).abs().max() for x in (mine, other))
            if not error <= 2 * usual:
                raise AssertionError(f"{options}: an error of {error:.3e}, where the generic kernels have {usual:.3e}")
    return Calls(forward, attention.prepare(**arrays, **saved, backward=True))


def _record(name: str, limit: float, times_ms: dict[str, list[float]], work: float = 1.0) -> dict[str, Any]:
    """`work`: of the feature's call, plain's being 1."""
    ratio = times_ms["feature"][1] / times_ms["plain"][1] / work
    return {"feature": name, "times_ms": times_ms, "ratio": ratio, "limit": limit}


if __name__ == "__main__":
    sys.exit(main())
