"""One model in four ways: torch and JAX have the gradients and steps written by hand; runs are judged and stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks import training, training_plot
from benchmarks.stamp import RESULTS, ROOT
from examples.train_text import data
from examples.train_text.model import Config, Transformer
from examples.train_text.train import ByHand, Settings

TINY = Config(num_layers=2, width=24, heads=3, hidden=40)
RATES = [1e-2, 7e-3, 4e-3]
ROUNDING = 200 * float(np.finfo(np.float32).eps)  # sums over a hundred rows, in another order
BFLOAT16_EPS = float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)


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
    pytest.importorskip("jax.experimental.buffer_callback", reason="jax is not installed, or older than 0.6.2")
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


def test_attention_in_sixteen_bits_keeps_everything_else_in_float32(rng: np.random.Generator) -> None:
    seed, batch = int(rng.integers(2**32)), rng.integers(0, TINY.vocabulary, (2, 3, 37))
    models = [
        Transformer(TINY, np, np.random.default_rng(seed), attention_dtype=dtype) for dtype in ("float32", "bfloat16")
    ]
    (loss, grads), (rounded_loss, rounded_grads) = (model.loss_and_grads(*batch) for model in models)
    assert any((rounded_grads[key] != grad).any() for key, grad in grads.items())  # losses may be the same float
    assert abs(loss - rounded_loss) <= BFLOAT16_EPS * abs(loss)
    for key, grad in grads.items():
        assert rounded_grads[key].dtype == np.float32
        assert np.abs(rounded_grads[key] - grad).max() <= 4 * BFLOAT16_EPS * np.abs(grad).max(), key


def run(way: str, seed: int, end: float) -> dict[str, Any]:
    return {"way": way, "seed": seed, "train": [3.0, 2.0], "held": [[1, 3.0], [2, end]]}


HEAD = {
    "backend": "numpy",
    "date": "2026-11-30",
    "bigram": 2.0,
    "absent": {"JAX, cupyflash": "no module"},
    "config": vars(TINY),
    "settings": vars(Settings()),
    "attention_dtype": "float32",
}


@pytest.mark.parametrize(
    ("ends", "is_good", "words"),
    [
        ((1.70, 1.71, 1.73), True, ["All runs", "2 ways end 0.01 apart", "2 seeds of one way 0.03:", "within"]),
        ((1.70, 1.75, 1.73), False, ["All runs", "0.05 apart", "BEYOND"]),
        ((1.70, 1.71, 1.81), False, ["NOT all runs", "within"]),
        ((1.70, np.nan, 1.73), False, ["NOT all runs"]),
    ],
)
def test_the_verdict_is_about_the_bigram_and_the_noise_of_seeds(
    ends: tuple[float, ...], is_good: bool, words: list[str]
) -> None:
    rows = [run("by hand, cupyflash", 0, ends[0]), run("torch", 0, ends[1]), run("by hand, cupyflash", 1, ends[2])]
    good, said = training.verdict(HEAD, rows)
    assert good == is_good
    assert all(word in said for word in words), said
    table = training.table(HEAD, rows)
    assert "| by hand, cupyflash | 0 | 1.7000 | 15.0 % | 2 |" in table
    assert "| JAX, cupyflash | | not run: no module | | |" in table


def test_a_run_is_stored_and_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    text = data.load(None)[:9000]
    monkeypatch.setattr(data, "load", lambda path: text)
    monkeypatch.setitem(training.SIZES, "numpy", (TINY, Settings(batch=2, context=20, num_evaluations=2), "float32"))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "examples.train_text.in_torch", None)
    monkeypatch.setitem(sys.modules, "jax", None)
    stored, drawn, again = (tmp_path / name for name in ("run.json", "run.svg", "again.svg"))
    arguments = ["--steps", "4", "--json", str(stored), "--plot", str(drawn)]
    assert training.main(arguments) == 1  # four steps are too few
    head, *rows = map(json.loads, stored.read_text("utf-8").splitlines())
    assert head["command"] == f"python -m benchmarks.training {' '.join(arguments)}"
    assert set(head["absent"]) == set(training.WAYS) - {"by hand, cupyflash"}
    assert [row["seed"] for row in rows] == [0, *training.OTHER_SEEDS]
    assert [step for step, _ in rows[0]["held"]] == [2, 4]
    assert len(rows[0]["train"]) == 4
    assert rows[0]["train"] != rows[1]["train"]
    assert training.table(head, rows) in capsys.readouterr().out
    assert f"by hand, cupyflash: {rows[0]['held'][-1][1]:.4f}" in drawn.read_text("utf-8")
    training.main(["--draw", str(stored), "--plot", str(again)])
    assert again.read_bytes() == drawn.read_bytes()


def test_a_library_without_a_gpu_is_absent_from_a_run_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, jax = (pytest.importorskip(name, reason=f"{name} is not installed") for name in ("torch", "jax"))

    def no_gpu(kind: str) -> list[Any]:
        raise RuntimeError(f"no {kind} here")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(jax, "devices", no_gpu)
    for way, why in (("torch, cupyflash", "this torch finds no GPU"), ("JAX, cupyflash", "no gpu here")):
        with pytest.raises(training.Absent, match=why):
            training.WAYS[way]("cupy", TINY, np.random.default_rng(), "bfloat16")


def test_the_page_shows_every_stored_run_and_the_picture_one_of_them() -> None:
    page, picture = ((ROOT / "docs" / name).read_text("utf-8") for name in ("training.md", "images/training.svg"))
    shown = []
    for file in RESULTS.glob("training-*.json"):
        head, *rows = map(json.loads, file.read_text("utf-8").splitlines())
        assert training.table(head, rows) in page, file.name
        assert training.verdict(head, rows)[0], file.name
        ends = [f"{row['way']}: {row['held'][-1][1]:.4f}" for row in rows if row["seed"] == 0]
        shown.append(all(words in picture for words in [*ends, training_plot.caption(head)]))
    assert shown.count(True) == 1
