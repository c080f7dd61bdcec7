"""Operations between hosts that are far from each other: how much of their line is used.

The hosts are namespaces that `aiodist.testing.long_links` joins. TCP is that of the kernel, so what
is lost there is lost to all; Gloo, and plain sockets that send what two ranks have to, are measured
in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiodist.testing.long_links import LongLine, far_hosts
from aiodist_cli.bench_cases import Case, Effort, Result, format_seconds
from aiodist_cli.bench_peers import Contender, PeerMissing, Site
from aiodist_cli.bench_report import Fact, Report
from aiodist_cli.bench_run import Progress, measure
from aiodist_cli.bench_team import teams
from benchmarks import asked

RATE = 50e6
"""Bytes per second of each line, each way."""

DELAYS = (0.01, 0.05)
"""Seconds from host to host."""

SHARE = 0.85
"""Of the line that is asked for."""

BLOCK = 2
"""Iterations of a block: they take seconds."""

OPS = {2: ("all_reduce", "broadcast", "ping_pong"), 4: ("all_reduce", "broadcast")}
"""By number of hosts."""

NBYTES = 64 << 20


def crossing(case: Case) -> float:
    """Bytes that leave the busiest rank, at least; there and back one after the other."""
    factor = {"all_reduce": 2 * (case.ranks - 1) / case.ranks, "broadcast": 1, "ping_pong": 2}
    return factor[case.op] * case.nbytes


async def measured(report: Report, contenders: Sequence[Contender], progress: Progress) -> None:
    """Each operation, on lines of each delay, by contenders of which aiodist is the first. Raises
    PeerMissing where no such line can be made."""
    effort = replace(report.effort, iterations=BLOCK)
    for delay in DELAYS:
        for count, ops in OPS.items():
            cases = [Case(op, NBYTES, count) for op in ops]
            who = [one for one in contenders if count == 2 or one.name != "wire"]
            results = await _on_lines(LongLine(RATE, delay), cases, who, effort, progress)
            report.facts += [_fact(delay, case, results) for case in cases]


async def _on_lines(
    line: LongLine,
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    effort: Effort,
    progress: Progress,
) -> list[Result]:
    count = cases[0].ranks
    try:
        with far_hosts(count, line) as (hosts, _):
            sites = [Site(host.prefix, host.address, host.device) for host in hosts]
            progress(f"{count} hosts, {line.delay * 1e3:.0f} ms each way")
            async with teams(contenders, sites) as started:
                return await measure(cases, started, effort, progress)
    except OSError as error:
        raise PeerMissing(f"hosts on long lines cannot be made: {error}") from error


def _fact(delay: float, case: Case, results: Sequence[Result]) -> Fact:
    """Which share of its line each contender has used."""
    name = f"{case}, {delay * 1e3:.0f} ms each way"
    shares = {
        result.column: crossing(case) / RATE / result.summary.median
        for result in results
        if result.case == case and result.summary is not None
    }
    if asked.OWN not in shares:
        why = [r.error or "" for r in results if (r.case, r.column) == (case, asked.OWN)]
        return Fact(name, f"failed: {''.join(why).partition(chr(10))[0]}", met=False)
    own = shares.pop(asked.OWN)
    seconds = format_seconds(crossing(case) / RATE / own)
    others = "".join(f"; {column} {share:.0%}" for column, share in shares.items())
    bare = f" ({own / shares['wire']:.0%} of plain sockets)" if "wire" in shares else ""
    found = f"{own:.0%} of the line{bare}, {seconds}{others}"
    return Fact(name, found, f"at least {SHARE:.0%}", own >= SHARE)
