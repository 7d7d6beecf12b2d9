"""`warmup`: plans in, loaded kernels out; nothing for NumPy, and a clear word for anything else."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash._cuda.device import KNOWN
from cupyflash._cuda.plan import backward as plan_backward
from cupyflash._cuda.plan import forward as plan_forward
from tests.backends import Backend
from tests.binaries import spec


def test_after_it_a_call_compiles_nothing(backend: Backend, rng: np.random.Generator, monkeypatch: Any) -> None:
    q = backend.put(rng.standard_normal((1, 9, 2, 8)).astype(np.float32))
    attention = cf.Attention(causal=True, softcap=3.0)
    cf.warmup(attention.plan(q, q, q), attention.plan(q, q, q, backward=True))

    def refuse(*_: Any) -> Any:
        raise AssertionError("compiled after the warm-up")

    monkeypatch.setattr(importlib.import_module("cupyflash._cuda.compile"), "_load", refuse)
    attention.bwd(q, q, q, *attention.fwd(q, q, q), q)


def test_every_kernel_of_a_plan_is_loaded_once(monkeypatch: Any) -> None:
    loaded: list[tuple[str, int]] = []
    compiler = importlib.import_module("cupyflash._cuda.compile")
    monkeypatch.setattr(compiler, "kernel", lambda plan, ordinal: loaded.append((plan.kernel, ordinal)))
    monkeypatch.setattr("cupyflash._interop.require_cupy", lambda function: None)
    fake = type("cupy", (), {"cuda": type("cuda", (), {"Device": lambda: type("Device", (), {"id": 1})()})})
    monkeypatch.setitem(importlib.import_module("sys").modules, "cupy", fake)
    cf.warmup(plan_forward(spec(), KNOWN[90]), plan_backward(spec(dim=256), KNOWN[90]))
    names = ["fwd_sm90", "bwd_preprocess", "bwd_dkv_sm90", "bwd_dq_sm90", "bwd_finish"]
    assert loaded == [(name, 1) for name in names]


def test_what_is_no_plan_is_named() -> None:
    q = np.ones((1, 2, 1, 4))
    with pytest.raises(TypeError, match=r"plans\[1\].*of type ndarray.*Attention\.plan"):
        cf.warmup(cf.Attention().plan(q, q, q), q)
