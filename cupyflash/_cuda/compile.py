"""Plan to Kernel: in-process cache, CuPy's disk cache below it, and errors that carry the compiler's log."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from .._errors import CompileError
from .plan import Plan
from .source import compose

# One tuple for every target: CuPy compiles an empty program once per process and tuple to learn the compiler's version.
OPTIONS = ("-std=c++17",)
QUIET = "CUPYFLASH_QUIET"  # set to anything: no word about slow first compiles
_IN_MEMORY = "CUPY_CACHE_IN_MEMORY"
_SLOW_SECONDS = 1.0
_OPT_IN_BYTES = 48 * 1024  # of shared memory, above which a kernel must ask for it

_kernels: dict[tuple[Any, int], Any] = {}
_lock = threading.Lock()
_notice_given = False
_unkept_said = False


def kernel(plan: Plan[Any], ordinal: int) -> Any:
    """The loaded kernel of this plan on this device; compiled at most once a process."""
    key = (plan.binary, ordinal)
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = _load(plan, ordinal)
    return found


def _load(plan: Plan[Any], ordinal: int) -> Any:
    began = time.perf_counter()
    try:
        function = _compiled(plan, ordinal)
    except OSError as error:  # the cache folder is read-only, another user's, or full
        function = _compiled_unkept(plan, ordinal, error)
    _notice(plan, time.perf_counter() - began)
    return function


def _compiled(plan: Plan[Any], ordinal: int) -> Any:
    import cupy

    options = OPTIONS if plan.target == f"sm_{plan.arch}" else (*OPTIONS, f"-arch={plan.target}")  # over CuPy's own
    with cupy.cuda.Device(ordinal):
        module = cupy.RawModule(code=compose(plan.constants), options=options)
        try:
            raw = module.get_function(plan.kernel)
            if plan.smem_bytes > _OPT_IN_BYTES:
                raw.max_dynamic_shared_size_bytes = plan.smem_bytes
            function = raw.kernel  # of this device, which `raw` would look up again at each launch
        except cupy.cuda.compiler.CompileException as error:
            raise CompileError(
                f"{plan.kernel} did not compile for {plan.target} with options {' '.join(options)}.\n{error}\n"
                f"The plan was: {plan}"
            ) from error
    return function


def _compiled_unkept(plan: Plan[Any], ordinal: int, error: OSError) -> Any:
    """Past CuPy's folder: CuPy looks at the variable anew in each compile."""
    global _unkept_said
    before = os.environ.get(_IN_MEMORY)
    os.environ[_IN_MEMORY] = "1"
    try:
        function = _compiled(plan, ordinal)
    finally:
        if before is None:
            del os.environ[_IN_MEMORY]
        else:
            os.environ[_IN_MEMORY] = before
    if not _unkept_said and QUIET not in os.environ:
        _unkept_said = True
        print(
            f"cupyflash: compiled kernels cannot be kept ({error}), so every process compiles its own. Set "
            f"CUPY_CACHE_DIR to a folder of yours, or {QUIET}=1 to silence this.",
            file=sys.stderr,
        )
    return function


def _notice(plan: Plan[Any], seconds: float) -> None:
    global _notice_given
    if seconds < _SLOW_SECONDS or _notice_given or QUIET in os.environ:
        return
    _notice_given = True
    print(
        f"cupyflash: compiling {plan.kernel} for {plan.target} took {seconds:.1f} s; CuPy keeps the result on disk, "
        f"so the next process starts without this wait. Set {QUIET}=1 to silence this.",
        file=sys.stderr,
    )
