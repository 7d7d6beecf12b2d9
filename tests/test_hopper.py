"""The forward for Hopper under construction compiles as it must: nothing spilled, no product serialised."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from benchmarks.hopper.run import TILES, Constants

pytestmark = pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy, which finds NVRTC, is not installed")


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_draft_compiles_without_spills(dim: int, is_masked: bool) -> None:
    import cuda.pathfinder
    from cupy.cuda import nvrtc

    headers = cuda.pathfinder.find_nvidia_header_directory("cudart")
    constants = Constants("bfloat16", dim, *TILES[dim], is_masked=is_masked)
    program = nvrtc.createProgram(constants.text(), "fwd_sm90.cu", (), ())
    nvrtc.compileProgram(program, ("-std=c++17", "-arch=sm_90a", f"-I{headers}", "-ftz=true", "--ptxas-options=-v"))
    log = nvrtc.getProgramLog(program)
    assert "bytes spill" in log
    assert not re.findall(r"C75\d\d|[1-9]\d* bytes spill", log), log
