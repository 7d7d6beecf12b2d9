"""New keys and values reach their slots bit for bit, and nothing else is written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import check_forward
from tests.backends import Backend, CupyBackend, NumpyBackend, gpu_is_there
from tests.cases import DTYPES

Random = np.random.Generator
HEADS, DIMS = 3, (20, 12)
WILD = 2**31 - 1


@dataclass
class Problem:
    """Pools [pages, page_size, H, D], and the new rows [n, H, D] of each sequence, of any bits."""

    pools: list[np.ndarray]  # of k and v
    new: list[list[np.ndarray]]  # of k and v, by sequence
    table: np.ndarray
    used: np.ndarray

    def arguments(
        self, backend: Backend, layout: str = "bshd", pools: str = "contiguous", rows: str = "contiguous"
    ) -> dict[str, Any]:
        """The call, its pools and rows in this memory."""
        join = np.concatenate if layout == "thd" else np.stack
        k, v = (join(parts) for parts in self.new)
        swapped = [array.swapaxes(1, 2) if layout == "bhsd" else array for array in (*self.pools, k, v)]
        memory = (pools, pools, rows, rows)
        arrays = [backend.put(np.ascontiguousarray(a), m) for a, m in zip(swapped, memory, strict=True)]
        call = dict(zip(("k_pages", "v_pages", "k", "v"), arrays, strict=True)) | {"layout": layout}
        call |= {"block_table": backend.put(self.table), "seqused_k": backend.put(self.used)}
        if layout == "thd":
            lengths = [len(part) for part in self.new[0]]
            call["cu_seqlens_k"] = backend.put(np.cumsum([0, *lengths]).astype(np.int32))
        return call

    def expected(self) -> list[np.ndarray]:
        """The contract's sentence as a loop; a row without a slot is left out."""
        pools = [pool.copy() for pool in self.pools]
        page_size = pools[0].shape[1]
        for pool, parts in zip(pools, self.new, strict=True):
            for b, part in enumerate(parts):
                for i, row in enumerate(part):
                    entry, slot = divmod(int(self.used[b]) - len(part) + i, page_size)
                    if 0 <= entry < self.table.shape[1] and 0 <= self.table[b, entry] < len(pool):
                        pool[self.table[b, entry], slot] = row
        return pools


