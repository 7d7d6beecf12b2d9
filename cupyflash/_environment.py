"""What this machine offers the two backends. Looks and changes nothing; imports CuPy only once that is safe."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OLDEST_CUPY = (14, 2)
OLDEST_COMPUTE_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Fact:
    """One line of `info`. `obstacle` says why the CUDA backend cannot run and what to do; empty when it can."""

    label: str
    text: str
    obstacle: str = ""


def facts() -> list[Fact]:
    """Ten facts; the last two are the verdict on each backend."""
    from cupyflash import __version__

    found = [
        Fact("cupyflash", __version__),
        Fact("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Fact("NumPy", f"{_version('numpy')}, ml_dtypes {_version('ml_dtypes')}"),
        cupy_wheel(),
        cache_folder(),
    ]
    is_importable = not any(fact.obstacle for fact in found)
    for label, look in (("NVRTC", _nvrtc), ("driver", _driver), ("GPU", _gpus)):
        found.append(_look(label, look) if is_importable else Fact(label, "not asked: see the lines above"))
    obstacles = [fact.obstacle for fact in found if fact.obstacle]
    found.append(Fact("NumPy backend", "runs"))
    why = "; ".join(obstacles)
    found.append(Fact("CUDA backend", f"does not run: {why}" if why else "runs", why))
    return found


def why_no_cuda() -> str:
    """What stands in the way of the CUDA backend; empty when nothing does."""
    return facts()[-1].obstacle


def cupy_wheel() -> Fact:
    """Which CuPy is installed. All its wheels own one cupy folder, and pip lets two of them share it."""
    wheels = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if re.fullmatch(r"cupy(-cuda\d+x|-rocm-[\d-]+)?", name):
            wheels[name] = distribution.version
    text = ", ".join(f"{name} {version}" for name, version in sorted(wheels.items()))
    if not wheels:
        advice = "in a clone, pip install -e '.[cuda12]' or '.[cuda13]', whichever major nvidia-smi names"
        return Fact("CuPy", "not installed", f"no CuPy; {advice}")
    if len(wheels) > 1:
        names = " ".join(sorted(wheels))
        advice = f"pip uninstall -y {names}, then install the one you want"
        return Fact("CuPy", text, f"{len(wheels)} CuPy wheels share one cupy folder; {advice}")
    [(name, version)] = wheels.items()
    if _numbers(version) < OLDEST_CUPY:
        oldest = ".".join(map(str, OLDEST_CUPY))
        return Fact("CuPy", text, f"{name} {version} is older than {oldest}; pip install -U '{name}>={oldest}'")
    return Fact("CuPy", text)


def cache_path() -> Path:
    """The folder of compiled kernels, as CuPy chooses it."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))


def cache_folder() -> Fact:
    """Where CuPy keeps compiled kernels. `import cupy` fails when that folder can be neither found nor made."""
    folder = cache_path()
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        if folder.is_dir():
            return Fact(
                "kernel cache", f"{folder}, not writable ({error.strerror}): every process compiles its kernels"
            )
        reason = f"the kernel cache {folder} is not writable ({error.strerror})"
        return Fact(
            "kernel cache", f"{folder}, not usable: {error.strerror}", f"{reason}; set CUPY_CACHE_DIR to one that is"
        )
    return Fact("kernel cache", f"{folder}, {'usable' if folder.exists() else 'usable, made at the first import'}")


def _look(label: str, look: Callable[[], Fact]) -> Fact:
    try:
        return look()
    except Exception as error:  # CuPy and pathfinder raise many kinds, each with its own advice: pass it on in one line
        reason = " ".join(str(error).split()) or type(error).__name__
        return Fact(label, f"none: {reason}", f"{label}: {reason}")


def _cuda() -> Any:
    return importlib.import_module("cupy.cuda")


def _nvrtc() -> Fact:
    version = ".".join(map(str, _cuda().nvrtc.getVersion()))
    if importlib.import_module("cuda.pathfinder").find_nvidia_header_directory("cudart") is None:
        advice = "pip install 'cuda-toolkit[cudart]' of the same major"
        return Fact("NVRTC", f"{version}, CUDA headers not found", f"no CUDA headers; {advice}")
    return Fact("NVRTC", f"{version}, CUDA headers found")


def _driver() -> Fact:
    version = _cuda().runtime.driverGetVersion()
    if version == 0:
        return Fact("driver", "none", "no NVIDIA driver; install one, or pass NumPy arrays")
    return Fact("driver", f"{_driver_release()}, CUDA {version // 1000}.{version % 1000 // 10}")


def _driver_release() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "release unknown"


def _gpus() -> Fact:
    runtime = _cuda().runtime
    if runtime.driverGetVersion() == 0:
        return Fact("GPU", "none")
    devices = [runtime.getDeviceProperties(device) for device in range(runtime.getDeviceCount())]
    text = ", ".join(f"{device['name'].decode()} (sm_{device['major']}{device['minor']})" for device in devices)
    if not any((device["major"], device["minor"]) >= OLDEST_COMPUTE_CAPABILITY for device in devices):
        return Fact("GPU", text or "none", "no GPU of compute capability 8.0 or newer; pass NumPy arrays")
    return Fact("GPU", text)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
