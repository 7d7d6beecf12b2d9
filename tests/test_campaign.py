"""A slice of the random campaign with a fresh seed each run, and the campaign itself."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import _cpu
from tests.backends import Backend, NumpyBackend
from tests.campaign import main, seeds_of, verdict
from tests.cases import DTYPES
from tests.random_problems import FEATURES, Choices, draw

ALL = frozenset(FEATURES), tuple(DTYPES)
PROBLEMS = 60
KINDS_ON_A_GPU = 4  # each compiles its own kernels
ONCE_FOUND_WRONG = {
    5857491580081425190: "one key and a softcap: dq in float16 is below that type's normal numbers",
    3622599809237488169: "shares of a sink that float32 holds as subnormal numbers: a GPU flushes them",
    678007717436577630: "all keys are equal: dq is 0, and what is there are the roundings of a few numbers",
    260870782490179211: "432 equal terms of dv, whose roundings all go to the same side",
}


def test_random_problems_are_as_close_to_the_reference_as_plain_operations(
    backend: Backend, rng: np.random.Generator
) -> None:
    kinds = None if backend.name == "numpy" else KINDS_ON_A_GPU
    seeds = [seed for kind in seeds_of(int(rng.integers(2**32)), PROBLEMS, kinds) for seed in kind]
    wrong = [found for seed in seeds if (found := verdict(backend, seed, *ALL).wrong)]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("seed", ONCE_FOUND_WRONG)
def test_what_was_once_found_wrong_is_right(backend: Backend, seed: int) -> None:
    assert verdict(backend, seed, *ALL).wrong == "", ONCE_FOUND_WRONG[seed]


def test_a_seed_is_one_problem(rng: np.random.Generator) -> None:
    ((seed,),) = seeds_of(int(rng.integers(2**32)), 1, None)
    first, second = (draw(Choices(seed, *ALL)) for _ in range(2))
    assert str(first) == str(second)
    for name, array in first.arrays.items():
        assert array.tobytes() == second.arrays[name].tobytes()


def test_a_feature_left_out_moves_nothing_else(rng: np.random.Generator) -> None:
    groups = seeds_of(int(rng.integers(2**32)), 200, None)
    whole = (draw(Choices(seed, *ALL)) for (seed,) in groups)
    problem = next(problem for problem in whole if {"dropout_p", "scale"} <= problem.options.keys())
    less = draw(Choices(problem.seed, ALL[0] - {"scale"}, ALL[1]))
    assert "scale" not in less.options
    assert less.options == {name: value for name, value in problem.options.items() if name != "scale"}
    assert less.q.tobytes() == problem.q.tobytes()


def test_every_feature_occurs(rng: np.random.Generator) -> None:
    text = "\n".join(str(draw(Choices(seed, *ALL))) for (seed,) in seeds_of(int(rng.integers(2**32)), 400, None))
    for said in (
        *("layout='bshd'", "layout='bhsd'", "layout='thd'", "block_table", "top-left", "window=(0, 0)", "softcap="),
        *("alibi_slopes", "sink", "bias", "dropout_p", "q_start", "k_start", "seqused_k", "num_splits", "split_len"),
        *("scale=0.0", "scale=-", "out_dtype", "grad_dtype", "deterministic", "accumulate=True", "gives_delta"),
        *("has_foreign_state", "gives_workspace", "dlse", "int64", "reversed", "broadcast", "transposed", "gaps"),
        *(f"q: {dtype}" for dtype in DTYPES),
    ):
        assert said in text, said


def test_a_wrong_result_is_found_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend that forgets what flows into lse."""
    delta = _cpu._delta

    def forgetful(call: _cpu.Call) -> np.ndarray:
        return delta(call) if call.dlse is None else delta(call) + call.dlse.array

    monkeypatch.setattr(_cpu, "_delta", forgetful)
    arguments = ["--problems", "20", "--seed", "1", "--processes", "1"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "wrong: " in printed.out
    seed = printed.err.partition("WRONG problem ")[2].split()[0]
    assert f"--only {seed}" in printed.err
    assert main(["--only", seed]) == 1
    monkeypatch.undo()
    assert main(["--only", seed]) == 0
    assert verdict(NumpyBackend(), int(seed), *ALL).wrong == ""
