"""``python -m benchmarks [NAME]``: one benchmark, or ``figures``: all, beside what is asked."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aiodist_cli import bench_plot
from aiodist_cli.bench_report import Report, machine, markdown, tables
from aiodist_cli.bench_run import Effort, run_to_end
from benchmarks import authentication, links
from benchmarks.asked import HEAD, SHARED, Outcome, rows
from benchmarks.suites import SUITES

RATIOS = [
    (over, column)
    for over in ("gloo", "openmpi", "intelmpi", "wire")
    for column in ("aiodist", SHARED)
]

EXAMPLES = """\
examples:
  python -m benchmarks                              all_reduce beside Gloo and MPI
  python -m benchmarks collectives --markdown       other collectives, as in docs/benchmarks.md
  python -m benchmarks figures --only all_reduce,citizen
  python -m benchmarks links --kinds tcp            the transports alone, without the engine
  python -m benchmarks authentication               what authenticating frames would cost
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
    if arguments[:1] == ["links"]:
        return links.main(arguments[1:])
    if arguments[:1] == ["authentication"]:
        return authentication.main(arguments[1:])
    options = parser().parse_args(arguments)
    figures = options.name == "figures"
    names = (
        (options.only.split(",") if options.only else list(SUITES)) if figures else [options.name]
    )
    for name in names:
        if name not in SUITES:
            parser().error(f"there is no benchmark {name!r}: expected {', '.join(SUITES)}")
    if options.plot and (why := bench_plot.problem(options.plot)):
        parser().error(why)
    effort = Effort(options.rounds, options.seconds)
    outcomes = run_to_end(run(names, effort))
    report = Report(
        effort,
        [result for outcome in outcomes for result in outcome.results],
        {name: text for outcome in outcomes for name, text in outcome.libraries.items()},
        [note for outcome in outcomes for note in outcome.notes],
    )
    show(outcomes, figures=figures, as_markdown=options.markdown)
    if options.json:
        options.json.write_text(f"{json.dumps(as_json(report, outcomes), indent=2)}\n")
    if options.plot and any(result.summary for result in report.results):
        bench_plot.write(report.results, options.plot)
    for note in report.notes:
        print(f"not measured: {note}", file=sys.stderr)
    for failure in report.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return bool(report.failures)


async def run(names: Iterable[str], effort: Effort) -> list[Outcome]:
    """The outcomes, in the order of the names."""
    with Console(stderr=True).status("…") as status:
        return [
            await SUITES[name](name, effort, lambda text: status.update(f"{text} …"))
            for name in names
        ]


def as_json(report: Report, outcomes: Iterable[Outcome]) -> dict[str, object]:
    """The report: that of `aiodist bench`, but with results and facts by benchmark."""
    found = report.as_json(machine())
    del found["results"]
    found["benchmarks"] = {
        outcome.name: {
            "results": [result.as_json() for result in outcome.results],
            "facts": [asdict(fact) for fact in outcome.facts],
        }
        for outcome in outcomes
    }
    return found


def show(outcomes: Iterable[Outcome], *, figures: bool, as_markdown: bool) -> None:
    """Print what was found: as figures beside what is asked, or as tables."""
    if figures:
        lines = [row for outcome in outcomes for row in rows(outcome)]
        _show_table(HEAD, lines, as_markdown=as_markdown)
        return
    for outcome in outcomes:
        if as_markdown:
            print(markdown(outcome.results, RATIOS))
        else:
            for table in tables(outcome.results):
                Console(width=110).print(table)
        if outcome.facts:
            facts = [(fact.name, fact.found, fact.asked) for fact in outcome.facts]
            _show_table((outcome.name, "found", "asked"), facts, as_markdown=as_markdown)


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
