"""How a run ended: which rank was the cause, what to say, which exit status to give."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aiodist.launching import spawn

_FRAME = b" |+-"
"""What an exception group draws around the text of its exceptions."""

_CONSEQUENCE = re.compile(
    rb"aiodist\.errors\.(?:%s)\b"
    % b"|".join(error.__name__.encode() for error in spawn.CONSEQUENCES)
)


class Exit(NamedTuple):
    """The end of one rank. `code`: its return code, negative for a signal; `tail`: the last lines
    that it wrote to stderr; `withheld`: those of them that were not shown yet, a traceback."""

    rank: int
    code: int
    tail: Sequence[bytes] = ()
    withheld: Sequence[bytes] = ()

    @property
    def is_consequence(self) -> bool:
        """Whether the rank failed because another one did, as far as its last words tell."""
        return self.code > 0 and self.blames_another

    @property
    def blames_another(self) -> bool:
        """Whether its last words are that another rank failed."""
        return _CONSEQUENCE.match(self.last_line) is not None

    @property
    def last_line(self) -> bytes:
        """What it said last; of a traceback, the exception."""
        words = (line.strip(_FRAME) for line in reversed(self.tail))
        return next((line for line in words if line), b"")


def distinct(
    first: Sequence[bytes], others: Iterable[tuple[int, Sequence[bytes]]]
) -> tuple[list[int], list[tuple[Sequence[bytes], list[int]]]]:
    """Several lines that ranks have in common are shown once: which of the `others`, ranks with
    their lines, have the same lines as `first`; and the lines of the rest, each with its ranks."""
    same: list[int] = []
    rest: list[tuple[Sequence[bytes], list[int]]] = []
    for rank, lines in others:
        if len(lines) > 1 and lines == first:
            same.append(rank)
        elif len(lines) > 1 and (known := [ranks for had, ranks in rest if had == lines]):
            known[0].append(rank)
        else:
            rest.append((lines, [rank]))
    return same, rest


def cause(exits: Sequence[Exit]) -> Exit | None:
    """Of `exits`, in the order in which they happened: the failure that a user should look at.

    None: nobody failed. That is the first failure which is no consequence of another one.
    """
    failures = [exit for exit in exits if exit.code != 0]
    return next((exit for exit in failures if not exit.is_consequence), None) or next(
        iter(failures), None
    )


def headline(failed: Exit, size: int) -> str:
    """Which rank failed, and how."""
    return f"rank {failed.rank} of {size} failed with {spawn.describe_exit(failed.code)}"


def last_words(reason: str, stopped: Sequence[int], failed: Exit | None = None) -> str:
    """The line that ends a run which had to stop; what `failed` said last comes behind it."""
    text = f"aiodist run: {reason}"
    if stopped:
        text += f"; {spawn.name_ranks(stopped)} stopped"
    if failed is not None:
        text += "; the end of its stderr:" if failed.tail else "; it wrote nothing to stderr"
    return text
