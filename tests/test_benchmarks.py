"""The benchmark's own judge is right, a wrong result gets no time, and what is shown is what is stored."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks import compare
from benchmarks.cases import EXTRA, FLOAT32, GRIDS, PEERS, STANDARD, Case
from benchmarks.compare import table
from cupyflash.testing import assert_close, flops, peer, peer_bwd, reference, reference_bwd, rounding_terms

torch: Any = pytest.importorskip("torch")

CASES = [
    Case("causal, grouped", "", 2, 37, 6, 2, 24, is_causal=True),
    Case("full", "", 1, 40, 2, 2, 16, is_causal=False),
    Case("window", "", 2, 33, 4, 4, 8, is_causal=True, window=(5, 0)),
    Case("window to both sides", "", 1, 33, 4, 2, 8, is_causal=False, window=(5, 3)),
    Case("values of their own width", "", 1, 33, 4, 2, 16, is_causal=True, head_dim_v=24),
]
SMALL = Case("small", "", 2, 37, 4, 2, 64, is_causal=True)
UNGROUPED = dataclasses.replace(SMALL, name="ungrouped", heads_kv=4)


def test_decoding_is_timed_beside_its_peers_on_the_same_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import decode

    monkeypatch.setattr(decode, "BATCH_AND_KEYS", ((2, 192),))
    monkeypatch.setattr(decode, "LEAST_BYTES", 8 * 192 * decode.HEADS_KV * decode.DIM)  # those of one set
    monkeypatch.setattr(decode, "PEERS", {"math": torch.nn.attention.SDPBackend.MATH})
    file = tmp_path / "decode.jsonl"
    decode.main(["--device", "cpu", "--reps", "2", "--json", str(file)])
    rows = [row for row in compare.load(file) if "contestant" in row]
    ours = ["cupyflash", "cupyflash, pages of 64", "cupyflash, pages of 16"]
    assert [row["contestant"] for row in rows] == [*ours, "math"]
    assert all(row["tb_s"] > 0 for row in rows)
    assert "| 2 x 192 | math |" in compare.markdown(compare.load(file))


def test_the_hosts_time_of_every_kind_of_call_is_held_to_torchs(tmp_path: Path) -> None:
    from benchmarks import host

    file = tmp_path / "host.jsonl"
    host.main(["--device", "cpu", "--reps", "2", "--json", str(file)])
    _, *rows, _ = map(json.loads, file.read_text("utf-8").splitlines())
    assert {row["call"] for row in rows} == {
        "forward, torch tensors",
        "forward, prepared",
        "torch operator",
        host.RECORDED,
    }
    assert all(row["us"] > 0 and row["ratio"] > 0 and row["limit"] > 0 for row in rows)


def test_a_cascade_is_timed_beside_its_keys_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import cascade

    for name, value in (("SEQUENCES", 3), ("SHARED", 90), ("OWN", 20), ("LEAST_BYTES", 1)):
        monkeypatch.setattr(cascade, name, value)
    file = tmp_path / "cascade.jsonl"
    cascade.main(["--device", "cpu", "--reps", "2", "--json", str(file)])
    [row] = [row for row in compare.load(file) if "speed" in row]
    assert row["speed"] == row["flat_ms"] / row["cascade_ms"] > 0


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
    right_terms = rounding_terms(q, k, v, dout, **options)
    exact, rounded = (judge.attention(case, *tensors, rounded=rounded) for rounded in (False, True))
    for name, right in expected.items():
        assert_close(exact[name].numpy(), right, right, dtype="float64", terms=np.abs(right).sum(), name=name)
        stored = "float32" if name == "lse" else ml_dtypes.bfloat16
        assert_close(rounded[name].numpy().astype(stored), right, plain[name], name=f"rounded {name}")
    assert exact["terms"] == pytest.approx({x: right_terms[x] / right_terms["lse"] for x in ("out", "dq", "dk", "dv")})


@pytest.mark.parametrize("is_causal", [False, True])
def test_standard_attention_is_attention(is_causal: bool) -> None:
    from benchmarks.peers import Standard
    from benchmarks.reference import attention
    from benchmarks.run import inputs

    case = Case("standard", "", 3, 41, 2, 2, 24, is_causal=is_causal, dtype="float32")
    tensors = inputs(case, torch.device("cpu"))
    exact, plain = (attention(case, *tensors, rounded=rounded) for rounded in (False, True))
    standard = Standard(case, *tensors)
    for _ in range(2):
        standard.forward()
        standard.backward()
    for name, found in standard.results().items():
        right, rounded = (results[name].numpy() for results in (exact, plain))
        assert_close(found.numpy(), right, rounded, dtype="float32", terms=exact["terms"][name], name=name)


def test_standard_attention_says_when_it_does_not_fit() -> None:
    from benchmarks.peers import Absent, Standard, _refuse_beyond, standard_bytes
    from benchmarks.run import inputs

    longest = STANDARD[-1]
    assert standard_bytes(longest) == 3 * 2 * 16 * 16_384**2
    _refuse_beyond(standard_bytes(longest), standard_bytes(longest))
    with pytest.raises(Absent, match="24 GiB for P, dP and dS, and 20 GiB are free"):
        _refuse_beyond(20 * 2**30, standard_bytes(longest))
    with pytest.raises(Absent, match="one KV head"):
        Standard(SMALL, *inputs(SMALL, torch.device("cpu")))


def test_flops_of_standard_attention_are_four_products_of_six_where_ours_are_five_of_seven() -> None:
    from benchmarks.peers import standard_flops

    shape = {"batch": 2, "len_q": 37, "len_k": 37, "heads_q": 4, "head_dim": 64}
    full = dataclasses.replace(SMALL, is_causal=False)
    ours = [flops(**shape, backward=backward) for backward in (False, True)]
    assert ours[0] == standard_flops(full, "forward") == standard_flops(SMALL, "forward")
    assert 4 * ours[1] == 5 * standard_flops(full, "backward")
    assert 6 * sum(ours) == 7 * sum(standard_flops(full, one_pass) for one_pass in compare.PASSES)


def test_every_grid_has_names_of_its_own_and_rows_to_be_held_to() -> None:
    for grid in GRIDS.values():
        names = [case.name for case in grid]
        assert len(set(names)) == len(names)
        for case in grid:
            assert case.heads_q % case.heads_kv == 0
            assert (case.against is None) == (case.limit is None)
            assert case.against is None or case.against in names
    for grid in (PEERS, STANDARD, FLOAT32):
        assert {(case.batch * case.length, case.heads_q * case.head_dim) for case in grid} == {(16_384, 2_048)}
        points = [(case.series, case.length) for case in grid]
        assert len(set(points)) == len(points) and all(case.series for case in grid)
    assert {case.dtype for case in FLOAT32} == {"float32"}
    assert {case.length for case in STANDARD} >= {128, 16_384}
    assert any(case.host for case in EXTRA)


def test_features_are_timed_beside_a_plain_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import features

    monkeypatch.setattr(features, "PLAIN", dataclasses.replace(UNGROUPED, name="plain", length=150))
    file = tmp_path / "features.jsonl"
    features.main(["--device", "cpu", "--reps", "2", "--json", str(file)])
    records = [json.loads(line) for line in file.read_text().splitlines()]
    rows, printed = [record for record in records if "feature" in record], capsys.readouterr().out
    both = [name for name in ("softcap 30", "ALiBi", "a sink", "dropout") for _ in range(2)]
    assert [row["feature"].split(",")[0] for row in rows] == [
        *both, "gradients in order", "gradients in float32", "a bfloat16 bias", "a bfloat16 bias", "a float32 bias",
        "a float32 bias", "packed",
    ]  # fmt: skip
    for row in rows:
        median = {name: quartiles[1] for name, quartiles in row["times_ms"].items()}
        if row["feature"] != rows[-1]["feature"]:
            assert row["ratio"] == median["feature"] / median["plain"]
        assert f"{row['feature']}: {row['ratio']:.2f} of plain" in printed
        assert f"| {row['feature']} | {row['ratio']:.2f} | {row['limit']:.2f} |" in compare.markdown(records)


def test_packed_rows_are_no_more_than_the_dense_ones() -> None:
    from benchmarks.features import PACKED_ROWS, PLAIN, packed_lengths

    lengths = packed_lengths(PLAIN)
    assert PLAIN.batch * PLAIN.length - PACKED_ROWS[1] < sum(lengths) <= PLAIN.batch * PLAIN.length
    assert all(PACKED_ROWS[0] <= length <= PACKED_ROWS[1] for length in lengths)


def test_a_run_checks_then_times_everybody_and_writes_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import run

    held = dataclasses.replace(SMALL, name="held", against="small", limit=0.0)
    windowed = dataclasses.replace(SMALL, name="windowed", window=(3, 0))
    single = dataclasses.replace(UNGROUPED, name="single", dtype="float32")
    monkeypatch.setitem(run.GRIDS, "quick", (SMALL, held, windowed, single))
    file = tmp_path / "run.jsonl"
    assert run.main(["--device", "cpu", "--reps", "2", "--backends", *run.PEERS, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert table(records) == printed.rstrip("\n")
    rows = [record for record in records if "case" in record]
    assert [(row["case"], row["pass"]) for row in rows] == [
        (name, one_pass) for name in ("small", "held", "windowed", "single") for one_pass in ("forward", "backward")
    ]
    for row in rows:
        assert {"ours", "prepared"} <= row["times_ms"].keys()
        assert ("standard" in row["times_ms"]) == (row["case"] == "single")
        assert set(row["times_ms"]) | set(row["absent"]) == {"ours", *run.PEERS}
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
            if victim in results:
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


def test_flash_attention_4_is_called_in_our_layout_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in, which is exact; the package itself runs on a GPU alone."""
    from benchmarks import peers, run

    absent = next(iter(run.measure(UNGROUPED, ["fa4"], torch.device("cpu"), 2)))["absent"]["fa4"]
    assert absent.startswith("flash-attn-4 does not run: ModuleNotFoundError")

    def flash_attn_func(q: Any, k: Any, v: Any, *, causal: bool, window_size: Any, return_lse: bool) -> Any:
        assert return_lse and window_size == (None, None)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf) if causal else scores
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)

    monkeypatch.setattr(peers, "import_module", lambda name: SimpleNamespace(flash_attn_func=flash_attn_func))
    for row in run.measure(dataclasses.replace(UNGROUPED, dtype="float32"), ["fa4"], torch.device("cpu"), 2):
        assert not row["failed"] and not row["absent"]
        assert max(row["errors"]["fa4"].values()) < 1e-4 and set(row["times_ms"]) == {"ours", "fa4"}


