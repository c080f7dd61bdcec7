"""Runs benchmarks: all contenders take turns, round by round.

`aiodist bench` and `python -m benchmarks` both use this to measure and to publish.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from aiodist.errors import printable
from aiodist_cli import bench_plot
from aiodist_cli.bench_cases import (
    MAX_ITERATIONS,
    Case,
    Effort,
    Result,
    iterations_for,
    turn,
)
from aiodist_cli.bench_peers import Contender, Site
from aiodist_cli.bench_report import Report
from aiodist_cli.bench_team import OrderError, Team, TeamError, teams
from aiodist_cli.bench_worker import Block
from aiodist_cli.errors import unwritable

STDOUT = Path("-")
"""The file of --json that stands for stdout."""

Progress = Callable[[str], None]
"""Shows the current step."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of results: a team, and the memory that it works on."""

    team: Team
    memory: str = "plain"

    @property
    def name(self) -> str:
        """The name of the column in results."""
        name = self.team.contender.name
        return name if self.memory == "plain" else f"{name} group.empty"


def columns_of(teams: Iterable[Team], op: str) -> list[Column]:
    """One column for each team.

    Teams on one host get a second one for collectives on shared memory, if they offer that.
    """
    columns: list[Column] = []
    for team in teams:
        columns.append(Column(team))
        one_host = all(site.is_loopback for site in team.sites)
        if "empty" in team.features and one_host and op != "ping_pong":
            columns.append(Column(team, "shared"))
    return columns


async def report_on(
    report: Report,
    cases: Iterable[Case],
    contenders: Sequence[Contender],
    sites: Sequence[Site],
    progress: Progress,
) -> None:
    """Start the contenders at `sites`, measure the cases, and add the results to `report`."""
    progress(f"starting {len(sites)} ranks of each library")
    async with teams(contenders, sites) as started:
        report.libraries |= {team.contender.name: team.library for team in started if team.library}
        report.results += await measure(cases, started, report.effort, progress)


async def measure(
    cases: Iterable[Case], teams: Sequence[Team], effort: Effort, progress: Progress
) -> list[Result]:
    """A result for each case and column. Failures are results, too.

    A broken team has a failure for each remaining case.
    """
    results: list[Result] = []
    for case in cases:
        progress(str(case))
        results += await _case(case, columns_of(teams, case.op), effort)
    return results


async def _case(case: Case, columns: Sequence[Column], effort: Effort) -> list[Result]:
    failed: dict[str, str] = {}
    counts: dict[str, int] = {}
    blocks: dict[str, list[Block]] = {column.name: [] for column in columns}
    for column in columns:
        try:
            counts[column.name] = await _warm_up(case, column, effort)
        except (OrderError, TeamError) as error:
            failed[column.name] = str(error)
    for number in range(effort.rounds):
        for column in turn(columns, number):
            if column.name not in failed:
                try:
                    count = counts[column.name]
                    block = await column.team.run(case, count, memory=column.memory)
                    blocks[column.name].append(block)
                except (OrderError, TeamError) as error:
                    failed[column.name] = str(error)
    return [
        Result(case, column.name, None, failed[column.name])
        if column.name in failed
        else Result.of(case, column.name, blocks[column.name])
        for column in columns
    ]


async def _warm_up(case: Case, column: Column, effort: Effort) -> int:
    """Check the result once, and find out how many iterations make a block."""
    run, memory = column.team.run, column.memory
    await run(case, 1, memory=memory, check=True)
    count = effort.iterations or 1
    while True:
        spent = sum((await run(case, count, memory=memory)).ns) / 1e9
        if effort.iterations is not None:
            return effort.iterations
        if spent > effort.seconds / 4 or count >= MAX_ITERATIONS:
            return iterations_for(effort.seconds, spent / count, effort.least)
        count *= 4


def unusable(as_json: Path | None, plot: Path | None) -> tuple[str, str] | None:
    """The option whose file cannot be written, and why. Checked before anything is measured."""
    for option, path in (("--json", as_json), ("--plot", plot)):
        if path not in (None, STDOUT) and (why := unwritable(path)) is not None:
            return option, why
    if plot is not None and (why := bench_plot.problem(plot)) is not None:
        return "--plot", why
    return None


def publish(report: Report, found: Any, as_json: Path | None, plot: Path | None) -> bool:
    """Write the requested files (`found` as JSON, to stdout for "-"), and notes and failures to
    stderr.

    Returns whether anything failed.
    """
    failures = report.failures
    text = json.dumps(found, indent=2)
    if as_json == STDOUT:
        typer.echo(text)
    writes: list[Callable[[], object]] = []
    if as_json not in (None, STDOUT):
        writes.append(lambda: as_json.write_text(f"{text}\n"))
    if plot is not None and any(result.summary for result in report.results):
        writes.append(lambda: bench_plot.write(report.results, plot))
    for write in writes:
        try:
            write()
        except OSError as error:
            failures.append(str(error))
    for note in report.notes:
        typer.echo(f"not measured: {note}", err=True)
    for failure in failures:
        typer.echo("\n".join(map(printable, f"failed: {failure}".split("\n"))), err=True)
    return bool(failures)