def bits(rng: Random, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Every number, infinity and NaN that a dtype has."""
    itemsize = DTYPES[dtype].itemsize
    return rng.integers(0, 256, (*shape, itemsize), np.uint8).view(DTYPES[dtype])[..., 0]


def draw(
    rng: Random,
    new: Sequence[int] = (5, 5, 5),
    *,
    page_size: int = 16,
    dtype: str = "bfloat16",
    heads: int = HEADS,
    dims: tuple[int, int] = DIMS,
) -> Problem:
    """Sequences of up to 40 older keys each, whose pages are apart. The entries of dead pages are wild."""
    used = np.array([length + rng.integers(40) for length in new], np.int32)
    live = -(-used // page_size)
    spare = 3
    order = rng.permutation(int(live.sum()) + spare)
    table = np.full((len(new), int(live.max(initial=0)) + 1), WILD, np.int32)
    for b, (count, begin) in enumerate(zip(live, np.cumsum(live) - live, strict=True)):
        table[b, :count] = order[begin : begin + count]
    shapes = [(len(order), page_size, heads, dim) for dim in dims]
    return Problem(
        [bits(rng, shape, dtype) for shape in shapes],
        [[bits(rng, (length, heads, dim), dtype) for length in new] for dim in dims],
        table,
        used,
    )


def appended(backend: Backend, call: dict[str, Any]) -> list[np.ndarray]:
    """The pools behind the call, as [pages, page_size, H, D]."""
    assert cf.kv_append(**call) is None
    pools = [backend.get(call[name]) for name in ("k_pages", "v_pages")]
    return [pool.swapaxes(1, 2) if call["layout"] == "bhsd" else pool for pool in pools]


def same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for name, left, right in zip(("k_pages", "v_pages"), got, want, strict=True):
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes(), name


# ------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 128), (20, 12), (1, 3), (264, 6)])
def test_new_rows_reach_their_slots(
    backend: Backend, page_size: int, dtype: str, dims: tuple[int, int], rng: Random
) -> None:
    problem = draw(rng, (21, 21), page_size=page_size, dtype=dtype, dims=dims)
    same(appended(backend, problem.arguments(backend)), problem.expected())


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("pools", ["contiguous", "gaps", "every second", "reversed"])
@pytest.mark.parametrize("rows", ["contiguous", "gaps", "reversed", "transposed"])
def test_layouts_and_strides_change_nothing(backend: Backend, layout: str, pools: str, rows: str, rng: Random) -> None:
    problem = draw(rng, page_size=3, dims=(16, 8))
    same(appended(backend, problem.arguments(backend, layout, pools, rows)), problem.expected())


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ragged_sequences_some_without_new_rows(backend: Backend, dtype: Any, rng: Random) -> None:
    problem = draw(rng, (0, 7, 0, 0, 1, 33, 0), page_size=3)
    call = problem.arguments(backend, "thd")
    call["cu_seqlens_k"] = call["cu_seqlens_k"].astype(dtype)
    same(appended(backend, call), problem.expected())


def test_rows_behind_the_last_offset_are_not_written(backend: Backend, rng: Random) -> None:
    problem = draw(rng, (4, 2, 6))
    call = problem.arguments(backend, "thd")
    problem.new = [parts[:2] for parts in problem.new]
    call |= {name: call[name][:count] for name, count in (("cu_seqlens_k", 3), ("block_table", 2), ("seqused_k", 2))}
    same(appended(backend, call), problem.expected())


def test_many_sequences_of_one_row_each(backend: Backend, rng: Random) -> None:
    problem = draw(rng, (1,) * 301)
    for layout in ("bshd", "thd"):
        same(appended(backend, problem.arguments(backend, layout)), problem.expected())


def test_rows_that_fill_their_table_to_the_end(backend: Backend, rng: Random) -> None:
    problem = draw(rng, (40, 40), page_size=4)
    problem.used[:] = 40
    problem.table = np.arange(20, dtype=np.int32).reshape(2, 10)
    problem.pools = [bits(rng, (20, 4, HEADS, dim), "bfloat16") for dim in DIMS]
    same(appended(backend, problem.arguments(backend)), problem.expected())


def test_only_the_pages_of_new_keys_are_looked_at(backend: Backend, rng: Random) -> None:
    """Older pages may have been given away."""
    problem = draw(rng, (2, 2), page_size=4)
    problem.used[:] = 21, 22
    problem.table = np.array([[-1, WILD, -1, 99, 1, 0], [-1, -1, -1, -1, -1, 2]], np.int32)
    problem.pools = [bits(rng, (3, 4, HEADS, dim), "bfloat16") for dim in DIMS]
    same(appended(backend, problem.arguments(backend)), problem.expected())


def test_a_table_of_any_strides(backend: Backend, rng: Random) -> None:
    problem = draw(rng, page_size=3)
    for memory in ("reversed", "transposed"):
        call = problem.arguments(backend)
        call["block_table"] = backend.put(problem.table, memory)
        call["seqused_k"] = backend.put(np.repeat(problem.used, 2))[::2]
        same(appended(backend, call), problem.expected())


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("new", [(0, 0), ()])
def test_no_rows_write_nothing(backend: Backend, layout: str, new: tuple[int, ...], rng: Random) -> None:
    problem = draw(rng, (0, 0))
    call = problem.arguments(backend, layout)
    for name in ("block_table", "seqused_k"):
        call[name] = call[name][: len(new)]
    if layout == "thd":
        call["cu_seqlens_k"] = call["cu_seqlens_k"][: len(new) + 1]
    else:
        call |= {name: call[name][: len(new)] for name in ("k", "v")}
    same(appended(backend, call), problem.pools)


def test_nothing_beside_the_slots_is_written(backend: Backend, rng: Random) -> None:
    """The pools are the halves of one buffer, with guards around every axis."""
    problem = draw(rng, dims=(8, 8))
    pages, page_size, _, dim = problem.pools[0].shape
    whole = bits(rng, (pages + 2, 2, page_size + 2, HEADS + 2, dim + 8), "bfloat16")
    inner = (slice(1, -1), slice(1, -1), slice(1, -1), slice(None, -8))
    want = whole.copy()
    for at, pool in enumerate(problem.pools):
        whole[:, at][inner] = pool
    for at, pool in enumerate(problem.expected()):
        want[:, at][inner] = pool
    buffer = backend.put(whole)
    call = problem.arguments(backend) | {"k_pages": buffer[:, 0][inner], "v_pages": buffer[:, 1][inner]}
    cf.kv_append(**call)
    assert backend.get(buffer).tobytes() == want.tobytes()


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_chunks_and_single_steps_are_read_back_by_attention(backend: Backend, layout: str, rng: Random) -> None:
    """A prompt in two chunks, then token after token: attention over the pages is that over the keys in a row."""
    chunks, batch, page_size, heads_q, dim, dim_v = (13, 20, 1, 1, 1), 2, 16, 6, 24, 16
    shapes = [(batch, sum(chunks), heads, width) for heads, width in ((heads_q, dim), (HEADS, dim), (HEADS, dim_v))]
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    pools = [backend.poisoned((7, page_size, HEADS, width), np.float32) for width in (dim, dim_v)]
    table = rng.permutation(7)[:6].reshape(batch, 3).astype(np.int32)
    live = backend.put(np.zeros(batch, np.int32))
    pages = {"block_table": backend.put(table), "seqused_k": live, "layout": layout}
    for begin, end in itertools.pairwise(np.cumsum([0, *chunks])):
        step, of_q, of_k = [array[:, begin:end] for array in (q, k, v)], {}, {}
        if layout == "thd":
            step = [array.reshape(-1, *array.shape[2:]) for array in step]
            offsets = backend.put(np.arange(batch + 1, dtype=np.int32) * np.int32(end - begin))
            of_q, of_k = {"cu_seqlens_q": offsets}, {"cu_seqlens_k": offsets}
        q_new, k_new, v_new = map(backend.put, step)
        live += end - begin
        cf.kv_append(*pools, k_new, v_new, **pages, **of_k)
        out, lse = map(backend.get, cf.attn_fwd(q_new, *pools, causal=True, **pages, **of_q))
        if layout == "thd":
            out, lse = out.reshape(batch, -1, heads_q, dim_v), lse.reshape(heads_q, batch, -1).swapaxes(0, 1)
        check_forward(out, lse, q[:, begin:end], k[:, :end], v[:, :end], causal=True, name=f"keys to {end}")


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_values_without_a_slot_are_refused_before_anything_is_written(
    backend: Backend, layout: str, rng: Random
) -> None:
    problem = draw(rng, (3, 3), page_size=4)
    problem.used[:], problem.table = (9, 3), np.array([[0, 1, 2], [3, WILD, -1]], np.int32)
    problem.pools = [bits(rng, (4, 4, HEADS, dim), "bfloat16") for dim in DIMS]
    wrong: list[tuple[str, Any, str]] = [
        ("seqused_k", [9, 2], "`seqused_k` is 2 at index 1, and 3 new rows .*at least 3"),
        ("seqused_k", [-1, 3], "`seqused_k` is -1 at index 0; 0 to 12"),
        ("seqused_k", [13, 3], "`seqused_k` is 13 at index 0; 0 to 12"),
        ("block_table", [[0, 4, 2], [3, 0, 0]], r"`block_table` is 4 at \[0, 1\], a live page; 0 to 3"),
        ("block_table", [[0, 1, 2], [-1, 0, 0]], r"`block_table` is -1 at \[1, 0\], a live page; 0 to 3"),
    ]
    if layout == "thd":
        wrong += [
            ("cu_seqlens_k", [1, 3, 6], "`cu_seqlens_k` starts at 1"),
            ("cu_seqlens_k", [0, 4, 3], "`cu_seqlens_k` falls from 4 to 3"),
            ("cu_seqlens_k", [0, 3, 7], "`cu_seqlens_k` ends at 7"),
        ]
    for name, value, message in wrong:
        call = problem.arguments(backend, layout) | {name: backend.put(np.array(value, np.int32))}
        with pytest.raises(ValueError, match=f"kv_append: {message}"):
            cf.kv_append(**call, check=True)
        same([backend.get(call[pool]) for pool in ("k_pages", "v_pages")], problem.pools)
    call = problem.arguments(backend, layout)
    cf.kv_append(**call, check=True)
    same([backend.get(call[pool]) for pool in ("k_pages", "v_pages")], problem.expected())


def test_pools_that_share_memory_are_refused(rng: Random) -> None:
    problem = draw(rng, dims=(8, 8))
    call = problem.arguments(NumpyBackend())
    for name in ("v_pages", "k", "v"):
        flat = call["k_pages"].reshape(-1)[: call[name].size]
        with pytest.raises(ValueError, match=f"kv_append: `k_pages` overlaps `{name}`"):
            cf.kv_append(**call | {name: flat.reshape(call[name].shape)})


def test_torch_tensors_are_written_in_place(rng: Random) -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    problem = draw(rng, dtype="float16")
    call = problem.arguments(NumpyBackend())
    tensors = {name: torch.from_numpy(value) for name, value in call.items() if name != "layout"}
    for name in ("k_pages", "k"):
        with pytest.raises(TypeError, match=rf"kv_append: `{name}` requires grad .*detach"):
            cf.kv_append(**tensors | {name: tensors[name].clone().requires_grad_()})
    cf.kv_append(**tensors)
    same([tensors[name].numpy() for name in ("k_pages", "v_pages")], problem.expected())


# ------------------------------------------------------------------------------------------------ on a GPU


def array(cupy: Any, value: np.ndarray, shift: int = 0) -> Any:
    """A stand-in's array, `shift` bytes past a multiple of 256."""
    return cupy.ndarray(value, 0, cupy.at + shift)


@pytest.mark.parametrize(
    ("dtype", "dims", "shift", "copied"),
    [
        ("bfloat16", (64, 128), 0, 16),
        ("bfloat16", (64, 20), 0, 8),
        ("float16", (64, 64), 4, 4),
        ("float16", (3, 64), 0, 2),
        ("float32", (3, 5), 0, 4),
        ("float64", (3, 5), 0, 8),
    ],
)
def test_rows_are_copied_as_wide_as_they_are_aligned(
    fake_cuda: Any, dtype: str, dims: tuple[int, int], shift: int, copied: int, rng: Random
) -> None:
    problem = draw(rng, dtype=dtype, dims=dims)
    call = problem.arguments(NumpyBackend())
    call = {name: array(fake_cuda, value) if name != "layout" else value for name, value in call.items()}
    call["k"] = array(fake_cuda, problem.arguments(NumpyBackend())["k"], shift)
    for _ in range(2):
        cf.kv_append(**call)
    first, second = fake_cuda.launches
    assert first == second
    assert not fake_cuda.allocations
    kernel, _, constants = first.binary
    assert (kernel, constants.copy_bytes) == ("kv_append", copied)


def test_an_axis_beyond_32_bits_is_refused(fake_cuda: Any, rng: Random) -> None:
    call = draw(rng, (1,)).arguments(NumpyBackend())
    call |= {name: np.broadcast_to(call[name], (1, 2**30, *call[name].shape[2:])) for name in ("k", "v")}
    with pytest.raises(cf.UnsupportedError, match=r"kv_append: `k` has shape \[1, 1073741824, 3, 20\]"):
        cf.kv_append(**{name: array(fake_cuda, a) if name != "layout" else a for name, a in call.items()})


gpu = pytest.mark.skipif(not gpu_is_there(), reason="no CUDA GPU")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_wild_lengths_and_pages_write_nothing_but_the_right_slots(layout: str, rng: Random) -> None:
    cupy = CupyBackend()
    problem = draw(rng, (6,) * 9, page_size=4)
    problem.used[:6] = 0, 5, -1, WILD, -WILD - 1, problem.table.shape[1] * 4 + 2  # the second: its first row has no key
    problem.table[6:8] = np.resize([-1, WILD, -WILD - 1, len(problem.pools[0])], problem.table.shape[1])
    same(appended(cupy, problem.arguments(cupy, layout)), problem.expected())


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [[0, -5, 200], [9, 3, 15], [0, 2**40, 5], [5, 100, 4], [-3, 40, 2]])
def test_wild_offsets_write_to_live_slots_at_most(offsets: list[int], rng: Random) -> None:
    """Rows of the sequences that garbage names, where they have slots; guard pages on both sides stay as they are."""
    cupy = CupyBackend()
    problem = draw(rng, (20, 20), page_size=4)
    guarded = [bits(rng, (len(pool) + 2, *pool.shape[1:]), "bfloat16") for pool in problem.pools]
    call = problem.arguments(cupy, "thd")
    buffers = [cupy.put(pool) for pool in guarded]
    call |= {"k_pages": buffers[0][1:-1], "v_pages": buffers[1][1:-1]}
    cf.kv_append(**call | {"cu_seqlens_k": cupy.put(np.array(offsets, np.int64))})
    owned = {int(page) for b in (0, 1) for page in problem.table[b] if page != WILD}
    for buffer, before in zip(map(cupy.get, buffers), guarded, strict=True):
        for page in {*range(len(before))} - {page + 1 for page in owned}:
            assert buffer[page].tobytes() == before[page].tobytes()


