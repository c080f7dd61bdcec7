"""``python -m benchmarks [NAME]``: one benchmark, or ``figures``: all, beside what is asked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aiodist_cli.bench_cases import Effort
from aiodist_cli.bench_report import Report, machine, markdown, tables
from aiodist_cli.bench_run import publish, unusable
from aiodist_cli.errors import run_until_signal
from benchmarks import suites
from benchmarks.asked import HEAD, SHARED, rows
from benchmarks.hosts import CELLS, LAYOUTS, cells_of, layouts_of
from benchmarks.suites import SUITES

RATIOS = [
    (over, column)
    for over in ("gloo", "openmpi", "intelmpi", "wire")
    for column in ("aiodist", SHARED)
]

EXAMPLES = """\
examples:
  python -m benchmarks                              all_reduce beside Gloo and MPI
  python -m benchmarks collectives --markdown       other collectives, as in benchmarks/README.md
  python -m benchmarks figures --only all_reduce,citizen
  python -m benchmarks hosts --hosts 2x1,4x2 --cases all_reduce:64MiB,broadcast --rounds 3
  python -m benchmarks links                        the transports alone, without the engine
"""


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure aiodist beside its peers, in turns, in one run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "name",
        nargs="?",
        default="all_reduce",
        choices=[*SUITES, "figures"],
        help="what to measure (default: all_reduce); figures: all of them, beside what is asked",
    )
    made.add_argument("--only", metavar="NAME,…", help="of the figures, those of these benchmarks")
    made.add_argument(
        "--hosts", type=layouts_of, default=LAYOUTS, metavar="NxM,…", help="hosts x ranks of each"
    )
    made.add_argument(
        "--cases", type=cells_of, default=CELLS, metavar="OP:SIZE,…", help="what these ranks do"
    )
    made.add_argument("--rounds", type=int, default=5, help="blocks of each library (default: 5)")
    made.add_argument(
        "--seconds", type=float, default=0.25, help="length of a block, about (default: 0.25)"
    )
    made.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    made.add_argument("--json", type=Path, metavar="FILE", help="write JSON as well")
    made.add_argument("--plot", type=Path, metavar="FILE", help="write a plot as well: .svg, .png")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the arguments name. The exit status: 1 if something failed."""
    options = parser().parse_args(arguments)
    figures = options.name == "figures"
    names = (
        (options.only.split(",") if options.only else list(SUITES)) if figures else [options.name]
    )
    for name in names:
        if name not in SUITES:
            parser().error(f"there is no benchmark {name!r}: expected {', '.join(SUITES)}")
    if (problem := unusable(options.json, options.plot)) is not None:
        parser().error(": ".join(problem))
    effort = Effort(options.rounds, options.seconds)
    reports = [Report(effort, name=name) for name in names]
    run_until_signal(run(reports, {"layouts": options.hosts, "cells": options.cases}))
    show(reports, figures=figures, as_markdown=options.markdown)
    whole = joined(effort, reports)
    return publish(whole, as_json(whole, reports), options.json, options.plot)


async def run(reports: Iterable[Report], of_hosts: Mapping[str, object]) -> None:
    """Run the benchmark of each report, one after the other. `of_hosts`: options of `hosts`."""
    with Console(stderr=True).status("…") as status:
        for report in reports:
            options = of_hosts if report.name == "hosts" else {}
            await suites.run(report, lambda text: status.update(f"{text} …"), **options)


def joined(effort: Effort, reports: Sequence[Report]) -> Report:
    """What all benchmarks have found."""
    whole = Report(effort)
    for report in reports:
        whole.results += report.results
        whole.libraries |= report.libraries
        whole.notes += report.notes
        whole.errors += report.errors
    return whole


def as_json(whole: Report, reports: Iterable[Report]) -> dict[str, object]:
    """The report: that of `aiodist bench`, but with results and facts by benchmark."""
    found = whole.as_json(machine())
    del found["results"]
    found["benchmarks"] = {
        report.name: {
            "results": [result.as_json() for result in report.results],
            "facts": [asdict(fact) for fact in report.facts],
        }
        for report in reports
    }
    return found


def show(reports: Iterable[Report], *, figures: bool, as_markdown: bool) -> None:
    """Print what was found: as figures beside what is asked, or as tables."""
    if figures:
        lines = [row for report in reports for row in rows(report)]
        _show_table(HEAD, lines, as_markdown=as_markdown)
        return
    for report in reports:
        if as_markdown:
            print(markdown(report.results, RATIOS))
        else:
            for table in tables(report.results):
                Console(width=110).print(table)
        if report.facts:
            facts = [(fact.name, fact.found, fact.asked) for fact in report.facts]
            _show_table((report.name, "found", "asked"), facts, as_markdown=as_markdown)


def _show_table(head: Sequence[str], lines: Iterable[Sequence[str]], *, as_markdown: bool) -> None:
    if as_markdown:
        for line in (head, ["---"] * len(head), *lines):
            print(f"| {' | '.join(line)} |")
        print()
        return
    table = Table(*head)
    for line in lines:
        table.add_row(*line)
    Console(width=170).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
