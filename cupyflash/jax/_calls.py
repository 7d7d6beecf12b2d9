"""The plain calls as hashable values: what they are asked, without arrays. A primitive has one as its parameter.

`compute` makes the call on arrays of `_memory`: on those without addresses it says the shapes of results, and refuses
what is to be refused; in a callback it computes. `batched` says how one call serves many of its like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cupyflash import _attention, _merge
from cupyflash._attention import Attention
from cupyflash.jax._memory import Form, Memory

_GRADIENTS = ("q", "k", "v", "bias", "sink")  # what has one, in the order of results
_WORDS = ("seed", "offset")
_WITH_BATCH = ("q", "k", "v", "out", "lse", "dout", "delta", "dlse", "seqused_k", "q_start", "k_start")


class Call(Protocol):
    """Hashable and comparable: equal ones share what was traced and compiled."""

    @property
    def function(self) -> str:
        """The public name."""
        ...

    def compute(self, arrays: Sequence[Memory]) -> list[Memory]:
        """The results."""
        ...

    def workspace_bytes(self, arrays: Sequence[Memory]) -> int:
        """What a GPU needs beside the results; plans and compiles, so that it is done before a callback runs."""
        ...

    def batched(self, forms: Sequence[Form], mapped: Sequence[bool]) -> list[bool] | None:
        """Which arrays have the batch as their first axis, as all results then have, so that calls which differ in the
        mapped ones are one with a longer batch. None where they are not."""
        ...


@dataclass(frozen=True)
class AttentionCall:
    """`Attention.fwd` or `Attention.bwd`."""

    attention: Attention
    names: tuple[str, ...]  # of the arrays
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    backward: bool = False

    @property
    def function(self) -> str:
        return "attn_bwd" if self.backward else "attn_fwd"

    @property
    def gradients(self) -> list[str]:
        """Of what a backward gives them, in order."""
        has_one = {"bias": self.attention.bias_grad}
        return [name for name in _GRADIENTS if name in self.names and has_one.get(name, True)]

    def _arguments(self, arrays: Sequence[Memory]) -> dict[str, Any]:
        named = zip(self.names, arrays, strict=True)
        given: dict[str, Any] = {name: array.as_word() if name in _WORDS else array for name, array in named}
        if self.backward:
            given.setdefault("out", None)  # it may be missing beside delta
        return given | {"max_seqlen_q": self.max_seqlen_q, "max_seqlen_k": self.max_seqlen_k}

    def compute(self, arrays: Sequence[Memory]) -> list[Memory]:
        run = self.attention.bwd if self.backward else self.attention.fwd
        return list(run(**self._arguments(arrays)))

    def workspace_bytes(self, arrays: Sequence[Memory]) -> int:
        from cupyflash._warmup import warmup

        given = self._arguments(arrays)
        plan, needed = _attention.planned(self.function, self.attention, given, backward=self.backward)
        warmup(plan)
        return needed

    def batched(self, forms: Sequence[Form], mapped: Sequence[bool]) -> list[bool] | None:
        shapes = {name: shape for name, (shape, _) in zip(self.names, forms, strict=True)}
        if self.attention.layout == "thd" or {"block_table", *_WORDS} & set(self.names):
            return None  # what dropout keeps depends on a row's place in the batch
        found: list[bool] = []
        for name, is_mapped in zip(self.names, mapped, strict=True):
            has_batch = name in _WITH_BATCH or (name == "alibi_slopes" and len(shapes[name]) == 2)
            has_batch |= name == "bias" and len(shapes[name]) == 4 and shapes[name][0] == shapes["q"][0]
            # What all rows share has one value, and in a backward one gradient.
            if not has_batch and (is_mapped or (self.backward and name in self.gradients)):
                return None
            found.append(has_batch)
        return found


@dataclass(frozen=True)
class PreprocessCall:
    """`attn_bwd_preprocess` of out, dout and perhaps dlse."""

    layout: str
    function: str = "attn_bwd_preprocess"

    def compute(self, arrays: Sequence[Memory]) -> list[Memory]:
        out, dout, dlse = (*arrays, None)[:3]
        return [_attention.preprocess(self.function, self.layout, out, dout, dlse)]

    def workspace_bytes(self, arrays: Sequence[Memory]) -> int:
        out, dout, dlse = (*arrays, None)[:3]
        _attention.ready_preprocess(self.function, self.layout, out, dout, dlse)
        return 0

    def batched(self, forms: Sequence[Form], mapped: Sequence[bool]) -> list[bool] | None:
        return None if self.layout == "thd" else [True] * len(forms)


@dataclass(frozen=True)
class MergeCall:
    """`merge_states` of outs and lses, each a number of arrays or (None) one of stacked states; or its gradient."""

    layout: str
    out_dtype: str | None
    num_outs: int | None
    num_lses: int | None
    backward: bool = False

    @property
    def function(self) -> str:
        return "merge_states_bwd" if self.backward else "merge_states"

    def families(self, arrays: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
        """Outs and lses as they were given, and the arrays behind them."""
        rest = list(arrays)
        outs, lses = (
            rest.pop(0) if number is None else [rest.pop(0) for _ in range(number)]
            for number in (self.num_outs, self.num_lses)
        )
        return outs, lses, rest

    def compute(self, arrays: Sequence[Memory]) -> list[Memory]:
        outs, lses, rest = self.families(arrays)
        if not self.backward:
            return list(_merge.merge_states(outs, lses, layout=self.layout, out_dtype=self.out_dtype))
        douts, dlses = _merge.merge_states_bwd(outs, lses, *rest, layout=self.layout)
        return [*_listed(douts), *_listed(dlses)]

    def workspace_bytes(self, arrays: Sequence[Memory]) -> int:
        outs, lses, rest = self.families(arrays)
        if not self.backward:
            return _merge.forward(self.function, outs, lses, self.layout, self.out_dtype).workspace_bytes
        out, lse, dout, dlse = (*rest, None)[:4]
        return _merge.backward(self.function, outs, lses, out, lse, dout, dlse, self.layout).workspace_bytes

    def batched(self, forms: Sequence[Form], mapped: Sequence[bool]) -> list[bool] | None:
        is_packed = self.layout == "thd" or len(forms[0][0]) == 3
        return None if is_packed or None in (self.num_outs, self.num_lses) else [True] * len(forms)


def _listed(family: Any) -> list[Any]:
    return family if isinstance(family, list) else [family]
