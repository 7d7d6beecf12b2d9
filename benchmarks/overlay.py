"""Kernels made of other files than those of `cuda_src`, for as long as one looks at them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from cupyflash import _attention
from cupyflash._cuda import compile as compiler
from cupyflash._cuda import source


@contextmanager
def sources(folder: Path | None) -> Iterator[Path]:
    """Kernels are made of `cuda_src` with this folder's files over it; what was compiled before is not used again."""
    root = source.root()
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made) / root.name
        shutil.copytree(root, copy)
        if folder is not None:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
        with mock.patch.object(source, "root", return_value=copy):
            forget()
            try:
                yield copy
            finally:
                forget()


def forget() -> None:
    """Flattened texts, loaded kernels, and forms that hold such kernels."""
    source.flatten.cache_clear()
    compiler._kernels.clear()
    _attention._ready.cache_clear()
