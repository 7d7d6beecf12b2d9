"""The runner says what each case said, and fails when one fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = """
import numpy as np

CASES = [dict(id=name, kind=f"the kind of {name}", needs=()) for name in ("right", "absent", "wrong")]


def run(api, only):
    x = api.asarray(np.ones((1, 5, 2, 8)), "bfloat16")
    out, lse = api.fwd(x, x, x, causal=True)
    assert (api.to_numpy(out) == 1).all() and lse.dtype == np.float32
    assert api.has("dropout") and not api.has("telepathy")
    return {name: {"right": "pass", "absent": "skip: telepathy", "wrong": "FAIL: it is"}[name] for name in only}
"""


@pytest.mark.parametrize(
    ("chosen", "status", "count"), [((), 1, "1 FAIL, 1 pass, 1 skip"), (("right", "absent"), 0, "1 pass, 1 skip")]
)
def test_each_case_has_a_line_and_a_failure_an_exit_status(
    tmp_path: Path, chosen: tuple[str, ...], status: int, count: str
) -> None:
    (tmp_path / "field_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "tests.field.run", "--backend", "numpy", "--cases", str(tmp_path)]
    if chosen:
        command += ["--only", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "numpy on the CPU"
    assert lines[1].startswith("right pass")
    assert "the kind of right" in lines[1]
    assert lines[-1] == count
    assert "telepathy" in done.stdout
