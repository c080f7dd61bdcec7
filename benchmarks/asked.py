"""What is measured, and how fast aiodist is asked to be. Pure data and arithmetic.

A ratio is the peer's median over that of aiodist, in the same run: 2 means that aiodist takes half
the time. The MPI of a ratio is the fastest of those that are installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aiodist_cli.bench_cases import Case, Result, digits, ratio
from aiodist_cli.bench_peers import MPIS
from aiodist_cli.bench_report import Report, label
from aiodist_cli.bench_worker import OPS

B, KIB, MIB = 1, 1 << 10, 1 << 20

OWN = "aiodist"
SHARED = "aiodist group.empty"


@dataclass(frozen=True, slots=True)
class Asked:
    """The ratios that `column` is asked for in `case`; None: none is."""

    case: Case
    gloo: float | None
    mpi: float | None = None
    column: str = OWN


def _filled(nbytes: int, gloo: tuple[float, float], mpi: float | None = None) -> list[Asked]:
    """An all_reduce of what has just been computed, for 2 and for 4 ranks; `mpi`: for 2."""
    cases = (Case("all_reduce", nbytes, ranks, fill=True) for ranks in (2, 4))
    return [Asked(case, gloo[i], (mpi, None)[i]) for i, case in enumerate(cases)]


def _beside_neighbours(op: str) -> list[Asked]:
    sizes = {8 * B: 4, 64 * KIB: 4, 1 * MIB: 4, 16 * MIB: 2}
    return [Asked(Case(op, nbytes, 2), gloo) for nbytes, gloo in sizes.items()]


def _numpy(op: str, ranks: int, mpi: Sequence[float]) -> list[Asked]:
    """An operation of numpy arrays that were just written. `mpi`: for each of its sizes."""
    sizes = (8 * B, 64 * KIB, 1 * MIB, 16 * MIB)
    if op in ("reduce_scatter", "all_to_all"):  # each rank has an element at least
        sizes = (4 * ranks, *sizes[1:])
    cases = (Case(op, nbytes, ranks, fill=True) for nbytes in sizes)
    return [Asked(case, None, ratio) for case, ratio in zip(cases, mpi, strict=True)]


def _both(op: str, nbytes: int, gloo: tuple[float, float], mpi: tuple[float, float]) -> list[Asked]:
    """For 2 and for 4 ranks."""
    return [Asked(Case(op, nbytes, n), gloo[i], mpi[i]) for i, n in enumerate((2, 4))]


ASKED: Mapping[str, Sequence[Asked]] = {
    "all_reduce": [
        *_both("all_reduce", 8 * B, (25, 25), (0.2, 0.4)),
        *_both("all_reduce", 64 * KIB, (15, 25), (0.3, 0.5)),
        *_both("all_reduce", 1 * MIB, (8, 10), (0.8, 0.7)),
        Asked(Case("all_reduce", 1 * MIB, 2), None, 1.2, SHARED),
        Asked(Case("all_reduce", 16 * MIB, 2), 10, 1.5),
        Asked(Case("all_reduce", 16 * MIB, 2), None, 2.5, SHARED),
        Asked(Case("all_reduce", 16 * MIB, 4), None),
        *_both("all_reduce", 64 * MIB, (10, 4.5), (1.8, 1.3)),
    ],
    "filled": [
        *_filled(8 * B, (25, 15)),
        *_filled(64 * KIB, (25, 40)),
        *_filled(1 * MIB, (12, 8), 1),
        *_filled(64 * MIB, (8, 4.5), 1),
    ],
    "numpy": [
        *_numpy("all_reduce", 2, (0.9, 1.1, 1, 1)),
        *_numpy("all_gather", 2, (0.9, 1.1, 1, 1)),
        *_numpy("broadcast", 2, (0.5, 0.7, 0.8, 0.9)),
        *_numpy("ping_pong", 2, (0.8, 1, 0.8, 0.8)),
        *_numpy("all_reduce", 4, (0.9, 1, 0.9, 1.1)),
        *_numpy("all_gather", 4, (0.8, 0.8, 0.8, 0.8)),
        *_numpy("reduce_scatter", 4, (0.8, 0.8, 0.8, 0.8)),
        *_numpy("all_to_all", 4, (0.8, 0.8, 0.8, 0.8)),
        *_numpy("broadcast", 4, (0.5, 0.7, 0.8, 0.9)),
    ],
    "neighbours": [each for op in OPS for each in _beside_neighbours(op)],
    "collectives": [
        *_both("broadcast", 64 * MIB, (3, 3), (0.9, 0.9)),
        *_both("reduce_scatter", 64 * MIB, (3, 3), (0.9, 0.9)),
        *_both("all_gather", 64 * MIB, (3, 3), (0.75, 0.75)),
        *_both("all_to_all", 64 * MIB, (3, 3), (0.75, 0.75)),
    ],
    "ping_pong": [
        Asked(Case("ping_pong", 8 * B, 2), 10),
        Asked(Case("ping_pong", 1 * MIB, 2), 3),
        Asked(Case("ping_pong", 64 * MIB, 2), 4),
    ],
    "namespaces": [
        Asked(Case("all_reduce", 8 * B, 2), 8),
        Asked(Case("all_reduce", 1 * MIB, 2), 2),
        Asked(Case("all_reduce", 64 * MIB, 2), 2.5),
    ],
    "torch": [
        Asked(Case("all_reduce", 8 * B, 2), 2),
        Asked(Case("all_reduce", 8 * B, 4), 3),
        Asked(Case("all_reduce", 1 * MIB, 2), 4),
        Asked(Case("all_reduce", 64 * MIB, 2), 6),
    ],
    "links": [
        Asked(case, None, column=link)
        for case in (Case("ping_pong", 8 * B, 2), Case("all_reduce", 64 * MIB, 2))
        for link in ("tcp link", "unix link")
    ],
    "two_by_two": [Asked(Case("all_reduce", 64 * MIB, 4), 2.5)],
}
"""By name of the benchmark; these are also the cases that it measures."""

PLACES = {
    "namespaces": " over TCP",
    "two_by_two": " on 2 hosts",
    "neighbours": ", busy cores",
    "torch": " of torch",
    "links": ", a bare link",
    "numpy": ", numpy",
}
"""Where the ranks of a benchmark are, if not all on one host."""

TICKER_PERIOD = 0.002
TICKER_LATER = 0.002
"""Seconds by which a ticker of `TICKER_PERIOD` may be later at p99 while the group works."""

SMALL, TAGGED, AT_ONCE = 1.5, 1.3, 1.2
"""How many times the time of an all_reduce of as many bytes a small operation may take: of another
kind, with a tag, and many at once; the latter two in processor time."""
TAGGED_RATE = 20_000
"""all_reduces of 8 B with tags that a rank does in a second, of a thousand at once."""

IDLE_SHARE = 0.01
"""Of a core, with a receive pending."""

MEMORY_BYTES = 1 << 30
MEMORY_GROWTH = 16 * MIB
"""Bytes by which a rank may grow over its array of `MEMORY_BYTES`, with 4 ranks."""


def of_small(name: str) -> tuple[str, str, float]:
    """Which case of `benchmarks.small` that one is compared with, in what ("wall", the time, or
    "cpu", that of a processor), and how many times as much it may take."""
    base, _, how = name.partition(", ")
    if how.endswith("tagged"):
        return name.removesuffix(", tagged"), "cpu", TAGGED
    if how.endswith("at once"):
        return base, "cpu", AT_ONCE
    if name.endswith("B"):  # a size, of what the others are compared with
        return name, "wall", 1
    return "all_reduce 8 B", "wall", SMALL


def cases_by_ranks(name: str) -> dict[int, list[Case]]:
    """The cases of a benchmark, each once, by number of ranks."""
    found: dict[int, list[Case]] = {}
    for asked in ASKED[name]:
        cases = found.setdefault(asked.case.ranks, [])
        if asked.case not in cases:
            cases.append(asked.case)
    return found


def fastest_mpi(results: Iterable[Result], case: Case) -> Result | None:
    """The MPI with the lowest median."""
    found = [r for r in results if r.case == case and r.column in MPIS and r.summary]
    return min(found, key=lambda r: r.summary.median if r.summary else 0.0, default=None)


HEAD = ("case", "aiodist: median (p99, mean)", "Gloo", "fastest MPI", "× Gloo (asked)",
        "× MPI (asked)", "met")  # fmt: skip


def rows(report: Report) -> Iterator[tuple[str, ...]]:
    """The lines of the table of figures, under `HEAD`."""
    for asked in ASKED.get(report.name, ()):
        found = {r.column: r for r in report.results if r.case == asked.case}
        if asked.column == SHARED and SHARED not in found:
            continue  # this version has no such memory
        mpi = fastest_mpi(report.results, asked.case)
        gloo_ratio = ratio(report.results, asked.case, "gloo", asked.column)
        mpi_ratio = ratio(report.results, asked.case, mpi.column, asked.column) if mpi else None
        yield (
            f"{asked.case}{PLACES.get(report.name, '')}"
            f"{', group.empty' if asked.column == SHARED else ''}",
            _shown(found.get(asked.column)),
            _shown(found.get("gloo")),
            f"{label(mpi.column)} {_shown(mpi)}" if mpi else "–",
            _ratio(gloo_ratio, asked.gloo),
            _ratio(mpi_ratio, asked.mpi),
            _verdict([(gloo_ratio, asked.gloo), (mpi_ratio, asked.mpi)]),
        )
    for fact in report.facts:
        asked_text = f" (asked: {fact.asked})" if fact.asked else ""
        yield (fact.name, f"{fact.found}{asked_text}", "", "", "", "", _word(fact.met))


def _shown(result: Result | None) -> str:
    if result is None:
        return "–"
    return str(result.summary) if result.summary else "failed"


def _ratio(found: float | None, asked: float | None) -> str:
    shown = "–" if found is None else digits(found)
    return shown if asked is None else f"{shown} ({asked:g})"


def _verdict(pairs: Iterable[tuple[float | None, float | None]]) -> str:
    """ "yes" if each ratio that is asked for was found and is reached; "?" if one is unknown."""
    wanted = [(found, asked) for found, asked in pairs if asked is not None]
    if any(found is not None and found < asked for found, asked in wanted):
        return _word(False)
    if any(found is None for found, _ in wanted):
        return "?"
    return _word(True) if wanted else ""


def _word(met: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[met]
