"""`python -m benchmarks.table` writes README's tables of what works where, and prints which kernels no GPU has run.

What NumPy does is tried, what CUDA does is asked of its planner, and what a GPU has run is read from the stored runs in
benchmarks/results, as far as they were made with the kernels and the backend as they now stand.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import cupyflash as cf
from benchmarks import stamp
from cupyflash._cuda.device import KNOWN
from cupyflash._cuda.plan import backward as plan_backward
from cupyflash._cuda.plan import forward as plan_forward

README = stamp.ROOT / "README.md"
NOT_RUN = stamp.RESULTS / "not-run.json"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
BACKEND = "backend"
PLANNED_FOR = KNOWN[90]


@dataclass(frozen=True)
class Feature:
    """One row: the options and arguments that ask for it, in both directions unless `backward` says otherwise."""

    label: str
    dtype: Any = np.float32
    head_dim: int = 32
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    forward_only: bool = False
    backward_only: bool = False


ROWS, HEADS_Q, HEADS_KV = 8, 4, 2
PACKED = {name: np.array([0, 3, ROWS], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
FEATURES = (
    Feature("float16", np.float16),
    Feature("bfloat16", ml_dtypes.bfloat16),
    Feature("float32"),
    Feature("float64", np.float64),
    Feature("head dims to 256", head_dim=256),
    Feature("head dims above 256", head_dim=264),
    Feature("causal, from either corner", options={"causal": True}),
    Feature("window", options={"window": (2, 1)}),
    Feature("softcap", options={"softcap": 10.0}),
    Feature("ALiBi", arguments={"alibi_slopes": np.ones(HEADS_Q, np.float32)}),
    Feature("sink and its gradient", arguments={"sink": np.ones(HEADS_Q, np.float32)}),
    Feature("bias and its gradient", arguments={"bias": np.ones((ROWS, ROWS), np.float32)}),
    Feature("dropout", options={"dropout_p": 0.1}, arguments={"seed": 1}),
    Feature("packed sequences", options={"layout": "thd"}, arguments=PACKED),
    Feature("positions of shards", options={"causal": True}, arguments={"q_start": 4, "k_start": 2}),
    Feature("live key lengths", arguments={"seqused_k": np.array([5], np.int32)}),
    Feature(
        "pages",
        arguments={"seqused_k": np.array([5], np.int32), "block_table": np.zeros((1, 1), np.int32)},
        forward_only=True,
    ),
    Feature("splits of the keys", options={"num_splits": 2}, forward_only=True),
    Feature("gradient of lse", arguments={"dlse": np.ones((1, HEADS_Q, ROWS), np.float32)}, backward_only=True),
    Feature("bitwise repeatable gradients", options={"deterministic": True}, backward_only=True),
)


def main(arguments: list[str]) -> int:
    """Write the tables, or with --check only compare them."""
    for entry in not_run():
        print(said(entry))
    text = README.read_text("utf-8")
    if between_markers(text) == render():
        return 0
    if "--check" in arguments:
        print("README's tables are out of date: run python -m benchmarks.table")
        return 1
    before, rest = text.split(BEGIN)
    README.write_text(f"{before}{BEGIN}{render()}{END}{rest.split(END)[1]}", "utf-8")
    return 0


def current_hashes() -> dict[str, str]:
    """The hash of every kernel, and under "backend" that of the Python around them."""
    hashes = {kernel: stamp.kernel_hash(kernel) for kernel in stamp.kernel_names()}
    return hashes | {BACKEND: stamp.backend_hash()}


def gpu_results() -> list[dict[str, Any]]:
    """The stored runs, one for each GPU and major version of CUDA."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(stamp.RESULTS.glob("gpu-tests-*.json"))]


def not_run() -> list[dict[str, str]]:
    """The kernels that no stored run has seen as they now stand, and tests that have changed since they failed in one:
    each `kernel` or `test` with date and reason."""
    return json.loads(NOT_RUN.read_text("utf-8"))


def excused(kind: str) -> set[str]:
    """The kernels, or the tests, of `not_run`."""
    return {entry[kind] for entry in not_run() if kind in entry}


def said(entry: dict[str, str]) -> str:
    return f"not run on a GPU: {entry.get('kernel') or entry['test']} since {entry['date']}: {entry['reason']}"


def ran_as_they_stand(now: dict[str, str], results: list[dict[str, Any]]) -> set[str]:
    """Which of the current hashes stand in some result."""
    return {name for name, digest in now.items() if any(digest == hashes(result).get(name) for result in results)}


def hashes(result: dict[str, Any]) -> dict[str, str]:
    return result["kernels"] | {BACKEND: result["backend"]}


def between_markers(text: str) -> str:
    return text.split(BEGIN)[1].split(END)[0]


def render() -> str:
    return "\n" + features_table() + "\n" + kernels_table() + "\n"


def features_table() -> str:
    lines = ["| | NumPy | CUDA forward | CUDA backward |", "|---|---|---|---|"]
    for feature in FEATURES:
        forward = "" if feature.backward_only else cuda_answer(feature, backward=False)
        backward = "" if feature.forward_only else cuda_answer(feature, backward=True)
        lines.append(f"| {feature.label} | yes | {forward} | {backward} |")
    return "\n".join(lines) + "\n"


def kernels_table() -> str:
    """Which GPU has run each kernel as it now stands."""
    now, results = current_hashes(), gpu_results()
    lines = ["| kernel | run on |", "|---|---|"]
    for kernel in stamp.kernel_names():
        runs = [
            f"{result['gpu']}, CUDA {stamp.cuda_of(result['machine'])}, {result['date']}"
            for result in results
            if hashes(result).get(kernel) == now[kernel]
        ]
        lines.append(f"| `{kernel}` | {'; '.join(runs) or 'compiled, not run'} |")
    return "\n".join(lines) + "\n"


def cuda_answer(feature: Feature, *, backward: bool) -> str:
    """What the CUDA planner says to the call, after NumPy has served it."""
    call = prepare(feature, backward=backward)
    call()
    try:
        (plan_backward if backward else plan_forward)(call.checked.judged.spec, PLANNED_FOR)
    except cf.UnsupportedError:
        return "no"
    return "yes"


def prepare(feature: Feature, *, backward: bool) -> Any:
    attention = cf.Attention(**feature.options)
    batch = () if attention.layout == "thd" else (1,)
    arguments = dict(feature.arguments)
    heads = (HEADS_Q, HEADS_KV, HEADS_KV)
    q, k, v = (np.ones((*batch, ROWS, number, feature.head_dim), feature.dtype) for number in heads)
    if backward:
        forward_arguments = {name: value for name, value in arguments.items() if name != "dlse"}
        out, lse = attention.fwd(q, k, v, **forward_arguments)
        arguments |= {"out": out, "lse": lse, "dout": np.ones_like(out)}
    return attention.prepare(q, k, v, backward, **arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
