"""The wheel carries the CUDA sources, and what is installed from it can compile them, without network or checkout."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COMPILE = """
import sys
from cuda.pathfinder import find_nvidia_header_directory
from cupy.cuda import nvrtc
from cupyflash._cuda import compile, constants, source

assert source.root().is_relative_to(sys.argv[1]), source.root()
text = source.compose(constants.MergeStates("float32", "bfloat16", "float32", columns=8, is_uniform=True))
program = nvrtc.createProgram(text, "merge_states.cu", (), ())
try:
    nvrtc.compileProgram(program, (*compile.OPTIONS, "-arch=sm_80", "-I" + find_nvidia_header_directory("cudart")))
except nvrtc.NVRTCError:
    sys.exit(nvrtc.getProgramLog(program))
assert b"merge_states" in nvrtc.getCUBIN(program)
"""


def run(*command: object, cwd: Path, **environment: str) -> None:
    words = [str(word) for word in command]
    env = os.environ | environment
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder into which the wheel, built here, was installed."""
    for module in ("pip", "hatchling"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, ROOT, cwd=wheels)
    [wheel] = wheels.glob("cupyflash-*.whl")
    run(*pip, "install", "--no-index", "--no-deps", "--target", target, wheel, cwd=wheels)
    return target


def test_every_cuda_source_is_in_the_wheel_byte_for_byte(installed: Path) -> None:
    here, there = ROOT / "cuda_src", installed / "cupyflash" / "cuda_src"
    names = {path.relative_to(here) for path in here.rglob("*") if path.is_file()}
    assert any(name.suffix == ".cu" for name in names), "the tree has no kernel"
    assert names == {path.relative_to(there) for path in there.rglob("*") if path.is_file()}
    for name in names:
        assert (there / name).read_bytes() == (here / name).read_bytes(), name


def test_the_wheel_holds_the_package_alone(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"cupyflash"}
    assert (installed / "cupyflash" / "py.typed").is_file()
    assert any(path.name == "LICENSE" for path in installed.rglob("*.dist-info/**/*"))


def test_a_kernel_compiles_from_the_wheel(installed: Path) -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy, which finds NVRTC, is not installed")
    run(sys.executable, "-c", COMPILE, installed, cwd=installed, PYTHONPATH=str(installed))


def test_numpy_attention_runs_from_the_wheel(installed: Path) -> None:
    program = (
        "import numpy, cupyflash; x = numpy.ones((1, 3, 2, 8)); assert (cupyflash.attn_fwd(x, x, x).out == 1).all()"
    )
    run(sys.executable, "-c", program, cwd=installed, PYTHONPATH=str(installed))
