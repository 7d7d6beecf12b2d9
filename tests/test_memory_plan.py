"""The plan's bytes are those of real arrays, its traffic that of a kernel's loops walked one element at a time."""

from __future__ import annotations

import csv
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import flops
from tests.cases import DTYPES

Random = np.random.Generator


@pytest.mark.parametrize(("length", "probabilities"), [(8192, 4 * 2**30), (32_768, 64 * 2**30)])
def test_lse_is_small_beside_p(length: int, probabilities: int) -> None:
    plan = cf.memory_plan((1, length, 32, 128), (1, length, 32, 128))
    assert plan.lse_bytes == 128 * length
    assert plan.probabilities_bytes == probabilities
    assert plan.standard_saved_bytes - plan.saved_bytes == probabilities - plan.out_bytes - plan.lse_bytes


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_saved_bytes_are_those_of_the_arrays(layout: str, dtype: str, rng: Random) -> None:
    shapes = {
        "bshd": ((2, 33, 6, 40), (2, 65, 3, 40), (2, 65, 3, 24)),
        "bhsd": ((2, 6, 33, 40), (2, 3, 65, 40), (2, 3, 65, 24)),
        "thd": ((66, 6, 40), (130, 3, 40), (130, 3, 24)),
    }[layout]
    q, k, v = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
    offsets = {}
    if layout == "thd":
        offsets = {"cu_seqlens_q": np.array([0, 20, 66]), "cu_seqlens_k": np.array([0, 100, 130])}
    out, lse = cf.attn_fwd(q, k, v, layout=layout, **offsets)
    grads = cf.attn_bwd(q, k, v, out, lse, out, layout=layout, **offsets)
    plan = cf.memory_plan(*shapes, dtype=dtype, layout=layout, **offsets)
    assert plan.saved_bytes == sum(array.nbytes for array in (q, k, v, out, lse))
    assert plan.forward_allocated_bytes == out.nbytes + lse.nbytes
    assert plan.backward_allocated_bytes - plan.workspace_bytes == sum(grad.nbytes for grad in grads)
    pairs = 20 * 100 + 46 * 30 if layout == "thd" else 2 * 33 * 65
    assert plan.probabilities_bytes == 6 * pairs * q.itemsize


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top-left", "window": (9, None)}])
def test_products_are_counted_by_the_one_function(options: dict[str, Any]) -> None:
    shapes = (2, 100, 6, 48), (2, 130, 2, 48), (2, 130, 2, 80)
    sizes = {"batch": 2, "len_q": 100, "len_k": 130, "heads_q": 6, "head_dim": 48}
    plan = cf.memory_plan(*shapes, **options)
    assert (plan.forward_gemms, plan.backward_gemms, plan.recomputed_gemms) == (2, 5, 1)
    assert plan.forward_flops == flops(**sizes, head_dim_v=80, **options)
    assert plan.backward_flops == flops(**sizes, head_dim_v=80, backward=True, **options)
    assert plan.recomputed_flops == flops(**sizes, head_dim_v=0, **options)
    assert plan.standard_forward_flops == flops(**sizes, head_dim_v=80)  # hidden pairs too
    assert plan.standard_backward_flops == 2 * plan.standard_forward_flops
    ordered = cf.memory_plan(*shapes, deterministic=True, **options)
    assert (ordered.backward_gemms, ordered.recomputed_gemms) == (5, 1)
    repeated = cf.memory_plan(*shapes, deterministic=True, arch=80, **options)
    assert (repeated.backward_gemms, repeated.recomputed_gemms) == (7, 3)
    assert repeated.backward_flops - plan.backward_flops == plan.forward_flops


