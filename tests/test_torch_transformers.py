"""Models of transformers give with `attn_implementation="cupy_attention"` what they give with "sdpa" or "eager"."""

from __future__ import annotations

from typing import Any

import pytest

import cupyflash as cf

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

from cupyflash.torch import register_with_transformers  # noqa: E402

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
}  # fmt: skip


def config(kind: str) -> Any:
    if kind == "soft caps and windows":
        return transformers.Gemma2Config(**SIZES, sliding_window=4, attn_logit_softcapping=0.1)
    if kind == "sinks and windows":
        return transformers.GptOssConfig(**SIZES, sliding_window=4, num_local_experts=2, num_experts_per_tok=1)
    return transformers.LlamaConfig(**SIZES)


def results(model: Any, tokens: Any, mask: Any) -> tuple[Any, ...]:
    """Logits of what is no padding, and the gradients of the parameters."""
    logits = model(input_ids=tokens, attention_mask=mask).logits
    real = logits if mask is None else logits[mask.bool()]
    return real, *torch.autograd.grad(real.square().mean(), [*model.parameters()])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["plain", "soft caps and windows", "sinks and windows"])
def test_a_model_gives_what_it_gives_with_torchs_operations(torch_device: str, kind: str, padded: bool) -> None:
    register_with_transformers()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(kind), attn_implementation="eager")
    model = model.to(torch_device).eval()
    tokens = torch.randint(0, 50, (2, 9), device=torch_device)
    mask = torch.ones_like(tokens) if padded else None
    if mask is not None:
        mask[0, :3] = 0
    want = results(model, tokens, mask)
    model.set_attn_implementation("cupy_attention")
    for a, b in zip(results(model, tokens, mask), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    if not padded:
        with torch.no_grad():
            again = [
                model.set_attn_implementation(name)
                or model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
                for name in ("cupy_attention", "eager")
            ]
        assert torch.equal(*again)


def test_attention_weights_are_refused() -> None:
    register_with_transformers("ours")
    model = transformers.AutoModelForCausalLM.from_config(config("plain"), attn_implementation="ours")
    with pytest.raises((cf.UnsupportedError, ValueError)):
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64), output_attentions=True)


def test_a_name_that_transformers_takes_for_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="`name` is 'cupyflash'; a name without 'flash' is accepted"):
        register_with_transformers("cupyflash")
