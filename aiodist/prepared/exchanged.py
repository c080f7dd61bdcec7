"""Which of the shown blobs an operation uses, and for what.

All ranks of such an operation show blobs. What it does with them follows from its name and
arguments alone, so this module decides it. `lane_values` carries it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aiodist.collectives import numbers
from aiodist.collectives.templates import Template, template_of

MANY = 16
"""With more ranks, operations that show one value for each other rank are not prepared."""
A_GAP = 2_000
"""Bytes of an array or a number in a template and of its views, measured with thousands of them."""
COPIES = 3
"""So many times the other bytes of a template are kept: in it, as metadata, and in a `Tree`."""


class Exchanged(NamedTuple):
    """What an operation does with the blobs.

    `counts` says how many values each rank shows. `takes` has the source and the number of each
    value that this rank takes. The result is a list of these values if `listed`. Otherwise it is
    the one value, or None if it takes none. If `given` is not None, the result goes to the argument
    with that number. `sources` are the ranks whose values have to fit what others say that they
    take. `op` reduces values that are numbers of the type `number`. `moves` says whether it may
    have arrays whose data travels apart from the blobs.
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
        """Return the template of the blob that `rank` shows. None: it has none."""
        if self.number is not None:
            return numbers.template_of(blob, self.number)
        return template_of(blob, self.counts[rank], rank, moves=self.moves)

    def bytes_kept(self, own: Template, rank: int) -> int:
        """Estimate the bytes of the templates of all ranks, if `rank` shows its `own`.

        Most ranks show values like those of this rank.
        """
        nbytes = A_GAP * len(own.gaps) + COPIES * sum(len(part) for _, part in own.fixed)
        return nbytes * sum(self.counts) // max(1, self.counts[rank])


def exchanged_by(op: str, rank: int, size: int, args: tuple[Any, ...]) -> Exchanged | None:
    """Return what `op` does with the blobs. None: it is not prepared, or exchanges no values."""
    one, everyone = [1] * size, range(size)
    first = [(src, 0) for src in everyone]
    # The argument for the result, if there is one.
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
        case "barrier" | "fence":
            return Exchanged([0] * size)
        case "all_reduce" | "reduce" if type(args[0]) in numbers.KINDS and given is None:
            takes = first if op == "all_reduce" or rank == args[1] else []
            return Exchanged(one, takes, number=type(args[0]), op=args[-2])
    return None
