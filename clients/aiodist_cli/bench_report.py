"""Reports of any benchmark: as JSON, as tables for a terminal, as Markdown."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

import aiodist
from aiodist.transports import polling
from aiodist_cli.bench_cases import (
    Effort,
    Result,
    digits,
    format_bandwidth,
    format_seconds,
    format_size,
    ratio,
)
from aiodist_cli.bench_peers import LABELS
from aiodist_cli.tables import NarrowingTable

SCHEMA = 1
"""The version of the JSON. Raise it if older readers would misread it."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A result other than a time of an operation.

    `met`: whether it is as `asked`; None if nothing is asked.
    """

    name: str
    found: str
    asked: str = ""
    met: bool | None = None


@dataclass(slots=True)
class Report:
    """The results of a run.

    `libraries`: by name, what each contender said that it is. `notes`: what could not be measured,
    and why. `errors`: why benchmarks broke off. `name`: of the benchmark, if it has one.
    """

    effort: Effort
    results: list[Result] = field(default_factory=list)
    libraries: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    name: str = ""

    @property
    def failures(self) -> list[str]:
        """What broke off, and each distinct failure after the first case in which it appeared."""
        first: dict[str, str] = {}
        for result in self.results:
            if result.error is not None:
                first.setdefault(result.error, f"{label(result.column)}, {result.case}")
        return [*self.errors, *(f"{where}: {error}" for error, where in first.items())]

    def as_json(self, machine: Mapping[str, Any]) -> dict[str, Any]:
        """Times in seconds, bandwidth in bytes per second; see docs/commands.md."""
        return {
            "schema": SCHEMA,
            "machine": dict(machine),
            "settings": {
                "rounds": self.effort.rounds,
                "seconds": self.effort.seconds,
                "iterations": self.effort.iterations,
                "dtype": "float32",
            },
            "libraries": self.libraries,
            "notes": self.notes + self.errors,
            "results": [result.as_json() for result in self.results],
        }


def machine() -> dict[str, Any]:
    """Describe this machine, and the time."""
    return {
        "cpu": _cpu(),
        "cores": polling.cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": ".".join(map(str, sys.version_info[:3])),
        "aiodist": aiodist.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def label(column: str) -> str:
    """A column's name for people."""
    return LABELS.get(column, column)


def groups(results: Iterable[Result]) -> Iterator[tuple[str, int, list[Result]]]:
    """(operation, ranks, results) in the order in which they appear."""
    found: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        op = f"{result.case.op}{', filled' if result.case.fill else ''}"
        found.setdefault((op, result.case.ranks), []).append(result)
    for (op, ranks), members in found.items():
        yield op, ranks, members


def tables(results: Sequence[Result]) -> Iterator[Table]:
    """A table for each operation and number of ranks, with a line for each size and column."""
    for op, ranks, members in groups(results):
        title = f"{op}, float32, {ranks} ranks"
        table = NarrowingTable(title, ("processor", "mean", "p99", "bandwidth"))
        reference = members[0].column
        for column in (
            "size",
            "library",
            "median",
            "p99",
            "mean",
            "processor",
            "bandwidth",
            "relative",
        ):
            is_text = column == "library"
            table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
        before: int | None = None
        for result in members:
            if before not in (None, result.case.nbytes):
                table.add_section()
            size = "" if before == result.case.nbytes else format_size(result.case.nbytes)
            table.add_row(size, label(result.column), *_cells(result, members, reference))
            before = result.case.nbytes
        yield table


def _cells(result: Result, members: Sequence[Result], reference: str) -> list[str | Text]:
    if result.summary is None or result.bandwidth is None:
        return [Text("failed", style="red"), *[""] * 5]
    processor = math.nan if result.processor is None else result.processor
    times = (result.summary.median, result.summary.p99, result.summary.mean, processor)
    share = ratio(members, result.case, result.column, reference)
    return [
        *map(format_seconds, times),
        format_bandwidth(result.bandwidth),
        "1" if result.column == reference else f"{digits(share)} ×" if share is not None else "–",
    ]


def markdown(results: Sequence[Result], ratios: Sequence[tuple[str, str]]) -> str:
    """Tables with a line for each size and a column for each library.

    Cells have the median, and in brackets p99 and mean. `ratios`: pairs (over, column), for columns
    with the ratio of their medians.
    """
    parts: list[str] = []
    for op, ranks, members in groups(results):
        columns = list(dict.fromkeys(result.column for result in members))
        pairs = [pair for pair in ratios if set(pair) <= set(columns)]
        head = ["size", *map(label, columns)]
        head += [f"{label(over)} / {label(column)}" for over, column in pairs]
        lines = [f"{op}, n={ranks}\n", _line(head), _line(["---"] * len(head))]
        for case in dict.fromkeys(result.case for result in members):
            found = {result.column: result for result in members if result.case == case}
            cells = [format_size(case.nbytes)]
            cells += [
                str(found[name].summary or "failed") if name in found else "–" for name in columns
            ]
            shares = (ratio(members, case, over, column) for over, column in pairs)
            cells += ["–" if share is None else digits(share) for share in shares]
            lines.append(_line(cells))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
