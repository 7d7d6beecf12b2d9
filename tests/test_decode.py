"""Few queries, split keys and pages: the same numbers as any other forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import check_forward
from tests.backends import Backend
from tests.cases import DTYPES

Random = np.random.Generator
HEADS_KV = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "top-left": {"causal": "top-left", "q_start": 150},
    "sink": {"sink": True, "causal": True},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": True, "causal": True},
    "dropout": {"dropout_p": 0.3, "seed": 7},
    "negative scale": {"scale": -0.3},
    "splits": {"num_splits": 3},
    "one split": {"num_splits": 1},
    "idle splits": {"num_splits": 50, "sink": True},
    "odd splits": {"split_len": 37, "causal": True},
    "float32 out": {"out_dtype": "float32"},
}


def _options(name: str, heads: int, rng: Random) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    for array in {"sink", "alibi_slopes"} & set(options):
        options[array] = rng.random(heads).astype(np.float32)
    return options


def _qkv(rng: Random, dtype: str, batch: int, len_q: int, len_k: int, group: int, dims: tuple[int, int]) -> Any:
    shapes = (len_q, HEADS_KV * group, dims[0]), (len_k, HEADS_KV, dims[0]), (len_k, HEADS_KV, dims[1])
    return [rng.standard_normal((batch, *shape)).astype(DTYPES[dtype]) for shape in shapes]


def _paged(rng: Random, keys: np.ndarray, used: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys as a pool whose other slots are NaN, and the table of their pages, whose dead entries are wild."""
    batch, length = keys.shape[:2]
    count = -(-length // page_size)
    order = rng.permutation(batch * count + 3)[: batch * count].reshape(batch, count)
    pool = np.full((batch * count + 3, page_size, *keys.shape[2:]), np.nan, keys.dtype)
    table = np.full((batch, count), 2**31 - 1, np.int32)
    for b, live in enumerate(used):
        for j in range(live):
            table[b, j // page_size] = order[b, j // page_size]
            pool[order[b, j // page_size], j % page_size] = keys[b, j]
    return pool, table


def _run(backend: Backend, arrays: Any, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    given = {name: backend.put(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    out, lse = cf.attn_fwd(*map(backend.put, arrays), **given)
    return backend.get(out), backend.get(lse)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "len_q", "group", "len_k", "dims"),
    [
        ("bfloat16", 1, 4, 1501, (128, 128)),
        ("float16", 3, 7, 700, (64, 40)),
        ("bfloat16", 16, 5, 331, (192, 128)),
        ("float32", 2, 1, 257, (80, 48)),
        ("float64", 1, 3, 300, (64, 64)),
        # Of these the tiles of queries are few, and keys many.
        ("bfloat16", 100, 2, 2311, (128, 128)),
        ("float16", 33, 8, 2100, (96, 64)),
        ("bfloat16", 65, 4, 2501, (128, 128)),
        ("bfloat16", 150, 1, 2048, (256, 256)),
        ("bfloat16", 200, 3, 3001, (64, 64)),
        ("float16", 17, 1, 2049, (192, 128)),
        ("float32", 129, 2, 2050, (64, 64)),
    ],
)
def test_few_queries_are_as_close_to_the_reference_as_plain_operations(
    backend: Backend, name: str, dtype: str, len_q: int, group: int, len_k: int, dims: tuple[int, int], rng: Random
) -> None:
    arrays = _qkv(rng, dtype, 2, len_q, len_k, group, dims)
    options = _options(name, HEADS_KV * group, rng)
    if dtype == "float64":
        options = {key: x.astype(np.float64) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    out, lse = _run(backend, arrays, options)
    check_forward(out, lse, *arrays, name=name, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "group", "dim"),
    [
        ((65, 0, 128, 1), (2500, 700, 31, 4099), 2, 128),
        ((40, 0, 33, 1), (2500, 700, 31, 4099), 4, 128),
        ((130, 17), (2048, 2305), 3, 64),
        ((1,) * 5, (256, 3, 0, 65, 129), 4, 128),
    ],
)
def test_packed_sequences_of_few_queries_and_many_keys(
    backend: Backend,
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    group: int,
    dim: int,
    causal: bool,
    rng: Random,
) -> None:
    q, k, v = (
        rng.standard_normal((sum(lengths) + 3, heads, dim)).astype(DTYPES["bfloat16"])
        for lengths, heads in ((lengths_q, HEADS_KV * group), (lengths_k, HEADS_KV), (lengths_k, HEADS_KV))
    )
    options = {"layout": "thd", "causal": causal, "max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
    for name, lengths in (("cu_seqlens_q", lengths_q), ("cu_seqlens_k", lengths_k)):
        options[name] = np.cumsum([0, *lengths]).astype(np.int32)
    out, lse = _run(backend, (q, k, v), options)
    check_forward(out, lse, q, k, v, name="packed", **options)


def test_so_many_sequences_that_their_keys_are_not_split(backend: Backend, rng: Random) -> None:
    arrays = _qkv(rng, "bfloat16", 700, 1, 129, 4, (64, 64))
    used = rng.integers(0, 130, 700).astype(np.int32)
    out, lse = _run(backend, arrays, {"seqused_k": used})
    check_forward(out, lse, *arrays, name="many sequences", seqused_k=used)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("batch", "dtype", "len_q", "group", "dims"),
    [
        # By the heads that there are: one round of large blocks, two that are full, and in between small blocks.
        (1, "bfloat16", 1, 4, (128, 128)),
        (3, "float16", 5, 5, (96, 64)),
        (2, "bfloat16", 2, 1, (192, 256)),
        (5, "float32", 3, 4, (40, 128)),
        (40, "bfloat16", 1, 16, (32, 32)),
        (128, "float16", 1, 2, (64, 64)),
        (75, "bfloat16", 1, 4, (64, 128)),
        (75, "bfloat16", 6, 4, (128, 72)),
    ],
)
def test_sequences_of_all_lengths_side_by_side(
    backend: Backend,
    batch: int,
    dtype: str,
    len_q: int,
    group: int,
    dims: tuple[int, int],
    paged: bool,
    rng: Random,
) -> None:
    """Groups of a block's warps divide the keys: of some there is none, or a part of a tile."""
    used = np.resize(np.array([700, 0, 1, 63, 64, 65, 255, 256, 257, 513], np.int32), batch)
    q, *keys = _qkv(rng, dtype, batch, len_q, int(used.max()), group, dims)
    sink = rng.standard_normal(HEADS_KV * group).astype(np.float32)
    options: dict[str, Any] = {"causal": True, "seqused_k": used, "sink": sink}
    for x in keys:
        x[np.arange(used.max()) >= used[:, None]] = np.nan
    if paged:
        (k, table), (v, _) = (_paged(np.random.default_rng(5), x, used, 16) for x in keys)
        keys, options = [k, v], options | {"block_table": table}
    out, lse = _run(backend, (q, *keys), options)
    check_forward(out, lse, q, *keys, name="all lengths", **options)


@pytest.mark.parametrize("dim_v", [1, 31, 63, 65, 95, 127, 251])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float32", "bfloat16"), ("float64", "float32"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(2, 1, 300), (2, 30, 300), (200, 1, 90)])
def test_rows_of_out_are_aligned_to_their_own_type_alone(
    backend: Backend, batch: int, len_q: int, len_k: int, dtype: str, out_dtype: str, dim_v: int, rng: Random
) -> None:
    arrays = _qkv(rng, dtype, batch, len_q, len_k, 2, (64, dim_v))
    out, lse = _run(backend, arrays, {"out_dtype": out_dtype})
    check_forward(out, lse, *arrays, name="aligned to its type", out_dtype=out_dtype)


@pytest.mark.parametrize("key", [0, 70, 128, 200, 699])
@pytest.mark.parametrize("array", ["k", "v"])
def test_a_nan_in_one_of_many_keys_is_seen(backend: Backend, array: str, key: int, rng: Random) -> None:
    q, k, v = _qkv(rng, "bfloat16", 2, 1, 700, 4, (128, 128))
    {"k": k, "v": v}[array][1, key, 0] = np.nan
    out, lse = map(np.asarray, _run(backend, (q, k, v), {}))
    dirty = np.zeros((2, 2 * 4), bool)
    dirty[1, :4] = True
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)).all(axis=(1, 3)), dirty)
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)).any(axis=(1, 3)), dirty)
    np.testing.assert_array_equal(np.isnan(lse).any(axis=2), dirty & (array == "k"))


