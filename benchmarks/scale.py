"""``make scale``: what a rank costs, and how that grows with ranks, hosts and members.

Four parts: ranks that share one process, processes of this host, hosts (network namespaces, which
need root), and members of a coordinator. Of each operation: processor time of a rank for one call;
frames of the busiest rank (those that it sends, or receives if these are more), and with how many
others it exchanges any. Of a rank that has done all operations: open files and memory. Frames and
connections are the same on any machine. Times are processor time, the least of some rounds; between
processes that has what polling and waking takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from aiodist.launching import tether
from aiodist.wire.limits import MAX_MEMBERS
from aiodist_cli.bench_cases import format_seconds, format_size
from aiodist_cli.bench_peers import Contender, PeerMissing, Site, launches
from aiodist_cli.bench_report import machine
from benchmarks import groups, members
from benchmarks.namespaces import namespaces
from benchmarks.scale_ranks import OPS, Found, Order

CASES = (
    "barrier:0,all_reduce:8,all_reduce:65536,all_reduce:65544,all_reduce:1048576,broadcast:8,"
    "broadcast:1048576,all_gather:8,all_gather:4096,reduce_scatter:4096,all_to_all:8"
)
PARTS = ("ranks", "processes", "hosts", "members")
TITLES = {
    "ranks": "Ranks in one process",
    "processes": "Processes of one host",
    "hosts": "Hosts, by ranks of each",
}
PATIENCE = 600.0
"""Seconds for the ranks of one column: how long they take is not what is measured."""

Case = tuple[str, int]


class Cell(NamedTuple):
    """What one case costs with one number of ranks."""

    seconds: float
    frames: int
    connections: int


class Column(NamedTuple):
    """What ranks cost that are so many, or so arranged."""

    name: str
    cells: list[Cell]
    files: float
    memory: float

    def as_json(self) -> dict[str, object]:
        """With names."""
        return self._asdict() | {"cells": [cell._asdict() for cell in self.cells]}


def column(name: str, found: Sequence[Found]) -> Column:
    """What the processes of a column have found, taken together."""
    cells = []
    for case, seconds in enumerate(zip(*[one["seconds"] for one in found], strict=True)):
        sent, received, met = Counter[int](), Counter[int](), set[tuple[int, int]]()
        for src, dst, count in (frames for one in found for frames in one["sent"][case]):
            sent[src] += count
            received[dst] += count
            met |= {(src, dst), (dst, src)}
        busiest = max([0, *sent.values(), *received.values()])
        connections = max([0, *Counter(one for one, _ in met).values()])
        cells.append(Cell(sum(seconds) / len(found), busiest, connections))
    files, memory = (max(one[what] for one in found) for what in ("files", "memory"))
    return Column(name, cells, files, memory)


def of_one_process(size: int, cases: Sequence[Case], transports: str) -> Column:
    """Ranks that share one event loop."""
    order = Order(cases=list(cases), size=size, transports=transports)
    return column(f"{size}", _asked([Site()], order, [dict(os.environ)]))


def of_processes(name: str, sites: Sequence[Site], cases: Sequence[Case]) -> Column:
    """A rank at each of `sites`, in a process of its own."""
    order = Order(cases=list(cases), size=None, transports="")
    with tempfile.TemporaryDirectory() as folder:
        control = Path(folder, "scale")
        started = launches(Contender("aiodist", "aiodist"), sites, control, os.environ)
        return column(name, _asked(sites, order, [dict(launch.env) for launch in started]))


def _asked(sites: Sequence[Site], order: Order, envs: Sequence[dict[str, str]]) -> list[Found]:
    """What the first of the processes prints. Raises RuntimeError if it does not come to that."""
    program = [sys.executable, "-m", "benchmarks.scale_ranks", json.dumps(order)]
    print(f"… {len(sites)} processes, {order['size'] or len(sites)} ranks", file=sys.stderr)
    with ExitStack() as started:
        ranks: list[subprocess.Popen[bytes]] = []
        for site, env in zip(sites, envs, strict=True):
            output = None if ranks else subprocess.PIPE
            command = tether.command([*site.prefix, *program])
            rank = started.enter_context(subprocess.Popen(command, env=env, stdout=output))
            started.callback(rank.kill)  # called before the process is waited for
            ranks.append(rank)
        said, _ = ranks[0].communicate(timeout=PATIENCE)
        codes = [rank.wait(PATIENCE) for rank in ranks]
    if any(codes):
        raise RuntimeError(f"processes of ranks ended with the exit codes {codes}")
    found: list[Found] = json.loads(said)
    return found


def tables(columns: Sequence[Column], cases: Sequence[Case]) -> Iterator[list[list[str]]]:
    """Three: processor time; frames and connections; files and memory."""
    names = [f"{op} {format_size(nbytes)}" if nbytes else op for op, nbytes in cases]
    head = [one.name for one in columns]
    rows = list(enumerate(names))
    yield [
        ["processor time of a rank", *head],
        *([name, *(format_seconds(one.cells[at].seconds) for one in columns)] for at, name in rows),
    ]
    yield [
        ["frames · connections", *head],
        *(
            [name, *(f"{c.frames} · {c.connections}" for c in (one.cells[at] for one in columns))]
            for at, name in rows
        ),
    ]
    yield [
        ["a rank, after all of these", *head],
        ["open files", *(f"{one.files:.1f}" for one in columns)],
        ["memory, MiB", *(f"{one.memory / (1 << 20):.2f}" for one in columns)],
    ]


def show(title: str, columns: Sequence[Column], cases: Sequence[Case]) -> None:
    """As Markdown."""
    print(f"\n## {title}\n")
    for head, *rows in tables(columns, cases):
        for line in (head, ["---", *("---:" for _ in head[1:])], *rows):
            print(f"| {' | '.join(line)} |")
        print(flush=True)


def of_hosts(text: str, cases: Sequence[Case]) -> Column:
    """``4x2``: four hosts with two ranks each."""
    count, _, each = text.partition("x")
    with namespaces(int(count)) as sites:
        spread = [site for site in sites for _ in range(int(each or 1))]
        return of_processes(text.replace("x", " × "), spread, cases)


def of_members(counts: Sequence[int], size: int, lease: float) -> list[dict[str, object]]:
    """Members of a coordinator in groups of `size`, and then as many as can be in one group. What
    is found is printed meanwhile."""
    print("\n## Members\n")
    members.allow_files(counts[-1] + members.SPARE_FILES)
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        token.write_bytes(members.TOKEN)
        found = asyncio.run(members.run(token, counts, size, lease))
        steps = asyncio.run(groups.one_group(token, min(counts[-1], MAX_MEMBERS)))
    return [*map(asdict, found), *map(asdict, steps)]


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _cases(text: str) -> list[Case]:
    cases = [
        (op, int(nbytes or 0)) for op, _, nbytes in (c.partition(":") for c in text.split(","))
    ]
    for op, _ in cases:
        if op not in OPS:
            raise argparse.ArgumentTypeError(
                f"there is no operation {op!r} to measure: expected {', '.join(OPS)}"
            )
    return cases


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    made.add_argument("--ranks", type=_numbers, default="2,4,8,16,32,64,128,256",
                      help="how many in one process")  # fmt: skip
    made.add_argument("--transports", default="inproc", help="between these (default: inproc)")
    made.add_argument("--processes", type=_numbers, default="2,4,8,16,32,48",
                      help="how many on this host")  # fmt: skip
    made.add_argument("--hosts", default="2x1,4x1,8x1,2x2,4x2", help="hosts x ranks of each")
    made.add_argument("--members", type=_numbers, default="1000,2000,5000,10000",
                      help="how many at a coordinator")  # fmt: skip
    made.add_argument("--group-size", type=int, default=10, help="members of a group")
    made.add_argument("--lease", type=float, default=15.0, help="of members, in seconds")
    made.add_argument("--cases", type=_cases, default=CASES, metavar="OP:BYTES,…",
                      help="what ranks do")  # fmt: skip
    made.add_argument("--json", type=Path, metavar="FILE", help="write JSON as well")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser().error(f"there is no part {', '.join(unknown)}: expected {', '.join(PARTS)}")
    parts, cases = options.parts or PARTS, options.cases
    if options.group_size < 1:
        parser().error("groups have at least one member")
    if "members" in parts and any(count % options.group_size for count in options.members):
        parser().error("members are a multiple of the size of their groups")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # many ranks of one process need many
    found: dict[str, object] = {"machine": machine(), "cases": cases}
    print(json.dumps(found["machine"]))
    columns = {
        "ranks": (of_one_process(size, cases, options.transports) for size in options.ranks),
        "processes": (of_processes(f"{n}", [Site()] * n, cases) for n in options.processes),
        "hosts": (of_hosts(text, cases) for text in options.hosts.split(",")),
    }
    failed = False
    for part, some in columns.items():
        if part in parts:
            there: list[Column] = []
            try:
                there.extend(some)  # those that come before one that fails stay
            except (PeerMissing, RuntimeError, subprocess.TimeoutExpired) as error:
                failed |= not isinstance(error, PeerMissing)
                found[f"{part} that are missing"] = str(error)
                print(f"\n{part} that are missing: {error}")
            show(TITLES[part], there, cases)
            found[part] = [one.as_json() for one in there]
    if "members" in parts:
        found["members"] = of_members(options.members, options.group_size, options.lease)
    if options.json:
        options.json.write_text(json.dumps(found))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
