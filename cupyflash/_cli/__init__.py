"""`python -m cupyflash`: each command is a file here, and says itself what it takes and does."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from cupyflash._cli import _bench, _cache, _check, _info, _plan, _warmup
from cupyflash._cli._say import UsageError
from cupyflash._errors import CompileError, UnsupportedError

COMMANDS = (_info, _check, _bench, _plan, _warmup, _cache)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 for bad news, 2 for what cannot be meant."""
    parser = argparse.ArgumentParser(prog="python -m cupyflash", description="FlashAttention for any array library.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add(commands)
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what an ASCII terminal cannot show
    try:
        status = options.run(options)
        sys.stdout.flush()  # here, where a reader who left is noticed
        return status
    except BrokenPipeError:  # `head` has what it wanted; the interpreter flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except (UnsupportedError, CompileError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1
