"""What the host tells Hopper's kernels, without a GPU: tensor maps, the grid, the order of tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash as cf
from cupyflash._cuda import params
from cupyflash._cuda.device import KNOWN

BF16 = np.dtype(ml_dtypes.bfloat16)
SMS = KNOWN[90].sm_count
Q, K, V, OUT = range(4)
BLOCKS_PER_MAP = 1 + params.MAP_WORDS


class Told:
    """A launch, the last one: its grid and the fields of its struct. A map holds what the driver was asked for."""

    def __init__(self, cupy: Any, which: int = -1) -> None:
        launch = cupy.launches[which]
        assert launch.binary[0] == "fwd_sm90"
        packer = params.packer("fwd_sm90")
        fields = packer.unpack(launch.struct[: packer.size])
        self.grid, self.smem_bytes = launch.grid[0], launch.smem_bytes
        self.maps = [fields[at * BLOCKS_PER_MAP : (at + 1) * BLOCKS_PER_MAP] for at in range(4)]
        self.num_splits, self.places, self.paired_heads, self.heads_at_a_time, self.staying_blocks, _ = fields[-6:]

    def extents(self, which: int) -> list[int]:
        return list(self.maps[which][3:7])

    def strides(self, which: int) -> list[int]:
        return list(self.maps[which][7:10])

    def box(self, which: int) -> list[int]:
        return list(self.maps[which][10:12])


def array(cupy: Any, *shape: int, view: Any = None) -> Any:
    host = np.zeros(shape, BF16)
    return cupy.ndarray(host if view is None else view(host), 0)


def forward(cupy: Any, shape: tuple[int, ...], heads_kv: int | None = None, **options: Any) -> Told:
    q, k = array(cupy, *shape), array(cupy, *shape[:2], heads_kv or shape[2], shape[3])
    cf.attn_fwd(q, k, k, **options)
    return Told(cupy)


def test_maps_say_where_rows_lie_and_addresses_are_each_calls_own(fake_cuda: Any) -> None:
    """q is every second of four heads, k a slice of wider rows, v has one batch row for all."""
    q = array(fake_cuda, 2, 70, 4, 64, view=lambda host: host[:, :, ::2])
    k = array(fake_cuda, 2, 90, 2, 128, view=lambda host: host[..., :64])
    v = array(fake_cuda, 1, 90, 2, 64, view=lambda host: np.broadcast_to(host, (2, 90, 2, 64)))
    cf.attn_fwd(q, k, v)
    again = array(fake_cuda, 2, 70, 4, 64, view=lambda host: host[:, :, ::2])
    out, _ = cf.attn_fwd(again, k, v)
    told = Told(fake_cuda)
    assert [told.maps[which][0] for which in range(4)] == [x.data.ptr for x in (again, k, v, out)]
    assert [told.extents(which) for which in (Q, K, V, OUT)] == [
        [64, 70, 2, 2],
        [64, 90, 2, 2],
        [64, 90, 2, 2],
        [64, 70, 2, 2],
    ]
    assert told.strides(Q) == [2 * 4 * 64, 2 * 2 * 64, 2 * 70 * 4 * 64]
    assert told.strides(K) == [2 * 2 * 128, 2 * 128, 2 * 90 * 2 * 128]
    assert told.strides(V) == [2 * 2 * 64, 2 * 64, 0]
    assert [told.box(which) for which in (Q, K, V, OUT)] == [[64, 128], [64, 128], [64, 128], [64, 16]]


@pytest.mark.parametrize(("dim", "dout_dtype"), [(64, BF16), (128, BF16), (40, np.dtype(np.float32))])
def test_the_backwards_maps_are_of_its_inputs(fake_cuda: Any, dim: int, dout_dtype: Any) -> None:
    """dout that comes wider is read where the preprocess has rounded it, in rows of whole 16 bytes."""
    q, k = array(fake_cuda, 2, 70, 4, dim), array(fake_cuda, 2, 90, 2, dim)
    dout = fake_cuda.ndarray(np.zeros((2, 70, 4, dim), dout_dtype), 0)
    out, lse = cf.attn_fwd(q, k, k)
    workspace = fake_cuda.ndarray(np.zeros(2**20, np.uint8), 0)
    cf.attn_bwd(q, k, k, out, lse, dout, workspace=workspace)
    launch = next(launch for launch in fake_cuda.launches if launch.binary[0] == "bwd_sm90")
    packer = params.packer("bwd_sm90")
    fields = packer.unpack(launch.struct[: packer.size])
    maps = [fields[at * BLOCKS_PER_MAP : (at + 1) * BLOCKS_PER_MAP] for at in range(4)]
    rows = 128 if dim <= 64 else 64
    assert [list(words[10:12]) for words in maps] == [[64, rows], [64, 128], [64, 128], [64, rows]]
    assert [words[0] for words in maps[:3]] == [q.data.ptr, k.data.ptr, k.data.ptr]
    assert list(maps[3][3:7]) == [dim, 70, 4, 2] and list(maps[3][7:10]) == [2 * dim * 4, 2 * dim, 2 * dim * 4 * 70]
    inside = 0 <= maps[3][0] - workspace.data.ptr < 2**20
    assert inside if dout_dtype != BF16 else maps[3][0] == dout.data.ptr
    assert launch.grid[0] == 1 * 2 * 2 and launch.smem_bytes == launch.binary[2].smem_bytes


def test_an_axis_of_one_may_have_any_stride(fake_cuda: Any) -> None:
    """Of one element here, which no map could hold."""
    q = array(
        fake_cuda, 70, 64, view=lambda host: np.lib.stride_tricks.as_strided(host, (1, 70, 1, 64), (2, 128, 2, 2))
    )
    cf.attn_fwd(q, q, q)
    told = Told(fake_cuda)
    assert told.strides(Q)[0] == 128
    assert all(stride % 16 == 0 for stride in told.strides(Q))


def test_a_float32_out_is_stored_by_threads(fake_cuda: Any) -> None:
    told = forward(fake_cuda, (2, 70, 4, 64), out_dtype="float32")
    assert not any(told.maps[OUT])


@pytest.mark.parametrize(
    ("shape", "heads_kv", "paired", "at_a_time"),
    [
        ((1, 128 * 3, 2, 128), 2, 0, 2),  # fewer tiles than multiprocessors: one each
        ((2, 1024, 16, 128), 16, 0, 16),  # 32 heads of 8 tiles, two rounds in all
        ((8, 1024, 16, 128), 16, 94, 16),  # 128 heads: all but two rounds' worth, and those odd, in pairs
        ((8, 1024, 16, 128), 2, 94, 128),  # of which groups share their keys
        ((1, 2**17, 3, 128), 3, 2, 2),  # one head's keys are more than L2 holds
        ((1, 2**17, 3, 64), 3, 2, 2),
    ],
)
def test_blocks_stay_and_some_heads_go_in_pairs(
    fake_cuda: Any, shape: tuple[int, ...], heads_kv: int, paired: int, at_a_time: int
) -> None:
    told = forward(fake_cuda, shape, heads_kv, causal=True)
    query_tile = 192 if shape[3] == 64 else 128
    tiles, heads = -(-shape[1] // query_tile), shape[0] * shape[2]
    assert told.places == heads * tiles
    assert told.grid == told.staying_blocks == min(told.places, SMS)
    assert (told.paired_heads, told.heads_at_a_time) == (paired, at_a_time)
    assert (heads - paired) * tiles >= min(2 * SMS, told.places) and paired % 2 == at_a_time % 2 == 0


@pytest.mark.parametrize(
    ("queries", "heads", "keys", "packed", "splits"),
    [(64, 32, 8192, 8, 8), (300, 16, 2048, 4, 3), (17, 32, 9999, 8, 16), (256, 16, 2048, 1, 4), (100, 4, 9000, 1, 24)],
)
def test_few_tiles_of_many_keys_are_split_until_they_fill_the_gpu(
    fake_cuda: Any, queries: int, heads: int, keys: int, packed: int, splits: int
) -> None:
    q, k = array(fake_cuda, 1, queries, heads, 128), array(fake_cuda, 1, keys, 4, 128)
    cf.attn_fwd(q, k, k, causal=True)
    told, combine = Told(fake_cuda, -2), fake_cuda.launches[-1]
    tiles = heads // packed * -(-queries * packed // 128)
    assert (told.num_splits, told.places) == (splits, splits * tiles)
    assert told.grid == told.staying_blocks == min(told.places, SMS)
    assert not any(told.maps[OUT])
    if packed > 1:
        assert told.maps[Q][2:8] == (5, 128, packed, queries, 4, 1)
        assert told.maps[Q][12:15] == (64, packed, 128 // packed)
    assert combine.binary[0] == "fwd_combine" and combine.grid[0] == -(-queries * heads // (1 if splits > 8 else 8))


def test_one_split_and_splits_of_a_given_length_are_no_calls_of_few_tiles(fake_cuda: Any) -> None:
    q, k = array(fake_cuda, 1, 100, 8, 128), array(fake_cuda, 1, 9000, 2, 128)
    cf.attn_fwd(q, k, k, num_splits=1)
    assert Told(fake_cuda).num_splits == 1 and any(Told(fake_cuda).maps[OUT])
    for queries, heads in ((1, 8), (17, 1), (33, 1)):  # and a row's bits do not depend on how many there are
        tiles: set[tuple[int, int]] = set()
        for batch in (1, 88, 89, 800):
            q, k = (
                fake_cuda.ndarray(np.broadcast_to(np.zeros((1, 1, 1, 64), BF16), shape), 0)
                for shape in ((batch, queries, heads, 64), (batch, 4096, 1, 64))
            )
            constants = cf.Attention(split_len=256).plan(q, k, k).constants
            tiles.add((constants.query_tile, constants.key_tile))
        assert len(tiles) == 1


def test_rows_behind_all_sequences_are_no_reason_to_split(fake_cuda: Any) -> None:
    """Of a buffer of fixed size: partial results have all of its rows."""
    q, k = array(fake_cuda, 4096, 8, 128), array(fake_cuda, 8192, 8, 128)
    offsets = fake_cuda.ndarray(np.array([0, 1, 2], np.int32), 0)
    call = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 1, "max_seqlen_k": 4096}
    partial = 4096 * 8 * (128 + 1) * 4
    assert cf.Attention(layout="thd").workspace_size(q, k, k, **call) <= 3 * partial


def test_a_plan_of_ones_own_has_a_workspace_of_its_own(fake_cuda: Any) -> None:
    """Smaller tiles may be more splits."""
    q, k = array(fake_cuda, 1, 300, 16, 128), array(fake_cuda, 1, 8192, 4, 128)
    plan = cf.Attention().plan(q, k, k)
    small = replace(plan, constants=replace(plan.constants, key_tile=32))
    default, size = (cf.Attention().workspace_size(q, k, k, plan=one) for one in (None, small))
    assert size > default
    with pytest.raises(ValueError, match="workspace"):
        cf.attn_fwd(q, k, k, plan=small, workspace=fake_cuda.ndarray(np.zeros(default, np.uint8), 0))
    cf.attn_fwd(q, k, k, plan=small, workspace=fake_cuda.ndarray(np.zeros(size, np.uint8), 0))
    assert Told(fake_cuda, -2).num_splits * 300 * 16 * (128 + 1) * 4 <= size


def test_more_partial_rows_than_31_bits_are_refused(fake_cuda: Any) -> None:
    one = array(fake_cuda, 1, 1, 1, 8, view=lambda host: np.broadcast_to(host, (1, 2**21, 2**10, 8)))
    with pytest.raises(cf.UnsupportedError, match=r"Split the batch"):
        cf.attn_fwd(one, one, one, num_splits=2)


@pytest.mark.parametrize(("length", "heads", "rounds"), [(5000, 2, 0), (5000, 16, 4), (30000, 16, 21)])
def test_a_quarter_of_the_tiles_of_packed_sequences_is_handed_out_one_by_one(
    fake_cuda: Any, length: int, heads: int, rounds: int
) -> None:
    q = array(fake_cuda, length, heads, 128)
    offsets = fake_cuda.ndarray(np.array([0, 100, length], np.int32), 0)
    cf.attn_fwd(q, q, q, layout="thd", cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    told = Told(fake_cuda)
    assert told.places == heads * (-(-length // 128) + 2 + 2)
    singles = told.places - rounds * SMS
    assert told.staying_blocks == (SMS if rounds else 0) and told.grid == told.staying_blocks + singles
    assert told.places / 4 <= singles < told.places / 4 + SMS + 1
    assert told.paired_heads == 0


def test_more_tiles_than_31_bits_are_refused_before_anything_is_launched(fake_cuda: Any) -> None:
    """As a view of one row: nothing of this size exists."""
    one = array(fake_cuda, 1, 1, 1, 8, view=lambda host: np.broadcast_to(host, (2**16, 1, 2**15, 8)))
    before = len(fake_cuda.launches)
    with pytest.raises(cf.UnsupportedError, match=r"fwd_sm90: 2147483648 blocks.*Split the batch"):
        cf.attn_fwd(one, one, one)
    assert len(fake_cuda.launches) == before
