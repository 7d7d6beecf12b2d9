"""How commands speak: text or JSON on stdout, refusals and progress on stderr."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import Any

_BAR = 24


class UsageError(Exception):
    """What was asked cannot be meant; the message names the argument and what is accepted."""


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def say(text: str, found: Any, *, as_json: bool) -> None:
    """One of the two."""
    print(json.dumps(found, indent=2) if as_json else text)


class Progress:
    """A bar on one line of a terminal, gone when done; nothing where stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.is_shown = total, 0, sys.stderr.isatty()
        self._draw("")

    def step(self, what: str) -> None:
        self.done += 1
        self._draw(what)

    def _draw(self, what: str) -> None:
        filled = _BAR * self.done // max(self.total, 1)
        line = f"[{'#' * filled}{'.' * (_BAR - filled)}] {self.done}/{self.total} {what}"
        self._write(line[: shutil.get_terminal_size().columns - 1])

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._write("")

    def _write(self, line: str) -> None:
        if self.is_shown:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
