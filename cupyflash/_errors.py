"""The error family, and the one sentence shape that every refusal has.

    NotImplementedError
        UnsupportedError    a legal request that this backend or GPU cannot serve; says what can
    RuntimeError
        CompileError        the compiler's log, the source position, and the options used

Everything else a caller can cause is a built-in: ValueError for shapes and values, TypeError for kinds and dtypes.
"""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """A legal request that this backend or GPU cannot serve; the message says what can.

    Examples
    --------
    >>> import cupyflash as cf
    >>> try:
    ...     cf.memory_plan((1, 64, 8, 320), (1, 64, 8, 320))
    ... except cf.UnsupportedError as error:
    ...     print(isinstance(error, NotImplementedError))
    True
    """


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message carries its log, the source position and the options.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash as cf
    >>> x = np.ones((1, 4, 2, 8), np.float32)
    >>> try:
    ...     out, lse = cf.attn_fwd(x, x, x)
    ... except cf.CompileError as error:  # a fault of ours, or of the toolkit: this text belongs in the report
    ...     print(error)
    """


def refusal(function: str, argument: str, given: str, accepted: str, advice: str = "") -> str:
    """`<function>: <argument> <what was given>; <what is accepted>. <what to do, when known>`"""
    tail = f" {advice}" if advice else ""
    return f"{function}: `{argument}` {given}; {accepted}.{tail}"
