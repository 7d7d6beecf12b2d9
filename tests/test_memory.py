"""Memory is linear in the lengths: no array of queries x keys ever exists."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import PEAK_BYTES
from tests.cases import DTYPES

LENGTH, WIDTH = 16_384, 64


def _peak(run: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes allocated at once above what was there before, results included."""
    tracemalloc.start()
    try:
        result = run()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}], ids=["full", "causal and softcap"])
def test_peak_memory_stays_linear(dtype: str, options: dict[str, Any], rng: np.random.Generator) -> None:
    q, k, v, dout = (rng.standard_normal((1, LENGTH, 1, WIDTH)).astype(DTYPES[dtype]) for _ in range(4))
    forward, (out, lse) = _peak(lambda: cf.attn_fwd(q, k, v, **options))
    assert forward < PEAK_BYTES
    backward, _ = _peak(lambda: cf.attn_bwd(q, k, v, out, lse, dout, **options))
    assert backward < PEAK_BYTES


def test_heads_are_not_worked_on_all_at_once(rng: np.random.Generator) -> None:
    """Eight times the heads cost eight times the results, and little more beside them."""

    def beside_the_results(heads: int) -> int:
        q = rng.standard_normal((1, 1024, heads, WIDTH)).astype(np.float32)
        saved = cf.attn_fwd(q, q, q)
        peak, grads = _peak(lambda: cf.attn_bwd(q, q, q, *saved, q))
        return peak - sum(grad.nbytes for grad in grads)

    assert beside_the_results(8) < 2 * beside_the_results(1)
