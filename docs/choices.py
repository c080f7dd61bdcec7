"""The table of what is chosen over links, by operation, size and number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

from aiodist.schedules.choose_reductions import (
    Shape,
    choose_all_reduce,
    choose_reduce,
    choose_reduce_scatter,
    choose_scan,
)
from aiodist.schedules.choose_values import (
    choose_all_gather,
    choose_all_to_all,
    choose_broadcast,
    choose_gather,
    choose_scatter,
)
from aiodist.schedules.selection import Choice

KIB = 1024
MIB = KIB * KIB
ARRAYS = {"64 KiB + 8": 64 * KIB + 8, "1 MiB": MIB, "64 MiB": 64 * MIB}
PARTS = {"4 KiB": 4 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB}
RANKS = (2, 8, 128, 1000, 1024)


def _slices(x: Shape, size: int) -> Choice:
    lengths = [x.length // size + (rank < x.length % size) for rank in range(size)]
    return choose_reduce_scatter(x, tuple(accumulate(lengths, initial=0)))


def _floats(choose: Callable[[Shape, int], Choice]) -> Callable[[int, int], Choice]:
    return lambda nbytes, size: choose(Shape(nbytes // 4, 4, 4), size)


def _from_others(nbytes: int, size: int) -> tuple[int, ...]:
    return (0, *[nbytes] * (size - 1))


OPERATIONS: dict[str, tuple[dict[str, int], Callable[[int, int], Choice]]] = {
    "all_reduce": (ARRAYS, _floats(choose_all_reduce)),
    "reduce": (ARRAYS, _floats(lambda x, size: choose_reduce(x, size, 0))),
    "reduce_scatter": (ARRAYS, _floats(_slices)),
    "scan": (ARRAYS, _floats(lambda x, size: choose_scan(x, size, False))),
    "broadcast": (ARRAYS, lambda nbytes, size: choose_broadcast(nbytes, size, 0)),
    "all_gather": (PARTS, lambda nbytes, size: choose_all_gather((nbytes,) * size)),
    "gather": (PARTS, lambda nbytes, size: choose_gather(_from_others(nbytes, size), 0)),
    "scatter": (PARTS, lambda nbytes, size: choose_scatter(_from_others(nbytes, size), 0)),
    "all_to_all": (PARTS, choose_all_to_all),
}


def render(root: Path) -> Iterator[str]:
    """A row for each operation, size, and number of ranks."""
    del root
    counts = "rounds | frames | grants | connections | scratch"
    yield f"| operation | size | P | algorithm | {counts} |\n"
    yield "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |\n"
    for operation, (sizes, choose) in OPERATIONS.items():
        for name, nbytes in sizes.items():
            for ranks in RANKS:
                chosen = choose(nbytes, ranks)
                tally = chosen.tally
                yield (
                    f"| {operation} | {name} | {ranks} | {chosen.name} | {tally.rounds} "
                    f"| {tally.frames} | {tally.grants} | {tally.connections} "
                    f"| {_kib(tally.scratch)} |\n"
                )


def _kib(nbytes: int) -> str:
    return f"{-(-nbytes // KIB)} KiB" if nbytes else "0"
