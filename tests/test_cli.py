"""`python -m cupyflash info` answers in ten lines on any machine, and says what stands in the way of a GPU."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

import cupyflash
from cupyflash import _cli, _environment

ROOT = Path(__file__).parents[1]


class FakeDistribution:
    def __init__(self, name: str, version: str) -> None:
        self.metadata = {"Name": name}
        self.version = version


def install(monkeypatch: pytest.MonkeyPatch, **wheels: str) -> None:
    fakes = [FakeDistribution(name.replace("_", "-"), version) for name, version in wheels.items()]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: fakes)


def info(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert _cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:14].strip(): line[14:] for line in lines}


def test_info_runs_as_a_command_in_ten_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cupyflash", "info"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10, done.stdout
    assert lines[0].split() == ["cupyflash", cupyflash.__version__]
    assert lines[-2].split() == ["NumPy", "backend", "runs"]
    assert lines[-1].startswith("CUDA backend")


def test_info_without_cupy_names_the_extras(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, numpy="2.3.0", cupy_xarray="0.1.4")
    said = info(capsys)
    assert said["CuPy"] == "not installed"
    assert "'.[cuda12]'" in said["CUDA backend"]
    assert said["NumPy backend"] == "runs"


def test_info_names_both_wheels_of_a_double_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, cupy_cuda12x="14.2.0", cupy_cuda13x="14.2.1")
    said = info(capsys)
    assert said["CuPy"] == "cupy-cuda12x 14.2.0, cupy-cuda13x 14.2.1"
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in said["CUDA backend"]


def test_info_refuses_an_old_cupy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, cupy_cuda12x="13.6.0")
    assert "cupy-cuda12x>=14.2" in info(capsys)["CUDA backend"]


def test_info_names_the_variable_when_the_cache_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("not a folder")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(a_file / "cache"))
    said = info(capsys)
    assert str(a_file / "cache") in said["kernel cache"]
    assert "CUPY_CACHE_DIR" in said["CUDA backend"]


def test_info_makes_no_cache_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install(monkeypatch, numpy="2.3.0")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    assert "usable" in info(capsys)["kernel cache"]
    assert list(tmp_path.iterdir()) == []


def test_info_with_cupy_but_no_driver_finds_the_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    runtime = pytest.importorskip("cupy.cuda").runtime
    if runtime.driverGetVersion():
        pytest.skip("this machine has a driver")
    said = info(capsys)
    assert "CUDA headers found" in said["NVRTC"]
    assert said["driver"] == said["GPU"] == "none"
    assert said["CUDA backend"].startswith("does not run: no NVIDIA driver")


@pytest.mark.parametrize(("major", "verdict"), [(7, "does not run: no GPU of compute capability 8.0"), (9, "runs")])
def test_info_judges_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], major: int, verdict: str
) -> None:
    install(monkeypatch, cupy_cuda12x="14.2.0")
    runtime = SimpleNamespace(
        driverGetVersion=lambda: 12080,
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda device: {"name": f"Card {device}".encode(), "major": major, "minor": 0},
    )
    cuda = SimpleNamespace(runtime=runtime, nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)))
    monkeypatch.setattr(_environment, "_cuda", lambda: cuda)
    pathfinder = SimpleNamespace(find_nvidia_header_directory=lambda name: f"/{name}/include")
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", cast(ModuleType, pathfinder))
    said = info(capsys)
    assert said["GPU"] == f"Card 0 (sm_{major}0), Card 1 (sm_{major}0)"
    assert "CUDA 12.8" in said["driver"]
    assert said["CUDA backend"].startswith(verdict)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        _cli.main(["inform"])
    assert stop.value.code == 2
    assert "inform" in capsys.readouterr().err
