"""The error family, and the one sentence shape that every refusal has.

    NotImplementedError
        UnsupportedError    a legal request that this backend or GPU cannot serve; says what can
    RuntimeError
        CompileError        the compiler's log, the source position, and the options used

Everything else a caller can cause is a built-in: ValueError for shapes and values, TypeError for kinds and dtypes.
"""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """A legal request that this backend or GPU cannot serve; the message says what can."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message carries its log, the source position and the options."""


def refusal(function: str, argument: str, given: str, accepted: str, advice: str = "") -> str:
    """`<function>: <argument> <what was given>; <what is accepted>. <what to do, when known>`"""
    tail = f" {advice}" if advice else ""
    return f"{function}: `{argument}` {given}; {accepted}.{tail}"
