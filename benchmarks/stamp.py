"""What a result was measured on: the machine, and hashes that change with a kernel or the backend, not with comments.

The GPU suite stores them beside its outcomes; `tests/test_results.py` recomputes them without a GPU.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_COMMENT = re.compile(
    r"""(?P<literal>"(?:\\.|[^"\\\n])*"|'(?:\\[^\n]{1,4}|[^'\\\n])')|//[^\n]*|/\*.*?\*/""",
    re.DOTALL,
)


def machine() -> dict[str, str]:
    """What `python -m cupyflash info` says, but for the kernel cache: that is a path of the machine's."""
    from cupyflash import _environment

    return {fact.label: fact.text for fact in _environment.facts() if fact.label != "kernel cache"}


def record(**found: Any) -> dict[str, Any]:
    """What was found, with the day and the machine."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"date": today, "machine": machine(), **found}


def gpu_of(facts: dict[str, str]) -> str:
    """The GPU's name, without what follows it in brackets."""
    return facts["GPU"].split(" (")[0]


def cuda_of(facts: dict[str, str]) -> str:
    """The CUDA version of the compiler, as in "13.0"."""
    return facts["NVRTC"].split(",")[0]


def result_file(kind: str, facts: dict[str, str]) -> Path:
    """Where results of this kind from this GPU and this major version of CUDA are kept."""
    name = f"{kind} {gpu_of(facts)} cuda {cuda_of(facts).split('.')[0]}"
    return RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"


def kernel_names(root: Path = ROOT) -> list[str]:
    """Every kernel: one .cu file each, named like its entry point."""
    return sorted(path.stem for path in (root / "cuda_src").glob("*.cu"))


def kernel_hash(kernel: str) -> str:
    """SHA-256 of the kernel's flattened text without comments, blank lines and #line directives."""
    from cupyflash._cuda.source import flatten

    return _sha256(without_comments(flatten(kernel)))


def backend_hash(root: Path = ROOT) -> str:
    """SHA-256 of the syntax trees, without docstrings, of the Python that plans, compiles and launches."""
    package = root / "cupyflash"
    paths = [package / "_interop.py", *sorted((package / "_cuda").glob("*.py"))]
    return _sha256("\n".join(f"{path.name}: {syntax(path.read_text('utf-8'))}" for path in paths))


def without_comments(text: str) -> str:
    """C++ text without comments, blank lines and #line directives. String and character literals stay as they are."""
    text = _COMMENT.sub(lambda match: match["literal"] or " ", text)
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#line"))


def syntax(text: str) -> str:
    """The syntax tree of Python text without docstrings; comments and layout are not in a tree anyway."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
        elif isinstance(node, ast.JoinedStr):  # Python 3.12.0 and 3.12.1 add empty constants to nested format specs
            node.values = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
    return _dump(tree)


def _dump(node: object) -> str:
    """Like `ast.dump`, but without absent and empty fields, whose set differs from one Python version to the next."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, _dump(value)) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({', '.join(f'{name}={text}' for name, text in fields)})"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
