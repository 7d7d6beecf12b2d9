"""`cache`: where CuPy keeps compiled kernels, how many, and their end."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from cupyflash import _environment
from cupyflash._cli import _say
from cupyflash._memory import in_binary

# A binary named by the digest of what it was made of, and its source where CuPy was told to keep that.
_ENTRY = re.compile(r"[0-9a-f]{40}\.(cubin|ltoir)(\.cu)?")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("cache", help="where compiled kernels are kept, how many, and how large")
    what = "remove them all, those of other programs that use CuPy too; other files in the folder stay"
    parser.add_argument("--clear", action="store_true", help=what)
    _say.add_json(parser)
    parser.set_defaults(run=_cache)


def _cache(options: argparse.Namespace) -> int:
    folder = _environment.cache_path()
    try:
        entries, others = look(folder)
    except FileNotFoundError:
        found = {"folder": str(folder), "exists": False, "entries": 0, "bytes": 0}
        _say.say(f"{folder}: not there; CuPy makes it when it is first imported", found, as_json=options.json)
        return 0
    except OSError as error:
        print(f"cache: {folder} cannot be read ({error.strerror}); CUPY_CACHE_DIR names another", file=sys.stderr)
        return 1
    found = {"folder": str(folder), "exists": True, "entries": len(entries), "bytes": sum(entries.values())}
    if not options.clear:
        text = f"{folder}: {_counted(entries)}{f', and {others} files of others' if others else ''}"
        _say.say(text, found, as_json=options.json)
        return 0
    removed, reason = _clear(entries)
    found |= {"removed_entries": len(removed), "removed_bytes": sum(removed.values())}
    _say.say(f"{folder}: removed {_counted(removed)}", found, as_json=options.json)
    if reason:
        print(f"cache: {len(entries) - len(removed)} could not be removed ({reason})", file=sys.stderr)
    return 1 if reason else 0


def look(folder: Path) -> tuple[dict[Path, int], int]:
    """What CuPy wrote there, with sizes, and how much else there is. A link is nobody's entry."""
    entries, others = {}, 0
    with os.scandir(folder) as found:
        for item in found:
            if _ENTRY.fullmatch(item.name) and item.is_file(follow_symlinks=False):
                entries[Path(item.path)] = item.stat(follow_symlinks=False).st_size
            else:
                others += 1
    return entries, others


def _clear(entries: dict[Path, int]) -> tuple[dict[Path, int], str]:
    """What was removed, and why the rest was not."""
    removed, reason = {}, ""
    for path, count in entries.items():
        try:
            path.unlink(missing_ok=True)
            removed[path] = count
        except OSError as error:
            reason = error.strerror or type(error).__name__
    return removed, reason


def _counted(entries: dict[Path, int]) -> str:
    return f"{len(entries)} files of compiled kernels, {in_binary(sum(entries.values()))}"
