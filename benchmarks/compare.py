"""Tables of stored runs: `python -m benchmarks.compare FILE.json` prints one as it was printed when it was made.

With `--markdown` the same file becomes tables for readers. `--write` puts those of benchmarks/results/bench-NAME.json
between the markers of NAME in docs/performance.md, for every NAME that stands there; `--check` only looks.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.stamp import RESULTS, ROOT

Row = dict[str, Any]

DOCUMENT = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "images"
NONE_STORED = "No run is stored yet.\n"
NAMES = {
    "ours": "cupyflash",
    "fa2": "FlashAttention-2",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "efficient": "memory-efficient",
    "flex": "FlexAttention",
    "standard": "standard",
    "prepared": "cupyflash, prepared",
    "cupy": "cupyflash, CuPy arrays",
    "deterministic": "cupyflash, deterministic",
    "generic": "cupyflash, generic kernels",
}
OURSELVES = ("prepared", "cupy")  # the same kernels again, of interest for the host's time alone
JUDGES = ("fa2", "efficient", "plain")  # whose error ours is shown beside: the first that took part
SUMMARISED_FROM = 1024  # a shorter row is mostly launches and tails
PASSES = ("forward", "backward")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="Tables of stored runs.")
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--markdown", action="store_true", help="print the file as tables for readers")
    parser.add_argument("--write", action="store_true", help=f"bring {DOCUMENT.relative_to(ROOT)} up to date")
    parser.add_argument("--check", action="store_true", help="say whether it is")
    options = parser.parse_args(arguments)
    if options.file:
        records = load(options.file)
        print(markdown(records) if options.markdown else table(records))
    if not (options.write or options.check):
        return 0
    before = DOCUMENT.read_text("utf-8")
    after = filled(before)
    if options.write:
        DOCUMENT.write_text(after, "utf-8")
    elif before != after:
        print(f"{DOCUMENT.name} is out of date: run python -m benchmarks.compare --write")
        return 1
    return 0


def load(file: Path) -> list[Row]:
    """The records of a run: its machine, its rows, its ceilings."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


# ------------------------------------------------------------------------------------------------ for the terminal


def table(records: Sequence[Row]) -> str:
    """One line a row: our time and rate, each peer's time over ours, our worst error beside a peer's; then remarks."""
    rows = _rows(records)
    peers = contestants(rows)[1:]
    head = f"{'case':<26}{'pass':<10}{'ours ms':>10}{'iqr':>6}{'TFLOP/s':>9}{'MiB':>8}"
    head += "".join(f"{peer + '/ours':>15}" for peer in peers) + f"{'error: ours':>16}{'peer':>20}{'ours/peer':>10}"
    lines = [head, *(_line(row, peers) for row in rows), *_beside_standard(rows), *_held_to(rows), *_remarks(rows)]
    ratios = [worst[0] for row in rows if (worst := _worst_error(row))]
    lines.append(f"errors above twice the peer's: {sum(ratio > 2 for ratio in ratios)} of {len(ratios)} rows")
    for record in records:
        lines += [f"{label}: {text}" for label, text in record.get("machine", {}).items()]
        for when, reached in record.get("ceilings", {}).items():
            lines += [f"{name} {when}: {value:.4g}" for name, value in reached.items()]
        if "seconds" in record:
            lines.append(f"seconds: {record['seconds']:.0f}")
    return "\n".join(lines)


def _line(row: Row, peers: Sequence[str]) -> str:
    text = f"{row['case']:<26}{row['pass']:<10}"
    if "ours" in row["times_ms"]:
        low, median, high = row["times_ms"]["ours"]
        text += f"{median:>10.4f}{(high - low) / median:>6.0%}{'host' if row['host'] else f'{rate(row):.1f}':>9}"
    else:
        text += f"{'-':>10}{'-':>6}{'-':>9}"
    text += f"{row['peak_bytes']['ours'] / 2**20:>8.0f}" if "ours" in row["peak_bytes"] else f"{'-':>8}"
    text += "".join(f"{_number(_speed_ratio(row, peer), '.2f', '-'):>15}" for peer in peers)
    worst = _worst_error(row)
    if worst is None:
        return text + f"{'-':>16}{'-':>20}{'-':>10}"
    ratio, name, judge = worst
    errors = row["errors"]
    return text + f"{name:>7}{errors['ours'][name]:>9.1e}{judge:>12}{errors[judge][name]:>8.1e}{ratio:>10.2f}"


