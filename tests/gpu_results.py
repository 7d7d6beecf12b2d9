"""A pytest plugin that keeps what a GPU said: `pytest -m gpu -p tests.gpu_results`.

It writes benchmarks/results/gpu-tests-<gpu>-cuda-<major>.json: the machine's facts, each test's outcome, the hash of
every kernel that the session loaded, and the backend's hash. `tests/test_results.py` compares the hashes with the tree.
Run all the tests that need a GPU with it: a file from half of them speaks for half of them. With `--again` the outcomes
of some tests, those of a mended test say, take the place of what they were in the stored session, which must have been
of the same machine, kernels and backend.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stamp
from cupyflash import _environment

outcomes = pytest.StashKey[dict[str, str]]()
kernels = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", action="store_true", help="put outcomes into the stored GPU results")


def pytest_configure(config: pytest.Config) -> None:
    verdict = _environment.facts()[-1].text
    if verdict != "runs":
        raise pytest.UsageError(f"tests.gpu_results: the CUDA backend {verdict}")
    import cupy

    config.stash[outcomes] = {}
    config.stash[kernels] = loaded = set[str]()
    config.pluginmanager.register(Collector(config.stash[outcomes], loaded))

    class RecordedModule(cupy.RawModule):
        def get_function(self, name: str) -> Any:
            function = super().get_function(name)
            loaded.add(name)
            return function

    cupy.RawModule = RecordedModule


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out the test that judges the very file which this session writes."""
    return True if collection_path.name == "test_results.py" else None


class Collector:
    """Collects outcomes, and from pytest-xdist's workers the kernels that they loaded."""

    def __init__(self, results: dict[str, str], loaded: set[str]) -> None:
        self.results = results
        self.loaded = loaded

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.results[report.nodeid] = outcome(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.loaded.update(node.workeroutput.get("kernels", ()))


def outcome(report: pytest.TestReport) -> str:
    """passed, failed, or skipped with the reason."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
    return report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        config.workeroutput["kernels"] = sorted(config.stash[kernels])  # pyright: ignore[reportAttributeAccessIssue]
        return
    is_again = config.getoption("--again")
    write(config.stash[outcomes], config.stash[kernels], list(config.invocation_params.args), is_again=is_again)


def write(results: dict[str, str], loaded: set[str], arguments: list[str], *, is_again: bool = False) -> None:
    """One result file, named after the GPU and CUDA."""
    record = stamp.record(
        arguments=arguments,
        kernels={kernel: stamp.kernel_hash(kernel) for kernel in stamp.kernel_names() if kernel in loaded},
        backend=stamp.backend_hash(),
        tests=dict(sorted(results.items())),
    )
    record["gpu"] = stamp.gpu_of(record["machine"])
    path = stamp.result_file("gpu-tests", record["machine"])
    if is_again:
        record = together(json.loads(path.read_text("utf-8")), record)
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"\nwrote {path}: {len(results)} outcomes, {len(record['kernels'])} kernels")


def together(stored: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """The stored session with the outcomes of one that ran some of its tests again, both of one text."""
    differing = [name for name in ("gpu", "machine", "backend") if stored[name] != again[name]]
    differing += [name for name, text in again["kernels"].items() if stored["kernels"].get(name) != text]
    if differing:
        raise pytest.UsageError(f"tests.gpu_results: --again, and not as in the stored session: {differing}")
    return stored | {
        "tests": dict(sorted((stored["tests"] | again["tests"]).items())),
        "again": [*stored.get("again", []), again["arguments"]],
    }
