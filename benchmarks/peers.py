"""Who is timed: cupyflash and, on the same tensors, torch's FlashAttention-2 and cuDNN."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupyflash
from benchmarks.cases import Case


class Absent(Exception):
    """This competitor cannot run the case; the message says why."""


class Contestant(Protocol):
    """One implementation bound to one set of tensors. `backward` uses the state of the last `forward`."""

    def context(self) -> AbstractContextManager[Any]:
        """What must surround the calls, and is not timed."""
        ...

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def results(self) -> dict[str, Any]:
        """`out`, `dq`, `dk`, `dv` [B, N, H, D] and `lse` [B, Hq, N] of the last calls, as far as they can be had."""
        ...


class Ours:
    """cupyflash on torch tensors, with outputs and workspace allocated once and poisoned."""

    def __init__(self, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        self.attention = cupyflash.Attention(causal=case.is_causal, window=case.window)
        self.q, self.k, self.v, self.dout = q, k, v, dout
        self.out, self.dq, self.dk, self.dv = (torch.full_like(x, torch.nan) for x in (q, q, k, v))
        self.lse = torch.full((case.batch, case.heads_q, case.length), torch.nan, device=q.device)
        self.workspaces = [self._workspace(backward=False), self._workspace(backward=True)]

    def _workspace(self, *, backward: bool) -> Any:
        size = self.attention.workspace_size(self.q, self.k, self.v, backward=backward)
        return torch.full((size,), 255, dtype=torch.uint8, device=self.q.device) if size else None

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def forward(self) -> None:
        self.attention.fwd(self.q, self.k, self.v, out=self.out, lse=self.lse, workspace=self.workspaces[0])

    def backward(self) -> None:
        self.attention.bwd(
            self.q,
            self.k,
            self.v,
            self.out,
            self.lse,
            self.dout,
            dq=self.dq,
            dk=self.dk,
            dv=self.dv,
            workspace=self.workspaces[1],
        )

    def results(self) -> dict[str, Any]:
        return {"out": self.out, "lse": self.lse, "dq": self.dq, "dk": self.dk, "dv": self.dv}


class Prepared(Ours):
    """cupyflash again, with its arguments checked and packed once: what a call costs the host beyond its launches."""

    def __init__(self, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        super().__init__(case, q, k, v, dout)
        state: dict[str, Any] = {"out": self.out, "lse": self.lse}
        grads: dict[str, Any] = {"dout": dout, "dq": self.dq, "dk": self.dk, "dv": self.dv}
        self.forward = self.attention.prepare(q, k, v, **state, workspace=self.workspaces[0])
        self.backward = self.attention.prepare(q, k, v, True, **state, **grads, workspace=self.workspaces[1])


class Sdpa:
    """One backend of torch's scaled_dot_product_attention; its layout is [B, H, N, D], which a transposed view is."""

    def __init__(self, backend: SDPBackend, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        if case.window is not None:
            raise Absent("scaled_dot_product_attention has no window")
        self.backend, self.case = backend, case
        self.inputs = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        self.dout = dout.transpose(1, 2)
        self.grads: tuple[Any, ...] = ()
        with warnings.catch_warnings(), self.context():
            warnings.simplefilter("ignore")  # torch warns why each backend is out; the exception is what counts
            try:
                self.forward()
            except RuntimeError as error:
                raise Absent(str(error).splitlines()[0]) from error

    def context(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(self.backend)

    def forward(self) -> None:
        self.out = scaled_dot_product_attention(
            *self.inputs, is_causal=self.case.is_causal, enable_gqa=self.case.heads_q != self.case.heads_kv
        )

    def backward(self) -> None:
        self.grads = torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def results(self) -> dict[str, Any]:
        grads = dict(zip(("dq", "dk", "dv"), self.grads, strict=False))
        return {name: x.detach().transpose(1, 2) for name, x in {"out": self.out, **grads}.items()}


class FlashAttention2(Sdpa):
    """torch's FLASH_ATTENTION backend."""

    def __init__(self, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        super().__init__(SDPBackend.FLASH_ATTENTION, case, q, k, v, dout)

    def results(self) -> dict[str, Any]:
        """Adds `lse`, which only the operator beneath scaled_dot_product_attention returns."""
        suffix = "" if self.dout.is_cuda else "_for_cpu"
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{suffix}")
        _, lse, *_ = operator(*(x.detach() for x in self.inputs), 0.0, self.case.is_causal)
        return {**super().results(), "lse": lse[..., : self.case.length]}


def fa2(case: Case, q: Any, k: Any, v: Any, dout: Any) -> Contestant:
    return FlashAttention2(case, q, k, v, dout)


def cudnn(case: Case, q: Any, k: Any, v: Any, dout: Any) -> Contestant:
    return Sdpa(SDPBackend.CUDNN_ATTENTION, case, q, k, v, dout)


PEERS: dict[str, Callable[..., Contestant]] = {"fa2": fa2, "cudnn": cudnn, "prepared": Prepared}
