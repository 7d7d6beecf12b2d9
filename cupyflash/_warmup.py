"""Compile ahead of the first call."""

from __future__ import annotations

from typing import Any

from cupyflash import _interop
from cupyflash._errors import refusal


def warmup(*plans: Any) -> None:
    """Compile and load, on the current GPU, the kernels that calls with these plans need.

    For what must not stop to compile: the capture of a CUDA graph, the first request of a server, a timed loop. A plan
    depends on dtypes, head dims and features, not on lengths, so one serves every call of its kind.

    Parameters
    ----------
    plans : what `Attention.plan` returned
        A plan of the NumPy backend needs nothing.

    Raises
    ------
    TypeError: something else than a plan. UnsupportedError: a GPU's plan where no GPU can be used. CompileError.

    Examples
    --------
    >>> import numpy as np, cupyflash as cf
    >>> q = np.ones((1, 4, 2, 8), np.float32)
    >>> attention = cf.Attention(causal=True)
    >>> cf.warmup(attention.plan(q, q, q), attention.plan(q, q, q, backward=True))
    """
    from cupyflash._cpu import NumpyPlan
    from cupyflash._cuda.plan import BackwardPlan, Plan

    kernels: list[Plan[Any]] = []
    for number, plan in enumerate(plans):
        if isinstance(plan, (Plan, BackwardPlan)):
            kernels += plan.kernels
        elif not isinstance(plan, NumpyPlan):
            given, accepted = f"is of type {type(plan).__name__}", "plans are accepted, as `Attention.plan` returns"
            raise TypeError(refusal("warmup", f"plans[{number}]", given, accepted))
    if not kernels:
        return
    _interop.require_cupy("warmup")
    import cupy

    from cupyflash._cuda.compile import kernel

    for plan in kernels:
        kernel(plan, cupy.cuda.Device().id)
