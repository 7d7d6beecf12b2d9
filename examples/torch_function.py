"""The smallest bridge to torch's autograd: one Function over attn_fwd and attn_bwd, with LSE as a second output.

Checked against torch's own attention, on the GPU when there is one, and by gradcheck in float64 on the CPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import cupyflash

# What torch calls is_causal starts at the top left corner; its attention has heads before positions.
ATTENTION = cupyflash.Attention(layout="bhsd", causal="top-left")

LARGEST_ERROR = 2e-5  # float32: sums of a hundred products of values near 1, gradients a few times larger


class FlashAttention(torch.autograd.Function):
    """(q, k, v) -> (out, lse), each differentiable."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = ATTENTION.fwd(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dout, dlse = grad_outputs  # zeros for an output that the loss does not use, which change nothing
        q, k, v, out, lse = ctx.saved_tensors
        return tuple(ATTENTION.bwd(q, k, v, out, lse, dout, dlse=dlse))


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same two outputs from torch's own operators; each KV head serves a group of query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    is_visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~is_visible, -torch.inf)
    return scaled_dot_product_attention(q, k, v, is_causal=True), scores.logsumexp(dim=-1)


def inputs(device: str, dtype: torch.dtype, len_q: int, len_k: int) -> list[torch.Tensor]:
    shapes = [(2, 6, len_q, 40), (2, 2, len_k, 40), (2, 2, len_k, 24)]  # Dv need not be D, and Hq a multiple of Hkv
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]


def largest_errors(device: str) -> dict[str, float]:
    """Of the float32 Function's results and gradients, from torch's in float64 on the same numbers."""
    tensors = inputs(device, torch.float32, len_q=93, len_k=131)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    results, expected = FlashAttention.apply(*tensors), torch_attention(*exact)
    cotangents = [torch.randn_like(result) for result in results]
    grads = torch.autograd.grad(results, tensors, cotangents)
    expected_grads = torch.autograd.grad(expected, exact, [cotangent.double() for cotangent in cotangents])
    pairs = zip([*results, *grads], [*expected, *expected_grads], strict=True)
    errors = [(ours - theirs).abs().max().item() for ours, theirs in pairs]
    return dict(zip(["out", "lse", "dq", "dk", "dv"], errors, strict=True))


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    errors = largest_errors(device)
    is_close = all(error <= LARGEST_ERROR for error in errors.values())
    listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"torch's attention on {device}: largest differences {listed}: {'good' if is_close else 'TOO FAR APART'}")
    is_gradient = torch.autograd.gradcheck(
        FlashAttention.apply, inputs("cpu", torch.float64, len_q=5, len_k=7), fast_mode=True, raise_exception=False
    )
    print(f"gradcheck in float64 on the CPU: {'good' if is_gradient else 'FAILED'}")
    return 0 if is_close and is_gradient else 1


if __name__ == "__main__":
    sys.exit(main())