def _walked(
    length_q: int, length_k: int, low: int, high: int, widths: tuple[int, int], tile: int, key_tile: int, key_steps: int
) -> tuple[int, int, int, int]:
    """Elements of q and keys that a query tile a block reads, elements that a key tile a block reads, and its steps."""

    def sees(i: int, j: int) -> bool:
        return i + low <= j <= i + high

    def span(found: list[int]) -> int:
        return found[-1] - found[0] + 1 if found else 0

    both = sum(widths)
    forward = backward = keys_read = steps = 0
    for begin in range(0, length_q, tile):
        rows = range(begin, min(begin + tile, length_q))
        keys = span([j for j in range(length_k) if any(sees(i, j) for i in rows)])
        forward += (len(rows) * widths[0] if keys else 0) + keys * both
    for begin in range(0, length_k, key_tile):
        keys = range(begin, min(begin + key_tile, length_k))
        rows = [i for i in range(length_q) if any(sees(i, j) for j in keys)]
        backward += span(rows) * both
        steps += len({i // key_steps for i in rows})
        keys_read += sum(any(sees(i, j) for i in range(length_q)) for j in keys) * both
    return forward, backward, keys_read, steps


@pytest.mark.parametrize(
    ("lengths", "options", "band"),
    [
        ((301, 205), {}, (-1000, 1000)),
        ((205, 301), {"causal": True}, (-1000, 96)),
        ((301, 205), {"causal": "top-left"}, (-1000, 0)),
        ((301, 333), {"window": (17, 5)}, (32 - 17, 32 + 5)),
        ((100, 700), {"causal": "top-left"}, (-1000, 0)),
    ],
)
def test_traffic_is_what_the_loops_read_and_write(
    lengths: tuple[int, int], options: dict[str, Any], band: tuple[int, int]
) -> None:
    len_q, len_k = lengths
    q_shape, k_shape, v_shape = (2, len_q, 6, 40), (2, len_k, 3, 40), (2, len_k, 3, 24)
    plan = cf.memory_plan(q_shape, k_shape, v_shape, **options)
    tiles = _tiles(q_shape, k_shape, v_shape, options)
    forward, backward, keys_read, steps = _walked(len_q, len_k, *band, (40, 24), *tiles[:3])
    assert plan.forward_traffic_bytes == 12 * (2 * forward + len_q * (24 * 2 + 4))
    main = 12 * (2 * backward + steps * tiles[2] * (8 + 4 * tiles[3])) + 6 * 2 * keys_read
    written = plan.q_bytes + plan.k_bytes + plan.v_bytes
    has_sums = len_k > 256  # else they are not zeroed, and the main kernel brings them home
    sums = 0 if has_sums else 12 * -(-len_q // 128) * 128 * tiles[3] * 4
    preprocess = 2 * plan.out_bytes + plan.lse_bytes + plan.workspace_bytes - sums
    finish = 12 * -(-len_q // 16) * 16 * 48 * 4 if has_sums else 0
    assert plan.backward_traffic_bytes == preprocess + main + finish + written


def _tiles(q_shape: Any, k_shape: Any, v_shape: Any, options: dict[str, Any]) -> tuple[int, int, int, int]:
    """The forward's query tile; the backward's key tile, query tile and head-dim tile, on the architecture of 90."""
    from cupyflash import _memory
    from cupyflash._cuda.device import KNOWN
    from cupyflash._cuda.plan import backward, forward

    arrays = _memory._arrays(q_shape, k_shape, v_shape, "bfloat16", None, None)
    attention = cf.Attention(**options)
    fwd, bwd = (_memory.judged_of("memory_plan", attention, arrays, backward=flag).spec for flag in (False, True))
    main = backward(bwd, KNOWN[90]).main.constants
    return forward(fwd, KNOWN[90]).constants.query_tile, main.key_tile, main.query_tile, main.head_dim


def test_traffic_grows_as_the_theory_says() -> None:
    """N d + N^2 where P is stored; N^2 d^2 / M in tiles, of which a larger head dim has smaller ones."""
    short, long = (cf.memory_plan((1, n, 4, 128), (1, n, 4, 128)) for n in (8192, 16_384))
    narrow, wide = (cf.memory_plan((1, 8192, 4, dim), (1, 8192, 4, dim)) for dim in (64, 256))
    for name in ("forward_traffic_bytes", "backward_traffic_bytes", "standard_forward_traffic_bytes"):
        assert 3.8 < getattr(long, name) / getattr(short, name) <= 4
    assert wide.standard_forward_traffic_bytes < 1.1 * short.standard_forward_traffic_bytes
    assert wide.backward_traffic_bytes > 5 * narrow.backward_traffic_bytes
    for plan in (short, long, wide):
        assert plan.least_forward_traffic_bytes < plan.forward_traffic_bytes
        assert plan.least_backward_traffic_bytes < plan.backward_traffic_bytes
    for plan in (short, long):
        assert plan.forward_traffic_bytes < plan.standard_forward_traffic_bytes
        assert plan.backward_traffic_bytes < plan.standard_backward_traffic_bytes


def test_a_plan_is_frozen_and_prints_what_it_holds() -> None:
    plan = cf.memory_plan((1, 8192, 32, 128), (1, 8192, 32, 128))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.dtype = "float16"  # pyright: ignore[reportAttributeAccessIssue]
    text = str(plan)
    for shown in ("[1, 8192, 32, 128]", "1.0 MiB", "4.0 GiB", "5 (1 recomputed)", "sm_90"):
        assert shown in text


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (((1, 8, 4, 16), (1, 8, 3, 16)), {}, ValueError, "`k` has 3 heads"),
        (((1, 8, 4, -1), (1, 8, 4, 16)), {}, ValueError, "`q_shape`"),
        (((1, 8, 4, 16), 5), {}, ValueError, "`k_shape`"),
        (((8, 4, 16), (8, 4, 16)), {"layout": "thd"}, ValueError, "`cu_seqlens_q`"),
        (((1, 8, 4, 16), (1, 8, 4, 16)), {"dtype": "int8"}, TypeError, "`dtype`"),
        (((1, 8, 4, 16), (1, 8, 4, 16)), {"dtype": None}, TypeError, "`dtype`"),
        (((1, 8, 4, 16), (1, 8, 4, 16)), {"arch": 70}, ValueError, "`arch` is 70"),
        (((1, 8, 4, 320), (1, 8, 4, 320)), {}, cf.UnsupportedError, "320"),
    ],
)
def test_refusals_name_the_argument(
    arguments: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cf.memory_plan(*arguments, **options)


def test_planning_asks_no_gpu_and_no_framework() -> None:
    code = """
import sys
import cupyflash as cf
cf.memory_plan((1, 8192, 32, 128), (1, 8192, 32, 128))
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not {"cupy", "torch", "jax"} & set(done.stdout.split())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "dtype": "float32"},
        {"deterministic": True},
        {"out_dtype": "float32", "grad_dtype": "float32"},
        {"layout": "thd", "cu_seqlens_q": [0, 1000, 2048], "cu_seqlens_k": [0, 24, 2048]},
    ],
    ids=["plain", "causal", "deterministic", "wide", "packed"],
)
def test_the_gpu_allocates_what_the_plan_says(options: dict[str, Any]) -> None:
    """In a pool of its own, which grows by each allocation and never shrinks: its size is the peak."""
    cupy = pytest.importorskip("cupy")
    from tests.backends import gpu_is_there

    if not gpu_is_there():
        pytest.skip("no CUDA GPU")
    layout = options.get("layout", "bshd")
    shape = (2048, 8, 64) if layout == "thd" else (2, 1024, 8, 64)
    arch = int(cupy.cuda.Device().compute_capability)
    plan = cf.memory_plan(shape, shape, arch=arch, **options)
    call = {name: cupy.asarray(value) if name.startswith("cu_") else value for name, value in options.items()}
    dtype = DTYPES[call.pop("dtype", "bfloat16")]
    q, k, v = (cupy.random.standard_normal(shape, dtype=np.float32).astype(dtype) for _ in range(3))

    def peak(run: Any) -> tuple[int, Any]:
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            results = run()
            return pool.total_bytes(), results

    forward, (out, lse) = peak(lambda: cf.attn_fwd(q, k, v, **call))
    backward, grads = peak(lambda: cf.attn_bwd(q, k, v, out, lse, out, **call))
    assert plan.saved_bytes == sum(array.nbytes for array in (q, k, v, out, lse))
    assert plan.backward_allocated_bytes - plan.workspace_bytes == sum(grad.nbytes for grad in grads)
    assert forward == plan.forward_allocated_bytes
    assert backward == -(-plan.backward_allocated_bytes // 512) * 512  # the pool's unit


PROFILED = """
import cupy, numpy as np
import cupyflash as cf
q, k, v, dout = (cupy.random.standard_normal({shape}, dtype=np.float32).astype(np.float16) for _ in range(4))
attention = cf.Attention(causal={causal}, deterministic={deterministic})
for _ in range(3):
    attention.bwd(q, k, v, *attention.fwd(q, k, v), dout)
cupy.cuda.get_current_stream().synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"deterministic": True}], ids=["full", "causal", "in order"])
def test_dram_sees_the_least_traffic(options: dict[str, bool]) -> None:
    """Within a fifth of the profiler's counters: L2 catches second accesses, and keeps the last writes to itself.

    The counters are the device's, so of three runs the one that others disturbed least counts.
    """
    from tests.backends import gpu_is_there

    ncu = shutil.which("ncu")
    if not gpu_is_there():
        pytest.skip("no CUDA GPU")
    if ncu is None:
        pytest.skip("no profiler: ncu is not on the path")
    shape = (8, 4096, 16, 128)
    code = PROFILED.format(shape=shape, **{"causal": False, "deterministic": False} | options)
    metrics = "dram__bytes_read.sum,dram__bytes_write.sum"
    command = [ncu, "--clock-control", "none", "--metrics", metrics, "--csv", "--page", "raw", "--print-units", "base"]
    command += ["-k", "regex:^(fwd|bwd)_", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[1])
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
    if not rows:
        pytest.skip(f"the profiler gave no counters: {(done.stdout + done.stderr).strip()[-200:]}")
    seen: dict[str, float] = {}
    for row in rows[1:]:  # the first names the units
        moved = sum(float(row[name].replace(",", "")) for name in metrics.split(","))
        seen[row["Kernel Name"]] = min(moved, seen.get(row["Kernel Name"], moved))
    forward, backward = (sum(seen[name] for name in seen if name.startswith(pass_)) for pass_ in ("fwd", "bwd"))
    plan = cf.memory_plan(shape, shape, dtype="float16", **options)
    assert forward == pytest.approx(plan.least_forward_traffic_bytes, rel=0.2)
    assert backward == pytest.approx(plan.least_backward_traffic_bytes, rel=0.2)
