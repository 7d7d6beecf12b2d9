"""Fixtures: the backends, which all run the same tests, and random numbers that say how to be drawn again."""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyflash import _attention, _cpu, _interop
from cupyflash._cuda import device
from tests import fake_cuda as stand_in
from tests.backends import Backend, CupyBackend, NumpyBackend, gpu_is_there

SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="compile every binary that a call can reach, not the named cover"
    )


GENERIC = "cupy, generic kernels"
GENERIC_IN = ("test_forward", "test_backward", "test_field_kinds")  # modules whose subject is what kernels compute


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the generic kernels out where they are the only ones, or something else is the subject."""
    items[:] = [
        item
        for item in items
        if f"[{GENERIC}" not in item.name  # the first parameter is `backend`'s
        or (item.path.stem in GENERIC_IN and not {"float32", "float64"} & {*re.split(r"[-\[\]]", item.name)})
    ]


@pytest.fixture(
    params=["numpy", "numpy, small tiles", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cupy", GENERIC))]
)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Where a test's arrays live; the GPU part is skipped on a machine without one.

    NumPy's tiles are larger than most problems here, so it runs them in small and odd ones too. A GPU with kernels of
    its own runs the generic ones too.
    """
    if request.param == "numpy":
        yield NumpyBackend()
    elif request.param == "numpy, small tiles":
        usual = _cpu.plan

        def small(spec: Any, call: Any, *, backward: bool, override: object | None = None) -> _cpu.NumpyPlan:
            plan = usual(spec, call, backward=backward, override=override)
            return plan if override is not None else replace(plan, block_q=48, block_k=29)

        _attention._ready.cache_clear()  # plans are remembered
        monkeypatch.setattr(_cpu, "plan", small)
        yield NumpyBackend()
        _attention._ready.cache_clear()
    elif not gpu_is_there():
        pytest.skip("no CUDA GPU")
    elif request.param == GENERIC:
        if device.of(0).arch != 90:
            pytest.skip("this GPU has no kernels but the generic ones")
        plan = importlib.import_module("cupyflash._cuda.plan")
        monkeypatch.setattr(plan, "why_not_sm90", lambda spec: "a test wants the generic ones")
        choices = plan.forward, plan.backward
        for choice in choices:
            choice.cache_clear()
        stand_in.forget_forms()
        yield CupyBackend()
        for choice in choices:
            choice.cache_clear()
        stand_in.forget_forms()
    else:
        yield CupyBackend()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def torch_device(request: pytest.FixtureRequest) -> str:
    """Where torch tensors live; the GPU part is skipped on a machine without one."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if request.param == "cuda" and not (gpu_is_there() and torch.cuda.is_available()):
        pytest.skip("no CUDA GPU, or a torch without CUDA")
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def jax_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where new JAX arrays live and traced calls run; the GPU part is skipped on a machine without one."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    try:
        device = jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip("no CUDA GPU, or a JAX without CUDA")
    with jax.default_device(device):
        yield request.param


@pytest.fixture
def fake_cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for CuPy without a GPU: see `tests.fake_cuda`."""
    cupy = stand_in.make_cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(_interop, "_cupy_trouble", lambda: "")
    return cupy


@pytest.fixture
def fake_cuda(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The same with kernels that are not compiled: their launches are kept in `cupy.launches`."""
    stand_in.take_launches(fake_cupy, monkeypatch)
    stand_in.forget_forms()
    yield fake_cupy
    stand_in.forget_forms()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh numbers each run. A failure prints the seed; TEST_SEED repeats it."""
    seed = int(os.environ.get("TEST_SEED") or random.SystemRandom().randrange(2**32))
    request.node.stash[SEED] = seed
    return np.random.default_rng(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if report.failed and SEED in item.stash:
        report.sections.append(("random numbers", f"TEST_SEED={item.stash[SEED]} repeats them"))
    return report
