"""Collectives of ranks on several hosts, over TCP, beside Gloo: times, and processor time.

What is found is printed as it is found: all of it takes some minutes, and with options
(`--hosts 2x1,4x2`, `--cases all_reduce:64MiB,broadcast:8B`) as long as one is interested in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from aiodist_cli.bench_cases import Case, Result, format_seconds, parse_sizes
from aiodist_cli.bench_peers import aiodist_over, find_peers
from aiodist_cli.bench_report import Fact, Report
from aiodist_cli.bench_run import Progress, measure
from aiodist_cli.bench_team import teams
from aiodist_cli.bench_worker import OPS
from benchmarks.asked import KIB, MIB, OWN, B
from benchmarks.namespaces import namespaces

LARGE = 64 * MIB
"""Bytes from which on processor time is asked for as well."""


class Layout(NamedTuple):
    """So many hosts, and ranks on each."""

    hosts: int
    each: int

    def __str__(self) -> str:
        return f"{self.hosts} × {self.each}"


Cell = tuple[str, int]
"""An operation, and bytes."""

LAYOUTS = (Layout(2, 1), Layout(4, 1), Layout(8, 1), Layout(4, 2))
CELLS: tuple[Cell, ...] = tuple(
    product(("all_reduce", "broadcast", "all_gather"), (8 * B, 64 * KIB, 1 * MIB, LARGE))
)


def layouts_of(text: str) -> list[Layout]:
    """Those of "2x1,4x2". Raises ArgumentTypeError."""
    return [Layout(*one) for one in _numbers(text)]


def _numbers(text: str) -> Iterator[tuple[int, int]]:
    for one in text.split(","):
        count, _, each = one.partition("x")
        numbers = count.isdecimal() and (each or "1").isdecimal()
        if not (numbers and int(count) > 1 and int(each or 1) > 0):
            raise argparse.ArgumentTypeError(f"{one!r} is no number of hosts: expected as in 4x2")
        yield int(count), int(each or 1)


def cells_of(text: str) -> list[Cell]:
    """Those of "all_reduce:8B,broadcast:64KiB..1MiB"; an operation alone has all usual sizes.
    Raises ArgumentTypeError."""
    cells: list[Cell] = []
    for one in text.split(","):
        op, _, sizes = one.partition(":")
        if op not in OPS:
            raise argparse.ArgumentTypeError(
                f"there is no operation {op!r} to measure: expected one of {', '.join(OPS)}"
            )
        try:
            found = parse_sizes(sizes) if sizes else sorted({nbytes for _, nbytes in CELLS})
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        cells += [(op, nbytes) for nbytes in found]
    return cells


async def hosts(
    report: Report,
    progress: Progress,
    layouts: Sequence[Layout] = LAYOUTS,
    cells: Sequence[Cell] = CELLS,
) -> None:
    """Measure each cell in each layout."""
    peers, report.notes = find_peers(["gloo"], [])
    # The longest take seconds: of those, one in each block is enough.
    effort = replace(report.effort, least=1)
    for layout in layouts:
        progress(f"starting {layout}")
        with namespaces(layout.hosts) as sites:
            spread = [site for site in sites for _ in range(layout.each)]
            async with teams([aiodist_over("auto"), *peers], spread) as started:
                report.libraries |= {one.contender.name: one.library for one in started}
                for op, nbytes in cells:
                    case = Case(op, nbytes, len(spread))
                    fact = _beside_gloo(layout, await measure([case], started, effort, progress))
                    report.facts.append(fact)
                    print(f"{fact.name}: {fact.found}", file=sys.stderr, flush=True)


def _beside_gloo(layout: Layout, found: Sequence[Result]) -> Fact:
    """How many times as long, and as much processor time, Gloo took for one case."""
    case = found[0].case
    name = f"{layout}: {case}"
    by_column = {result.column: result for result in found}
    own, gloo = by_column[OWN], by_column.get("gloo")
    if own.summary is None or gloo is None or gloo.summary is None:
        why = own.error or (gloo.error if gloo else "there is no Gloo")
        return Fact(name, f"failed: {(why or '').splitlines()[0]}", met=False)
    assert own.processor and gloo.processor
    times, work = gloo.summary.median / own.summary.median, gloo.processor / own.processor
    large = case.nbytes >= LARGE
    return Fact(
        name,
        f"{format_seconds(own.summary.median)}, Gloo {times:.2f} ×; "
        f"processor {format_seconds(own.processor)}, Gloo {work:.2f} ×",
        "at least 1 ×, and in processor time" if large else "at least 1 ×",
        times >= 1 and (work >= 1 or not large),
    )
