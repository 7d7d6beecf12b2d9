"""Every public name is in the reference, with an example that runs; links and the tree of the architecture are right;
pictures are what their scripts draw."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.figures import diagrams, lse_precision
from tests.backends import gpu_is_there

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MODULES = ("cupyflash", "cupyflash.parallel", "cupyflash.torch", "cupyflash.jax", "cupyflash.testing")
# What an example asks for, beside torch and JAX in their own.
NEEDS = {
    "MpiTransport": "mpi4py",
    "NcclTransport": "gpu",
    "StagedTransport": "gpu",
    "register_with_transformers": "transformers",
    "time_gpu": "gpu",
}


def public_names() -> list[str]:
    """Of all modules; read from their source, for where torch or JAX is missing."""
    names = []
    for module in MODULES:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        listed = re.search(r"^__all__ = \[(.*?)\]", Path(spec.origin).read_text("utf-8"), re.MULTILINE | re.DOTALL)
        assert listed is not None, module
        names += [f"{module}.{name}" for name in re.findall(r'"(\w+)"', listed[1])]
    return names


def run_example(name: str) -> None:
    """The example in the docstring of what a dotted name means."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    [example] = doctest.DocTestFinder(recurse=False).find(found, name, globs={})
    assert example.examples, f"{name} has no example"
    text: list[str] = []
    failed, _ = doctest.DocTestRunner().run(example, out=text.append)
    assert not failed, "".join(text)


def parameters() -> list[object]:
    needs = {name: NEEDS.get(name.rpartition(".")[2], "") for name in public_names() if not name.endswith("__")}
    return [pytest.param(name, marks=pytest.mark.gpu if need == "gpu" else ()) for name, need in needs.items()]


@pytest.mark.parametrize("name", parameters())
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that torch's kernel is overridden
def test_the_example_of_a_public_name_runs(name: str) -> None:
    needed = [NEEDS.get(name.rpartition(".")[2], ""), "torch" if "torch" in name.lower() else ""]
    needed += ["jax.experimental.buffer_callback"] if ".jax." in name else []
    for package in filter(None, needed):
        if package == "gpu" and not gpu_is_there():
            pytest.skip("no CUDA GPU")
        if package != "gpu":
            pytest.importorskip(package, reason=f"{package} is not installed")
    if not name.endswith("Transport"):
        run_example(name)
    else:  # a process of its own: MPI starts once, and a group of processes is the process's own
        code = f"from tests.test_docs import run_example; run_example({name!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr


def test_the_reference_has_every_public_name_and_no_other() -> None:
    listed = re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)", REFERENCE.read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(public_names())


def test_the_examples_on_the_reference_page_run() -> None:
    failed, attempted = doctest.testfile(str(REFERENCE), module_relative=False, encoding="utf-8")
    assert attempted and not failed


def prose(page: Path) -> str:
    """A page without what is in fences, where nothing is a link or a heading."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> list[str]:
    """Of its headings, as GitHub makes them, and the site of those of three levels."""
    headings = re.findall(r"^#{1,3} (.+)$", prose(page), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", link):  # on the web
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_pages_link_to_pages() -> None:
    assert sum(len(re.findall(r"\]\([\w./-]+\.md(?:#[\w-]+)?\)", prose(page))) for page in PAGES) > 50


def test_every_page_can_be_reached_from_readme() -> None:
    listed = set(re.findall(r"\]\(docs/([\w-]+\.md)", prose(ROOT / "README.md")))
    assert listed >= {page.name for page in PAGES if page.parent.name == "docs"} - {"index.md"}


@pytest.mark.parametrize("folder", ["", "_cuda/", "_cli/", "parallel/", "torch/", "jax/"])
def test_the_architecture_page_has_every_module_and_no_other(folder: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    [row] = re.findall(rf"^\| `cupyflash/{folder}` \| (.*) \|$", page, re.MULTILINE)
    named = re.findall(r"`(\w+)`", row)
    modules = {path.stem for path in (ROOT / "cupyflash" / folder).glob("*.py")} - {"__init__", "__main__"}
    assert modules <= set(named)
    assert {name for name in named if name.startswith("_")} <= modules


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_a_diagram_is_what_its_script_draws(name: str) -> None:
    assert (ROOT / "docs" / "images" / f"{name}.svg").read_text("utf-8") == diagrams.DIAGRAMS[name]().svg()


def test_every_picture_is_shown_and_described() -> None:
    pages = "\n".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    shown = set(re.findall(r"!\[[^\]]{10,}\]\(images/([\w-]+\.svg)\)", pages))
    assert shown == {path.name for path in (ROOT / "docs" / "images").iterdir()}


@pytest.mark.parametrize("length", [256, 1024])
def test_the_cost_of_a_bfloat16_lse_is_what_the_page_says(length: int) -> None:
    """Its own rounding to the last digit shown, that of float32 sums within what another order of summing changes."""
    page = (ROOT / "docs" / "lse-precision.md").read_text("utf-8")
    [row] = re.findall(rf"^\| {length:,} \|(.*)\|$", page, re.MULTILINE)
    errors = lse_precision.measure(length, lse_precision.USUAL_SPREAD)
    for (dtype, name), shown in zip(lse_precision.COLUMNS, map(float, row.split("|")), strict=True):
        assert errors[dtype][name] == pytest.approx(shown, rel=0.05 if dtype == "bfloat16" else 0.5), (dtype, name)
