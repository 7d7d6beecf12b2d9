"""`plan`: which kernels a described call gets, and why. `source`: the exact text that is compiled for one of them."""

from __future__ import annotations

import argparse
import dataclasses

from cupyflash._cli import _call, _say
from cupyflash._cli._say import UsageError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser("plan", help="which kernels a call gets on a GPU, and why; needs none")
    source = commands.add_parser("source", help="the exact text of a kernel that a call gets; needs no GPU")
    source.add_argument("--kernel", metavar="NAME", help="one of those that `plan` prints; default: the main one")
    for parser, run in ((plan, _plan), (source, _source)):
        parser.add_argument("--backward", action="store_true", help="of the backward instead of the forward")
        _say.add_json(parser)
        _call.add_arguments(parser)
        parser.set_defaults(run=run)


def _plan(options: argparse.Namespace) -> int:
    judged, target = _call.judge(options, backward=options.backward), _call.device(options)
    kernels = _call.kernels(judged, target)
    found = {
        "arch": target.arch,
        "direction": "backward" if judged.backward else "forward",
        "kernels": [
            {
                "kernel": plan.kernel,
                "target": plan.target,
                "threads": plan.threads,
                "smem_bytes": plan.smem_bytes,
                "constants": dataclasses.asdict(plan.constants),
                "why": plan.why,
            }
            for plan in kernels
        ],
    }
    # A plan that splits keys says what follows it, which stands in the list for itself.
    text = "\n".join(str(plan) for plan in kernels if judged.backward or plan.kernel != "fwd_combine")
    _say.say(text, found, as_json=options.json)
    return 0


def _source(options: argparse.Namespace) -> int:
    from cupyflash._cuda.source import compose

    judged = _call.judge(options, backward=options.backward)
    kernels = {plan.kernel: plan for plan in _call.kernels(judged, _call.device(options))}
    name = options.kernel or _call.main_kernel(judged, [*kernels.values()])
    if name not in kernels:
        raise UsageError(f"source: `--kernel` is {name!r}; {', '.join(kernels)} is accepted for this call.")
    text = compose(kernels[name].constants)
    found = {"kernel": name, "target": kernels[name].target, "source": text}
    _say.say(text.removesuffix("\n"), found, as_json=options.json)
    return 0