def test_one_pass_alone_is_checked_on_the_state_of_a_forward() -> None:
    from benchmarks import run

    (row,) = run.measure(UNGROUPED, ["standard"], torch.device("cpu"), 2, ["backward"])
    assert row["pass"] == "backward" and not row["failed"] and set(row["times_ms"]) == {"ours", "standard"}
    (row,) = run.measure(UNGROUPED, ["standard"], torch.device("cpu"), 2, ["forward"])
    assert row["pass"] == "forward" and set(row["errors"]["ours"]) == {"out", "lse"}


@pytest.mark.gpu
def test_peak_memory_is_of_the_call_alone() -> None:
    """Ours to the byte, in torch's blocks of 512: out and lse, then the gradients and the workspace too."""
    import cupyflash as cf
    from benchmarks import run
    from benchmarks.peers import standard_bytes

    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU that torch sees")
    case = dataclasses.replace(UNGROUPED, length=128)  # small, as torch may give more than was asked above 1 MiB
    device = torch.device("cuda")
    q, k, v, _ = run.inputs(case, device)
    sizes = [cf.Attention(causal=True).workspace_size(q, k, v, backward=backward) for backward in (False, True)]
    kept = sum(map(_blocks, (q.nbytes, 4 * q[..., 0].numel(), sizes[0])))
    made = sum(map(_blocks, (q.nbytes, k.nbytes, v.nbytes, sizes[1])))
    rows = list(run.measure(case, ["standard", "fa2"], device, 2))
    assert [row["failed"] for row in rows] == [[], []]
    assert [row["peak_bytes"]["ours"] for row in rows] == [kept, kept + made]
    assert rows[1]["peak_bytes"]["standard"] >= standard_bytes(case)
    assert q.nbytes < rows[0]["peak_bytes"]["fa2"] < rows[0]["peak_bytes"]["standard"]


