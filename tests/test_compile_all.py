"""Every kernel compiles for every architecture, on a machine without a GPU, and spills no more than is on record."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest

from cupyflash._cuda import tiles
from cupyflash._cuda.device import KNOWN
from tests import binaries

MOST_SETS = 80  # of one architecture

pytestmark = pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy, which finds NVRTC, is not installed")


@pytest.fixture(scope="module")
def pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", sorted(KNOWN))
def test_the_cover_compiles_without_unrecorded_spills(
    arch: int, pool: ProcessPoolExecutor, request: pytest.FixtureRequest
) -> None:
    device = KNOWN[arch]
    named = binaries.cover(device)
    assert len(named) <= MOST_SETS
    reachable = binaries.everything(device)
    if request.config.getoption("--all"):
        named = {str(plan): plan for plan in reachable.values()}
    share = len({plan.binary for plan in named.values()} & set(reachable)) / len(reachable)
    print(f"sm_{arch}: {len(named)} binaries, {share:.1%} of the {len(reachable)} that a call can reach")
    failures = []
    for (name, plan), report in zip(named.items(), pool.map(binaries.compile_to_report, named.values()), strict=True):
        allowed, reason = tiles.SPILLS.get(binaries.allowance_key(plan.constants), (0, "none is on record"))
        if report.log:
            failures.append(f"{name}: {report.log}")
        elif report.spill_bytes > allowed:
            failures.append(f"{name}: spills {report.spill_bytes} bytes, {allowed} allowed ({reason}). {plan}")
    assert not failures, f"sm_{arch}:\n" + "\n".join(failures)


@pytest.mark.timeout(1800)
def test_no_tile_of_hoppers_forward_spills(pool: ProcessPoolExecutor) -> None:
    named = binaries.hopper_forwards(KNOWN[90])
    rows = [*itertools.chain(*tiles.FWD_SM90.values(), *tiles.FWD_SM90_SMALL.values())]
    sizes = [field for field in tiles.Sm90Tile._fields if field != "room"]
    used = {tuple(getattr(plan.constants, size) for size in sizes) for plan in named.values()}
    assert used == {tuple(getattr(row, size) for size in sizes) for row in rows}
    reports = dict(zip(named, pool.map(binaries.compile_to_report, named.values()), strict=True))
    assert not {name: report for name, report in reports.items() if report.log or report.spill_bytes}


@pytest.mark.timeout(1800)
def test_no_backward_of_hopper_spills_unrecorded(pool: ProcessPoolExecutor, request: pytest.FixtureRequest) -> None:
    named = binaries.hopper_backwards(KNOWN[90])
    named |= binaries.hopper_backwards_of_changed_scores(KNOWN[90], are_all=request.config.getoption("--all"))
    reports = dict(zip(named, pool.map(binaries.compile_to_report, named.values()), strict=True))
    for name, report in reports.items():
        allowed, _ = tiles.SPILLS.get(binaries.allowance_key(named[name].constants), (0, ""))
        assert not report.log and report.spill_bytes <= allowed, (name, report)


def test_recorded_spills_belong_to_tiles_that_exist() -> None:
    covers = [binaries.cover(device) for device in KNOWN.values()] + [binaries.hopper_backwards(KNOWN[90])]
    keys = {binaries.allowance_key(plan.constants) for cover in covers for plan in cover.values()}
    assert set(tiles.SPILLS) <= keys
