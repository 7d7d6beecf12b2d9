"""One rank of a group of processes: `python -m tests.rank ENGINE FOLDER SEED`, started by `benchmarks.ranks.launch`.

Computes its part of every problem and leaves it in the folder, where the test that started the ranks judges it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks import ranks
from tests.sharded import CASES, Problem, Way

NAMES = [
    "causal",
    "queries that see the sink alone",
    "window narrower than a shard",
    "dropout, everything",
    "everything, heads before rows",
    "packed, everything",
    "fewer positions than parts",
    "bfloat16",
    "float64",
]


def problems(size: int, seed: int) -> dict[str, Problem]:
    """What so many ranks compute, by names that serve as file names."""
    ways = [Way("ring", size), Way("ring", size, True), Way("gather", size, True), Way("ulysses", size)]
    return {
        f"{way}, {name}": Problem(CASES[name], way, seed)
        for way in ways
        for name in NAMES
        if way.scheme != "ulysses" or CASES[name].seed is None
    }


def main(engine: str, folder: str, seed: str) -> None:
    transport = ranks.connect(engine)
    library = ranks.Library(engine)
    for name, problem in problems(transport.size, int(seed)).items():
        results = problem.run(transport, library.put, library.get)
        if problem.case.dtype == ml_dtypes.bfloat16:  # which a file does not keep
            results = {what: array.astype(np.float32) for what, array in results.items()}
        np.savez(Path(folder) / f"{name} {transport.rank}.npz", **results)  # type: ignore[arg-type]
    ranks.disconnect(engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
