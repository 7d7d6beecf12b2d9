"""`cupyflash.jax` over several devices: the tests of `sharded_jax`, in a process that has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

jax: Any = pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("jax.experimental.buffer_callback", reason="jax is older than 0.6.2")

ROOT = Path(__file__).parents[1]


def run_with(**environment: str) -> None:
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/sharded_jax.py"]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_four_devices_of_a_cpu() -> None:
    run_with(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")


@pytest.mark.gpu
def test_all_gpus() -> None:
    try:
        count = len(jax.devices("cuda"))
    except RuntimeError:
        count = 0
    if count < 2:
        pytest.skip("fewer than two CUDA GPUs, or a JAX without CUDA")
    run_with(XLA_PYTHON_CLIENT_PREALLOCATE="false")
