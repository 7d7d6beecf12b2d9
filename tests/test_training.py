"""One model in four ways: torch and JAX have the gradients and steps written by hand; runs are judged and stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from examples.train_text.model import Config, Transformer
from examples.train_text.train import ByHand

TINY = Config(num_layers=2, width=24, heads=3, hidden=40)
RATES = [1e-2, 7e-3, 4e-3]
ROUNDING = 200 * float(np.finfo(np.float32).eps)  # sums over a hundred rows, in another order


def plain_attention_in_jax(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    """Stands where cupyflash.jax is missing."""
    import jax
    import jax.numpy as jnp

    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 - slopes[:, None, None] * distance
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(jnp.where(distance < 0, -jnp.inf, scores)), v)


def learner(name: str, seed: int) -> Any:
    """And a function of tokens and targets to its gradients by name."""
    rng = np.random.default_rng(seed)
    if name.startswith("torch"):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        from examples.train_text import in_torch

        made = in_torch.InTorch(TINY, rng, getattr(in_torch, f"{name.split(', ')[1]}_attention"))

        def gradients(*batch: np.ndarray) -> dict[str, np.ndarray]:
            found = torch.autograd.grad(made.forward(*batch), list(made.params.values()))
            return {name: grad.numpy() for name, grad in zip(made.params, found, strict=True)}

        return made, gradients
    pytest.importorskip("jax", reason="JAX is not installed")
    if name == "JAX, cupyflash":
        pytest.importorskip("cupyflash.jax", reason="cupyflash.jax is not there")
    from examples.train_text import in_jax

    attention = in_jax.cupyflash_attention if name == "JAX, cupyflash" else plain_attention_in_jax
    made = in_jax.InJax(TINY, rng, attention)
    return made, lambda *batch: {
        name: np.asarray(grad) for name, grad in made.loss_and_grads(made.params, *batch)[1].items()
    }


@pytest.mark.parametrize("name", ["torch, sdpa", "torch, cupyflash", "JAX, plain", "JAX, cupyflash"])
def test_gradients_and_steps_are_those_written_by_hand(name: str, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**32))
    by_hand = ByHand(Transformer(TINY, np, np.random.default_rng(seed)))
    other, gradients = learner(name, seed)
    tokens, targets = rng.integers(0, TINY.vocabulary, (2, 3, 37))

    _, wanted = by_hand.model.loss_and_grads(tokens, targets)
    found = gradients(tokens, targets)
    assert found.keys() == wanted.keys()
    for key, grad in wanted.items():
        assert np.abs(found[key] - grad).max() <= ROUNDING * np.abs(grad).max(), key

    begin = by_hand.loss(tokens, targets)
    for rate in RATES:
        assert other.step(tokens, targets, rate) == pytest.approx(by_hand.step(tokens, targets, rate), rel=ROUNDING)
    end = by_hand.loss(tokens, targets)
    assert end < begin - 0.1, "steps that change little would not be told apart"
    assert other.loss(tokens, targets) == pytest.approx(end, rel=ROUNDING)
