"""The site: `python -m sphinx -W --keep-going -b html docs docs/_build`, in which a warning is an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import cupyflash

sys.path.append(str(Path(__file__).parent))  # for `docstrings`

project = "cupyflash"
author = copyright = "cupyflash contributors"
release = version = cupyflash.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings"]
exclude_patterns = ["_build", "figures"]
html_theme = "furo"
html_title = "cupyflash"
html_copy_source = False
smartquotes = False  # "bshd" is written so in code

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # a link to a heading is the one that GitHub makes

default_role = "py:obj"  # `attn_fwd` in a docstring is a link where it names something, and code elsewhere
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say more: shapes, dtypes, units


def setup(app: Any) -> None:
    app.connect("source-read", _without_outside_links)


def _without_outside_links(app: Any, page: str, source: list[str]) -> None:
    """Links to the repository's other folders work where the page is read beside them, and are plain text here."""
    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", source[0])