def _blocks(size: int) -> int:
    return -(-size // 512) * 512


# ------------------------------------------------------------------------------------------------ what is shown

MACHINE = {"GPU": "a GPU", "torch": "2", "date": "2026-01-02", "commit": "abc"}
CEILINGS = {"before": {}, "after": {"gemm_tflops": 789.4, "copy_tb_s": 4.125}}


def _row(series: str | None, length: int, one_pass: str, times: dict[str, float], **changes: Any) -> dict[str, Any]:
    factor = 1 if one_pass == "forward" else 2
    return {
        "case": f"{series or 'alone'}-{length}",
        "series": series,
        "dtype": "bfloat16",
        "length": length,
        "pass": one_pass,
        "host": False,
        "against": None,
        "limit": None,
        "flops": int(6e11) * factor,
        "standard_flops": int(8e11) * factor,
        "times_ms": {name: [time * factor * 0.9, time * factor, time * factor * 1.1] for name, time in times.items()},
        "peak_bytes": {"ours": 2**20 * factor, "standard": 2**20 * 30 * factor} if "standard" in times else {},
        "errors": {},
        "absent": {},
        "failed": [],
    } | changes


def _records(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"machine": MACHINE}, *rows, {"ceilings": CEILINGS, "seconds": 1.0}]


