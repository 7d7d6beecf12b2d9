"""The forward for Hopper under construction compiles as it must: nothing spilled, no product serialised."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks.hopper.run import TILES, Constants, complaints

pytestmark = pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy, which finds NVRTC, is not installed")


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_draft_compiles_without_spills(dim: int, is_masked: bool) -> None:
    found = complaints(Constants("bfloat16", dim, *TILES[dim], is_masked=is_masked))
    assert not found, "\n".join(found)
