"""Docstrings in this project's form, as reStructuredText: equations indented, then sections underlined with dashes.

    Parameters
    ----------
    q : array [B, Nq, Hq, D], float16 | bfloat16 | float32 | float64
        What it is.

A section's name becomes a rubric, each argument an entry of a definition list, an indented block of the text a literal
block. Nothing of the text is taken for markup but `names` and examples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_LISTS = ("Parameters", "Returns")  # of `name : what it is`, each with indented text
_MARKUP = re.compile(r"([*|\\]|_(?!\w))")


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}


def _process(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    lines[:] = list(restructured(lines))


def restructured(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring as lines of reStructuredText."""
    section = ""
    is_literal = is_example = False
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if line and following == "-" * len(line):
            section, is_literal, is_example = line, False, False
            yield from (f".. rubric:: {line}", "")
        elif line and set(line) == {"-"}:
            yield ""
        elif is_example or line.lstrip().startswith(">>>"):
            is_example = bool(line.strip())  # a blank line ends it
            yield line
        elif section in _LISTS and re.match(r"\S.* : ", line):
            name, _, kind = line.partition(" : ")
            yield from ("", f"**{_escaped(name)}** : {_escaped(kind)}")
        elif line.startswith("    ") and section not in _LISTS:
            if not is_literal and not lines[number - 1].rstrip().endswith("::"):
                yield from ("::", "")
            is_literal = True
            yield line
        else:
            is_literal = is_literal and not line.strip()
            yield _escaped(line)


def _escaped(text: str) -> str:
    """Text that holds no markup but `names`."""
    parts = re.split(r"(`[^`]*`|::$)", text)
    return "".join(part if number % 2 else _MARKUP.sub(r"\\\1", part) for number, part in enumerate(parts))
