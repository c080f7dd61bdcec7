"""The end of a run: which rank caused it, what to say, and the exit status."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

from aiodist.launching import spawn
from aiodist_cli.tracebacks import HEADER

_FRAME = b" |+-"
"""What an exception group draws around the text of its exceptions."""

_CONSEQUENCE = re.compile(
    rb"aiodist\.errors\.(?:%s)\b"
    % b"|".join(error.__name__.encode() for error in spawn.CONSEQUENCES)
)

_LEADS_ON = (
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
)
"""What stands between two exceptions in a traceback."""

_LEAF = re.compile(rb"[ |]*\+[+-]*-{16} \d+ -{16}$")
"""What an exception group writes before each of its exceptions, which may have no traceback."""

_RECORD = re.compile(rb"\b(?:WARNING|ERROR|CRITICAL)\b")
"""What a log says in the line before a traceback. Without it, the exception may have ended the
program, because programs write other lines, such as their progress, before that, too."""


class Exit(NamedTuple):
    """The end of one rank.

    `code`: its return code, negative for a signal. `tail`: the last lines of its stderr.
    `withheld`: those that were not shown yet, a traceback.
    """

    rank: int
    code: int
    tail: Sequence[bytes] = ()
    withheld: Sequence[bytes] = ()

    @property
    def is_consequence(self) -> bool:
        """Whether the rank failed because of another one, according to its last lines."""
        return self.code > 0 and self.blames_another

    @property
    def blames_another(self) -> bool:
        """Whether its exception says that another rank failed, or one that led to it."""
        named, led, _ = _raised(self.withheld or self.tail)
        return _CONSEQUENCE.match(self.error) is not None or (led and named == self.error)

    @property
    def waited_in_vain(self) -> bool:
        """Whether its exception says that too few ranks came for a group."""
        return self.error.startswith(b"aiodist.errors.JoinTimeoutError")

    @property
    def error(self) -> bytes:
        """The exception of a traceback that it has just written; else the last line of all.

        More lines may follow that of the exception: of its text, its notes, or an exit handler. If
        a log has the traceback, they say more than it does.
        """
        before = self.tail[: -len(self.withheld)][-1:]
        named, _, is_logged = _raised([*before, *self.withheld])
        words = (line.strip(_FRAME) for line in reversed(self.tail))
        return (b"" if is_logged else named) or next((line for line in words if line), b"")

    @property
    def unsaid(self) -> Sequence[bytes]:
        """The line of `error`, and what was not shown yet of the lines after it."""
        words = [line for line in self.withheld if line.strip(_FRAME)]
        error = self.error.strip(_FRAME)
        after = takewhile(lambda line: line.strip(_FRAME) != error, reversed(words))
        return [self.error, *reversed([*after])]


def _raised(lines: Iterable[bytes]) -> tuple[bytes, bool, bool]:
    """Return the exception of the last traceback, whether a consequence led to it, and whether a
    log has it.

    Tracebacks of exceptions that Python ignores do not count, because the end brings many of them.
    """
    led, is_next, is_ignored, is_logged, named = False, False, False, False, b""
    for before, whole in pairwise([b"", *lines]):
        if HEADER.match(whole) and not is_ignored:
            is_logged = (is_next and is_logged) or _RECORD.search(before) is not None
        line = _without_frame(whole)
        if line.startswith(b"Traceback (most recent call last):"):
            if not is_ignored:
                led, is_next, named = led and is_next, False, b""
            is_ignored = False
        elif line.startswith(b"Exception ignored "):
            is_ignored = True
        elif _LEAF.match(whole):
            named = b""
        elif line in _LEADS_ON:
            led, is_next = led or _CONSEQUENCE.match(named) is not None, True
        elif not (named or line[:1].isspace()):
            named = line
    return named, led, is_logged


def _without_frame(line: bytes) -> bytes:
    """Return a line of a traceback without what an exception group draws before it."""
    return re.sub(rb"^ *\| ?", b"", line)


def distinct(
    first: Sequence[bytes], others: Iterable[tuple[int, Sequence[bytes]]]
) -> tuple[list[int], list[tuple[Sequence[bytes], list[int]]]]:
    """Find lines that ranks have in common, to show them once.

    Returns which of the `others` (ranks with their lines) have the same lines as `first`, and the
    lines of the rest, each with its ranks.
    """
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
    """The failure that a user should look at; None if there was none.

    `exits`: in the order in which they happened. The result is the first failure that no other
    failure caused.
    """
    failures = [exit for exit in exits if exit.code != 0]
    return next((exit for exit in failures if not exit.is_consequence), None) or next(
        iter(failures), None
    )


def headline(failed: Exit, size: int) -> str:
    return f"rank {failed.rank} of {size} failed with {spawn.describe_exit(failed.code)}"


def last_words(reason: str, stopped: Sequence[int], failed: Exit | None = None) -> str:
    """The line that ends a stopped run. The last lines of `failed` come after it."""
    text = f"aiodist run: {reason}"
    if stopped:
        text += f"; {spawn.name_ranks(stopped)} stopped"
    if failed is not None:
        text += "; the end of its stderr:" if failed.tail else "; it wrote nothing to stderr"
    return text
