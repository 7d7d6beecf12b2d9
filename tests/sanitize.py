"""compute-sanitizer over a small suite of calls: `python -m tests.sanitize` on a machine with a GPU.

Each tool runs the suite in a process of its own. What they say, a refusal to run included, is written to
benchmarks/results/sanitizer-<gpu>.json beside the hashes of the kernels that they watched.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

import cupyflash as cf
from benchmarks import stamp
from cupyflash import _environment

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
TOOL_SECONDS = 300
ERRORS_FOUND = 99  # the exit code that is asked of a tool
DTYPES: tuple[Any, ...] = (np.dtype(ml_dtypes.bfloat16), np.float16, np.float32, np.float64)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=str(__doc__).splitlines()[0])
    parser.add_argument("--suite", action="store_true", help="only make the calls that the tools watch")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    options = parser.parse_args(arguments)
    if options.suite:
        suite()
        return 0
    facts = {fact.label: fact.text for fact in _environment.facts() if fact.label != "kernel cache"}  # a path
    suite()  # kernels are compiled here, so that no tool watches the compiler
    verdicts = {tool: verdict(tool) for tool in options.tools}
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": facts,
        "kernels": {kernel: stamp.kernel_hash(kernel) for kernel in stamp.kernel_names()},
        "tools": verdicts,
    }
    gpu = re.sub(r"[^a-z0-9]+", "-", facts["GPU"].split(" (")[0].lower()).strip("-")
    (stamp.RESULTS / f"sanitizer-{gpu}.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    for tool, word in verdicts.items():
        print(f"{tool}: {word}")
    return int(any(word != "clean" for word in verdicts.values()))


def verdict(tool: str) -> str:
    """clean, or what the tool found or why it did not run."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(ERRORS_FOUND), "--print-limit", "3"]
    command += [sys.executable, "-m", "tests.sanitize", "--suite"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS)
    except OSError as error:
        return f"did not run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"did not end within {TOOL_SECONDS} s"
    said = [
        line.removeprefix("=========").strip() for line in (done.stdout + done.stderr).splitlines() if "=====" in line
    ]
    summaries = [line for line in said if "SUMMARY" in line]
    if done.returncode == 0 and summaries and all(re.search(r": 0 (errors|hazards)", line) for line in summaries):
        return "clean"
    return f"exit {done.returncode}: " + " | ".join([*said[:12], *summaries])


def suite() -> None:
    """Every kernel in every dtype: whole and ragged tiles, grouped heads, every feature, both ways to sum dq."""
    import cupy

    cupy.cuda.set_allocator(None)  # an allocation each: nothing hides in a pool
    rng = np.random.default_rng()

    def draw(*shape: int, dtype: Any = np.float32) -> Any:
        return cupy.asarray(rng.standard_normal(shape).astype(np.float32).astype(dtype))

    def differentiate(attention: cf.Attention, q: Any, k: Any, v: Any, dout: Any, **given: Any) -> None:
        out, lse = attention.fwd(q, k, v, **given)
        for deterministic in (False, True):
            attention.replace(deterministic=deterministic).bwd(q, k, v, out, lse, dout, **given)

    for dtype in DTYPES:
        for len_q, len_k, dim, dim_v in ((128, 128, 64, 64), (65, 131, 40, 72), (1, 33, 128, 128)):
            q, dout = draw(2, len_q, 4, dim, dtype=dtype), draw(2, len_q, 4, dim_v, dtype=dtype)
            k, v = draw(2, len_k, 2, dim, dtype=dtype), draw(2, len_k, 2, dim_v, dtype=dtype)
            differentiate(cf.Attention(causal=True), q, k, v, dout)
        statistic = np.float64 if dtype == np.float64 else np.float32
        given = {"bias": draw(1, 4, 1, 33, dtype=dtype), "alibi_slopes": draw(4, dtype=statistic), "seed": 3}
        given["sink"] = draw(4, dtype=statistic)
        differentiate(cf.Attention(window=(9, 2), softcap=2.0, dropout_p=0.2), q, k, v, dout, **given)
        offsets = cupy.asarray(np.array([0, 33, 33, 90], np.int32))
        q, k, v, dout = (draw(100, heads, 64, dtype=dtype) for heads in (4, 2, 2, 4))
        packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        differentiate(cf.Attention(layout="thd", causal=True), q, k, v, dout, **packed)
        outs, lses = zip(
            *(cf.attn_fwd(*(draw(1, 37, 2, 64, dtype=dtype) for _ in range(3))) for _ in range(3)), strict=True
        )
        merged = cf.merge_states(list(outs), list(lses))
        cf.merge_states_bwd(list(outs), list(lses), *merged, *merged)
    cupy.cuda.get_current_stream().synchronize()


if __name__ == "__main__":
    sys.exit(main())
