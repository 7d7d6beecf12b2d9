"""compute-sanitizer over a small suite of calls: `python -m tests.sanitize` on a machine with a GPU.

Each tool watches the suite in a process of its own. What they say, a refusal to run included, is written to
benchmarks/results/sanitizer-<gpu>-cuda-<major>.json beside the hashes of the kernels that they watched.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import cupyflash as cf
from benchmarks import stamp
from tests.cases import DTYPES

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
TOOL_SECONDS = 500
SHAPES = ((128, 128, 64), (65, 131, 57), (1, 33, 64), (150, 150, 128))
OF_16_BITS = ((400, 390, 64), (330, 330, 128), (90, 100, 128), (200, 260, 256))  # for kernels with rings of stages
ERRORS_FOUND = 99  # the exit code that is asked of a tool
SUITE = (sys.executable, "-m", "tests.sanitize", "--suite")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description="compute-sanitizer over our kernels.")
    parser.add_argument("--suite", nargs="+", choices=DTYPES, help="only make the calls that the tools watch")
    options = parser.parse_args(arguments)
    if options.suite:
        suite(options.suite)
        return 0
    with ThreadPoolExecutor() as pool:  # of subprocesses
        compiled = pool.map(lambda dtype: subprocess.run((*SUITE, dtype), check=True), DTYPES)
        list(compiled)  # no tool need watch the compiler
        verdicts = dict(zip(TOOLS, pool.map(verdict, TOOLS), strict=True))
    hashes = {kernel: stamp.kernel_hash(kernel) for kernel in stamp.kernel_names()}
    record = stamp.record(kernels=hashes, tools=verdicts)
    path = stamp.result_file("sanitizer", record["machine"])
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    for tool, word in verdicts.items():
        print(f"{tool}: {word}")
    return int(any(word != "clean" for word in verdicts.values()))


def verdict(tool: str) -> str:
    """clean, or what the tool found or why it did not run."""
    command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", str(ERRORS_FOUND), "--print-limit", "3")
    try:
        done = subprocess.run((*command, *SUITE, *DTYPES), capture_output=True, text=True, timeout=TOOL_SECONDS)
    except OSError as error:
        return f"did not run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"did not end within {TOOL_SECONDS} s"
    lines = (done.stdout + done.stderr).splitlines()
    said = [line.removeprefix("=========").strip() for line in lines if line.startswith("=========")]
    summaries = [line for line in said if "SUMMARY" in line]
    is_quiet = not any(line.startswith(("Error", "Warning", "Internal")) for line in said)
    is_zero = bool(summaries) and all(re.search(r": 0 (errors|hazards)", line) for line in summaries)
    if done.returncode == 0 and is_quiet and is_zero:
        return "clean"
    return f"exit {done.returncode}: " + " | ".join([*said[:12], *summaries, *([] if said else lines[-3:])])


def suite(dtypes: Sequence[str]) -> None:
    """Every kernel: ragged tiles, grouped heads, every feature, packed rows, both ways to sum dq, merges, pages.

    The longer rows, and the many short ones, take every place in shared memory more than once.
    """
    import cupy

    cupy.cuda.set_allocator(None)  # an allocation each: nothing hides in a pool
    rng = np.random.default_rng()

    def draw(dtype: Any, *shape: int) -> Any:
        return cupy.asarray(rng.standard_normal(shape).astype(np.float32).astype(dtype))

    def differentiate(attention: cf.Attention, q: Any, k: Any, v: Any, dout: Any, **given: Any) -> None:
        # initcheck does not see what the copy engine writes: NaNs stand there before, and none may be left.
        out, lse = attention.fwd(q, k, v, out=cupy.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype), **given)
        results = [out]
        for deterministic in (False, True):
            asked = attention.replace(deterministic=deterministic)
            workspace = cupy.full(asked.workspace_size(q, k, v, backward=True, **given), 0xFF, np.uint8)
            results += asked.bwd(q, k, v, out, lse, dout, workspace=workspace, **given)
        assert all(bool(cupy.isfinite(result.astype(np.float32)).all()) for result in results)

    for name in dtypes:
        dtype, statistic = DTYPES[name], np.float64 if name == "float64" else np.float32
        is_narrow = dtype.itemsize == 2
        for len_q, len_k, dim in SHAPES + OF_16_BITS * is_narrow:
            q, k, v, dout = (
                draw(dtype, 2, length, heads, dim) for length, heads in ((len_q, 4), (len_k, 2), (len_k, 2), (len_q, 4))
            )
            differentiate(cf.Attention(causal=True), q, k, v, dout)
            saved = cf.attn_fwd(q, k, v, causal=True, plan="fwd_generic")  # also where the GPU has others
            cf.attn_bwd(q, k, v, *saved, dout, causal=True, plan="bwd_generic")
        if is_narrow:
            q, k, v = (draw(dtype, 120, 40, heads, 64) for heads in (8, 2, 2))
            cf.attn_fwd(q, k, v, causal=True)
        packed = draw(dtype, 2, 150, 8, 128)  # q, k and v in one array, read backwards and once for all batches
        q, k = packed[:, ::-1, :4], packed[:, :, 4:6]
        v = cupy.broadcast_to(packed[:1, :, 6:], k.shape)
        dout = draw(dtype, *q.shape)
        differentiate(cf.Attention(causal=True), q, k, v, dout)
        given = {"bias": draw(dtype, 1, 4, 1, 150), "alibi_slopes": draw(statistic, 4), "sink": draw(statistic, 4)}
        differentiate(cf.Attention(window=(9, 2), softcap=2.0, dropout_p=0.2), q, k, v, dout, **given, seed=3)
        offsets = cupy.asarray(np.array([0, 33, 33, 90], np.int32))
        q, k, v, dout = (draw(dtype, 100, heads, 64) for heads in (4, 2, 2, 4))
        differentiate(
            cf.Attention(layout="thd", causal=True), q, k, v, dout, cu_seqlens_q=offsets, cu_seqlens_k=offsets
        )
        outs, lses = [draw(dtype, 1, 37, 2, 64) for _ in range(3)], [draw(statistic, 1, 2, 37) for _ in range(3)]
        cf.merge_states_bwd(outs, lses, *cf.merge_states(outs, lses), outs[0], lses[0])
        pools, rows = ([draw(dtype, *shape, dim) for dim in (64, 20)] for shape in ((9, 5, 3), (2, 11, 3)))
        table = cupy.asarray(np.array([[3, 8, 0, 7], [99, -1, 4, 2]], np.int32))  # the last rows of both have no slot
        used = cupy.asarray(np.array([22, 23], np.int32))
        cf.kv_append(*pools, *rows, block_table=table, seqused_k=used)
        q, k, v = draw(dtype, 2, 3, 6, 40), draw(dtype, 2, 300, 2, 40), draw(dtype, 2, 300, 2, 24)
        for splits in ({}, {"num_splits": 3}, {"split_len": 70}):
            cf.attn_fwd(q, k, v, causal=True, **splits)
        for length in (3, 80):
            cf.attn_fwd(draw(dtype, 2, length, 6, 64), pools[0], pools[0], block_table=table % 9, seqused_k=used)
    cupy.cuda.get_current_stream().synchronize()


if __name__ == "__main__":
    sys.exit(main())
