"""CuPy's folder of compiled kernels in every state that a user may leave it in: each is survived, with right numbers.

Two programs go through the same drills, each in processes of its own. One runs a forward and a backward on a GPU. The
other needs none: it compiles through the same code for two architectures, and what it then has must be what the
compiler gives without a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.backends import gpu_is_there

pytest.importorskip("cupy")

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = (80, 90)  # what the program without a GPU compiles for
FOREIGN = (89, 86)  # the first of them that a program does not compile for
SOMEBODY = 12_345  # a user who is not us
DIGEST_LENGTH = 40  # CuPy writes a binary's SHA-1 in front of it

COMPILE = (sys.executable, "-m", "tests.test_cache")
# float32: kernels that any architecture can have.
RUN = (sys.executable, "-m", "tests.field.selfcheck", "cupy", "3")
# Root is bound by permissions like anybody else once it has given up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
BOUND = """
import ctypes, os, sys
for capability in (1, 2):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module", params=["compiled", pytest.param("run", marks=pytest.mark.gpu)])
def program(request: pytest.FixtureRequest) -> tuple[str, ...]:
    if request.param == "compiled":
        return COMPILE
    if not gpu_is_there():
        pytest.skip("no CUDA GPU")
    return RUN


@pytest.fixture(scope="module")
def filled(program: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the program leaves in a folder that was not there; the sources beside the binaries."""
    folder = tmp_path_factory.mktemp("cache") / "not" / "there"
    _check(program, folder, CUPY_CACHE_SAVE_CUDA_SOURCE="1")
    assert _entries(folder) and not _unsound(folder)
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def test_a_folder_that_is_not_there_is_made_and_read_by_the_next_process(
    program: tuple[str, ...], folder: Path
) -> None:
    before = _stamps(folder)
    _check(program, folder)
    assert _stamps(folder) == before


def test_corrupted_entries_are_compiled_anew(program: tuple[str, ...], folder: Path) -> None:
    right = _entries(folder)
    for number, (name, data) in enumerate(right.items()):
        middle = len(data) // 2
        flipped = bytes([data[middle] ^ 1])
        damaged = [data[:middle], data[:middle] + flipped + data[middle + 1 :], b"", data[:DIGEST_LENGTH]]
        (folder / name).write_bytes(damaged[number % len(damaged)])
    assert len(_unsound(folder)) == len(right)
    _check(program, folder)
    assert _entries(folder).keys() == right.keys() and not _unsound(folder)


def test_processes_that_start_together_share_an_empty_cache(
    program: tuple[str, ...], filled: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "cache"
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: _check(program, empty), range(3)))
    assert _entries(empty).keys() == _entries(filled).keys() and not _unsound(empty)


def test_two_architectures_live_in_one_cache(program: tuple[str, ...], filled: Path, tmp_path: Path) -> None:
    """The very sources of the program, compiled for another GPU, are there first."""
    shared = tmp_path / "cache"
    _check((*COMPILE, str(_foreign(program)), *map(str, filled.glob("*.cu"))), shared)
    theirs = _entries(shared)
    assert theirs and not theirs.keys() & _entries(filled).keys()
    _check(program, shared)
    both = _entries(shared)
    assert both.keys() == theirs.keys() | _entries(filled).keys() and not _unsound(shared)
    assert theirs.items() <= both.items()


def _read_only(folder: Path) -> None:
    folder.chmod(0o500)


def _read_only_and_empty(folder: Path) -> None:
    for entry in folder.iterdir():
        entry.unlink()
    folder.chmod(0o500)


def _with_files_of_somebody(folder: Path) -> None:
    for entry in folder.iterdir():
        _give_away(entry)


def _of_somebody(folder: Path) -> None:
    _give_away(folder)


def _give_away(path: Path) -> None:
    """To another user, who keeps it closed; where we may not, it is ours and closed to ourselves."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, SOMEBODY)
        path.chmod(0o700)
    else:
        path.chmod(0)


@pytest.mark.parametrize("close", [_read_only, _read_only_and_empty, _with_files_of_somebody, _of_somebody])
def test_a_folder_that_we_may_not_use_is_done_without(program: tuple[str, ...], folder: Path, close: Any) -> None:
    with _closed(folder, close):
        _check(program, folder, is_bound=True)


def test_a_folder_that_cannot_be_made_is_named(program: tuple[str, ...], tmp_path: Path) -> None:
    """CuPy then refuses to be imported, which is before any code of ours."""
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "cache"
    done = _start(program, folder)
    assert done.returncode == 0 or str(folder) in done.stdout, done.stdout


def test_the_numpy_backend_asks_for_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    _check((*RUN[:3], "numpy", "1"), tmp_path / "file" / "cache")


# ------------------------------------------------------------------------------------------------ helpers


def _check(command: Sequence[str], folder: Path, *, is_bound: bool = False, **environment: str) -> None:
    """The program ends well, and says that what it has is right."""
    done = _start(command, folder, is_bound=is_bound, **environment)
    assert done.returncode == 0 and done.stdout.splitlines()[-1:] == ["right"], done.stdout


def _start(
    command: Sequence[str], folder: Path, *, is_bound: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BOUND, *command] if is_bound else command,
        cwd=ROOT,
        env={**os.environ, "CUPY_CACHE_DIR": str(folder), "CUPYFLASH_QUIET": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


@contextlib.contextmanager
def _closed(folder: Path, close: Any) -> Iterator[None]:
    """The folder closed for as long, provided that it is closed to a process of ours."""
    inside = [*folder.iterdir()]
    close(folder)
    try:
        present = [path for path in inside if os.access(folder, os.X_OK) and path.exists()]
        look = "import sys; from pathlib import Path; [Path(p).read_bytes() for p in sys.argv[2:]]; "
        look += "Path(sys.argv[1], 'new').touch()"
        probe = _start([sys.executable, "-c", look, str(folder), *map(str, present[:1])], folder, is_bound=True)
        if probe.returncode == 0:
            pytest.skip("no permission binds this process, and it cannot give that up")
        yield
    finally:
        for path in (folder, *inside):
            if path.exists():
                path.chmod(0o700)


def _entries(folder: Path) -> dict[str, bytes]:
    """Every binary by its file's name. Nothing but binaries, and sources where they were asked for, is ever left."""
    files = {path.name: path for path in folder.iterdir()}
    assert {path.suffix for path in files.values()} <= {".cubin", ".cu"}, sorted(files)
    return {name: path.read_bytes() for name, path in files.items() if path.suffix == ".cubin"}


def _stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def _unsound(folder: Path) -> list[str]:
    """Which binaries do not have the digest that stands in front of them."""

    def is_sound(data: bytes) -> bool:
        digest, binary = data[:DIGEST_LENGTH], data[DIGEST_LENGTH:]
        return digest.decode("ascii", "replace") == hashlib.sha1(binary).hexdigest()

    return [name for name, data in _entries(folder).items() if not is_sound(data)]


def _foreign(program: tuple[str, ...]) -> int:
    from cupyflash._cuda import device

    own = ARCHITECTURES if program == COMPILE else (device.of(0).arch,)
    return next(arch for arch in FOREIGN if arch not in own)


# ------------------------------------------------------------------------------------------------ without a GPU


def main(arguments: Sequence[str]) -> None:
    """Without arguments, the library's own path to a binary; with ARCH FILE..., these sources through CuPy's cache."""
    import cupy
    from cupy._core import core
    from cupy.cuda import compiler
    from cupy.cuda._compiler_cache import DiskKernelCacheBackend

    from cupyflash._cuda import compile as ours
    from cupyflash._cuda.device import KNOWN
    from cupyflash._cuda.source import compose
    from tests.binaries import merges

    class Module(compiler.function.Module):
        """Keeps the binary that a GPU would load."""

        def load(self, cubin: bytes) -> None:
            self.cubin = cubin

    class RawModule:
        """What `cupy.RawModule` is to the library, for `arch` instead of the GPU's."""

        def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
            self.code, self.options = code, options

        def get_function(self, _: str) -> Any:
            return SimpleNamespace(kernel=core.compile_with_cache(self.code, self.options, str(arch)))

    compiler.function.Module = Module
    compiler._get_arch_for_options_for_nvrtc = lambda arch=None: (f"-arch=sm_{arch}", "cubin")
    cupy.RawModule, cupy.cuda.Device = RawModule, contextlib.nullcontext
    if arguments:
        arch, *files = arguments
        for file in files:
            RawModule(code=Path(file).read_text("utf-8"), options=ours.OPTIONS).get_function("")
    else:
        for arch in ARCHITECTURES:
            plan = merges(KNOWN[arch])[0]
            found = ours.kernel(plan, 0).cubin
            right = []
            with tempfile.TemporaryDirectory() as clean:  # a binary names its source, which has one where it is kept
                compiler._kernel_cache_backend, usual = DiskKernelCacheBackend(clean), compiler._kernel_cache_backend
                for in_memory in ("0", "1"):
                    os.environ["CUPY_CACHE_IN_MEMORY"] = in_memory
                    module = RawModule(code=compose(plan.constants), options=ours.OPTIONS)
                    right.append(module.get_function("").kernel.cubin)
            compiler._kernel_cache_backend = usual
            del os.environ["CUPY_CACHE_IN_MEMORY"]
            if found not in right:
                raise AssertionError(f"sm_{arch}: {len(found)} bytes that are not the compiler's")
    print("right")


if __name__ == "__main__":
    main(sys.argv[1:])
