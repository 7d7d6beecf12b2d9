"""The whole package in seconds: run this before every commit."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import check_backward, check_forward

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": "top-left", "window": (9, None), "softcap": 2.0},
    {"scale": -0.3, "dropout_p": 0.25, "seed": 7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_and_backward_match_the_reference(rng: np.random.Generator, options: dict[str, Any]) -> None:
    q, dout = (rng.standard_normal((2, 37, 4, 24)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((2, 41, 2, 24)).astype(np.float32) for _ in range(2))
    out, lse = cf.attn_fwd(q, k, v, **options)
    check_forward(out, lse, q, k, v, **options)
    check_backward(cf.attn_bwd(q, k, v, out, lse, dout, **options), q, k, v, dout, **options)


def test_parts_merge_into_the_whole(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((1, 30, 2, 16)) for _ in range(3))
    attn = cf.Attention(causal=True)
    parts = [attn.fwd(q, k[:, at : at + 10], v[:, at : at + 10], q_start=0, k_start=at) for at in (0, 10, 20)]
    out, lse = cf.merge_states([part.out for part in parts], [part.lse for part in parts])
    check_forward(out, lse, q, k, v, causal=True)


def test_delta_stands_for_out_and_dlse(rng: np.random.Generator) -> None:
    q, k, v, dout = (rng.standard_normal((1, 11, 2, 8)) for _ in range(4))
    dlse = rng.standard_normal((1, 2, 11))
    out, lse = cf.attn_fwd(q, k, v)
    delta = cf.attn_bwd_preprocess(out, dout, dlse)
    grads = cf.attn_bwd(q, k, v, None, lse, dout, delta=delta)
    check_backward(grads, q, k, v, dout, dlse=dlse)


PLAIN = ["_api", "_append", "_attention", "_cascade", "_memory", "_merge", "_warmup"]
PARALLEL = [f"parallel.{name}" for name in ("_gather", "_ring", "_shards", "_transport", "_ulysses")]

TORCH = [f"torch.{name}" for name in ("_attention", "_flash", "_kvcache", "_sdpa")]

JAX = [f"jax.{name}" for name in ("_attention", "_merge", "_nn")]


@pytest.mark.parametrize("module", PLAIN + PARALLEL + TORCH + JAX)
def test_the_examples_in_docstrings_run(module: str) -> None:
    if module in TORCH:
        pytest.importorskip("torch", reason="torch is not installed")
    if module in JAX:
        pytest.importorskip("jax.experimental.buffer_callback", reason="jax is not installed, or older than 0.6.2")
    ran = doctest.testmod(importlib.import_module(f"cupyflash.{module}"))
    assert ran.attempted > 0
    assert ran.failed == 0


def test_a_wrong_call_says_what_is_wrong() -> None:
    q, k = np.ones((2, 8, 8, 4), np.float32), np.ones((2, 8, 5, 4), np.float32)
    with pytest.raises(ValueError, match=r"attn_fwd: `k` has 5 heads and `q` has 8; .*multiple.*q \[2, 8, 8, 4\]"):
        cf.attn_fwd(q, k, k)
