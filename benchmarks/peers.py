"""Who is timed: cupyflash and, on the same tensors, what else torch has for attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupyflash
from benchmarks.cases import Case
from benchmarks.reference import visible_pairs


class Absent(Exception):
    """This competitor cannot run the case; the message says why."""


class Contestant(Protocol):
    """One implementation bound to one set of tensors. `backward` uses the state of the last `forward`.

    A new one holds nothing but its inputs, and a forward makes nothing that only the backward writes: whatever memory a
    call takes is then the call's own.
    """

    def context(self) -> AbstractContextManager[Any]:
        """What must surround the calls, and is not timed."""
        ...

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def results(self) -> dict[str, Any]:
        """`out`, `dq`, `dk`, `dv` [B, N, H, D] and `lse` [B, Hq, N] of the last calls, as far as they can be had."""
        ...


class Ours:
    """cupyflash on torch tensors, with outputs and workspace allocated once, at the first call, and poisoned.

    Where the host is timed, outputs and workspace are each call's own, as they are a peer's.
    """

    def __init__(self, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        self.makes_outputs = case.host
        self.attention = cupyflash.Attention(causal=case.is_causal, window=case.window)
        self.q, self.k, self.v, self.dout = q, k, v, dout

    @cached_property
    def state(self) -> dict[str, Any]:
        batch, length, heads, _ = self.q.shape
        lse = torch.full((batch, heads, length), torch.nan, device=self.q.device)
        return {"out": torch.full_like(self.dout, torch.nan), "lse": lse}

    @cached_property
    def grads(self) -> dict[str, Any]:
        return {"d" + name: torch.full_like(getattr(self, name), torch.nan) for name in "qkv"}

    @cached_property
    def forward_workspace(self) -> Any:
        return self._workspace(backward=False)

    @cached_property
    def backward_workspace(self) -> Any:
        return self._workspace(backward=True)

    def _workspace(self, *, backward: bool) -> Any:
        size = self.attention.workspace_size(self.q, self.k, self.v, backward=backward)
        return torch.full((size,), 255, dtype=torch.uint8, device=self.q.device) if size else None

    def adopted(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The tensors as the calls get them."""
        return tensors

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return self.adopted({"q": self.q, "k": self.k, "v": self.v})

    @cached_property
    def gradient(self) -> dict[str, Any]:
        return self.adopted({"dout": self.dout})

    @cached_property
    def forward_arrays(self) -> dict[str, Any]:
        return self.inputs | self.adopted({**self.state, "workspace": self.forward_workspace})

    @cached_property
    def backward_arrays(self) -> dict[str, Any]:
        made = self.adopted({**self.state, **self.grads, "workspace": self.backward_workspace})
        return self.inputs | self.gradient | made

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def forward(self) -> None:
        if self.makes_outputs:
            out, lse = self.attention.fwd(**self.inputs)
            self.state = {"out": out, "lse": lse}
        else:
            self.attention.fwd(**self.forward_arrays)

    def backward(self) -> None:
        if self.makes_outputs:
            dq, dk, dv = self.attention.bwd(**self.inputs, **self.state, **self.gradient)
            self.grads = {"dq": dq, "dk": dk, "dv": dv}
        else:
            self.attention.bwd(**self.backward_arrays)

    def results(self) -> dict[str, Any]:
        return self.state | vars(self).get("grads", {})


class Prepared(Ours):
    """cupyflash again, with its arguments checked and packed at the first call: what a call costs the host beyond its
    launches."""

    forward_plan: str | None = None  # the best
    backward_plan: str | None = None

    def forward(self) -> None:
        self.forward = self.attention.prepare(**self.forward_arrays, plan=self.forward_plan)
        self.forward()

    def backward(self) -> None:
        self.backward = self.attention.prepare(**self.backward_arrays, backward=True, plan=self.backward_plan)
        self.backward()


class Generic(Prepared):
    """cupyflash by the kernels that serve every GPU, where this one has its own; a plan that is named is made once."""

    forward_plan = "fwd_generic"
    backward_plan = "bwd_generic"