@gpu
@pytest.mark.gpu
def test_slots_and_rows_beyond_32_bits() -> None:
    """Pages 2^31 elements apart."""
    cupy = CupyBackend()
    xp, far = cupy.xp, 2**31 + 64
    memory = xp.zeros(far + 64, np.float16)
    pool = xp.ndarray((2, 4, 1, 8), np.float16, memory.data, strides=(2 * far, 16, 16, 2))
    other = xp.zeros((2, 4, 1, 8), np.float16)
    new = xp.arange(1, 17, dtype=np.float16).reshape(1, 2, 1, 8)
    table, used = xp.asarray([[0, 1]], np.int32), xp.asarray([5], np.int32)
    cf.kv_append(pool, other, new, new, block_table=table, seqused_k=used)
    assert cupy.get(memory[24:32]).tolist() == list(range(1, 9))
    assert cupy.get(memory[far : far + 8]).tolist() == list(range(9, 17))
    assert int(xp.count_nonzero(memory)) == 16


@gpu
@pytest.mark.gpu
def test_a_captured_append_follows_the_lengths_and_allocates_nothing(rng: Random) -> None:
    cupy = CupyBackend()
    xp = cupy.xp
    problem = draw(rng, (1, 1, 1), page_size=4)
    call = problem.arguments(cupy)
    problem.pools = appended(cupy, call)  # compiles, which no recording may do
    asked: list[int] = []

    def allocate(size: int) -> Any:
        asked.append(size)
        raise MemoryError

    with xp.cuda.Stream(non_blocking=True) as stream:
        with xp.cuda.using_allocator(allocate):
            stream.begin_capture()
            cf.kv_append(**call)
            graph = stream.end_capture()
        assert not asked
        for used in (problem.used - 1, [0, 0, problem.used[2]]):  # of 0: a sequence that takes no part
            problem.used = np.array(used, np.int32)
            problem.new = [[bits(rng, part.shape, "bfloat16") for part in parts] for parts in problem.new]
            values = {"seqused_k": problem.used} | {
                name: np.stack(parts) for name, parts in zip("kv", problem.new, strict=True)
            }
            for name, value in values.items():
                call[name][...] = cupy.put(value)
            graph.launch(stream)
            problem.pools = problem.expected()
            same([cupy.get(call[name]) for name in ("k_pages", "v_pages")], problem.pools)
