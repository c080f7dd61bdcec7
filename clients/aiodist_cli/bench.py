"""`aiodist bench`: how fast collectives are on this machine, beside Gloo and MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from aiodist.launching import spawn
from aiodist.transports import registry
from aiodist_cli.bench_cases import Case, Effort, cases_of, parse_sizes
from aiodist_cli.bench_peers import Contender, Site, aiodist_over, find_peers
from aiodist_cli.bench_report import Report, machine, tables
from aiodist_cli.bench_run import STDOUT, publish, report_on, unusable
from aiodist_cli.errors import run_until_signal, usage_error
from aiodist_cli.tables import console

T = TypeVar("T")

_REFUSED = {
    "inproc": "inproc joins ranks of one process, and here each has its own",
    registry.DEVICES: f"{registry.DEVICES} moves tensors of GPUs, and bench measures host arrays",
}
"""Transports that bench cannot measure, and why."""

EPILOG = """Two operations beside Gloo and every MPI that is installed, as table, JSON and plot:

    aiodist bench --ops all_reduce,broadcast --sizes 8B,1MiB..8MiB -n 2,4
    --compare gloo,mpi --json out.json --plot out.svg

Times are measured at rank 0: the median of all rounds, the 99th percentile, and the mean (all time
over all iterations). The bandwidth is a rank's input over the median. The libraries take turns,
round by round, and those that wait sleep; results are checked once. With --fill each operation
has fresh input, and ranks arrive apart: the time is that of the call, without the writing.

Exit status: 0 if all was measured, 1 if something failed, 2 for wrong usage, 128 + n after
signal n.
"""


def bench(
    ops: Annotated[
        str,
        typer.Option(
            help="Operations: all_reduce, broadcast, reduce_scatter, all_gather, all_to_all, "
            "ping_pong."
        ),
    ] = "all_reduce",
    sizes: Annotated[
        str, typer.Option(help="Bytes of each rank's input; 1MiB..8MiB doubles from 1 to 8 MiB.")
    ] = "8B,64KiB,1MiB,16MiB",
    ranks: Annotated[
        str, typer.Option("-n", "--ranks", help="Numbers of ranks, on this host.")
    ] = "2",
    transports: Annotated[
        str, typer.Option(help="What aiodist uses: auto (its own choice), shm, unix, tcp.")
    ] = "auto",
    compare: Annotated[
        str,
        typer.Option(
            help="Libraries to compare with: gloo, mpi (each that is installed), openmpi, "
            "intelmpi, mpich."
        ),
    ] = "",
    mpi: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PREFIX",
            help="A Python environment that has an MPI and mpi4py, beside that of aiodist. "
            "May be given several times.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of each library and case.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=0.001, max=60.0, help="Length of a block, about.")
    ] = 0.2,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Iterations of a block, instead of a length.")
    ] = None,
    fill: Annotated[
        bool,
        typer.Option(
            "--fill", help="Write each rank's input before each operation, as programs do."
        ),
    ] = False,
    as_json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write JSON; - for stdout, without tables."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a plot: .svg, .png or .pdf.")
    ] = None,
) -> None:
    """Measure collectives of float32 arrays on this host: latency and bandwidth.

    No other library is needed. Arrays are torch tensors if torch is installed, else numpy arrays.
    Close other programs, because they take time from the measured ones.
    """
    spawn.require_posix("aiodist bench")
    if (problem := unusable(as_json, plot)) is not None:
        option, why = problem
        raise usage_error(why, option)
    if mpi and not _items(compare):
        raise usage_error("MPIs are measured by --compare: add --compare mpi", "--mpi")
    own = _valid("--transports", lambda: [_own(name) for name in _items(transports)])
    peers, missing = _valid("--compare", lambda: find_peers(_items(compare), mpi or []))
    cases = _valid("--ops / --sizes / --ranks", lambda: _cases(ops, sizes, ranks, fill))
    report = Report(Effort(rounds, seconds, iterations), notes=missing)
    run_until_signal(_measure(report, cases, [*own, *peers]))
    if as_json != STDOUT:
        for table in tables(report.results):
            console().print(table)
    if publish(report, report.as_json(machine()), as_json, plot):
        raise typer.Exit(1)


async def _measure(
    report: Report, cases: Mapping[int, Sequence[Case]], contenders: Sequence[Contender]
) -> None:
    with Console(stderr=True).status("starting …") as status:
        for size, some in cases.items():
            await report_on(
                report, some, contenders, [Site()] * size, lambda text: status.update(f"{text} …")
            )


def _valid(option: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except ValueError as error:
        raise usage_error(str(error), option) from error


def _cases(ops: str, sizes: str, ranks: str, fill: bool) -> dict[int, list[Case]]:
    numbers: list[int] = []
    for item in _items(ranks):
        if not item.isdecimal():
            raise ValueError(f"{item!r} is no number of ranks: expected such as 2 or 2,4")
        numbers.append(int(item))
    if not (numbers and _items(ops)):
        raise ValueError("at least one operation and one number of ranks is needed")
    return {
        number: cases_of(_items(ops), parse_sizes(sizes), number, fill=fill) for number in numbers
    }


def _own(transport: str) -> Contender:
    if transport not in ("auto", "shm", "unix", "tcp"):
        why = _REFUSED.get(transport, f"there is no transport {transport!r}")
        raise ValueError(f"{why}: choose auto, shm, unix or tcp")
    if transport != "auto":
        registry.choose(transport)
    return aiodist_over(transport)


def _items(text: str) -> Sequence[Any]:
    return [item for item in (part.strip() for part in text.split(",")) if item]
