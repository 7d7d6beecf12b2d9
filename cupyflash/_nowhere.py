"""The backend of arrays that are shape and dtype alone: it accepts every call and computes nothing.

A call on such arrays is checked as any other and returns what its results look like, which is all that tracing asks.
"""

from __future__ import annotations

from typing import Any

from ._spec import AppendCall, Call, Spec, Work


def plan(spec: Spec, call: Call, *, backward: bool, override: object | None = None) -> None:
    """None: there is no machine to plan for."""


def workspace_bytes(spec: Spec, call: Call, *, backward: bool) -> int:
    """None are needed."""
    return 0


def plan_bytes(spec: Spec, call: Call, plan: None) -> int:
    """None are used."""
    return 0


def forward(spec: Spec, call: Call, plan: None) -> Work:
    """To do nothing."""
    return _nothing


def backward(spec: Spec, call: Call, plan: None) -> Work:
    """To do nothing."""
    return _nothing


def preprocess(call: Call) -> Work:
    """To do nothing."""
    return _nothing


def merge_bytes(call: Any) -> int:
    """None are needed."""
    return 0


def merge(call: Any) -> Work:
    """To do nothing."""
    return _nothing


def merge_bwd(call: Any) -> Work:
    """To do nothing."""
    return _nothing


def append(call: AppendCall) -> Work:
    """To do nothing."""
    return _nothing


def _nothing(given: Any, stream: int) -> None:
    pass
