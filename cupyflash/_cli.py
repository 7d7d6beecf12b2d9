"""`python -m cupyflash info`: what runs here, and why not."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from cupyflash import _environment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cupyflash", description="FlashAttention for any array library.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what is installed, which backend runs here, and why another does not")
    parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what an ASCII terminal cannot show
    for fact in _environment.facts():
        print(f"{fact.label:<14}{fact.text}")
    return 0
