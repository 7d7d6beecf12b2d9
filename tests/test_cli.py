"""`python -m cupyflash`: every command says on any machine what it can, and what stands in the way of the rest."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from benchmarks import ptxas
from cupyflash import Attention, _cli, _environment
from cupyflash._cli import _call, _check, _problems, _say, _warmup
from cupyflash._cuda.device import KNOWN
from cupyflash._cuda.source import compose
from cupyflash._errors import CompileError
from cupyflash._memory import judged_of

ROOT = Path(__file__).parents[1]


class FakeDistribution:
    def __init__(self, name: str, version: str) -> None:
        self.metadata = {"Name": name}
        self.version = version


def install(monkeypatch: pytest.MonkeyPatch, **wheels: str) -> None:
    fakes = [FakeDistribution(name.replace("_", "-"), version) for name, version in wheels.items()]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: fakes)


def info(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert _cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:14].strip(): line[14:] for line in lines}


def test_info_runs_as_a_command_in_ten_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cupyflash", "info"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10, done.stdout
    assert lines[0].split() == ["cupyflash", cupyflash.__version__]
    assert lines[-2].split() == ["NumPy", "backend", "runs"]
    assert lines[-1].startswith("CUDA backend")


def test_info_without_cupy_names_the_extras(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, numpy="2.3.0", cupy_xarray="0.1.4")
    said = info(capsys)
    assert said["CuPy"] == "not installed"
    assert "'.[cuda12]'" in said["CUDA backend"]
    assert said["NumPy backend"] == "runs"


def test_info_names_both_wheels_of_a_double_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, cupy_cuda12x="14.2.0", cupy_cuda13x="14.2.1")
    said = info(capsys)
    assert said["CuPy"] == "cupy-cuda12x 14.2.0, cupy-cuda13x 14.2.1"
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in said["CUDA backend"]


def test_info_refuses_an_old_cupy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, cupy_cuda12x="13.6.0")
    assert "cupy-cuda12x>=14.2" in info(capsys)["CUDA backend"]


def test_info_names_the_variable_when_the_cache_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("not a folder")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(a_file / "cache"))
    said = info(capsys)
    assert str(a_file / "cache") in said["kernel cache"]
    assert "CUPY_CACHE_DIR" in said["CUDA backend"]


def test_info_makes_no_cache_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install(monkeypatch, numpy="2.3.0")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    assert "usable" in info(capsys)["kernel cache"]
    assert list(tmp_path.iterdir()) == []


def test_info_with_cupy_but_no_driver_finds_the_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    runtime = pytest.importorskip("cupy.cuda").runtime
    if runtime.driverGetVersion():
        pytest.skip("this machine has a driver")
    said = info(capsys)
    assert "CUDA headers found" in said["NVRTC"]
    assert said["driver"] == said["GPU"] == "none"
    assert said["CUDA backend"].startswith("does not run: no NVIDIA driver")


@pytest.mark.parametrize(("major", "verdict"), [(7, "does not run: no GPU of compute capability 8.0"), (9, "runs")])
def test_info_judges_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], major: int, verdict: str
) -> None:
    install(monkeypatch, cupy_cuda12x="14.2.0")
    runtime = SimpleNamespace(
        driverGetVersion=lambda: 12080,
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda device: {"name": f"Card {device}".encode(), "major": major, "minor": 0},
    )
    cuda = SimpleNamespace(runtime=runtime, nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)))
    monkeypatch.setattr(_environment, "_cuda", lambda: cuda)
    pathfinder = SimpleNamespace(find_nvidia_header_directory=lambda name: f"/{name}/include")
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", cast(ModuleType, pathfinder))
    said = info(capsys)
    assert said["GPU"] == f"Card 0 (sm_{major}0), Card 1 (sm_{major}0)"
    assert "CUDA 12.8" in said["driver"]
    assert said["CUDA backend"].startswith(verdict)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        _cli.main(["inform"])
    assert stop.value.code == 2
    assert "inform" in capsys.readouterr().err


def run(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    """Status, stdout, stderr of a command line, whether it ends in argparse or in ours."""
    try:
        status = _cli.main(line.split())
    except SystemExit as stop:
        status = cast(int, stop.code)
    said = capsys.readouterr()
    return status, said.out, said.err


def as_json(capsys: pytest.CaptureFixture[str], line: str) -> Any:
    status, said, _ = run(capsys, f"{line} --json")
    assert status == 0
    return json.loads(said)


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_environment, "why_no_cuda", lambda: "no NVIDIA driver")


def with_gpu(monkeypatch: pytest.MonkeyPatch, arch: int = 90) -> None:
    monkeypatch.setattr(_environment, "why_no_cuda", lambda: "")
    monkeypatch.setattr("cupyflash._cuda.device.of", lambda ordinal: KNOWN[arch])


def test_info_as_json_is_the_same_ten_facts(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "info")
    assert [fact["label"] for fact in found][-2:] == ["NumPy backend", "CUDA backend"]
    assert len(found) == 10 and all(set(fact) == {"label", "text", "obstacle"} for fact in found)


# ------------------------------------------------------------------------------------------------ plan and source

HALF = np.dtype(ml_dtypes.bfloat16)
# A description, and the call that it describes, in arrays.
DESCRIBED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "--q 2,300,8,64": ({}, {"q": (2, 300, 8, 64)}),
    "--q 2,300,8,64 --k 2,77,2,64 --v 2,77,2,40 --causal": (
        {"causal": True},
        {"q": (2, 300, 8, 64), "k": (2, 77, 2, 64), "v": (2, 77, 2, 40)},
    ),
    "--batch 2 --len-q 300 --len-k 77 --heads-q 8 --heads-kv 2 --dim 64 --dim-v 40 --layout bhsd --causal top-left": (
        {"causal": "top-left", "layout": "bhsd"},
        {"q": (2, 8, 300, 64), "k": (2, 2, 77, 64), "v": (2, 2, 77, 40)},
    ),
    "--q 30,4,33 --layout thd --cu-seqlens-q 0,10,30 --cu-seqlens-k 0,29,30 --window none,3": (
        {"layout": "thd", "window": (None, 3)},
        {"q": (30, 4, 33), "cu_seqlens_q": np.array([0, 10, 30]), "cu_seqlens_k": np.array([0, 29, 30])},
    ),
    "--q 1,300,8,64 --softcap 20 --alibi --bias float32 --sink --dropout 0.1 --scale 2": (
        {"softcap": 20.0, "dropout_p": 0.1, "scale": 2.0},
        {
            "q": (1, 300, 8, 64),
            "alibi_slopes": np.ones(8, np.float32),
            "bias": np.ones((1, 8, 300, 300), np.float32),
            "sink": np.ones(8, np.float32),
        },
    ),
    "--q 1,300,8,64 --bias": ({}, {"q": (1, 300, 8, 64), "bias": np.ones((1, 8, 300, 300), HALF)}),
}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("words", DESCRIBED)
@pytest.mark.parametrize("direction", ["", "--backward"])
def test_a_described_call_gets_the_kernels_of_the_call(
    capsys: pytest.CaptureFixture[str], words: str, direction: str, arch: int
) -> None:
    options, given = DESCRIBED[words]
    arrays = {name: np.zeros(what, HALF) if isinstance(what, tuple) else what for name, what in given.items()}
    arrays.setdefault("k", arrays["q"])
    arrays.setdefault("v", arrays["k"])
    judged = judged_of("plan", Attention(**options), arrays, backward=bool(direction))
    expected = _call.kernels(judged, KNOWN[arch])
    found = as_json(capsys, f"plan {words} {direction} --arch {arch}")
    assert [kernel["constants"] for kernel in found["kernels"]] == [asdict(plan.constants) for plan in expected]
    status, said, _ = run(capsys, f"plan {words} {direction} --arch sm_{arch}")
    assert status == 0 and said == "\n".join(map(str, expected)) + "\n"


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
def test_keys_in_pages_are_split_and_merged(capsys: pytest.CaptureFixture[str], layout: str) -> None:
    words = f"--batch 3 --len-q 1 --len-k 900 --heads-q 8 --heads-kv 2 --dim 64 --page-size 16 --layout {layout}"
    main, combine = as_json(capsys, f"plan {words} --arch 90")["kernels"]
    assert main["constants"]["is_paged"] and main["constants"]["is_split"]
    assert combine["kernel"] == "fwd_combine"
    assert run(capsys, f"plan {words} --arch 90")[1].count("fwd_combine") == 1
    if layout != "thd":
        shapes = {"bshd": "--q 3,1,8,64 --k 3,900,2,64", "bhsd": "--q 3,8,1,64 --k 3,2,900,64"}[layout]
        again = as_json(capsys, f"plan {shapes} --page-size 16 --layout {layout} --arch 90")
        assert again["kernels"] == [main, combine]


def test_without_arch_it_is_the_gpu_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpu(monkeypatch, 89)
    assert as_json(capsys, "plan --q 1,64,2,64")["arch"] == 89
    without_gpu(monkeypatch)
    status, _, complaint = run(capsys, "plan --q 1,64,2,64")
    assert status == 2 and "`--arch` is missing" in complaint and "no NVIDIA driver" in complaint


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        ("", 2, "`--len-q` is missing; a call is described by --q, or by"),
        ("--q 1,64,2,64 --dim 64", 2, "`--q` is given beside --dim"),
        ("--q 1,64,2", 2, "`--q` is 1,64,2; 4 sizes"),
        ("--q 1,64,x,64", 2, "argument --q: is '1,64,x,64'; ints like"),
        ("--q 1,64,4,64 --k 1,64,3,64", 2, "`k` has 3 heads"),
        ("--q 9,2,64 --layout thd", 2, "`cu_seqlens_q` is None"),
        ("--q 9,2,64 --layout thd --cu-seqlens-q 0,9 --page-size 4", 2, "`--page-size`"),
        ("--len-q 9 --heads-q 2 --dim 64 --k 1,9,2,64", 2, "`--k` is given without --q"),
        ("--len-q -9 --heads-q 2 --dim 64", 2, "`--len-q` is -9; 0 and more"),
        ("--len-q 9 --heads-q 2 --dim 64 --page-size 0", 2, "`--page-size` is 0; 1 and more"),
        ("--q 1,64,2,64 --window 3", 2, "argument --window: is '3'; two ints or none"),
        ("--q 1,64,2,64 --dropout 1", 2, "`dropout_p`"),
        ("--q 1,64,2,64 --page-size 8 --backward", 2, "`block_table` is given; None is accepted for a backward"),
        ("--q 1,64,2,64 --accumulate --backward", 2, "grad_dtype='float32'"),
        ("--q 1,64,2,300", 1, "plan: `q` has head_dim 300; 1 to 256 are accepted on CUDA"),
        ("--q 1,64,2,64 --softcap 1e-40", 1, "1 / softcap"),
        ("--q 1,64,2,64 --arch 75", 2, "argument --arch: is '75'; 80, 86, 89, 90, 100, 120 is accepted"),
    ],
)
def test_what_cannot_be_planned_is_named(
    capsys: pytest.CaptureFixture[str], words: str, status: int, complaint: str
) -> None:
    got, said, complained = run(capsys, f"plan --arch 90 {words}")
    assert got == status and not said
    assert complaint in complained and "Traceback" not in complained


def test_source_is_the_text_that_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--q 1,300,8,64 --causal --backward --arch 90"
    judged = _call.judge(_described(f"{words}"), backward=True)
    main = _call.kernels(judged, KNOWN[90])[1]
    assert run(capsys, f"source {words}") == (0, compose(main.constants), "")
    found = as_json(capsys, f"source {words}")
    assert found == {"kernel": "bwd_sm90", "target": "sm_90a", "source": compose(main.constants)}
    status, _, complaint = run(capsys, f"source {words} --kernel fwd_sm90")
    assert status == 2 and "`--kernel` is 'fwd_sm90'; bwd_preprocess, bwd_sm90, bwd_finish is accepted" in complaint


def _described(words: str) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backward", action="store_true")
    parser.set_defaults(command="source")
    _call.add_arguments(parser)
    return parser.parse_args(words.split())


def test_what_source_prints_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")
    _, text, _ = run(capsys, "source --q 1,300,8,64 --backward --arch 80 --kernel bwd_finish")
    is_compiled, log = ptxas.compiled(text, "bwd_finish.cu", "sm_80")
    assert is_compiled, log


def test_a_reader_who_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "cupyflash", "source", "--q", "1,300,8,64", "--arch", "90"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        complaint = process.stderr.read()
    assert process.returncode == 0 and not complaint


def test_the_documents_show_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Their lines are broken, and nothing else."""
    page = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    command, shown = page.split("$ python -m cupyflash plan ")[1].split("```")[0].split("\n", 1)
    assert run(capsys, f"plan {command}")[1].split() == shown.split()