RATES = _records(
    _row("D 64", 512, "forward", {"ours": 2.0, "fa2": 1.0}),
    _row("D 64", 2048, "forward", {"ours": 2.0, "fa2": 1.5, "cudnn": 1.0}),
    _row("D 64", 4096, "forward", {"ours": 2.0, "fa2": 3.0}, absent={"cudnn": "no such shape"}),
    _row("D 64", 2048, "backward", {"ours": 1.0, "fa2": 1.0}),
    _row(None, 100, "forward", {"ours": 0.5, "fa2": 1.0, "prepared": 0.4}, case="lonely"),
    _row(None, 100, "forward", {"ours": 0.6}, case="bound", against="lonely", limit=1.1),
)
BESIDE_STANDARD = _records(
    *(
        _row("D 64", length, one_pass, {"ours": length / 100, "standard": length / 40})
        for length in (128, 1024)
        for one_pass in ("forward", "backward")
    ),
    _row("D 64", 2048, "forward", {"ours": 20.0}, absent={"standard": "it needs 9 GiB"}),
    _row("D 64", 2048, "backward", {"ours": 20.0}, absent={"standard": "it needs 9 GiB"}),
)


def test_rates_are_shown_by_length_with_ratios_and_their_mean() -> None:
    text = compare.markdown(RATES)
    assert "a GPU, 2026-01-02: torch 2; commit abc. The same run reached 789 TFLOP/s" in text
    assert "|  | N = | 512 | 2k | 4k |".replace("|  |", "| |") in text
    assert "| D 64 | cupyflash | 300 | 300 | 300 |" in text
    assert "|  | FlashAttention-2 | 600 (0.50) | 400 (0.75) | 200 (1.50) |" in text
    assert "|  | cuDNN |  | 600 (0.50) |  |" in text
    assert "N ≥ 1,024: 0.75 to 1.50, geometric mean 1.06 of 2 cells." in text
    assert "| lonely | forward | 500.0 | 1200 | 2.00 | 0.80 |" in text
    assert "- bound forward: 1.20 of lonely, ABOVE 1.1" in text
    assert "- no cudnn: no such shape (D 64-4096 forward)" in text


def test_standard_attention_is_shown_as_ratios_of_time_memory_and_flops() -> None:
    text = compare.markdown(BESIDE_STANDARD)
    together = text[text.index("**Forward and backward") :]
    assert "| D 64 | time, standard / ours | 2.50 | 2.50 | – |" in together
    assert "|  | peak memory, standard / ours | 30.0 | 30.0 | – |" in together
    assert "|  | FLOPs, ours / standard | 0.75 | 0.75 | 0.75 |" in together
    assert "- no standard: it needs 9 GiB (D 64-2048 forward, D 64-2048 backward)" in text
    printed = table(BESIDE_STANDARD)
    assert "D 64-1024: standard/ours, both passes: time 2.50, peak memory 30.00, FLOPs 1.33 (ours 1.8e+12" in printed
    assert "D 64-2048: standard" not in printed


