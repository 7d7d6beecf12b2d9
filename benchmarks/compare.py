"""Prints the table of a stored run: `python -m benchmarks.compare results.jsonl`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(records: Sequence[dict[str, Any]]) -> str:
    """One line a row: our time and rate, each peer's time over ours, our worst error beside FA2's; then remarks."""
    rows = [record for record in records if "case" in record]
    peers = list(dict.fromkeys(name for row in rows for name in row["times_ms"] if name != "ours"))
    head = f"{'case':<18}{'pass':<10}{'ours ms':>10}{'iqr':>6}{'TFLOP/s':>9}"
    head += "".join(f"{peer + '/ours':>12}" for peer in peers) + f"{'error: ours':>16}{'fa2':>10}{'ours/fa2':>10}"
    lines = [head, *(_line(row, peers) for row in rows), *_held_to(rows)]
    remarks: dict[str, list[str]] = {}
    for row in rows:
        for remark in [f"no {name}: {reason}" for name, reason in row["absent"].items()]:
            remarks.setdefault(remark, []).append(f"{row['case']} {row['pass']}")
        for reason in row["failed"]:
            remarks.setdefault(f"FAILED: {reason}", []).append(f"{row['case']} {row['pass']}")
    lines += [f"{remark} ({', '.join(where)})" for remark, where in remarks.items()]
    ratios = [worst[0] for row in rows if (worst := _worst_error(row))]
    lines.append(f"errors above twice FA2's: {sum(ratio > 2 for ratio in ratios)} of {len(ratios)} rows")
    for record in records:
        lines += [f"{label}: {text}" for label, text in record.get("machine", {}).items()]
        for when, reached in record.get("ceilings", {}).items():
            lines += [f"{name} {when}: {value:.4g}" for name, value in reached.items()]
        if "seconds" in record:
            lines.append(f"seconds: {record['seconds']:.0f}")
    return "\n".join(lines)


def _line(row: dict[str, Any], peers: Sequence[str]) -> str:
    times = row["times_ms"]
    text = f"{row['case']:<18}{row['pass']:<10}"
    if "ours" in times:
        low, median, high = times["ours"]
        rate = "host" if row["host"] else f"{row['flops'] / median / 1e9:.1f}"
        text += f"{median:>10.4f}{(high - low) / median:>6.0%}{rate:>9}"
    else:
        text += f"{'-':>10}{'-':>6}{'-':>9}"
    for peer in peers:
        known = "ours" in times and peer in times
        text += f"{times[peer][1] / times['ours'][1]:>12.2f}" if known else f"{'-':>12}"
    worst = _worst_error(row)
    if worst is None:
        return text + f"{'-':>16}{'-':>10}{'-':>10}"
    ratio, name = worst
    return text + f"{name:>7}{row['errors']['ours'][name]:>9.1e}{row['errors']['fa2'][name]:>10.1e}{ratio:>10.2f}"


def _worst_error(row: dict[str, Any]) -> tuple[float, str] | None:
    """Our error over FlashAttention-2's where that is largest, and of which result."""
    ours, fa2 = (row["errors"].get(name, {}) for name in ("ours", "fa2"))
    return max(((ours[x] / fa2[x], x) for x in ours if fa2.get(x)), default=None)


def _held_to(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for every row that names another row and the largest ratio to it."""
    medians = {(row["case"], row["pass"]): row["times_ms"]["ours"][1] for row in rows if "ours" in row["times_ms"]}
    lines = []
    for row in rows:
        ours, against = (medians.get((row[key], row["pass"])) for key in ("case", "against"))
        if ours and against:
            verdict = "within" if ours / against <= row["limit"] else "ABOVE"
            lines.append(
                f"{row['case']} {row['pass']}: {ours / against:.2f} of {row['against']}, {verdict} {row['limit']}"
            )
    return lines


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text("utf-8").splitlines()]))