# ------------------------------------------------------------------------------------------------ cache


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_cache_counts_and_clears_what_cupy_wrote_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.setenv("CUPY_CACHE_SAVE_CUDA_SOURCE", "1")
    entries = pytest.importorskip("cupy.cuda._compiler_cache").DiskKernelCacheBackend(str(folder))
    for digit in "0a":
        entries.save(f"{digit * 40}.cubin", b"binary", "source")
    kept = folder / "notes.txt", folder / "lookalike.cubin", folder / f"{'b' * 40}.cubin"
    kept[0].write_text("somebody's")
    kept[1].write_text("somebody's")
    kept[2].symlink_to(kept[0])
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name[0] in "0a")
    found = {"folder": str(folder), "exists": True, "entries": 4, "bytes": size}
    assert as_json(capsys, "cache") == found
    assert "4 files of compiled kernels" in run(capsys, "cache")[1]
    assert as_json(capsys, "cache --clear") == found | {"removed_entries": 4, "removed_bytes": size}
    assert sorted(folder.iterdir()) == sorted(kept)
    assert "removed 0 files" in run(capsys, "cache --clear")[1]


def test_a_cache_that_is_not_there_is_neither_made_nor_an_error(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    status, said, _ = run(capsys, "cache --clear")
    assert status == 0 and f"{folder}: not there" in said
    assert as_json(capsys, "cache") == {"folder": str(folder), "exists": False, "entries": 0, "bytes": 0}
    assert not folder.exists()


def test_a_cache_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    folder.write_text("in the way")
    status, _, complaint = run(capsys, "cache")
    assert status == 1 and f"{folder} cannot be read (Not a directory)" in complaint


def test_what_cannot_be_removed_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    folder.mkdir()
    (folder / f"{'0' * 40}.cubin").write_bytes(b"binary")

    def refuse(path: Path, missing_ok: bool) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    status, said, complaint = run(capsys, "cache --clear")
    assert status == 1 and "removed 0 files" in said and "1 could not be removed (Permission denied)" in complaint


# ------------------------------------------------------------------------------------------------ check


def test_check_finds_numpy_right() -> None:
    command = [sys.executable, "-m", "cupyflash", "check", "--backend", "numpy", "--seed", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    seed, numpy = done.stdout.splitlines()
    assert seed.split() == ["seed", "4"] and not done.stderr
    assert numpy.startswith(f"numpy  right: {_problems.count()} problems")


def test_check_says_why_a_backend_was_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_gpu(monkeypatch)
    monkeypatch.setattr(_check, "_on_cpu", lambda seed: [""] * _problems.count())
    status, said, _ = run(capsys, "check")
    assert status == 0 and said.splitlines()[-1] == "cuda   not checked: no NVIDIA driver"


def test_check_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compiled: list[Any]
) -> None:
    cases = [case for case in _problems.CASES if case.name in ("softcap", "ALiBi")]
    monkeypatch.setattr(_problems, "CASES", cases)
    monkeypatch.setitem(sys.modules, "cupy", np)
    right = _check.attn_fwd
    monkeypatch.setattr(_check, "attn_fwd", lambda *arrays, softcap=None, **options: right(*arrays, **options))
    status, said, _ = run(capsys, "check --backend cuda --json")
    [cuda] = json.loads(said)["backends"]
    assert status == 1 and not json.loads(said)["is_right"]
    assert [*cuda["wrong"]] == ["softcap, bfloat16", "softcap, float32"] and cuda["problems"] == 4
    assert "WRONG in 2 of 4 problems" in run(capsys, "check --backend cuda")[1]


def test_a_backend_that_was_asked_for_has_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_gpu(monkeypatch)
    assert run(capsys, "check --backend cuda")[0] == 1
    assert run(capsys, "check --seed -1")[0] == 2


def test_a_seed_draws_the_same_numbers_again() -> None:
    once, again, other = ([*_problems.problems(seed)] for seed in (1, 1, 2))
    assert all((a.q == b.q).all() for a, b in zip(once, again, strict=True))
    assert not any((a.q == b.q).all() for a, b in zip(once, other, strict=True))


# ------------------------------------------------------------------------------------------------ warmup


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Any]:
    """A GPU on which each kernel that is loaded leaves a file, as CuPy does, and an entry here."""
    folder.mkdir()
    found: list[Any] = []

    def load(plan: Any, ordinal: int) -> None:
        found.append(plan)
        (folder / f"{hash(plan.binary) % 16**40:040x}.cubin").write_bytes(b"binary")

    with_gpu(monkeypatch)
    monkeypatch.setenv("CUPYFLASH_QUIET", "1")
    monkeypatch.setattr(importlib.import_module("cupyflash._cuda.compile"), "_load", load)
    return found


