"""How sequences are cut over ranks: which positions each rank holds, in which order, and who sees whom."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupyflash import _interop
from cupyflash._errors import refusal


class Piece(NamedTuple):
    """Consecutive positions of every sequence, and the rows of the rank's array that hold them."""

    rows: slice
    begins: tuple[int, ...]  # by sequence, like `ends`
    ends: tuple[int, ...]


class Run(NamedTuple):
    """Rows that lie together both in a rank's array and in the whole one."""

    local: slice
    whole: slice


@dataclass(frozen=True, slots=True)
class Shards:
    """Which positions of a sequence each rank holds; the same on every rank.

    A sequence is cut into `size` parts and rank r holds part r; or, `zigzag`, into 2 · `size` parts of which rank r
    holds parts r and 2 · `size` − 1 − r, one from each end: then a causal mask leaves every rank the same work. Parts
    are as equal as can be, longer ones first, as `numpy.array_split` cuts; where there are fewer positions than parts,
    some are empty.

    Packed sequences are each cut like that. A rank's array holds the first parts of all of them, then, `zigzag`, the
    second parts of all of them.

    Parameters
    ----------
    length : int, or a sequence of ints for packed sequences (layout "thd")
        Positions of the whole sequence, or of each.
    size : int
        Ranks.
    zigzag : bool, default False

    Raises
    ------
    ValueError for values, TypeError for kinds.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash.parallel import Shards, shard
    >>> tokens = np.arange(10)
    >>> [shard(tokens, Shards(10, size=2), rank, axis=0).tolist() for rank in range(2)]
    [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    >>> [shard(tokens, Shards(10, size=2, zigzag=True), rank, axis=0).tolist() for rank in range(2)]
    [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]
    """

    length: int | tuple[int, ...]
    size: int
    zigzag: bool = False

    def __post_init__(self) -> None:
        length: Any = self.length
        if isinstance(length, (int, np.integer)):
            normal: Any = _integer("length", length, 0)
        elif isinstance(length, (Sequence, np.ndarray)) and not isinstance(length, (str, bytes)):
            normal = tuple(_integer("length", n, 0) for n in length)
        else:
            accepted = "an int, or a sequence of ints for packed sequences, is accepted"
            raise TypeError(refusal("Shards", "length", f"is {length!r}", accepted))
        object.__setattr__(self, "length", normal)
        object.__setattr__(self, "size", _integer("size", self.size, 1))
        if not isinstance(self.zigzag, (bool, np.bool_)):
            raise TypeError(refusal("Shards", "zigzag", f"is {self.zigzag!r}", "True or False is accepted"))

    @property
    def is_packed(self) -> bool:
        return isinstance(self.length, tuple)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the packed sequences; of the one that all batch rows share otherwise."""
        return self.length if isinstance(self.length, tuple) else (self.length,)

    @property
    def total(self) -> int:
        """Rows of the whole array."""
        return sum(self.lengths)

    def rows(self, rank: int) -> int:
        """Of this rank's array."""
        return self.pieces(rank)[-1].rows.stop

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What this rank holds, in the order of its array."""
        return _pieces(self, rank)

    def runs(self, rank: int) -> Iterator[Run]:
        """Where the rows of this rank's array lie in the whole one."""
        for piece in self.pieces(rank):
            at, base = piece.rows.start, 0
            for begin, end, length in zip(piece.begins, piece.ends, self.lengths, strict=True):
                if end > begin:
                    yield Run(slice(at, at + end - begin), slice(base + begin, base + end))
                at, base = at + end - begin, base + length


def shard(array: Any, shards: Shards, rank: int, *, axis: int) -> Any:
    """This rank's part of a whole array: a new array of its library.

    Parameters
    ----------
    array : array of NumPy, CuPy or torch, any shape
        With `shards.total` positions along `axis`; packed sequences one after the other.
    shards : Shards
    rank : int
        In [0, shards.size).
    axis : int
        That of positions: 1 for q in layout "bshd", 2 for its lse.

    Returns
    -------
    part : array like `array`, with `shards.rows(rank)` positions along `axis`

    Raises
    ------
    ValueError for shapes and values, TypeError for kinds and dtypes.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash.parallel import Shards, shard
    >>> packed = np.array([0, 1, 2, 3, 100, 101, 102])  # sequences of 4 and of 3
    >>> shard(packed, Shards([4, 3], size=2, zigzag=True), rank=0, axis=0)
    array([  0, 100,   3])
    """
    _check_rank("shard", rank, shards.size)
    axis = _check_axis("shard", "array", array, axis, shards.total, "shards.total")
    part = _empty("shard", {"array": array}, axis, shards.rows(rank))
    for run in shards.runs(rank):
        part[along(axis, run.local)] = array[along(axis, run.whole)]
    return part