class OnCupy(Ours):
    """cupyflash once more, on CuPy arrays in the same memory."""

    def __init__(self, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        if not q.is_cuda:
            raise Absent("CuPy arrays live on a GPU")
        super().__init__(case, q, k, v, dout)

    def adopted(self, tensors: dict[str, Any]) -> dict[str, Any]:
        import cupy

        return {name: None if x is None else cupy.from_dlpack(x) for name, x in tensors.items()}

    def results(self) -> dict[str, Any]:
        return {name: torch.from_dlpack(array) for name, array in super().results().items()}


class Deterministic(Ours):
    """cupyflash with gradients that are bitwise the same in every run."""

    def __init__(self, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        super().__init__(case, q, k, v, dout)
        self.attention = self.attention.replace(deterministic=True)


class ByAutograd:
    """Attention of torch that records a graph; its layout is [B, H, N, D], which a transposed view is."""

    def __init__(self, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        self.case = case
        self.inputs = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        self.dout = dout.transpose(1, 2)
        self.out: Any = None
        self.grads: tuple[Any, ...] = ()

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def attention(self) -> Any:
        raise NotImplementedError

    def forward(self) -> None:
        self.out = self.attention()

    def backward(self) -> None:
        self.grads = torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def results(self) -> dict[str, Any]:
        grads = dict(zip(("dq", "dk", "dv"), self.grads, strict=False))
        return {name: x.detach().transpose(1, 2) for name, x in {"out": self.out, **grads}.items()}

    def forget(self) -> None:
        """As if nothing had been called."""
        self.out, self.grads = None, ()


class Sdpa(ByAutograd):
    """One backend of torch's scaled_dot_product_attention."""

    def __init__(self, backend: SDPBackend, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        if case.window is not None:
            raise Absent("scaled_dot_product_attention has no window")
        super().__init__(case, q, k, v, dout)
        self.backend = backend
        with warnings.catch_warnings(), self.context():
            warnings.simplefilter("ignore")  # torch warns why each backend is out; the exception is what counts
            try:
                self.forward()
            except RuntimeError as error:
                raise Absent(str(error).splitlines()[0]) from error
        self.forget()

    def context(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(self.backend)

    def attention(self) -> Any:
        is_grouped = self.case.heads_q != self.case.heads_kv
        return scaled_dot_product_attention(*self.inputs, is_causal=self.case.is_causal, enable_gqa=is_grouped)


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


class FlashAttention4(ByAutograd):
    """The kernels of flash-attn-4, written in CuTe DSL and compiled here; its layout is ours."""

    def __init__(self, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        super().__init__(case, q, k, v, dout)
        self.inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        self.dout = dout
        self.lse: Any = None
        try:
            self.function: Any = import_module("flash_attn.cute").flash_attn_func
            self.forward()
        except Exception as error:  # not installed, or what it says of this shape
            raise Absent(f"flash-attn-4 does not run: {type(error).__name__}: {error}".splitlines()[0]) from error
        self.forget()
        self.lse = None

    def attention(self) -> Any:
        window = self.case.window or (None, None)
        out, self.lse = self.function(*self.inputs, causal=self.case.is_causal, window_size=window, return_lse=True)
        return out

    def results(self) -> dict[str, Any]:
        grads = dict(zip(("dq", "dk", "dv"), self.grads, strict=False))
        return {name: x.detach() for name, x in {"out": self.out, "lse": self.lse, **grads}.items()}


class Flex(ByAutograd):
    """torch's FlexAttention, compiled for this very shape; compiling takes seconds a case."""

    def __init__(self, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        if not q.is_cuda:
            raise Absent("FlexAttention is compared on a GPU alone")
        super().__init__(case, q, k, v, dout)
        try:
            from torch._functorch import config
            from torch.nn.attention.flex_attention import flex_attention

            torch.compiler.reset()  # else it gives up on compiling after a few shapes, or makes them dynamic
            self.compiled: Any = torch.compile(flex_attention, dynamic=False)
            self.mask = self._mask()
            with config.patch(donated_buffer=False):  # its backward would else give the graph's memory away at once
                self.forward()
                self.backward()
        except Exception as error:  # no Triton, no C compiler, a shape it cannot tile: each has its own type
            raise Absent(f"FlexAttention does not run: {type(error).__name__}: {error}".splitlines()[0]) from error
        self.forget()

    def _mask(self) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        if not self.case.is_causal and self.case.window is None:
            return None
        left, right = self.case.window or (self.case.length, self.case.length)
        if self.case.is_causal:
            right = min(right, 0)

        def is_visible(_b: Any, _h: Any, query: Any, key: Any) -> Any:
            return (key >= query - left) & (key <= query + right)

        return create_block_mask(is_visible, None, None, self.case.length, self.case.length, self.dout.device)

    def attention(self) -> Any:
        is_grouped = self.case.heads_q != self.case.heads_kv
        return self.compiled(*self.inputs, block_mask=self.mask, enable_gqa=is_grouped)


class Standard:
    """What attention was before it was tiled: plain operations, with P [B, H, N, N] stored for the backward.

    It gets its favourite memory, [B·H, N, D], without paying for it, and torch's own gradient of softmax.
    """

    def __init__(self, case: Case, q: Any, k: Any, v: Any, dout: Any) -> None:
        if case.heads_q != case.heads_kv:
            raise Absent("standard attention is written for one KV head per query head")
        self.case = case
        self.hidden: Any = None
        if q.is_cuda:
            torch.cuda.empty_cache()
            _refuse_beyond(torch.cuda.mem_get_info(q.device)[0], standard_bytes(case))
        self.q, self.k, self.v, self.dout = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, dout))
        if (visible := visible_pairs(case, q.device)) is not None:
            self.hidden = ~visible
        self.out: Any = None
        self.p: Any = None
        self.grads: tuple[Any, ...] = ()

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def forward(self) -> None:
        self.p = None  # or two of them would be held
        scores = torch.matmul(self.q * self.case.scale, self.k.mT)
        if self.hidden is not None:
            scores.masked_fill_(self.hidden, -torch.inf)
        self.p = torch.softmax(scores, -1)
        self.out = torch.matmul(self.p, self.v)

    def backward(self) -> None:
        dv = torch.matmul(self.p.mT, self.dout)
        dp = torch.matmul(self.dout, self.v.mT)
        ds = torch.ops.aten._softmax_backward_data(dp, self.p, -1, dp.dtype)  # P ∘ (dP − rowsum(P ∘ dP))
        dq = torch.matmul(ds, self.k).mul_(self.case.scale)
        dk = torch.matmul(ds.mT, self.q).mul_(self.case.scale)
        self.grads = dq, dk, dv

    def results(self) -> dict[str, Any]:
        named = {"out": self.out, **dict(zip(("dq", "dk", "dv"), self.grads, strict=False))}
        return {name: x.unflatten(0, (self.case.batch, -1)).transpose(1, 2) for name, x in named.items()}


def standard_bytes(case: Case) -> int:
    """Of the three arrays [B, H, N, N] that its backward holds at once: P, dP and dS."""
    return 3 * getattr(torch, case.dtype).itemsize * case.batch * case.heads_q * case.length**2


def standard_flops(case: Case, one_pass: str) -> int:
    """Two products forward and four backward, half of each with Dv, of all pairs: plain operations skip none."""
    products = {"forward": 1, "backward": 2}[one_pass]
    return products * 2 * case.batch * case.heads_q * case.length**2 * (case.head_dim + case.dv)


def _refuse_beyond(free: int, needed: int) -> None:
    if needed > free:
        raise Absent(f"it needs {needed / 2**30:.0f} GiB for P, dP and dS, and {free / 2**30:.0f} GiB are free")


def fa2(case: Case, q: Any, k: Any, v: Any, dout: Any) -> Contestant:
    return FlashAttention2(case, q, k, v, dout)


def cudnn(case: Case, q: Any, k: Any, v: Any, dout: Any) -> Contestant:
    return Sdpa(SDPBackend.CUDNN_ATTENTION, case, q, k, v, dout)


def efficient(case: Case, q: Any, k: Any, v: Any, dout: Any) -> Contestant:
    return Sdpa(SDPBackend.EFFICIENT_ATTENTION, case, q, k, v, dout)


PEERS: dict[str, Callable[..., Contestant]] = {
    "fa2": fa2,
    "fa4": FlashAttention4,
    "cudnn": cudnn,
    "efficient": efficient,
    "flex": Flex,
    "standard": Standard,
    "prepared": Prepared,
    "cupy": OnCupy,
    "deterministic": Deterministic,
    "generic": Generic,
}