def test_warmup_compiles_each_kernel_of_both_directions_once(
    capsys: pytest.CaptureFixture[str], compiled: list[Any], folder: Path
) -> None:
    found = as_json(capsys, "warmup --q 1,300,8,64 --backward")
    assert sorted(plan.kernel for plan in compiled) == ["bwd_finish", "bwd_preprocess", "bwd_sm90", "fwd_sm90"]
    assert found.items() >= {"arch": 90, "folder": str(folder), "kernels": 4, "compiled": 4}.items()
    assert as_json(capsys, "warmup --q 1,300,8,64 --arch 90")["compiled"] == 0


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("name", _warmup.SETS)
def test_every_set_can_be_planned_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compiled: list[Any], name: str, arch: int
) -> None:
    with_gpu(monkeypatch, arch)
    found = as_json(capsys, f"warmup --set {name}")
    assert found["kernels"] == len(compiled) == len({plan.binary for plan in compiled}) > 8


def test_warmup_says_where_it_can_be_done_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compiled: list[Any]
) -> None:
    status, _, complaint = run(capsys, "warmup --q 1,300,8,64 --arch 80")
    assert status == 1 and "`--arch` is 80, and this machine's GPU is of 90. CuPy compiles for the GPU" in complaint
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    status, _, complaint = run(capsys, "warmup --q 1,300,8,64")
    assert status == 1 and "nothing compiled here would be kept: CUPY_CACHE_IN_MEMORY is set" in complaint
    without_gpu(monkeypatch)
    status, _, complaint = run(capsys, "warmup --q 1,300,8,64 --arch 90")
    assert status == 1 and "no GPU runs here (no NVIDIA driver)" in complaint
    for words, flag in (("--q 1,300,8,64", "--q"), ("--page-size 8", "--page-size"), ("--backward", "--backward")):
        status, _, complaint = run(capsys, f"warmup --set decoding {words}")
        assert status == 2 and f"`--set` is given beside {flag};" in complaint
    assert not compiled


