"""Kinds of fault that users of attention kernels have met elsewhere, as far as no other file holds them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import check_backward, check_forward
from tests.backends import Backend, CupyBackend, gpu_is_there
from tests.cases import DTYPES, Case, assert_backward, assert_forward, make, parameters

Random = np.random.Generator

MANY_TILES = [
    Case("no mask", "a backward that skips tiles as a causal one may", batch=1, len_q=203, len_k=331),
    Case(
        "narrow band",
        "rows of one query tile whose first visited key tile is wholly hidden from them",
        batch=1,
        len_q=211,
        len_k=467,
        options={"window": (5, 7)},
    ),
    Case(
        "a band beside the corner",
        "the same for fewer queries than keys, aligned to the last one",
        batch=1,
        len_q=67,
        len_k=301,
        options={"window": (2, 0), "causal": True},
    ),
    Case("65,539 query heads on one", "a grid axis ends at 65,535", 1, 1, 2, heads_q=65_539, heads_kv=1, head_dim=4),
    Case("65,539 heads", "and dk's too", 1, 1, 2, heads_q=65_539, heads_kv=65_539, head_dim=4),
]


@pytest.mark.parametrize(("case", "dtype"), parameters(MANY_TILES))
def test_tiles_and_heads_beyond_the_usual(backend: Backend, case: Case, dtype: str, rng: Random) -> None:
    problem = make(case, dtype, rng)
    out, lse = assert_forward(backend, problem)
    assert_backward(backend, problem, out, lse)


def test_a_row_does_not_depend_on_how_many_there_are(backend: Backend, rng: Random) -> None:
    """66,001 batch rows give the bits that the first and the last hundred give alone, forward and backward."""
    q, k, v, dout = (rng.standard_normal((66_001, n, 1, 8)).astype(np.float32) for n in (1, 2, 2, 1))
    whole = _round_trip(backend, q, k, v, dout)
    for part in (slice(0, 100), slice(-100, None)):
        alone = _round_trip(backend, q[part], k[part], v[part], dout[part])
        for all_rows, some in zip(whole, alone, strict=True):
            assert all_rows[part].tobytes() == some.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_array_is_read_with_its_own_strides(backend: Backend, dtype: str, rng: Random) -> None:
    """Four arrays of one shape, no two of them alike in memory."""
    arrays = [rng.standard_normal((2, 71, 2, 32)).astype(DTYPES[dtype]) for _ in range(4)]
    memories = ("gaps", "every second", "reversed", "heads outside")
    for turn in range(4):
        q, k, v, dout = (
            _heads_outside(backend, array) if memory == "heads outside" else backend.put(array, memory)
            for array, memory in zip(arrays, memories[turn:] + memories[:turn], strict=True)
        )
        out, lse = cf.attn_fwd(q, k, v, causal=True)
        grads = cf.attn_bwd(q, k, v, _heads_outside(backend, backend.get(out)), lse, dout, causal=True)
        _judge(backend, arrays, (out, lse), grads, causal=True)


def test_q_k_and_v_may_be_slices_of_one_buffer(backend: Backend, rng: Random) -> None:
    packed = rng.standard_normal((2, 45, 3, 2, 32)).astype(np.float16)
    dout = rng.standard_normal((2, 45, 2, 32)).astype(np.float16)
    there = backend.put(packed)
    q, k, v = (there[:, :, n] for n in range(3))
    out, lse = cf.attn_fwd(q, k, v)
    grads = cf.attn_bwd(q, k, v, out, lse, backend.put(dout))
    _judge(backend, [*(packed[:, :, n] for n in range(3)), dout], (out, lse), grads)


@pytest.mark.parametrize("level", [-(2.0**13), -(2.0**20), -(2.0**30)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_of_very_low_scores_is_no_empty_row(backend: Backend, causal: bool, level: float, rng: Random) -> None:
    """One key takes all the weight, and is itself below what others use for a finite minus infinity."""
    best, length = 3, 150
    q = np.ones((1, 7, 2, 16), np.float32)
    k = np.full((1, length, 2, 16), 2 * level / 16, np.float32)
    k[:, best] /= 2
    v = rng.standard_normal(k.shape).astype(np.float32)
    out, lse = cf.attn_fwd(*map(backend.put, (q, k, v)), scale=1.0, causal=causal)
    check_forward(backend.get(out), backend.get(lse), q, k, v, scale=1.0, causal=causal)


def test_what_a_row_cannot_see_does_not_move_it(backend: Backend, rng: Random) -> None:
    """Not even through the soft cap, which would turn a masked -inf into a finite score."""
    q, k, v = (rng.standard_normal((1, 90, 2, 32)).astype(np.float32) for _ in range(3))
    attn = cf.Attention(causal=True, softcap=1.5)
    before = attn.fwd(*map(backend.put, (q, k, v)))
    k[:, 50:] *= 1000
    v[:, 50:] *= -1000
    after = attn.fwd(*map(backend.put, (q, k, v)))
    assert backend.get(before.out)[:, :50].tobytes() == backend.get(after.out)[:, :50].tobytes()
    assert backend.get(before.lse)[:, :, :50].tobytes() == backend.get(after.lse)[:, :, :50].tobytes()
    assert (backend.get(before.out)[:, 50:] != backend.get(after.out)[:, 50:]).any()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"scale": 0.4},
    {"scale": 1.7},
    {"causal": True},
    {"causal": "top-left"},
    {"window": (4, 0)},
    {"window": (6, 1)},
    {"window": (None, 3)},
    {"softcap": 0.9},
    {"softcap": 4.0},
    {"alibi_slopes": np.array([0.7, 0.2], np.float32)},
    {"alibi_slopes": np.array([0.1, 0.4], np.float32)},
    {"sink": np.array([1.5, -0.5], np.float32)},
    {"sink": np.array([-0.5, 2.5], np.float32)},
]


def test_no_setting_is_answered_with_another_ones_kernel(backend: Backend, rng: Random) -> None:
    """One shape, every setting after every neighbour in both orders, two dtypes taking turns."""
    shapes = [(2, 43, heads, 32) for heads in (2, 1, 1, 2)]
    data = {d: [rng.standard_normal(shape).astype(DTYPES[d]) for shape in shapes] for d in ("float16", "float32")}
    for setting in SETTINGS + SETTINGS[::-1]:
        for arrays in data.values():
            _run_and_judge(backend, arrays, setting)


@pytest.mark.parametrize("chunk", [19, 24])
def test_chunks_use_the_state_of_the_whole_row(backend: Backend, chunk: int, rng: Random) -> None:
    """Gradients of chunks add up to the whole; each chunk gets out, lse and dout as slices of the whole arrays."""
    length = 4 * chunk
    q, k, v, dout = (rng.standard_normal((2, length, heads, 32)).astype(np.float32) for heads in (4, 2, 2, 4))
    there = [backend.put(array) for array in (q, k, v, dout)]
    attn = cf.Attention(causal=True)
    out, lse = attn.fwd(*there[:3])
    total = [np.zeros(x.shape, np.float32) for x in (q, k, v)]
    parts = [slice(begin, begin + chunk) for begin in range(0, length, chunk)]
    for rows in parts:
        for keys in parts:
            q_part, k_part, v_part, dout_part = (x[:, y] for x, y in zip(there, (rows, keys, keys, rows), strict=True))
            state = out[:, rows], lse[:, :, rows]
            grads = attn.bwd(q_part, k_part, v_part, *state, dout_part, q_start=rows.start, k_start=keys.start)
            for sum_, grad, part in zip(total, grads, (rows, keys, keys), strict=True):
                sum_[:, part] += backend.get(grad)
    check_backward(tuple(total), q, k, v, dout, out=backend.get(out), lse=backend.get(lse), causal=True)


def test_threads_that_meet_in_a_first_call_get_their_own_results(backend: Backend, rng: Random) -> None:
    settings = SETTINGS[:8]
    problems = [[rng.standard_normal((1, 29 + n, 2, 24)).astype(np.float32) for _ in range(4)] for n in range(8)]
    barrier = Barrier(len(settings))

    def work(number: int) -> None:
        barrier.wait()
        _run_and_judge(backend, problems[number], settings[number])

    with ThreadPoolExecutor(len(settings)) as pool:
        list(pool.map(work, range(len(settings))))


# ------------------------------------------------------------------------------------------------ streams and graphs


@pytest.fixture
def gpu() -> CupyBackend:
    if not gpu_is_there():
        pytest.skip("no CUDA GPU")
    return CupyBackend()


@pytest.mark.gpu
def test_work_waits_for_what_is_on_the_current_stream(gpu: CupyBackend, rng: Random) -> None:
    """Inputs become right late on a stream that the default one does not wait for; two such streams are in flight."""
    host = [rng.standard_normal((1, 150, heads, 64)).astype(np.float16) for heads in (4, 2, 2, 4)]
    right = [gpu.put(array) for array in host]
    busy = gpu.xp.ones(2**26, np.float32)
    _run_and_judge(gpu, host, {"causal": True})  # compiles, so that below nothing waits on the host
    flights = []
    for _ in range(2):
        late = [gpu.poisoned(array.shape, array.dtype) for array in host]
        gpu.xp.cuda.Device().synchronize()
        with gpu.xp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(50):
                gpu.xp.sqrt(busy, out=busy)
            for array, value in zip(late, right, strict=True):
                array[...] = value
            q, k, v, dout = late
            out, lse = cf.attn_fwd(q, k, v, causal=True)
            flights.append((stream, (out, lse), cf.attn_bwd(q, k, v, out, lse, dout, causal=True)))
    for stream, state, grads in flights:
        with stream:
            _judge(gpu, host, state, grads, causal=True)


@pytest.mark.gpu
def test_a_recorded_graph_reads_its_inputs_anew(gpu: CupyBackend, rng: Random) -> None:
    shapes = [(2, 75, heads, 64) for heads in (4, 2, 2, 4)]
    q, k, v, dout = there = [gpu.put(rng.standard_normal(shape).astype(np.float16)) for shape in shapes]
    attn = cf.Attention(causal=True)
    out, lse = gpu.poisoned(q.shape, q.dtype), gpu.poisoned((2, 4, 75), np.float32)
    dq, dk, dv = (gpu.poisoned(array.shape, array.dtype) for array in (q, k, v))
    sizes = [attn.workspace_size(q, k, v, backward) for backward in (False, True)]
    forward_space, backward_space = (gpu.xp.empty(max(size, 1), np.uint8) for size in sizes)

    def step() -> None:
        attn.fwd(q, k, v, out=out, lse=lse, workspace=forward_space)
        attn.bwd(q, k, v, out, lse, dout, dq=dq, dk=dk, dv=dv, workspace=backward_space)

    with gpu.xp.cuda.Stream(non_blocking=True) as stream:
        step()  # compiles, which no recording may do
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for _ in range(2):
            host = [rng.standard_normal(shape).astype(np.float16) for shape in shapes]
            for array, value in zip(there, host, strict=True):
                array[...] = gpu.put(value)
            graph.launch(stream)
            _judge(gpu, host, (out, lse), (dq, dk, dv), causal=True)


# ------------------------------------------------------------------------------------------------ helpers


def _heads_outside(backend: Backend, array: np.ndarray) -> Any:
    """[B, N, H, D] in the memory of [B, H, N, D]."""
    return backend.put(np.ascontiguousarray(array.swapaxes(1, 2))).swapaxes(1, 2)


def _round_trip(backend: Backend, *arrays: np.ndarray) -> list[np.ndarray]:
    """out, lse and the gradients of q, k, v and dout."""
    q, k, v, dout = (backend.put(array) for array in arrays)
    out, lse = cf.attn_fwd(q, k, v)
    return [backend.get(x) for x in (out, lse, *cf.attn_bwd(q, k, v, out, lse, dout))]


def _run_and_judge(backend: Backend, arrays: list[np.ndarray], setting: dict[str, Any]) -> None:
    q, k, v, dout = (backend.put(array) for array in arrays)
    options = {name: backend.put(value) for name, value in setting.items()}
    out, lse = cf.attn_fwd(q, k, v, **options)
    _judge(backend, arrays, (out, lse), cf.attn_bwd(q, k, v, out, lse, dout, **options), **setting)


def _judge(backend: Backend, arrays: list[np.ndarray], state: tuple[Any, Any], grads: Any, **options: Any) -> None:
    """Forward and backward of q, k, v and dout against the reference."""
    q, k, v, dout = arrays
    out, lse = map(backend.get, state)
    check_forward(out, lse, q, k, v, name=str(options), **options)
    check_backward(tuple(map(backend.get, grads)), q, k, v, dout, out=out, lse=lse, name=str(options), **options)
