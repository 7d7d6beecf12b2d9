"""`info`: what is installed, which backend runs here, and why another does not."""

from __future__ import annotations

import argparse
import dataclasses

from cupyflash import _environment
from cupyflash._cli import _say


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("info", help="what is installed, which backend runs here, and why another does not")
    _say.add_json(parser)
    parser.set_defaults(run=_info)


def _info(options: argparse.Namespace) -> int:
    facts = _environment.facts()
    text = "\n".join(f"{fact.label:<14}{fact.text}" for fact in facts)
    _say.say(text, [dataclasses.asdict(fact) for fact in facts], as_json=options.json)
    return 0
