"""The cases of `aiodist bench`: sizes, statistics of samples, and their formats."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aiodist_cli.bench_worker import FLOAT, OPS, Block

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]i)?B", re.IGNORECASE)

MAX_ITERATIONS = 20_000
"""The most iterations of one block, however short the operation is."""

MIN_ITERATIONS = 3
"""The fewest iterations of one block, however long the operation takes."""


def parse_size(text: str) -> int:
    """Bytes of "8B", "64 KiB", "1MiB", "1GiB". Raises ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size: expected such as 8B, 64KiB, 1MiB or 1GiB")
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    nbytes = int(match[1]) * units[f"{match[2] or ''}B".lower()]
    if nbytes < FLOAT or nbytes % FLOAT:
        raise ValueError(f"{text!r} is no size of a float32 array: expected a multiple of 4 bytes")
    return nbytes


def parse_sizes(text: str) -> list[int]:
    """Bytes of each size in "8B,64KiB,1MiB..64MiB", in order; `a..b` doubles from a to b."""
    sizes: list[int] = []
    for item in text.split(","):
        first, dots, last = item.partition("..")
        low = parse_size(first)
        high = parse_size(last) if dots else low
        if high < low:
            raise ValueError(f"{item.strip()!r} is no range: expected the smaller size first")
        sizes += [low << step for step in range((high // low).bit_length())]
    return list(dict.fromkeys(sizes))


def format_size(nbytes: int) -> str:
    """The shortest exact way to write a size: "8 B", "64 KiB"."""
    unit, factor = next(
        (unit, factor) for unit, factor in reversed(_UNITS.items()) if nbytes % factor == 0
    )
    return f"{nbytes // factor} {unit}"


def format_seconds(seconds: float) -> str:
    """Three significant digits: "1.05 µs", "54.1 µs", "17.8 ms", "2.00 s"."""
    if not math.isfinite(seconds):
        return "–"
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{digits(seconds * factor)} {unit}"
    return f"{digits(seconds)} s"


def format_bandwidth(rate: float) -> str:
    """Three significant digits of bytes per second: "12.4 GB/s", "8.00 MB/s", "40.0 kB/s"."""
    for unit, factor in (("kB/s", 1e3), ("MB/s", 1e6)):
        if rate / factor < 999.5:
            return f"{digits(rate / factor)} {unit}"
    return f"{digits(rate / 1e9)} GB/s"


def digits(value: float) -> str:
    """Three significant digits, without an exponent: "0.05", "1.05", "54.1", "178"."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: `rounds` blocks of each column.

    Each block takes `seconds`, with at least `least` iterations, or exactly `iterations` if given.
    """

    rounds: int = 5
    seconds: float = 0.2
    iterations: int | None = None
    least: int = MIN_ITERATIONS


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one size.

    `nbytes`: of the input of each rank. `fill`: write the input before each operation, as a program
    does that has computed it.
    """

    op: str
    nbytes: int
    ranks: int
    fill: bool = False

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(
                f"there is no operation {self.op!r} to measure: expected one of {', '.join(OPS)}"
            )
        if self.ranks < 2:
            raise ValueError(f"{self.ranks} ranks cannot communicate: expected at least 2")
        parts = self.ranks if self.op in ("reduce_scatter", "all_to_all") else 1
        if self.nbytes % (parts * FLOAT):
            raise ValueError(
                f"{self.op} of {format_size(self.nbytes)} cannot be split among {self.ranks} ranks:"
                f" expected a multiple of {parts * FLOAT} bytes"
            )

    def __str__(self) -> str:
        how = ", filled" if self.fill else ""
        return f"{self.op} {format_size(self.nbytes)}, n={self.ranks}{how}"


def cases_of(
    ops: Iterable[str], sizes: Sequence[int], ranks: int, *, fill: bool = False
) -> list[Case]:
    return [Case(op, nbytes, ranks, fill) for op in ops for nbytes in sizes]


@dataclass(frozen=True, slots=True)
class Summary:
    """Times of an operation in seconds. `mean`: the time of all iterations over their number."""

    count: int
    median: float
    p99: float
    mean: float

    @classmethod
    def of(cls, nanoseconds: Sequence[int]) -> Summary:
        """Summarise samples. `p99` is by nearest rank: at least 99 % of the samples are not above
        it."""
        ordered = sorted(nanoseconds)
        if not ordered:
            raise ValueError("there are no samples to summarise")
        return cls(
            len(ordered),
            statistics.median(ordered) / 1e9,
            ordered[math.ceil(len(ordered) * 0.99) - 1] / 1e9,
            statistics.fmean(ordered) / 1e9,
        )

    def __str__(self) -> str:
        median, p99, mean = map(format_seconds, (self.median, self.p99, self.mean))
        return f"{median} ({p99}, {mean})"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one column in one case: a summary, or an error.

    `processor`: seconds of processor time of all ranks together for one operation, including
    filling.
    """

    case: Case
    column: str
    summary: Summary | None
    error: str | None = None
    processor: float | None = None

    @classmethod
    def of(cls, case: Case, column: str, blocks: Sequence[Block]) -> Result:
        times = [ns for block in blocks for ns in block.ns]
        processor = sum(block.cpu for block in blocks) / max(1, len(times))
        return cls(case, column, Summary.of(times), None, processor)

    @property
    def bandwidth(self) -> float | None:
        """Bytes of a rank's input over the median time, per second."""
        return self.case.nbytes / self.summary.median if self.summary else None

    def as_json(self) -> dict[str, Any]:
        """Times in seconds, bandwidth in bytes per second."""
        found: dict[str, Any] = {
            "op": self.case.op,
            "nbytes": self.case.nbytes,
            "ranks": self.case.ranks,
            "fill": self.case.fill,
            "column": self.column,
        }
        if self.summary is None:
            return found | {"error": self.error}
        return found | {
            "count": self.summary.count,
            "median": self.summary.median,
            "p99": self.summary.p99,
            "mean": self.summary.mean,
            "bandwidth": self.bandwidth,
            "processor": self.processor,
        }


def ratio(results: Iterable[Result], case: Case, over: str, column: str) -> float | None:
    """The median of `over` divided by that of `column`: 2 means that `column` takes half the
    time."""
    medians = {
        result.column: result.summary.median
        for result in results
        if result.case == case and result.summary
    }
    if over not in medians or column not in medians:
        return None
    return medians[over] / medians[column]


def iterations_for(seconds: float, once: float, least: int = MIN_ITERATIONS) -> int:
    return max(least, min(MAX_ITERATIONS, round(seconds / max(once, 1e-9))))


def turn(columns: Sequence[Any], number: int) -> list[Any]:
    """The order of a round. Each starts with another column, so that no column always follows the
    same one."""
    at = number % max(1, len(columns))
    return [*columns[at:], *columns[:at]]
