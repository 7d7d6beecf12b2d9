"""Runs a folder of field cases against one backend: `python -m tests.field.run --backend numpy --cases DIR`.

The folder holds `field_cases.py`; the environment variable CUPYFLASH_FIELD_CASES may name it instead.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.field.adapter import BACKENDS, Adapter


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    sys.path.insert(0, str(options.cases))
    field: Any = importlib.import_module("field_cases")
    api = Adapter(options.backend)
    outcomes = Counter[str]()
    print(f"{options.backend} on {'the GPU' if api.gpu else 'the CPU'}")
    for case in field.CASES:
        if options.only and case["id"] not in options.only:
            continue
        started = time.perf_counter()
        verdict = field.run(api, only={case["id"]})[case["id"]]
        outcome, _, reason = verdict.partition(": ")
        outcomes[outcome] += 1
        reason = api.refusals.get(reason, reason)
        print(f"{case['id']} {outcome:<5}{time.perf_counter() - started:6.1f} s  {case['kind']}", flush=True)
        if reason:
            print(f"      {reason}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "no case chosen")
    return int(outcomes["FAIL"] > 0 or not outcomes)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    folder = os.environ.get("CUPYFLASH_FIELD_CASES")
    parser = argparse.ArgumentParser(prog="python -m tests.field.run", description="Field cases against one backend.")
    parser.add_argument("--backend", choices=BACKENDS, default="numpy")
    parser.add_argument("--cases", type=Path, default=folder and Path(folder), required=folder is None, metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="ID", help="only these cases")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
