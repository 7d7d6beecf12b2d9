"""Ring, gather and Ulysses: what the ranks compute together is the whole problem's result and gradient."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import UnsupportedError
from tests import threads
from tests.backends import Backend
from tests.sharded import CASES, Problem, Way

WAYS = [
    Way("ring", 2),
    Way("ring", 3, zigzag=True),
    Way("ring", 4, zigzag=True),
    Way("ring", 4),
    Way("gather", 2, zigzag=True),
    Way("gather", 3),
    Way("gather", 4, zigzag=True),
    Way("ulysses", 2, zigzag=True),
    Way("ulysses", 3),
    Way("ulysses", 4),
]


# Ulysses cuts the heads that a dropout mask counts.
TOGETHER = [(way, name) for way in WAYS for name in CASES if way.scheme != "ulysses" or CASES[name].seed is None]


def run(problem: Problem, backend: Backend) -> list[dict[str, np.ndarray]]:
    return threads.run(problem.way.size, lambda transport: problem.run(transport, backend.put, backend.get))


@pytest.mark.parametrize(("way", "name"), TOGETHER, ids=[f"{way}-{name}" for way, name in TOGETHER])
def test_the_ranks_together_compute_the_whole(backend: Backend, way: Way, name: str, rng: np.random.Generator) -> None:
    problem = Problem(CASES[name], way, int(rng.integers(2**32)))
    problem.check(run(problem, backend))