def test_a_kernel_that_does_not_compile_ends_warmup_with_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compiled: list[Any]
) -> None:
    def fail(plan: Any, ordinal: int) -> None:
        raise CompileError("fwd_sm90 did not compile")

    monkeypatch.setattr(importlib.import_module("cupyflash._cuda.compile"), "_load", fail)
    status, _, complaint = run(capsys, "warmup --q 1,300,8,64")
    assert status == 1 and "warmup: fwd_sm90 did not compile" in complaint


def test_check_compiles_ahead_what_it_computes_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compiled: list[Any]
) -> None:
    """The GPU's arrays are NumPy's here, so that everything around the kernels runs."""
    cases = [case for case in _problems.CASES if case.name in ("causal, top-left", "pages")]
    monkeypatch.setattr(_problems, "CASES", cases)
    monkeypatch.setitem(sys.modules, "cupy", np)
    status, said, _ = run(capsys, "check --backend cuda --seed 1")
    assert status == 0 and "cuda   right: 3 problems" in said
    names = [plan.kernel for plan in compiled]
    assert sorted(names) == sorted(
        ["fwd_sm90", "bwd_preprocess", "bwd_sm90", "bwd_finish", *("fwd_generic", "fwd_combine") * 2]
    )


# ------------------------------------------------------------------------------------------------ bench


