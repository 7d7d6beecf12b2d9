"""Torch's own `scaled_dot_product_attention` computes by cupyflash once that is activated, and not before or after."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
registry: Any = pytest.importorskip("torch.nn.attention")
if not hasattr(registry, "register_flash_attention_impl"):
    pytest.skip("this torch has no registry of flash attentions", allow_module_level=True)

from cupyflash.torch import _registry, attention, register_with_torch, scaled_dot_product_attention  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that a kernel is overridden


def problem(device: str, dtype: Any) -> list[Any]:
    heads = {"q": 4, "k": 2, "v": 2}
    tensors = [torch.randn(2, 9, heads[name], 16, device=device, dtype=dtype).transpose(1, 2) for name in "qkv"]
    return [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"dropout_p": 0.5}], ids=str)
def test_torchs_operator_and_its_gradient_are_ours(torch_device: str, options: dict[str, Any]) -> None:
    tensors = problem(torch_device, torch.bfloat16 if torch_device == "cuda" else torch.float32)
    held = _registry.override(torch_device.upper())
    try:
        torch.manual_seed(3)
        out, lse, *_, max_q, max_k, seed, _, _ = torch.ops.aten._scaled_dot_product_flash_attention(*tensors, **options)
        grads = torch.autograd.grad(out.square().sum(), tensors)
    finally:
        held.remove()
    assert (max_q, max_k) == (9, 9)
    assert out.stride() == tensors[0].stride()
    named = {"scale": options.get("scale"), "dropout_p": options.get("dropout_p", 0.0), "seed": seed[:1]}
    want = attention(*tensors, layout="bhsd", causal="top-left" if "is_causal" in options else False, **named)
    torch.testing.assert_close((out, lse), tuple(want))
    torch.testing.assert_close(grads, torch.autograd.grad(want.out.square().sum(), tensors))


def test_registering_activates_nothing() -> None:
    register_with_torch("ours, for a test")
    assert "ours, for a test" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() is None


@pytest.mark.gpu
@pytest.mark.parametrize("torch_device", ["cuda"], indirect=True)
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_activated_until_restored(torch_device: str, compiler: str | None) -> None:
    register_with_torch()
    tensors = problem(torch_device, torch.bfloat16)

    def step(function: Any) -> Any:
        out = function(*tensors, is_causal=True, enable_gqa=True)
        return out, *torch.autograd.grad(out.sum(), tensors)

    def torchs(*arrays: Any, **options: Any) -> Any:
        with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*arrays, **options)

    registry.activate_flash_attention_impl("cupyflash")
    try:
        own = torchs if compiler is None else torch.compile(torchs, backend=compiler)
        torch.testing.assert_close(step(own), step(scaled_dot_product_attention))
    finally:
        registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None
