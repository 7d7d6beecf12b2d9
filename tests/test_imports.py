"""What importing costs, what is public, and who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import cupyflash as cf

PACKAGE = Path(cf.__file__).parent
FRAMEWORKS = {"cupy", "torch", "jax", "jaxlib", "cuda", "mpi4py"}

# A module imports only from modules above its own; backends see specs and bare arrays.
ORDER = (
    "_errors",
    "_spec",
    "_philox",
    "_environment",
    "_interop",
    "_making",
    "_overlap",
    "_check",
    "_attention",
    "_memory",
    "_merge",
    "_append",
    "_warmup",
    "_api",
    "_cascade",
    "parallel",
    "torch",
    "jax",
    "__init__",
    "testing",
    "_cli",
    "__main__",
)
BACKENDS = {"_cpu", "_cuda", "_nowhere"}
BACKENDS_MAY_IMPORT = {"_errors", "_spec", "_philox"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_and_computing_on_numpy_imports_no_framework() -> None:
    code = """
import sys
import numpy as np
import cupyflash as cf
import cupyflash.parallel
x = np.ones((1, 3, 2, 4), np.float32)
out, lse = cf.attn_fwd(x, x, x)
cf.attn_bwd(x, x, x, out, lse, out)
cf.merge_states([out, out], [lse, lse])
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    loaded = set(run(code).split())
    assert "cupyflash" in loaded
    assert not loaded & FRAMEWORKS


def test_all_is_what_is_public() -> None:
    public = {
        name for name, value in vars(cf).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(cf.__all__) == public | {"__version__"}
    assert len(cf.__all__) == len(set(cf.__all__))


def test_a_star_import_gives_every_public_name() -> None:
    names: dict[str, object] = {}
    exec("from cupyflash import *", names)
    assert set(cf.__all__) <= set(names)


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """(imported module, whether at module level) of a file, leaving out what only type checkers see."""
    package = ".".join(path.relative_to(PACKAGE.parent).parts[:-1])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(node)
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and ast.unparse(guard.test) == "TYPE_CHECKING"
        for node in ast.walk(guard)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            outer = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*outer, *([node.module] if node.module else [])])
            modules = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            yield module, node in tree.body


def sibling(module: str) -> str | None:
    """Which of our modules an import names: `_check` for cupyflash._check.FLOATS, `__init__` for cupyflash.attn_fwd."""
    root, _, rest = module.partition(".")
    if root != "cupyflash":
        return None
    name = rest.partition(".")[0]
    return name if name and ((PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()) else "__init__"


FILES = sorted(PACKAGE.rglob("*.py"))
by_file = pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])


@by_file
def test_imports_go_downward(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module, is_at_module_level in imports_of(path):
        name = sibling(module)
        if name in (None, own) or not is_at_module_level:
            continue
        if own in BACKENDS:
            assert name in BACKENDS_MAY_IMPORT, f"{own} is a backend and imports {module}"
        else:
            assert own in ORDER, f"{own} has no place in the order"
            assert name in ORDER[: ORDER.index(own)], f"{own} imports {module}, which stands above it"


@by_file
def test_backends_never_reach_for_options_or_frameworks_arrays(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in BACKENDS:
        for module, _ in imports_of(path):
            assert sibling(module) in {None, own, *BACKENDS_MAY_IMPORT}, f"{path.name} imports {module}"
            assert module.partition(".")[0] not in {"torch", "jax", "jaxlib"}


@by_file
def test_frameworks_are_imported_where_they_are_used(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] not in ("torch", "jax"):  # adapters, which nothing else imports
        for module, is_at_module_level in imports_of(path):
            assert not (is_at_module_level and module.partition(".")[0] in FRAMEWORKS), f"{path.name} imports {module}"


def test_planning_imports_no_cupy() -> None:
    planning = [PACKAGE / "_cuda" / name for name in ("plan.py", "tiles.py", "constants.py", "params.py")]
    for path in planning:
        assert not {module for module, _ in imports_of(path)} & FRAMEWORKS, path.name