def test_bench_measures_both_passes_beside_torch_and_draws_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    without_gpu(monkeypatch)
    words = "bench --lengths 16,33 --heads 2 --dim 8 --dtype bfloat16 --causal"
    found = as_json(capsys, f"{words} --plot {tmp_path / 'speed.svg'}")
    assert found["backend"] == "numpy" and found["runs"] == 7
    for row, (length, one_pass) in zip(
        found["rows"], [(n, p) for n in (16, 33) for p in ("forward", "backward")], strict=True
    ):
        assert (row["length"], row["pass"]) == (length, one_pass)
        assert all(ms["median"] > 0 for ms in row["ms"].values()) and set(row["ms"]) == {"cupyflash", "torch SDPA"}
        assert row["apart"]["torch SDPA"] < 0.02  # a few units of bfloat16: they computed the same
    assert "</svg>" in (tmp_path / "speed.svg").read_text()
    status, said, _ = run(capsys, words)
    assert status == 0 and len(said.splitlines()) == 1 + 1 + 4 + 1 and "torch SDPA, ms" in said


def test_bench_without_torch_is_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, said, _ = run(capsys, "bench --backend numpy --lengths 16 --heads 1 --dim 8")
    assert status == 0 and said.endswith("no peer: torch is not installed\n")
    status, _, complaint = run(capsys, "bench --backend numpy --plot speed.png")
    assert status == 1 and "`--plot` needs matplotlib" in complaint


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        ("--lengths 0,16", 2, "`--lengths` is 0; 1 and more"),
        ("--dim 0", 2, "`--dim` is 0; 1 and more"),
        ("--plot speed.pdf", 2, "`--plot` is speed.pdf; a .png or .svg"),
        ("--backend cuda", 1, "the CUDA backend does not run here: no NVIDIA driver"),
    ],
)
def test_what_cannot_be_measured_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, status: int, complaint: str
) -> None:
    without_gpu(monkeypatch)
    got, said, complained = run(capsys, f"bench {words}")
    assert got == status and not said and complaint in complained


# ------------------------------------------------------------------------------------------------ progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_that_a_terminal_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with _say.Progress(2) as progress:
            progress.step("one")
            progress.step("two")
        assert ("[########################] 2/2 two" in stream.getvalue()) == shown
        assert "\n" not in stream.getvalue()
        assert stream.getvalue().endswith("\r\x1b[K" if shown else "")