def test_the_document_is_filled_from_stored_runs_alone(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "one.svg").touch()
    (tmp_path / "bench-one.json").write_text("\n".join(map(json.dumps, RATES)))
    begin = "a\n<!-- bench-one: begin -->\n"
    between = "<!-- bench-one: end -->\nb\n<!-- bench-two: begin -->\nold\n"
    once = compare.filled(f"{begin}{between}<!-- bench-two: end -->\nc", tmp_path, images)
    assert compare.filled(once, tmp_path, images) == once
    assert once.startswith(begin) and once.endswith("<!-- bench-two: end -->\nc") and "old" not in once
    assert compare.markdown(RATES) in once and compare.NONE_STORED in once
    assert "](images/one.svg)" in once


def test_the_document_shows_the_stored_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--check"]) == 0, capsys.readouterr().out
    named = {line.split()[1] for line in compare.DOCUMENT.read_text("utf-8").splitlines() if line.endswith("begin -->")}
    for file in compare.RESULTS.glob("bench-*.json"):
        assert f"{file.stem}:" in named, f"{compare.DOCUMENT.name} has no place for {file.name}"


def test_a_stored_run_prints_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text("\n".join(map(json.dumps, RATES)))
    for options, expected in (([], table(RATES)), (["--markdown"], compare.markdown(RATES))):
        assert compare.main([str(file), *options]) == 0
        assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize("format", ["svg", "png"])
def test_pictures_are_small_and_repeatable(tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    runs = {"rates": RATES, "standard": BESIDE_STANDARD, "alone": _records(_row(None, 1, "forward", {"ours": 1.0}))}
    for name, records in runs.items():
        (tmp_path / f"bench-{name}.json").write_text("\n".join(map(json.dumps, records)))
    files = [str(tmp_path / f"bench-{name}.json") for name in runs]
    written = []
    for folder in ("one", "two"):
        assert plot.main([*files, "--out", str(tmp_path / folder), "--format", format]) == 0
        written.append({path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()})
    assert "no series over N" in capsys.readouterr().out
    assert written[0] == written[1] and set(written[0]) == {f"rates.{format}", f"standard.{format}"}
    for name, data in written[0].items():
        assert len(data) < 200_000, name
    if format == "svg":
        assert b">FlashAttention-2<" in written[0]["rates.svg"] and b">cuDNN<" in written[0]["rates.svg"]
        shown = written[0]["standard.svg"].decode()
        assert shown.count(">2.5×<") == 1 and shown.count(">30.0×<") == 1 and "0.75 times standard" in shown


def test_a_variant_replaces_files_of_the_kernels_while_it_is_asked_for(tmp_path: Path) -> None:
    from benchmarks.overlay import sources
    from cupyflash._cuda import source

    def text() -> str:
        return source.flatten("bwd_finish")

    as_it_stands = text()
    (tmp_path / "include" / "ptx").mkdir(parents=True)
    (tmp_path / "include" / "ptx" / "reduce.cuh").write_text("// another one\n")
    with sources(tmp_path) as folder:
        assert "// another one" in text() != as_it_stands and source.root() == folder
    with sources(None):
        assert text() == as_it_stands
    assert text() == as_it_stands and not folder.exists()
    with pytest.raises(FileNotFoundError), sources(tmp_path):
        source.flatten("no such kernel")
    assert text() == as_it_stands


def test_variants_take_turns_and_are_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On NumPy, whose arithmetic no file of kernels changes."""
    from benchmarks import variants

    case = dataclasses.replace(UNGROUPED, name="small", length=40)
    monkeypatch.setattr(variants, "CASES", {"small": case})
    arguments = [str(tmp_path), "--cases", "small", "--backends", "efficient", "standard", "--reps", "2"]
    arguments += ["--device", "cpu"]
    assert variants.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].split(maxsplit=1)[0] for line in lines] == ["small"] * len(lines)
    assert "efficient" in lines[0] and "absent" in lines[0]
    assert "as it stands" in lines[1] and "1.000 of its speed" in lines[1]
    assert str(tmp_path) in lines[2] and "standard" in lines[3]
    monkeypatch.setattr(variants, "limits", lambda *_: {"dq": 0.0, "dk": 0.0, "dv": 0.0})
    assert variants.main(arguments) == 1
    assert "WRONG: dq: error" in capsys.readouterr().out