def _worst_error(row: Row) -> tuple[float, str, str] | None:
    """Our error over a peer's where that is largest, of which result, and whose."""
    judge = next((name for name in JUDGES if row["errors"].get(name)), "")
    ours, others = (row["errors"].get(name, {}) for name in ("ours", judge))
    return max(((ours[x] / others[x], x, judge) for x in ours if others.get(x)), default=None)


def _held_to(rows: Sequence[Row]) -> list[str]:
    """A line for every row that names another row and the largest ratio to it."""
    medians = {(row["case"], row["pass"]): _median(row) for row in rows}
    lines = []
    for row in rows:
        ours, against = (medians.get((row[key], row["pass"])) for key in ("case", "against"))
        if ours and against:
            verdict = "within" if ours / against <= row["limit"] else "ABOVE"
            lines.append(
                f"{row['case']} {row['pass']}: {ours / against:.2f} of {row['against']}, {verdict} {row['limit']}"
            )
    return lines


def _beside_standard(rows: Sequence[Row]) -> list[str]:
    """A line for every case that standard attention ran too, forward and backward together."""
    lines = []
    for row in together(rows):
        if (time := _speed_ratio(row, "standard")) is not None:
            memory = _number(_memory_ratio(row), ".2f", "-")
            counts = ", ".join(f"{name} {row[key]:.3g}" for name, key in (("ours", "flops"), ("its", "standard_flops")))
            lines.append(
                f"{row['case']}: standard/ours, both passes: time {time:.2f}, peak memory {memory}, "
                f"FLOPs {1 / flop_ratio(row):.2f} ({counts})"
            )
    return lines


def _remarks(rows: Sequence[Row]) -> list[str]:
    """Who is absent or wrong, why, and where."""
    remarks: dict[str, list[str]] = {}
    for row in rows:
        for remark in [f"no {name}: {reason}" for name, reason in row["absent"].items()]:
            remarks.setdefault(remark, []).append(f"{row['case']} {row['pass']}")
        for reason in row["failed"]:
            remarks.setdefault(f"FAILED: {reason}", []).append(f"{row['case']} {row['pass']}")
    return [f"{remark} ({', '.join(where)})" for remark, where in remarks.items()]


# ------------------------------------------------------------------------------------------------ for readers


def filled(document: str, results: Path = RESULTS, images: Path = IMAGES) -> str:
    """The document with everything between two markers made anew from the stored run of that name."""

    def block(match: re.Match[str]) -> str:
        name, file = match["name"], results / f"bench-{match['name']}.json"
        text = markdown(load(file)) if file.exists() else NONE_STORED
        for image in sorted(images.glob(f"{name}.*")):
            text += f"\n![The same as curves]({images.name}/{image.name})\n"
        return f"{match['begin']}\n{text}\n{match['end']}"

    pattern = r"(?P<begin><!-- bench-(?P<name>[\w-]+): begin -->\n).*?(?P<end><!-- bench-(?P=name): end -->\n)"
    return re.sub(pattern, block, document, flags=re.DOTALL)


def markdown(records: Sequence[Row]) -> str:
    """On what it ran, then rates by N, ratios to standard attention by N, the rows that stand alone, and remarks."""
    rows = _rows(records)
    series = [row for row in rows if row["series"]]
    alone = [row for row in rows if not row["series"]]
    parts = [on_what(records)]
    if any("standard" in row["times_ms"] for row in series):
        for one_pass in PASSES:
            parts += [_standard_table([row for row in series if row["pass"] == one_pass], one_pass.capitalize())]
        parts += [_standard_table(together(series), "Forward and backward")]
    else:
        parts += [_rates_table([row for row in series if row["pass"] == one_pass], one_pass) for one_pass in PASSES]
    parts += [
        _list_table(alone),
        *(_lines_of([_derived(r) for r in records if field in r], columns) for field, columns in _TABLES.items()),
        "".join(f"- {remark}\n" for remark in _remarks(rows)),
    ]
    return "\n".join(part for part in parts if part)


