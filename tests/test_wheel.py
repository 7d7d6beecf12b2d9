"""The wheel carries the CUDA sources, and what is installed from it can compile them, without network or checkout."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COMPILE = """
import sys
from cupyflash._cuda import source
assert source.__file__.startswith(sys.argv[1]), source.__file__
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


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
