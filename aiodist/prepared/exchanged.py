"""What an operation that exchanges values makes of the blobs that all ranks show: a decision by its
name and arguments alone. `lane_values` carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aiodist.collectives import numbers
from aiodist.collectives.templates import Template, template_of

MANY = 16
"""With more ranks, what each has for each other one is not prepared."""


class Exchanged(NamedTuple):
    """What an operation makes of the blobs.

    `counts`: how many values each rank shows. `takes`: the values that this rank takes, by source
    and number. Its result is a list of them, or the one if it is not `listed`, or None without any;
    or the argument `given`, where that is the number of one. `sources`: whose values have to fit
    what others have said that they take. `op`: what the values are reduced by, which then are
    numbers, of the type `number`. `moves`: it may be of arrays whose data travels apart.
    """

    counts: Sequence[int]
    takes: Sequence[tuple[int, int]] = ()
    listed: bool = False
    given: int | None = None
    sources: Sequence[int] = ()
    number: type | None = None
    op: Any = None
    moves: bool = False

    def template_of(self, blob: bytes, rank: int) -> Template | None:
        """The template of what `rank` shows."""
        if self.number is not None:
            return numbers.template_of(blob, self.number)
        return template_of(blob, self.counts[rank], rank, moves=self.moves)


def exchanged_by(op: str, rank: int, size: int, args: tuple[Any, ...]) -> Exchanged | None:
    """What `op` is, of those who exchange values; None for others."""
    one, everyone = [1] * size, range(size)
    first = [(src, 0) for src in everyone]
    # Where the result goes, if it is given.
    given = len(args) - 1 if args and args[-1] is not None else None
    match op:
        case "broadcast":
            value, src = args
            counts = [int(each == src) for each in everyone]
            given = None if value is None else 0
            takes = [] if rank == src else [(src, 0)]
            return Exchanged(counts, takes, False, given, [src])
        case "all_gather":
            return Exchanged(one, first, True, given, everyone)
        case "gather":
            return Exchanged(one, first if rank == args[1] else (), True, given, everyone)
        case "scatter" if size <= MANY:
            src = args[1]
            counts = [size * (each == src) for each in everyone]
            return Exchanged(counts, [(src, rank)], False, given, [src])
        case "all_to_all" if size <= MANY:
            takes = [(src, rank) for src in everyone]
            return Exchanged([size] * size, takes, True, given, everyone)
        case "barrier":
            return Exchanged([0] * size)
        case "all_reduce" | "reduce" if type(args[0]) in numbers.KINDS and given is None:
            takes = first if op == "all_reduce" or rank == args[1] else []
            return Exchanged(one, takes, number=type(args[0]), op=args[-2])
    return None
