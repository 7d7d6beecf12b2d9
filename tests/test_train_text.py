"""The example program: its gradients, its data and its verdict."""

from __future__ import annotations

import json
import re
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import recompute
from benchmarks.stamp import RESULTS, ROOT
from examples.train_text import data, standard
from examples.train_text.__main__ import main, printable
from examples.train_text.model import GRADCHECK_RTOL, GRADCHECK_STEP, Config, Keep, Transformer
from examples.train_text.report import draw_curve
from examples.train_text.train import ByHand, History, Settings, held_out_nats, sample, train

TINY = Config(num_layers=2, width=6, heads=2, hidden=10, vocabulary=11)
TINY_BYTES = Config(num_layers=2, width=6, heads=2, hidden=10)


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
    learner = ByHand(model)
    before = held_out_nats(learner, held, settings)
    history = train(learner, fit, held, settings, rng, lambda history: reported.append(len(history.train)))
    assert reported == list(range(1, 61))
    assert [step for step, _ in history.held] == [20, 40, 60]
    assert history.held[-1][1] == pytest.approx(held_out_nats(learner, held, settings))
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


KEEPS = {"all": Keep(p=True), "feed-forward": Keep(), "less": Keep(feed_forward=False)}


def gradients(keep: Keep, seed: int, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    model = Transformer(TINY, np, rng, dtype, keep)
    return model.loss_and_grads(*rng.integers(0, TINY.vocabulary, (2, 3, 17)))[1]


def test_what_is_computed_again_has_the_same_bits(rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**32))
    kept, again = (gradients(KEEPS[name], seed, "float32") for name in ("feed-forward", "less"))
    assert kept.keys() == again.keys()
    for name, grad in kept.items():
        assert grad.any(), name
        assert grad.tobytes() == again[name].tobytes(), name


def test_kept_probabilities_give_the_gradients_of_those_computed_again(rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**32))
    kept, again = (gradients(KEEPS[name], seed, "float64") for name in ("all", "feed-forward"))
    for name, grad in kept.items():
        assert np.abs(grad - again[name]).max() <= 1e-12 * np.abs(grad).max(), name


@pytest.mark.parametrize("name", KEEPS)
def test_layers_keep_as_many_bytes_as_the_formula_says(name: str) -> None:
    keep = KEEPS[name]
    model = Transformer(TINY, np, np.random.default_rng(), keep=keep)
    for block in model._forward(np.zeros((3, 17), dtype=np.int64))[1]:
        arrays = vars(block) | (vars(block.feed_forward) if block.feed_forward else {})
        kept = sum(array.nbytes for array in arrays.values() if isinstance(array, np.ndarray))
        assert kept == keep.bytes_per_layer(TINY, batch=3, length=17)


def test_a_backward_frees_what_each_layer_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing the feed-forward blocks again keeps their memory for one layer at a time."""
    alive: list[int] = []
    compute = Transformer._feed_forward

    def counted(self: Transformer, *arguments: Any) -> Any:
        made = compute(self, *arguments)
        alive.append(0)
        weakref.finalize(made.hidden, alive.pop)
        most.append(len(alive))
        return made

    most: list[int] = []
    monkeypatch.setattr(Transformer, "_feed_forward", counted)
    tokens = np.zeros((2, 1, 5), dtype=np.int64)
    for keep, expected in ((KEEPS["feed-forward"], TINY.num_layers), (KEEPS["less"], 1)):
        Transformer(TINY, np, np.random.default_rng(), keep=keep).loss_and_grads(*tokens)
        assert max(most) == expected
        assert not alive
        most.clear()


def test_the_table_measures_what_it_can_and_says_what_it_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Config(num_layers=2, width=16, heads=2, hidden=64)
    monkeypatch.setitem(recompute.SIZES, "numpy", (small, (32, 128), 32))
    file = tmp_path / "rows.json"
    assert recompute.main(["--json", str(file)]) == 0
    stamp, *rows = map(json.loads, file.read_text().splitlines())
    assert stamp["config"]["width"] == 16
    assert [row["context"] for row in rows] == [32] * 3 + [128] * 3
    for row, keep in zip(rows, [*recompute.WAYS.values()] * 2, strict=True):
        assert row["kept_bytes"] == 2 * keep.bytes_per_layer(small, 1, row["context"])
        is_run = not keep.p or row["context"] == 32
        assert (row["step_ms"] is not None) == is_run
        assert not is_run or row["peak_bytes"] > row["kept_bytes"]
    assert rows[4]["peak_bytes"] > rows[5]["peak_bytes"]
    printed = capsys.readouterr().out
    assert printed.count("by arithmetic | not run") == 1
    assert printed.count("\n| ") == 7


def test_the_recipe_shows_every_stored_table() -> None:
    recipes = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    for file in RESULTS.glob("recompute-*.json"):
        stamp, *rows = map(json.loads, file.read_text("utf-8").splitlines())
        assert recompute.table(Config(**stamp["config"]), rows) in recipes, file.name


def test_gradients_that_differ_stop_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard, "attention_bwd", lambda xp, dout, qkv, out, p: xp.zeros_like(qkv))
    with pytest.raises(AssertionError, match=r"attention computed again, context 16: the gradient of"):
        recompute.measure(np, TINY_BYTES, 16, keeps_p=True)


def test_a_run_computes_feed_forward_blocks_again_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = tmp_path / "text.txt"
    text.write_bytes(data.load(None)[:9000].tobytes())
    arguments = ["--text", str(text), "--steps", "2", "--context", "40", "--batch", "3"]
    said = []
    for more in ([], ["--recompute", "ffn"]):
        assert main(arguments + more) == 1
        said.append(capsys.readouterr().out)
    assert "context 40" in said[0]
    assert "layers keep 1.4 MiB a step; P alone is computed again" in said[0]
    assert "layers keep 0.8 MiB a step; P and the feed-forward blocks are computed again" in said[1]
    losses = [re.findall(r"verdict .*", text) for text in said]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["steps", "context", "batch"])
def test_sizes_below_one_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--{name}", "0"])
    assert f"--{name} 0: at least 1" in capsys.readouterr().err


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
