"""The Python in README and in the documents, and every one-file example run as they stand."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in ("README.md", "docs/recipes.md", "docs/torch.md", "docs/jax.md")
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    )
]
FRAMEWORKS = {name: rf"^\s*(import|from) {name}\b" for name in ("cupy", "torch", "jax")}
FRAMEWORKS["mpi4py"] = r"\bMpiTransport\b"  # which imports it


def run(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def skip_without_frameworks(text: str) -> None:
    for name, use in FRAMEWORKS.items():
        if re.search(use, text, re.MULTILINE) and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def test_readme_has_an_example() -> None:
    assert any(block.id == "README.md-0" for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str) -> None:
    skip_without_frameworks(block)
    run("-c", block)


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem != "__init__"], ids=lambda path: path.stem)
def test_example_runs_and_prints(path: Path) -> None:
    skip_without_frameworks(path.read_text("utf-8"))
    assert run(str(path)).strip(), "an example prints something checkable"
