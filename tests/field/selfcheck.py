"""A small forward and backward in a process of its own: `python -m tests.field.selfcheck BACKEND VARIANT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash.testing import check_backward, check_forward
from tests.field.adapter import Adapter

# What differs between them is compiled into the kernels.
VARIANTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("float16", 32, {}),
    ("bfloat16", 64, {"causal": True}),
    ("float16", 64, {"softcap": 2.0}),
    ("float32", 32, {"window": (5, 3)}),
)


def main(arguments: Sequence[str]) -> None:
    backend, number = arguments
    dtype, head_dim, options = VARIANTS[int(number)]
    api = Adapter(backend)
    rng = np.random.default_rng()
    shapes = [(2, 37, heads, head_dim) for heads in (4, 2, 2, 4)]
    arrays = [api.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    q, k, v, dout = arrays
    out, lse = api.fwd(q, k, v, **options)
    grads = api.bwd(dout, q, k, v, out, lse, **options)
    inputs = [api.to_numpy(x) for x in arrays]
    check_forward(api.to_numpy(out), api.to_numpy(lse), *inputs[:3], **options)
    check_backward(tuple(map(api.to_numpy, grads)), *inputs, **options)
    print("right")


if __name__ == "__main__":
    main(sys.argv[1:])
