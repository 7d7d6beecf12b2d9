"""The example program: its gradients, its data and its verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from examples.train_text import data
from examples.train_text.__main__ import main, printable
from examples.train_text.model import GRADCHECK_RTOL, GRADCHECK_STEP, Config, Transformer
from examples.train_text.report import draw_curve
from examples.train_text.train import History, Settings, held_out_nats, sample, train

TINY = Config(num_layers=2, width=6, heads=2, hidden=10, vocabulary=11)


def random_text(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, data.VOCABULARY, length, dtype=np.uint8)


def test_every_gradient_agrees_with_finite_differences() -> None:
    rng = np.random.default_rng()
    model = Transformer(TINY, np, rng, dtype="float64")
    for value in model.params.values():
        value[...] = 0.6 * rng.standard_normal(value.shape)  # nothing at its gentle first value
    tokens, targets = rng.integers(0, TINY.vocabulary, (2, 2, 5))
    _, grads = model.loss_and_grads(tokens, targets)
    assert grads.keys() == model.params.keys()
    for name, value in model.params.items():
        expected = np.empty_like(value)
        for index in np.ndindex(value.shape):
            kept = value[index]
            value[index] = kept + GRADCHECK_STEP
            above = model.loss(tokens, targets)
            value[index] = kept - GRADCHECK_STEP
            below = model.loss(tokens, targets)
            value[index] = kept
            expected[index] = (above - below) / (2 * GRADCHECK_STEP)
        error, largest = abs(grads[name] - expected).max(), abs(expected).max()
        assert largest > 0, name
        assert error <= GRADCHECK_RTOL * largest, f"{name}: {error} of {largest}"


def test_loss_and_grads_reports_the_loss() -> None:
    rng = np.random.default_rng()
    model = Transformer(TINY, np, rng, dtype="float64")
    tokens, targets = rng.integers(0, TINY.vocabulary, (2, 3, 7))
    logits = model.logits(tokens)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(log_p, targets[..., None], axis=-1).mean()
    assert model.loss_and_grads(tokens, targets)[0] == pytest.approx(expected)
    assert model.loss(tokens, targets) == pytest.approx(expected)


def test_a_byte_does_not_see_the_bytes_after_it() -> None:
    rng = np.random.default_rng()
    model = Transformer(TINY, np, rng)
    tokens = rng.integers(0, TINY.vocabulary, (1, 9))
    before = model.logits(tokens)
    tokens[0, 5] = (tokens[0, 5] + 1) % TINY.vocabulary
    after = model.logits(tokens)
    assert np.array_equal(before[:, :5], after[:, :5])
    assert not np.array_equal(before[:, 5:], after[:, 5:])


def test_a_short_run_learns_a_repeated_word() -> None:
    rng = np.random.default_rng()
    text = np.tile(rng.permutation(256)[:13].astype(np.uint8), 60)
    fit, held = data.split(text)
    model = Transformer(Config(num_layers=1, width=32, heads=2, hidden=64), np, rng)
    settings = Settings(num_steps=60, batch=4, context=20, peak_rate=1e-2, num_evaluations=3)
    reported: list[int] = []
    before = held_out_nats(model, held, settings)
    history = train(model, fit, held, settings, rng, lambda history: reported.append(len(history.train)))
    assert reported == list(range(1, 61))
    assert [step for step, _ in history.held] == [20, 40, 60]
    assert history.held[-1][1] == pytest.approx(held_out_nats(model, held, settings))
    assert history.held[-1][1] < before / 4
    assert np.mean(history.train[-5:]) < np.mean(history.train[:5]) / 4
    written = sample(model, text[:20].tobytes(), 26, settings.context, rng, temperature=0.1)
    assert written == text[:46].tobytes()


def test_the_held_out_tenth_is_not_in_the_rest() -> None:
    text = data.load(None)
    fit, held = data.split(text)
    assert np.array_equal(np.concatenate([fit, held]), text)
    assert len(held) == -(-len(text) // 10)
    assert b"The" in held.tobytes()
    paragraphs = held.tobytes().split(b"\n\n")[1:]  # the first may begin before the split
    assert not set(paragraphs) & set(fit.tobytes().split(b"\n\n"))


def test_windows_for_training_stay_inside_their_text_and_reach_its_ends() -> None:
    rng = np.random.default_rng()
    text = np.arange(23, dtype=np.uint8)
    seen = set()
    for _ in range(200):
        tokens, targets = data.random_windows(text, 3, 7, rng)
        assert tokens.shape == targets.shape == (3, 7)
        assert np.array_equal(targets, tokens + 1)
        seen |= {*tokens.ravel().tolist(), *targets.ravel().tolist()}
    assert seen == set(range(23))


@pytest.mark.parametrize("length", [2, 7, 8, 9, 50, 64])
def test_windows_for_judging_ask_for_every_byte_once(length: int) -> None:
    text = random_text(np.random.default_rng(), length)
    asked = []
    for tokens, targets in data.every_window(text, batch=3, context=7):
        assert np.array_equal(tokens[:, 1:], targets[:, :-1])
        asked.append(targets.ravel())
    assert np.array_equal(np.concatenate(asked), text[1:])


def test_bigram_follows_its_formula() -> None:
    rng = np.random.default_rng()
    fit, held = rng.integers(0, 5, 40, dtype=np.uint8), rng.integers(0, 6, 30, dtype=np.uint8)
    pairs = list(zip(fit[:-1].tolist(), fit[1:].tolist(), strict=True))
    total = 0.0
    for first, second in zip(held[:-1].tolist(), held[1:].tolist(), strict=True):
        count, followers = pairs.count((first, second)), sum(pair[0] == first for pair in pairs)
        total -= np.log((count + 0.01) / (followers + 256 * 0.01))
    assert data.bigram_nats(fit, held) == pytest.approx(total / (len(held) - 1))


def test_attention_keeps_a_row_sum_for_each_row_of_p() -> None:
    model = Transformer(TINY, np, np.random.default_rng())
    lse_bytes, p_bytes = model.attention_bytes(np.zeros((3, 5), dtype=np.int64))
    assert lse_bytes == 4 * 2 * 3 * 2 * 5  # float32, layers, batch, heads, length
    assert p_bytes == 5 * lse_bytes


def test_the_curve_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the loss curve needs matplotlib")
    curve = tmp_path / "curve.png"
    assert draw_curve(str(curve), History(train=[3.0, 2.0], held=[(2, 2.5)]), bigram=2.2)
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_losing_to_the_bigram_and_lacking_matplotlib_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text, curve = tmp_path / "text.txt", tmp_path / "curve.png"
    text.write_bytes(data.load(None)[:9000].tobytes())
    assert main(["--text", str(text), "--steps", "3", "--plot", str(curve)]) == 1
    output = capsys.readouterr().out
    assert "DOES NOT BEAT" in output
    assert "128 times" in output
    assert "matplotlib is missing" in output
    assert not curve.exists()


def test_a_text_too_short_to_split_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"too short")
    with pytest.raises(SystemExit, match=r"9 bytes.*need"):
        main(["--text", str(text)])


@pytest.mark.parametrize("problem", ["no CuPy", "no GPU"])
def test_a_missing_gpu_is_said_before_any_work(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "cupy", None if problem == "no CuPy" else fake)
    with pytest.raises(SystemExit, match=r"--backend cupy: .*cupyflash info"):
        main(["--backend", "cupy"])


def test_a_sample_cannot_steer_the_terminal() -> None:
    assert printable(b"a\n\x1b[2J\xff") == "a\n.[2J\\xff"
