"""Every kernel compiles for every architecture, on a machine without a GPU, and spills no more than is on record."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest

from cupyflash._cuda import tiles
from cupyflash._cuda.device import KNOWN
from cupyflash._cuda.plan import Plan
from tests import binaries
from tests.spills import SPILLS

MOST_SETS = 100  # of one architecture

pytestmark = pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy, which finds NVRTC, is not installed")


@pytest.fixture(scope="module")
def pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))


def beyond_record(named: dict[str, Plan[Any]], pool: ProcessPoolExecutor) -> list[str]:
    """Of each that does not compile, or warns, or spills more than is on record: what ptxas says."""
    failures = []
    for (name, plan), report in zip(named.items(), pool.map(binaries.compile_to_report, named.values()), strict=True):
        allowed, reason = SPILLS.get(binaries.allowance_key(plan.constants), (0, "none is on record"))
        if report.log:
            failures.append(f"{name}: {report.log}")
        elif report.spill_bytes > allowed:
            failures.append(f"{name}: spills {report.spill_bytes} bytes, {allowed} allowed ({reason}). {plan}")
    return failures


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", sorted(KNOWN))
def test_the_cover_compiles_without_unrecorded_spills(
    arch: int, pool: ProcessPoolExecutor, request: pytest.FixtureRequest
) -> None:
    device = KNOWN[arch]
    named = binaries.cover(device)
    assert len(named) <= MOST_SETS
    if request.config.getoption("--all"):
        named = {str(plan): plan for plan in binaries.everything(device).values()}
    print(f"sm_{arch}: {len(named)} binaries")
    failures = beyond_record(named, pool)
    assert not failures, f"sm_{arch}:\n" + "\n".join(failures)


@pytest.mark.timeout(1800)
def test_every_tile_of_hoppers_forward_compiles_without_unrecorded_spills(
    pool: ProcessPoolExecutor, request: pytest.FixtureRequest
) -> None:
    named = binaries.hopper_forwards(KNOWN[90], are_all=request.config.getoption("--all"))
    rows = [*itertools.chain(*tiles.FWD_SM90.values(), *tiles.FWD_SM90_SMALL.values())]
    sizes = [field for field in tiles.Sm90Tile._fields if field != "room"]
    used = {tuple(getattr(plan.constants, size) for size in sizes) for plan in named.values()}
    assert used == {tuple(getattr(row, size) for size in sizes) for row in rows}
    assert not beyond_record(named, pool)


@pytest.mark.timeout(1800)
def test_every_backward_of_hopper_compiles_without_unrecorded_spills(
    pool: ProcessPoolExecutor, request: pytest.FixtureRequest
) -> None:
    named = binaries.hopper_backwards(KNOWN[90])
    named |= binaries.hopper_backwards_of_changed_scores(KNOWN[90], are_all=request.config.getoption("--all"))
    assert not beyond_record(named, pool)


def test_recorded_spills_belong_to_tiles_that_exist() -> None:
    covers = [binaries.cover(device) for device in KNOWN.values()]
    covers += [binaries.hopper_forwards(KNOWN[90], are_all=False), binaries.hopper_backwards(KNOWN[90])]
    covers += [binaries.hopper_backwards_of_changed_scores(KNOWN[90], are_all=True)]
    keys = {binaries.allowance_key(plan.constants) for cover in covers for plan in cover.values()}
    assert set(SPILLS) <= keys