def on_what(records: Sequence[Row]) -> str:
    """One paragraph: machine, versions, commit, date, and what the run reached elsewhere."""
    [machine] = [record["machine"] for record in records if "machine" in record]
    labels = ("driver", "CuPy", "NVRTC", "torch", "cuDNN", "commit", "inputs")
    text = f"{machine.get('GPU', 'no GPU')}, {machine['date']}: "
    text += "; ".join(f"{label} {machine[label]}" for label in labels if label in machine)
    for record in records:
        if reached := record.get("ceilings", {}).get("after"):
            text += (
                f". The same run reached {reached['gemm_tflops']:.0f} TFLOP/s in a bfloat16 matrix product of 8,192³"
            )
            text += f" and {reached['copy_tb_s']:.2f} TB/s in a copy, bytes read plus written"
    return text + ".\n"


def _rates_table(rows: Sequence[Row], one_pass: str) -> str:
    """TFLOP/s of everybody by N, and in brackets how much faster than a peer we are."""
    if not rows:
        return ""
    who = [name for name in contestants(rows) if name not in OURSELVES]

    def cell(name: str, row: Row) -> str:
        text = _number(rate(row, name), ".0f", "")
        return text if name == "ours" or not text else f"{text} ({_number(_speed_ratio(row, name), '.2f', '–')})"

    lines = [f"**{one_pass.capitalize()}, TFLOP/s; in brackets a peer's time over ours**\n"]
    lines += _matrix(rows, [(NAMES[name], lambda row, name=name: cell(name, row)) for name in who])
    for name in who[1:]:
        long = [row for row in rows if row["length"] >= SUMMARISED_FROM]
        ratios = [ratio for row in long if (ratio := _speed_ratio(row, name)) is not None]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(
                f"\n{NAMES[name]}'s time over ours at N ≥ {SUMMARISED_FROM:,}: {min(ratios):.2f} to {max(ratios):.2f}, "
                f"geometric mean {mean:.2f} of {len(ratios)} cells."
            )
    return "\n".join(lines) + "\n"


def _standard_table(rows: Sequence[Row], title: str) -> str:
    """Ratios to standard attention by N."""
    lines = [f"**{title}: standard attention beside ours**\n"]
    lines += _matrix(
        rows,
        [
            ("time, standard / ours", lambda row: _number(_speed_ratio(row, "standard"), ".2f", "–")),
            ("peak memory, standard / ours", lambda row: _number(_memory_ratio(row), ".1f", "–")),
            ("FLOPs, ours / standard", lambda row: f"{flop_ratio(row):.2f}"),
        ],
    )
    return "\n".join(lines) + "\n"


def _matrix(rows: Sequence[Row], contents: Sequence[tuple[str, Callable[[Row], str]]]) -> list[str]:
    """A line for every series and content, a column for every N."""
    lengths = sorted({row["length"] for row in rows})
    lines = [f"| | N = | {' | '.join(length_label(n) for n in lengths)} |", "|---|---|" + "---|" * len(lengths)]
    for series in unique(row["series"] for row in rows):
        at = {row["length"]: row for row in rows if row["series"] == series}
        for number, (label, content) in enumerate(contents):
            cells = " | ".join(content(at[n]) if n in at else "" for n in lengths)
            lines.append(f"| {'' if number else series} | {label} | {cells} |")
    return lines


def _list_table(rows: Sequence[Row]) -> str:
    """A line for every row."""
    if not rows:
        return ""
    peers = contestants(rows)[1:]
    columns = ["case", "pass", "µs", "TFLOP/s", *(f"{NAMES[peer]} / ours" for peer in peers)]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        median = _median(row)
        cells = [
            f"{row['case']}{' (time of the host)' if row['host'] else ''}",
            row["pass"],
            _number(median and median * 1e3, ",.1f", "–"),
            "" if row["host"] else _number(rate(row), ".0f", "–"),
            *(_number(_speed_ratio(row, peer), ".2f", "–") for peer in peers),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in _held_to(rows))]) + "\n"


