"""How sequences are cut over ranks."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash.parallel import Shards, shard, unshard
from cupyflash.parallel._shards import visible
from tests.backends import Backend

LENGTHS: list[Any] = [0, 1, 5, 16, 61, (), (0,), (13, 0, 30, 1), [7, 7]]


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", LENGTHS, ids=str)
@pytest.mark.parametrize("backend", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)
def test_parts_make_the_whole(backend: Backend, length: Any, size: int, zigzag: bool) -> None:
    shards = Shards(length, size, zigzag)
    for axis, dtype in ((0, "int64"), (1, "float32"), (-1, ml_dtypes.bfloat16)):
        shape = [2, 3, 4]
        shape[axis] = shards.total
        whole = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        parts = [shard(backend.put(whole), shards, rank, axis=axis) for rank in range(size)]
        assert [part.shape[axis] for part in parts] == [shards.rows(rank) for rank in range(size)]
        found = backend.get(unshard(parts, shards, axis=axis))
        assert found.dtype == whole.dtype
        np.testing.assert_array_equal(found.astype(float), whole.astype(float))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_cut_as_numpy_cuts(size: int) -> None:
    tokens = np.arange(61)
    plain = [shard(tokens, Shards(61, size), rank, axis=0) for rank in range(size)]
    for part, right in zip(plain, np.array_split(tokens, size), strict=True):
        np.testing.assert_array_equal(part, right)
    parts = np.array_split(tokens, 2 * size)
    for rank in range(size):
        right = np.concatenate([parts[rank], parts[2 * size - 1 - rank]])
        np.testing.assert_array_equal(shard(tokens, Shards(61, size, zigzag=True), rank, axis=0), right)


def test_packed_sequences_are_cut_one_by_one() -> None:
    tokens = np.array([0, 1, 2, 3, 4, 100, 200, 201, 202])
    shards = Shards((5, 1, 3), 2, zigzag=True)
    assert shard(tokens, shards, 0, axis=0).tolist() == [0, 1, 100, 200, 4]  # first parts, then last parts
    assert shard(tokens, shards, 1, axis=0).tolist() == [2, 201, 3, 202]


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("window", [None, (3, 1), (0, 0), (None, 2)])
@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("lengths", [(11, 11), (7, 19), (19, 7), (2, 0), ((5, 0, 9), (8, 3, 4))], ids=str)
def test_who_sees_whom_is_what_the_mask_says(lengths: Any, causal: bool | str, window: Any, zigzag: bool) -> None:
    size = 3
    shards_q, shards_k = (Shards(length, size, zigzag) for length in lengths)
    right = set()
    for b, (len_q, len_k) in enumerate(zip(shards_q.lengths, shards_k.lengths, strict=True)):
        p = np.arange(len_q)[:, None] + (0 if causal == "top-left" else len_k - len_q)
        r = np.arange(len_k)[None, :]
        mask = np.ones((len_q, len_k), bool)
        if causal:
            mask &= r <= p
        if window and window[0] is not None:
            mask &= p - window[0] <= r
        if window and window[1] is not None:
            mask &= r <= p + window[1]
        for rank, other in itertools.product(range(size), repeat=2):
            for i, queries in enumerate(shards_q.pieces(rank)):
                for j, keys in enumerate(shards_k.pieces(other)):
                    if mask[queries.begins[b] : queries.ends[b], keys.begins[b] : keys.ends[b]].any():
                        right.add((rank, i, other, j))
    assert visible(shards_q, shards_k, causal, window) == right


def test_shards_are_values() -> None:
    assert Shards([3, 4], np.int64(2)) == Shards((3, 4), 2)
    assert hash(Shards(np.array([3, 4]), 2)) == hash(Shards((3, 4), 2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1.5, 2), TypeError, "`length` is 1.5"),
        (("12", 2), TypeError, "`length` is '12'"),
        ((-1, 2), ValueError, "`length` is -1"),
        (([3, -4], 2), ValueError, "`length` is -4"),
        ((True, 2), TypeError, "`length` is True"),
        ((8, 0), ValueError, "`size` is 0; an int of at least 1"),
        ((8, 2, "yes"), TypeError, "`zigzag` is 'yes'"),
    ],
)
def test_wrong_shards_say_what_is_wrong(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Shards(*arguments)


def test_a_wrong_cut_says_what_is_wrong() -> None:
    tokens, shards = np.arange(10), Shards(10, 2)
    with pytest.raises(ValueError, match=r"shard: `rank` is 2; an int in \[0, 2\)"):
        shard(tokens, shards, 2, axis=0)
    with pytest.raises(ValueError, match="shard: `axis` is 1; `array` has 1 axes"):
        shard(tokens, shards, 0, axis=1)
    with pytest.raises(ValueError, match="shard: `array` has 9 positions in axis 0"):
        shard(tokens[1:], shards, 0, axis=0)
    with pytest.raises(TypeError, match="shard: `array` is bool"):
        shard(tokens > 1, shards, 0, axis=0)
    with pytest.raises(ValueError, match="unshard: `parts` holds 1 arrays"):
        unshard([tokens], shards, axis=0)
    with pytest.raises(ValueError, match=r"unshard: `parts\[1\]` has 4 positions"):
        unshard([tokens[:5], tokens[:4]], shards, axis=0)
    with pytest.raises(TypeError, match=r"unshard: `parts\[1\]` is float64 and `parts\[0\]` is int64"):
        unshard([tokens[:5], tokens[5:].astype(float)], shards, axis=0)
