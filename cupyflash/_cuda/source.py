"""Find `cuda_src`, inline our own includes, and put the constants before them.

The result is the whole truth about a binary: CuPy's cache key covers the text, and no install path enters it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from .constants import KERNELS, Constants, render

_INCLUDE = re.compile(r'^\s*#include "([^"]+)"\s*$')


@cache
def root() -> Path:
    """The folder of CUDA sources: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed, checkout = package / "cuda_src", package.parent / "cuda_src"
    for folder in (installed, checkout):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"cuda_src is missing from this installation: looked in {installed} and {checkout}")


@cache
def flatten(kernel: str) -> str:
    """`kernel`.cu with quoted includes inlined once each, `#line` kept right; angle includes are left to NVRTC."""
    seen: set[str] = set()

    def inline(name: str, path: Path) -> list[str]:
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            include = _INCLUDE.match(line)
            if line.strip() == "#pragma once":
                lines.append("")
            elif include is None:
                lines.append(line)
            elif include[1] not in seen:
                seen.add(include[1])
                lines += inline(include[1], root() / "include" / include[1])
                lines.append(f'#line {number + 1} "{name}"')
            else:
                lines.append("")
        return lines

    return "\n".join(inline(f"{kernel}.cu", root() / f"{kernel}.cu")) + "\n"


def compose(constants: Constants) -> str:
    """The exact text that the compiler gets."""
    return render(constants) + flatten(KERNELS[type(constants)])