@pytest.mark.parametrize("far", [300.0, 3e4])
def test_groups_of_keys_whose_scores_lie_far_apart(backend: Backend, far: float, rng: Random) -> None:
    """Each group has a maximum of its own; those of one hardly count beside another's."""
    q, k, v = _qkv(rng, "bfloat16", 1, 2, 900, 4, (64, 64))
    k[:, :, :, 0] = 0
    k[:, 64 * rng.integers(0, 14, 3), :, 0] = far
    q[..., 0] = 1
    out, lse = _run(backend, (q, k, v), {"scale": 0.5})
    check_forward(out, lse, q, k, v, name="far apart", scale=0.5)


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "sink", "alibi", "odd splits", "splits"])
@pytest.mark.parametrize(
    ("dtype", "len_q", "group"), [("bfloat16", 1, 4), ("float16", 5, 6), ("bfloat16", 40, 2), ("float32", 1, 3)]
)
def test_pages_hold_the_keys_of_any_length(
    backend: Backend, page_size: int, name: str, dtype: str, len_q: int, group: int, rng: Random
) -> None:
    used = np.array([523, 0, 64, 129], np.int32)
    q, *keys = _qkv(rng, dtype, len(used), len_q, int(used.max()), group, (64, 48))
    (k, table), (v, _) = ((_paged(np.random.default_rng(5), x, used, page_size)) for x in keys)
    options = _options(name, HEADS_KV * group, rng) | {"block_table": table, "seqused_k": used}
    out, lse = _run(backend, (q, k, v), options)
    check_forward(out, lse, q, k, v, name=name, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("len_q", [1, 40])
@pytest.mark.parametrize("wild", [-1, 9, 2**31 - 1, -(2**31)])
def test_a_live_entry_that_names_no_page_reads_as_an_empty_page(len_q: int, wild: int, rng: Random) -> None:
    from tests.backends import CupyBackend, gpu_is_there

    if not gpu_is_there():
        pytest.skip("no CUDA GPU")
    backend, page_size = CupyBackend(), 32
    q, k, v = _qkv(rng, "float16", 1, len_q, 6 * page_size, 2, (64, 64))
    pools = [x.reshape(6, page_size, HEADS_KV, 64) for x in (k, v)]
    table = np.array([[0, 1, wild, 3, wild, 5]], np.int32)
    used = np.array([6 * page_size - 3], np.int32)
    out, lse = _run(backend, (q, *pools), {"block_table": table, "seqused_k": used})
    seen = np.concatenate([np.arange(b, min(b + page_size, used[0])) for b in (0, 32, 96, 160)])
    check_forward(out, lse, q, k[:, seen], v[:, seen], name="empty pages")


def test_splits_are_the_same_bits_every_time(backend: Backend, rng: Random) -> None:
    arrays = _qkv(rng, "bfloat16", 3, 1, 2000, 4, (128, 128))
    first = _run(backend, arrays, {"causal": True})
    for _ in range(20):
        again = _run(backend, arrays, {"causal": True})
        assert all((a == b).all() for a, b in zip(first, again, strict=True))


def test_splits_fit_the_workspace_that_is_asked_for(backend: Backend, rng: Random) -> None:
    q, k, v = map(backend.put, _qkv(rng, "float16", 2, 2, 900, 3, (64, 36)))
    for options in ({}, {"num_splits": 7}, {"split_len": 100}):
        attention = cf.Attention(**options)
        size = attention.workspace_size(q, k, v)
        given = backend.put(np.full(size + 64, 0xAB, np.uint8))
        out, lse = attention.fwd(q, k, v, workspace=given[:size])
        assert (backend.get(given)[size:] == 0xAB).all()
        check_forward(backend.get(out), backend.get(lse), *map(backend.get, (q, k, v)), name=str(options), **options)
        if size:
            with pytest.raises(ValueError, match="`workspace` has"):
                attention.fwd(q, k, v, workspace=given[: size - 1])


@pytest.mark.gpu
def test_a_graph_holds_decoding_behind_another_stream_and_behind_what_wrote_its_keys(rng: Random) -> None:
    """Kernels that start early wait for all that is in front: a join of streams, a write of keys, or decoding."""
    from tests.backends import CupyBackend, gpu_is_there

    if not gpu_is_there():
        pytest.skip("no CUDA GPU, or no CuPy")
    backend = CupyBackend()
    cupy = backend.xp
    arrays = _qkv(rng, "bfloat16", 4, 1, 3000, 4, (128, 128))
    q, k, v = map(backend.put, arrays)
    expected = _run(backend, arrays, {})
    copies = [cupy.full_like(x, np.nan) for x in (k, v)]
    main, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with main:
        calls = [cf.Attention().prepare(q, *copies), cf.Attention().prepare(q, *copies)]
        results = [call() for call in calls]
        main.synchronize()
        main.begin_capture()
        side.wait_event(main.record())
        with side:
            copies[0][...] = k
        copies[1][...] = v
        main.wait_event(side.record())
        for call in calls:
            call()
        graph = main.end_capture()
        for _ in range(20):
            for array in (*copies, *results[0], *results[1]):
                array.fill(np.nan)
            graph.launch(main)
            for result in results:
                for found, wanted in zip(result, expected, strict=True):
                    assert (backend.get(found) == wanted).all()
