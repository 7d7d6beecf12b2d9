"""The benchmark's own judge is right, and a wrong result gets no time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks.cases import EXTRA, GRIDS, PEERS, Case
from benchmarks.compare import table
from cupyflash.testing import assert_close, peer, peer_bwd, reference, reference_bwd

torch: Any = pytest.importorskip("torch")

CASES = [
    Case("causal, grouped", "", 2, 37, 6, 2, 24, is_causal=True),
    Case("full", "", 1, 40, 2, 2, 16, is_causal=False),
    Case("window", "", 2, 33, 4, 4, 8, is_causal=True, window=(5, 0)),
    Case("window to both sides", "", 1, 33, 4, 2, 8, is_causal=False, window=(5, 3)),
]
SMALL = Case("small", "", 2, 37, 4, 2, 64, is_causal=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_judge_agrees_with_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    import benchmarks.reference as judge
    from benchmarks.run import inputs

    monkeypatch.setattr(judge, "SCORES_AT_ONCE", 1)  # a KV head at a time, as the long cells need it
    tensors = inputs(case, torch.device("cpu"))
    q, k, v, dout = (x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for x in tensors)
    options: dict[str, Any] = {"causal": case.is_causal, "window": case.window}
    expected = dict(zip(("out", "lse"), reference(q, k, v, **options), strict=True))
    expected |= reference_bwd(q, k, v, dout, **options)
    plain = dict(zip(("out", "lse"), peer(q, k, v, **options), strict=True)) | peer_bwd(q, k, v, dout, **options)
    exact, rounded = (judge.attention(case, *tensors, rounded=rounded) for rounded in (False, True))
    for name, right in expected.items():
        assert_close(exact[name].numpy(), right, right, dtype="float64", terms=np.abs(right).sum(), name=name)
        stored = "float32" if name == "lse" else ml_dtypes.bfloat16
        assert_close(rounded[name].numpy().astype(stored), right, plain[name], name=f"rounded {name}")


def test_every_grid_has_names_of_its_own_and_rows_to_be_held_to() -> None:
    for grid in GRIDS.values():
        names = [case.name for case in grid]
        assert len(set(names)) == len(names)
        for case in grid:
            assert case.heads_q % case.heads_kv == 0
            assert (case.against is None) == (case.limit is None)
            assert case.against is None or case.against in names
    assert {(case.batch * case.length, case.heads_q * case.head_dim) for case in PEERS} == {(16_384, 2_048)}
    assert any(case.host for case in EXTRA)


def test_a_run_checks_then_times_everybody_and_writes_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import run

    held = dataclasses.replace(SMALL, name="held", against="small", limit=0.0)
    windowed = dataclasses.replace(SMALL, name="windowed", window=(3, 0))
    monkeypatch.setitem(run.GRIDS, "quick", (SMALL, held, windowed))
    file = tmp_path / "run.jsonl"
    assert run.main(["--device", "cpu", "--reps", "2", "--backends", "fa2", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert table(records) == printed.rstrip("\n")
    rows = [record for record in records if "case" in record]
    assert [(row["case"], row["pass"]) for row in rows] == [
        (name, one_pass) for name in ("small", "held", "windowed") for one_pass in ("forward", "backward")
    ]
    for row in rows:
        assert "ours" in row["times_ms"]
        assert ("fa2" in row["times_ms"]) == (row["case"] != "windowed")
        assert set(row["errors"]["ours"]) == set(run.OUTPUTS[row["pass"]])
    assert "no fa2: scaled_dot_product_attention has no window" in printed
    assert "held backward" in printed
    assert "ABOVE 0.0" in printed


@pytest.mark.parametrize("victim", ["out", "lse", "dv"])
@pytest.mark.parametrize("damage", [float("nan"), 0.3])
def test_a_wrong_result_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch, victim: str, damage: float) -> None:
    from benchmarks import run

    class Damaged(run.Ours):
        def results(self) -> dict[str, Any]:
            results = super().results()
            results[victim] = results[victim].clone()
            results[victim].view(-1)[5] += damage
            return results

    monkeypatch.setattr(run, "Ours", Damaged)
    rows = {row["pass"]: row for row in run.measure(SMALL, [], torch.device("cpu"), 2)}
    wrong = rows["backward" if victim == "dv" else "forward"]
    assert len(wrong["failed"]) == 1
    assert wrong["failed"][0].startswith(f"{victim}: error")
    assert "ours" not in wrong["times_ms"]
    assert "FAILED" in table(list(rows.values()))


def test_a_crash_of_one_contestant_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import run

    class Crashing(run.Ours):
        def forward(self) -> None:
            raise MemoryError("no room")

    monkeypatch.setattr(run, "Ours", Crashing)
    for row in run.measure(SMALL, ["fa2"], torch.device("cpu"), 2):
        assert row["failed"] == ["failed: MemoryError: no room"]
        assert set(row["times_ms"]) == {"fa2"}
