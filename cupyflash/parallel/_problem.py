"""One rank's part of a call: judged before anything is sent, then computed one shard of keys at a time.

    forward    out, lse = merge over shards s of Attention.fwd(q, k_s, v_s),  in float32
    backward   delta = rowsum(dout · out) − dlse, once;   for each s Attention.bwd(q, k_s, v_s, lse, delta) adds to
               dq, which stays, and to dk_s and dv_s, which end on the rank that holds s,  in float32

A shard may be several pieces of consecutive positions. Each pair of a piece of queries and a piece of keys is a call of
its own with the positions where both stand, and none is made where no query sees a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupyflash import _check, _interop
from cupyflash._api import attn_bwd_preprocess
from cupyflash._attention import Attention, AttnGrads, AttnGradsPlain, AttnGradsSink, AttnOutput
from cupyflash._errors import refusal
from cupyflash._making import Maker
from cupyflash._merge import merge_states
from cupyflash.parallel._shards import Shards, along, first_positions, visible
from cupyflash.parallel._transport import Message, Transfer, Transport

ROWS_AXIS = {"bshd": 1, "bhsd": 2, "thd": 0}  # of q, k, v, out and their gradients; of lse it is the last


class Problem(Maker):
    """What is given on this rank, and what it computes of it.

    `arrays` are q, k and v, and for a backward also out, lse, dout and dlse; `extras` are the rest of a call.
    """

    def __init__(
        self, function: str, transport: Transport, shards: Shards, shards_k: Shards | None, attention: Attention,
        arrays: dict[str, Any], extras: dict[str, Any],
    ) -> None:  # fmt: skip
        self.function, self.transport, self.attention = function, transport, attention
        self.rank, self.size = transport.rank, transport.size
        self.shards_q, self.shards_k = shards, shards if shards_k is None else shards_k
        self.arrays, self.extras = arrays, extras
        self._check_shards()
        self.rows_axis = ROWS_AXIS[attention.layout]
        self.adopted = _interop.adopt(
            function,
            arrays | {name: value for name, value in extras.items() if _interop.is_array(value)},
        )
        self._check_kind_and_lengths()
        self.visible = visible(self.shards_q, self.shards_k, attention.causal, attention.window)
        self._positions = self._packed_positions() if self.shards_q.is_packed else {}
        self._shapes = self._check_call()
        self.dtype = self.adopted.views["q"].dtype
        self.sums = "float64" if self.dtype == "float64" else "float32"  # of partial results and gradients
        self.partial = attention.replace(out_dtype=self.sums, grad_dtype=self.sums)

    # What is judged.

    def _check_shards(self) -> None:
        if not isinstance(self.attention, Attention):
            accepted = "a cupyflash.Attention is accepted"
            raise TypeError(refusal(self.function, "attention", f"is {self.attention!r}", accepted))
        for name, shards in (("shards", self.shards_q), ("shards_k", self.shards_k)):
            if not isinstance(shards, Shards):
                accepted = "a cupyflash.parallel.Shards is accepted"
                raise TypeError(refusal(self.function, name, f"is {shards!r}", accepted))
            if shards.size != self.size:
                given = f"is for {shards.size} ranks"
                raise ValueError(refusal(self.function, name, given, f"the transport has {self.size}"))
            if shards.is_packed != (self.attention.layout == "thd"):
                given = f"has length {shards.length} while the layout is {self.attention.layout!r}"
                accepted = "a sequence of lengths is accepted with 'thd', an int with others"
                raise ValueError(refusal(self.function, name, given, accepted))
        if len(self.shards_q.lengths) != len(self.shards_k.lengths):
            given = f"has {len(self.shards_k.lengths)} packed sequences"
            raise ValueError(refusal(self.function, "shards_k", given, f"`shards` has {len(self.shards_q.lengths)}"))

    def _check_kind_and_lengths(self) -> None:
        if self.adopted.kind == "dlpack":
            accepted = "arrays of NumPy, CuPy or torch are accepted"
            raise TypeError(refusal(self.function, "q", f"is an array of {self.adopted.library.name}", accepted))
        for name, shards in (("q", self.shards_q), ("k", self.shards_k), ("v", self.shards_k)):
            shape, rows = self.adopted.views[name].shape, shards.rows(self.rank)
            if len(shape) > self.rows_axis and shape[self.rows_axis] != rows:
                given = f"has {shape[self.rows_axis]} positions in axis {self.rows_axis} of {list(shape)}"
                accepted = f"rank {self.rank} of {shards} holds {rows}"
                raise ValueError(refusal(self.function, name, given, accepted))

    def _check_call(self) -> dict[str, tuple[int, ...]]:
        """This rank's arrays as one call: their shapes, dtypes and values, and whether a kernel serves them.

        Returns the shapes of what such a call makes.
        """
        is_backward = "dout" in self.arrays
        arguments: dict[str, Any] = dict.fromkeys(_BOTH + (_BACKWARD if is_backward else _FORWARD))
        arguments |= {"k_start": 0, "check": False} | self.arrays | self.extras
        if self.shards_q.is_packed:
            arguments |= {f"cu_seqlens_{side}": self._positions[side, self.rank, 0][0] for side in "qk"}
        checked = _check.checked_call(self.function, self.attention, arguments, backward=is_backward, planning=False)
        judged = checked.judged
        _interop.backend(judged.place).plan(judged.spec, judged.call, backward=is_backward, override=None)
        return {name: shape for name, (shape, _) in judged.outputs.items()}

    # Where shards lie.

    def _packed_positions(self) -> dict[tuple[str, int, int], tuple[Any, Any, int]]:
        """Of this rank's queries and everybody's keys, by ("q" or "k", rank, piece): offsets, first positions, longest.

        They go to the device in one copy.
        """
        firsts = first_positions(self.shards_q, self.shards_k, self.attention.causal)
        zeros = (0,) * len(firsts)
        parts: dict[tuple[str, int, int], tuple[np.ndarray, np.ndarray]] = {}
        sides = [("q", self.shards_q, [self.rank], firsts), ("k", self.shards_k, range(self.size), zeros)]
        for side, shards, ranks, base in sides:
            for rank in ranks:
                for number, piece in enumerate(shards.pieces(rank)):
                    begins, ends = (np.array(each, np.int64) for each in piece[1:])
                    offsets = np.concatenate([[0], np.cumsum(ends - begins)])
                    parts[side, rank, number] = offsets, begins + np.array(base, np.int64)
        flat = np.concatenate([array for pair in parts.values() for array in pair])
        on_device, at, found = self.int32(flat), 0, {}
        count = len(firsts)
        for key, (offsets, _) in parts.items():
            split, end = at + count + 1, at + 2 * count + 1
            longest = int(np.diff(offsets).max(initial=0))
            found[key] = on_device[at:split], on_device[split:end], longest
            at = end
        return found

    def _where(self, a: int, owner: int, b: int) -> dict[str, Any]:
        """The arguments that place this rank's a-th piece of queries and `owner`'s b-th piece of keys."""
        if self.shards_q.is_packed:
            offsets_q, first_q, longest_q = self._positions["q", self.rank, a]
            offsets_k, first_k, longest_k = self._positions["k", owner, b]
            return {
                "cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k, "max_seqlen_q": longest_q,
                "max_seqlen_k": longest_k, "q_start": first_q, "k_start": first_k,
            }  # fmt: skip
        [first] = first_positions(self.shards_q, self.shards_k, self.attention.causal)
        q_begin = self.shards_q.pieces(self.rank)[a].begins[0]
        return {"q_start": first + q_begin, "k_start": self.shards_k.pieces(owner)[b].begins[0]}

    def sees(self, rank: int, owner: int) -> bool:
        """Whether any of a rank's queries sees any of another's keys."""
        return any(
            (rank, a, owner, b) in self.visible
            for a in range(len(self.shards_q.pieces(rank)))
            for b in range(len(self.shards_k.pieces(owner)))
        )

    def _keys_of(self, a: int, owner: int, also_first: bool) -> Iterator[tuple[int, slice, bool]]:
        """`owner`'s pieces of keys that the a-th piece of queries sees: number, rows, and whether the sink goes there.

        The sink goes to the rank's own first keys alone; `also_first` gives these also where they are not seen.
        """
        for b, keys in enumerate(self.shards_k.pieces(owner)):
            is_first = owner == self.rank and b == 0
            if (self.rank, a, owner, b) in self.visible or (is_first and also_first):
                yield b, keys.rows, is_first

    # What is computed.

    def attend(self, owner: int, keys: list[Any], state: AttnOutput) -> None:
        """This rank's queries over `owner`'s k and v, merged into the state; the rank's own come first and begin it."""
        for a, queries in enumerate(self.shards_q.pieces(self.rank)):
            q = self._rows(self.arrays["q"], queries.rows)
            out, lse = self._rows(state.out, queries.rows), state.lse[..., queries.rows]
            parts = [AttnOutput(out, lse)]
            for b, rows, is_first in self._keys_of(a, owner, also_first=True):
                k, v = (self._rows(array, rows) for array in keys)
                arguments = self._arguments(a, owner, b, is_first)
                if is_first:
                    self.partial.fwd(q, k, v, out=out, lse=lse, **arguments)
                else:
                    parts.append(self.partial.fwd(q, k, v, **arguments))
            if len(parts) > 1:
                outs, lses = map(list, zip(*parts, strict=True))
                merge_states(outs, lses, layout=self.attention.layout, out=out, lse=lse)

    def delta(self) -> Any:
        """D of this rank's queries, which no key enters."""
        out, dout, dlse = (self.arrays[name] for name in ("out", "dout", "dlse"))
        return attn_bwd_preprocess(out, dout, dlse, layout=self.attention.layout)

    def differentiate(self, owner: int, keys: list[Any], delta: Any, grads: dict[str, Any], sums: list[Any]) -> None:
        """Add what this rank's queries and `owner`'s k and v give: to dq and dsink in `grads`, and to `sums`."""
        for a, queries in enumerate(self.shards_q.pieces(self.rank)):
            q, dout, dq = (
                self._rows(array, queries.rows) for array in (self.arrays["q"], self.arrays["dout"], grads["dq"])
            )
            lse, own_delta = self.arrays["lse"][..., queries.rows], delta[..., queries.rows]
            for b, rows, is_first in self._keys_of(a, owner, also_first="dsink" in grads):
                (k, v), (dk, dv) = ([self._rows(array, rows) for array in pair] for pair in (keys, sums))
                self.partial.bwd(
                    q, k, v, None, lse, dout, delta=own_delta, dq=dq, dk=dk, dv=dv,
                    dsink=grads.get("dsink") if is_first else None, accumulate=True,
                    **self._arguments(a, owner, b, is_first),
                )  # fmt: skip

    def _arguments(self, a: int, owner: int, b: int, with_sink: bool) -> dict[str, Any]:
        extras = self.extras if with_sink else self.extras | {"sink": None}
        return extras | self._where(a, owner, b)

    def _rows(self, array: Any, rows: slice) -> Any:
        return array[along(self.rows_axis, rows)]

    # What is returned.

    def state(self) -> AttnOutput:
        """Memory for the partial result of this rank's queries."""
        return AttnOutput(self.empty(self._shapes["out"], self.sums), self.empty(self._shapes["lse"], self.sums))

    def output(self, state: AttnOutput) -> AttnOutput:
        return AttnOutput(self.cast(state.out, self.attention.out_dtype or self.dtype), state.lse)

    def zero_grads(self) -> dict[str, Any]:
        """dq, and dsink where there is a sink; dk and dv belong to a shard."""
        return {name: self.zeros(self._shapes[name], self.sums) for name in ("dq", "dsink") if name in self._shapes}

    def output_grads(self, grads: dict[str, Any]) -> AttnGrads:
        dtype = self.attention.grad_dtype or self.dtype
        dq, dk, dv = (self.cast(grads[name], dtype) for name in ("dq", "dk", "dv"))
        return AttnGradsSink(dq, dk, dv, grads["dsink"]) if "dsink" in grads else AttnGradsPlain(dq, dk, dv)

    # Arrays of the caller's library.

    def keys_like(self, owner: int, dtype: str, make: Any) -> list[Any]:
        """A pair of arrays like `owner`'s k and v."""
        shapes = []
        for name in ("k", "v"):
            shape = list(self.adopted.views[name].shape)
            shape[self.rows_axis] = self.shards_k.rows(owner)
            shapes.append(tuple(shape))
        return [make(shape, dtype) for shape in shapes]

    def contiguous(self, name: str) -> Any:
        """The caller's array as it can be sent: itself, or a C-contiguous copy."""
        view = self.adopted.views[name]
        if view.strides == _interop.contiguous(tuple(view.shape)) and name not in self.adopted.unwritable:
            return self.arrays[name]
        return self.copy(self.arrays[name])

    # What travels.

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start it; both ends leave out arrays without elements."""
        sends, receives = _not_empty(sends), _not_empty(receives)
        return self.transport.exchange(sends, receives) if sends or receives else _Nothing()


_BOTH = (
    "q", "k", "v", "bias", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
    "seqused_k", "q_start", "k_start", "seed", "offset", "out", "lse", "workspace", "check",
)  # fmt: skip
_FORWARD = ("block_table",)
_BACKWARD = ("dout", "delta", "dlse", "dq", "dk", "dv", "dbias", "dsink")


def add(sums: list[Any], others: list[Any]) -> None:
    """Into `sums`; others may be none."""
    for array, other in zip(sums, others, strict=False):
        array += other


class _Nothing:
    """The transfer of no message."""

    def wait(self) -> None:
        pass


def _not_empty(messages: Sequence[Message]) -> list[Message]:
    return [(peer, array) for peer, array in messages if 0 not in array.shape]
