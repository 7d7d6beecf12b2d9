"""The Python in README and in the documents, and every one-file example run as they stand."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.backends import gpu_is_there

ROOT = Path(__file__).parents[1]
NEEDS_GPU = ("cuda_graph", "streams")
EXAMPLES = [
    pytest.param(path, id=path.stem, marks=pytest.mark.gpu if path.stem in NEEDS_GPU else ())
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path.stem != "__init__"
]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}", marks=pytest.mark.gpu if "import cupy\n" in block else ())
    for page in PAGES
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
    if "import cupy\n" in block and not gpu_is_there():
        pytest.skip("no CUDA GPU")
    run("-c", block)


@pytest.mark.parametrize("path", EXAMPLES)
def test_example_runs_and_prints(path: Path) -> None:
    skip_without_frameworks(path.read_text("utf-8"))
    if path.stem in NEEDS_GPU and not gpu_is_there():
        pytest.skip("no CUDA GPU")
    assert run(str(path)).strip(), "an example prints something checkable"


@pytest.mark.parametrize("name", NEEDS_GPU)
def test_an_example_that_needs_a_gpu_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for cupy in (None, SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        with pytest.raises(SystemExit, match="needs a GPU that CuPy can use") as stopped:
            importlib.import_module(f"examples.{name}").main()
        assert stopped.value.code != 0