def unshard(parts: Sequence[Any], shards: Shards, *, axis: int) -> Any:
    """The whole array of all ranks' parts: the inverse of `shard`.

    Parameters
    ----------
    parts : sequence of arrays
        Of rank 0, 1, ..., all here.
    shards : Shards
    axis : int
        That of positions.

    Returns
    -------
    array : array like the parts, with `shards.total` positions along `axis`

    Raises
    ------
    As `shard`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash.parallel import Shards, unshard
    >>> unshard([np.array([0, 1, 2, 8, 9]), np.array([3, 4, 5, 6, 7])], Shards(10, 2, zigzag=True), axis=0)
    array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    if len(parts) != shards.size:
        given = f"holds {len(parts)} arrays"
        raise ValueError(refusal("unshard", "parts", given, f"shards.size = {shards.size} are accepted"))
    named = {f"parts[{rank}]": part for rank, part in enumerate(parts)}
    for rank, (name, part) in enumerate(named.items()):
        axis = _check_axis("unshard", name, part, axis, shards.rows(rank), f"shards.rows({rank})")
    whole = _empty("unshard", named, axis, shards.total)
    for rank, part in enumerate(parts):
        for run in shards.runs(rank):
            whole[along(axis, run.whole)] = part[along(axis, run.local)]
    return whole


def along(axis: int, rows: slice) -> tuple[slice, ...]:
    """The index that takes these rows of an axis."""
    return (*(slice(None),) * axis, rows)


def first_positions(shards_q: Shards, shards_k: Shards, causal: bool | str) -> tuple[int, ...]:
    """Of the first query of each sequence, where its first key stands at 0, as the contract aligns them."""
    if causal == "top-left":
        return (0,) * len(shards_q.lengths)
    return tuple(len_k - len_q for len_q, len_k in zip(shards_q.lengths, shards_k.lengths, strict=True))


@functools.lru_cache(maxsize=512)
def visible(
    shards_q: Shards, shards_k: Shards, causal: bool | str, window: tuple[int | None, int | None] | None
) -> frozenset[tuple[int, int, int, int]]:
    """(rank, its piece, other rank, its piece) wherever a query of the first sees a key of the second."""
    left, right = (math.inf if side is None else side for side in window or (None, None))
    right = 0 if causal else right
    firsts = first_positions(shards_q, shards_k, causal)

    def sees(queries: Piece, keys: Piece) -> bool:
        return any(
            q_begin < q_end
            and k_begin < k_end
            and k_begin <= first + q_end - 1 + right
            and k_end - 1 >= first + q_begin - left
            for first, q_begin, q_end, k_begin, k_end in zip(firsts, *queries[1:], *keys[1:], strict=True)
        )

    ranks = range(shards_q.size)
    return frozenset(
        (rank, a, other, b)
        for rank in ranks
        for other in ranks
        for a, queries in enumerate(shards_q.pieces(rank))
        for b, keys in enumerate(shards_k.pieces(other))
        if sees(queries, keys)
    )


@functools.lru_cache(maxsize=4096)
def _pieces(shards: Shards, rank: int) -> tuple[Piece, ...]:
    parts = 2 * shards.size if shards.zigzag else shards.size
    held = (rank, parts - 1 - rank) if shards.zigzag else (rank,)
    pieces, at = [], 0
    for part in held:
        spans = [cut(length, parts, part) for length in shards.lengths]
        begins, ends = (tuple(span[side] for span in spans) for side in (0, 1))
        rows = sum(ends) - sum(begins)
        pieces.append(Piece(slice(at, at + rows), begins, ends))
        at += rows
    return tuple(pieces)


def cut(length: int, parts: int, part: int) -> tuple[int, int]:
    """Where a part of this length begins and ends: parts are as equal as can be, longer ones first."""
    each, longer = divmod(length, parts)
    begin = part * each + min(part, longer)
    return begin, begin + each + (part < longer)


def _empty(function: str, arrays: dict[str, Any], axis: int, rows: int) -> Any:
    """An array of the library, dtype and place of these, like the first but with so many positions along the axis."""
    adopted = _interop.adopt(function, arrays)
    (first, view), *others = adopted.views.items()
    if view.dtype not in _interop.NUMPY_DTYPES:
        accepted = f"{', '.join(_interop.NUMPY_DTYPES)} are accepted"
        raise TypeError(refusal(function, first, f"is {view.dtype}", accepted))
    for name, other in others:
        if other.dtype != view.dtype:
            given = f"is {other.dtype} and `{first}` is {view.dtype}"
            raise TypeError(refusal(function, name, given, "arrays of one dtype are accepted"))
    shape = (*view.shape[:axis], rows, *view.shape[axis + 1 :])
    return adopted.give(adopted.empty(shape, view.dtype))


def _check_rank(function: str, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(refusal(function, "rank", f"is {rank}", f"an int in [0, {size}) is accepted"))


def _check_axis(function: str, name: str, array: Any, axis: int, rows: int, what: str) -> int:
    """The axis counted from the front, where the array has so many positions."""
    shape = tuple(array.shape)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(refusal(function, "axis", f"is {axis}", f"`{name}` has {len(shape)} axes"))
    if shape[axis] != rows:
        given = f"has {shape[axis]} positions in axis {axis} of {list(shape)}"
        raise ValueError(refusal(function, name, given, f"{what} = {rows} are accepted"))
    return axis % len(shape)


def _integer(name: str, value: Any, low: int) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(refusal("Shards", name, f"is {value!r}", f"an int of at least {low} is accepted"))
    if value < low:
        raise ValueError(refusal("Shards", name, f"is {value}", f"an int of at least {low} is accepted"))
    return int(value)
