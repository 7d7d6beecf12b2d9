"""What the stored GPU results speak for.

Every kernel and the backend are either in a result file, as they now stand, or named in benchmarks/results/not-run.json
with a date and a reason. So is a test that has changed since it failed on a GPU, until it has run there again.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from benchmarks import stamp, table
from tests import gpu_results


def test_every_kernel_and_the_backend_ran_or_say_why_not() -> None:
    now = table.current_hashes()
    for entry in table.not_run():
        print(table.said(entry))
    assert now, "no kernel found"
    ran, excused = table.ran_as_they_stand(now, table.gpu_results()), table.excused("kernel")
    silent = sorted(set(now) - ran - excused)
    assert not silent, (
        f"{silent} changed since the last GPU run: run the suite on a GPU, or say in {table.NOT_RUN.name} why not"
    )
    assert not excused - set(now), f"{table.NOT_RUN.name} names {sorted(excused - set(now))}, which do not exist"
    assert not excused & ran, f"{sorted(excused & ran)} ran on a GPU: take them out of {table.NOT_RUN.name}"


def test_not_run_entries_carry_date_and_reason() -> None:
    for entry in table.not_run():
        assert set(entry) in ({"kernel", "date", "reason"}, {"test", "date", "reason"}), entry
        assert datetime.date.fromisoformat(entry["date"]) <= datetime.date.today()
        assert len(entry["reason"].split()) >= 3, entry


def test_no_stored_gpu_run_holds_a_failure_that_nobody_speaks_of() -> None:
    spoken_of, failed = table.excused("test"), set[str]()
    for result in table.gpu_results():
        failed |= {test for test, outcome in result["tests"].items() if outcome == "failed"}
        assert failed <= spoken_of, f"{result['gpu']}, {result['date']}: {sorted(failed - spoken_of)}"
        assert "passed" in result["tests"].values(), f"{result['gpu']}: no test passed"
    assert spoken_of <= failed, f"{sorted(spoken_of - failed)} did not fail: take them out of {table.NOT_RUN.name}"


def test_readme_shows_the_table_of_these_results() -> None:
    assert table.render() == table.between_markers(table.README.read_text("utf-8")), "run python -m benchmarks.table"


def test_tests_that_ran_again_take_the_place_of_what_they_were() -> None:
    first = {
        "gpu": "H",
        "machine": {"os": "L"},
        "backend": "b",
        "kernels": {"fwd": "1", "bwd": "2"},
        "arguments": ["all"],
    }
    stored = first | {"tests": {"x": "failed", "y": "passed"}}
    again = first | {"tests": {"x": "passed"}, "kernels": {"fwd": "1"}, "arguments": ["x"]}
    both = gpu_results.together(stored, again)
    assert both == first | {"tests": {"x": "passed", "y": "passed"}, "again": [["x"]]}
    assert gpu_results.together(both, again)["again"] == [["x"], ["x"]]
    for other in ({"backend": "c"}, {"kernels": {"fwd": "3"}}, {"kernels": {"new": "1"}}, {"machine": {"os": "W"}}):
        with pytest.raises(pytest.UsageError, match="not as in the stored session"):
            gpu_results.together(stored, again | other)


def test_a_changed_kernel_is_noticed() -> None:
    results = [{"kernels": {"fwd": "1", "bwd": "2"}, "backend": "3"}]
    assert table.ran_as_they_stand({"fwd": "1", "bwd": "changed", "backend": "3"}, results) == {"fwd", "backend"}
    assert table.ran_as_they_stand({"fwd": "1", "backend": "3"}, []) == set()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int a; // why\n\n\nint b;", 'int a;\n#line 7 "x.cuh"\nint b; /* two\nlines */'),
        ('asm("// kept");', 'asm("// kept"); // gone'),
        ("char c = '\"'; // a quote", "char c = '\"';"),
    ],
)
def test_comments_and_blank_lines_do_not_change_a_kernel(one: str, other: str) -> None:
    assert stamp.without_comments(one) == stamp.without_comments(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int a = 1;", "int a = 2;"),
        ('asm("// one");', 'asm("// two");'),
        ("int a; // b\nint c;", "int a; // b int c;"),
    ],
)
def test_code_changes_a_kernel(one: str, other: str) -> None:
    assert stamp.without_comments(one) != stamp.without_comments(other)


def test_docstrings_and_comments_do_not_change_the_backend() -> None:
    bare = "def f(x):\n    return x\n"
    assert stamp.syntax(bare) == stamp.syntax(
        '"""Module."""\ndef f(x):\n    """What f does."""\n    # why\n    return (x)\n'
    )
    assert stamp.syntax(bare) != stamp.syntax("def f(x):\n    return -x\n")
    assert stamp.syntax("a = 'text'") != stamp.syntax("a = 'other'")


def test_a_backend_file_changes_the_hash(tmp_path: Path) -> None:
    cuda = tmp_path / "cupyflash" / "_cuda"
    cuda.mkdir(parents=True)
    (tmp_path / "cupyflash" / "_interop.py").write_text("a = 1\n")
    (cuda / "plan.py").write_text("b = 1\n")
    before = stamp.backend_hash(tmp_path)
    (cuda / "plan.py").write_text("b = 1  # one\n")
    assert stamp.backend_hash(tmp_path) == before
    (cuda / "plan.py").write_text("b = 2\n")
    assert stamp.backend_hash(tmp_path) != before