# Of records that are no cases: the field that tells them, and the columns of their table.
_TABLES = {
    "merge": {
        "merge of": "{merge}",
        "MB moved": "{megabytes:,.0f}",
        "TB/s": "{tb_s:.2f}",
        "of a copy's rate": "{of_copy:.2f}",
    },
    "feature": {"feature": "{feature}", "time over plain's": "{ratio:.2f}", "limit": "{limit:.2f}"},
    "contestant": {
        "sequences x keys": "{batch} x {keys:,}",
        "": "{contestant}",
        "µs": "{us:.0f}",
        "TB/s": "{tb_s:.2f}",
        "of a copy's rate": "{of_copy:.2f}",
    },
    "cascade_ms": {
        "sequences": "{sequences}",
        "keys shared, and of each": "{shared:,}, {own:,}",
        "ms with all keys written out": "{flat_ms:.3f}",
        "ms as a cascade": "{cascade_ms:.3f}",
        "times as fast": "{speed:.1f}",
        "wanted": "{least:.0f}",
    },
    "call": {"call": "{call}", "µs": "{us:.1f}", "time over torch's own": "{ratio:.2f}", "limit": "{limit:.2f}"},
}


def _derived(record: Row) -> Row:
    """With the units that tables show."""
    units = {"megabytes": ("bytes", 1e-6), "us": ("ms", 1e3)}
    return record | {unit: record[of] * factor for unit, (of, factor) in units.items() if of in record}


def _lines_of(rows: Sequence[Row], columns: dict[str, str]) -> str:
    """A table with a line for every row; nothing without rows."""
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(columns.values())} |".format(**row) for row in rows]
    return "\n".join(lines) + "\n" if rows else ""


def length_label(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


# ------------------------------------------------------------------------------------------------ what rows say


def _rows(records: Sequence[Row]) -> list[Row]:
    return [record for record in records if "case" in record]


def unique(values: Iterable[Any]) -> list[Any]:
    """The values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def contestants(rows: Sequence[Row]) -> list[str]:
    """Ours first, then whoever was timed in some row."""
    return unique(["ours", *(name for row in rows for name in row["times_ms"])])


def together(rows: Sequence[Row]) -> list[Row]:
    """Forward and backward of each case as one row: times and FLOPs added, and the larger peak."""
    passes = {one_pass: {row["case"]: row for row in rows if row["pass"] == one_pass} for one_pass in PASSES}
    merged = []
    for case, forward in passes["forward"].items():
        if (backward := passes["backward"].get(case)) is None:
            continue
        times, peaks = ([one[key] for one in (forward, backward)] for key in ("times_ms", "peak_bytes"))
        merged.append(
            forward
            | {key: forward[key] + backward[key] for key in ("flops", "standard_flops")}
            | {
                "pass": "both",
                "times_ms": {
                    name: [a + b for a, b in zip(times[0][name], times[1][name], strict=True)]
                    for name in times[0]
                    if name in times[1]
                },
                "peak_bytes": {name: max(peaks[0][name], peaks[1][name]) for name in peaks[0] if name in peaks[1]},
            }
        )
    return merged


def _median(row: Row, name: str = "ours") -> float | None:
    return row["times_ms"][name][1] if name in row["times_ms"] else None


def rate(row: Row, name: str = "ours") -> float | None:
    """TFLOP/s that the visible pairs ask for."""
    median = _median(row, name)
    return median and row["flops"] / median / 1e9


def _speed_ratio(row: Row, peer: str) -> float | None:
    """A peer's time over ours."""
    ours, theirs = _median(row), _median(row, peer)
    return theirs / ours if ours and theirs else None


def _memory_ratio(row: Row) -> float | None:
    """Standard attention's peak over ours."""
    ours, theirs = (row["peak_bytes"].get(name) for name in ("ours", "standard"))
    return theirs / ours if ours and theirs else None


def flop_ratio(row: Row) -> float:
    """Our FLOPs over standard attention's."""
    return row["flops"] / row["standard_flops"]


def _number(value: float | None, form: str, absent: str) -> str:
    return absent if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
