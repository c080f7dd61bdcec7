"""Who holds up the others: a decision on what the members of a group say that they are doing.

Members answer one after the other while the program goes on, so a wait counts only once it is
longer than `LEAST`. A rank waits for those that have not entered its collective, or for the other
end of its message. Who is waited for and waits for nobody is a culprit; so is who does not answer,
and whose event loop does not turn. Ranks that wait for each other and for no culprit are in a
deadlock. Who waits for what no rank is known to owe, such as a key of the store that nobody has
set, is told beside them.

Sets of ranks are bits of an int: there may be thousands of ranks that wait for thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from aiodist.wire.activity import bits_of, ranks_in

LEAST = 1.0
"""Seconds after which an operation that waits is taken for held up."""

Key = tuple[bytes, str, int | None]
"""What an operation is known by on all of its ranks: context, tag, number (None: a message)."""


class Waiting(NamedTuple):
    """An operation that is pending, `what` in words. `missing`, as bits: the ranks that it waits
    for, as far as its own rank knows. `lacking`: what else it waits for, in words."""

    key: Key
    what: str
    seconds: float
    missing: int
    lacking: str = ""


class Doing(NamedTuple):
    """What a rank says. `is_stuck`: its event loop does not turn."""

    waits: tuple[Waiting, ...] = ()
    is_stuck: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """`ranks` wait in the operation `what`, the longest of them for `seconds`."""

    what: str
    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Finding:
    """`culprits` hold up others, by way of these operations; in a `deadlock`: each other. There are
    none where it is something else that is `lacking`."""

    culprits: tuple[int, ...]
    held: tuple[Held, ...]
    deadlock: bool = False
    lacking: str = ""


def find(doings: Mapping[int, Doing | None]) -> list[Finding]:
    """What is wrong with a group, by rank: those who hold up the most first. None: no answer.
    Ranks that are gone are not among them."""
    # As bits, of ranks 0 to 5, where 3 computes, 0 and 1 wait for it, 2 waits for 1, 4 and 5 for
    # each other::
    #
    #     waiting   0: 001000  1: 001000  2: 000010  4: 100000  5: 010000
    #     by_mask   001000: {0, 1}   000010: {2}   100000: {4}   010000: {5}
    #     awaited & ~stuck  = {3}: waited for, and waits for nobody. Behind it are 0 and 1, and 2 by
    #                         way of 1
    #     stuck & ~reached  = {4, 5}: they wait, and for nobody who is to blame: a deadlock
    #
    # Ranks that wait for the same others are one entry of `by_mask`: of thousands of ranks there
    # are a handful of masks, and the walk over them takes that many steps.
    held_up = _held_up(doings)
    waiting: dict[int, int] = {}  # rank -> those it waits for
    for rank, waits in held_up.items():
        for _, missing in waits:
            waiting[rank] = waiting.get(rank, 0) | missing
    by_mask: dict[int, int] = {}  # those that are waited for -> who waits for just those
    for rank, mask in waiting.items():
        by_mask[mask] = by_mask.get(mask, 0) | 1 << rank
    awaited = 0
    for mask in by_mask:
        awaited |= mask
    stuck = bits_of(waiting)
    behind: dict[int, int] = {}  # who waits for a culprit, by whatever way -> the culprits
    reached = 0
    for culprit in ranks_in(awaited & ~stuck):
        followers = _behind(1 << culprit, by_mask)
        behind[followers] = behind.get(followers, 0) | 1 << culprit
        reached |= followers
    findings = [
        Finding(ranks_in(culprits), _held(held_up, ranks_in(ranks)))
        for ranks, culprits in sorted(
            behind.items(), key=lambda item: (-item[0].bit_count(), item[1])
        )
    ]
    if locked := stuck & ~reached:
        ranks = ranks_in(locked)
        findings.append(Finding(ranks, _held(held_up, ranks), deadlock=True))
    return findings + _lacking(doings)


def entered(doings: Mapping[int, Doing | None]) -> dict[Key, int]:
    """Who has entered which operation, as bits."""
    found: dict[Key, int] = {}
    for rank, doing in doings.items():
        for wait in doing.waits if doing is not None else ():
            found[wait.key] = found.get(wait.key, 0) | 1 << rank
    return found


def _lacking(doings: Mapping[int, Doing | None]) -> list[Finding]:
    """What ranks wait for that no rank is known to owe: what most of them wait for first."""
    by_text: dict[str, HeldUp] = {}
    for rank, doing in doings.items():
        for wait in doing.waits if doing is not None else ():
            if wait.lacking and wait.seconds >= LEAST:
                by_text.setdefault(wait.lacking, {}).setdefault(rank, []).append((wait, 0))
    found = [Finding((), _held(held, held), lacking=text) for text, held in by_text.items()]
    return sorted(found, key=lambda one: (-len(by_text[one.lacking]), one.lacking))


HeldUp = dict[int, list[tuple[Waiting, int]]]
"""rank -> its operations that are held up, and by whom."""


def _held_up(doings: Mapping[int, Doing | None]) -> HeldUp:
    there = bits_of(doings)
    mute = bits_of([rank for rank, doing in doings.items() if doing is None or doing.is_stuck])
    known = entered(doings)
    found: HeldUp = {}
    for rank, doing in doings.items():
        if doing is None or doing.is_stuck:
            continue
        for wait in doing.waits:
            missing = wait.missing & there
            if wait.key[2] is not None:
                # Where all have entered, it goes on when the loops of all turn.
                missing = missing & ~known[wait.key] or mute
            missing &= ~(1 << rank)
            if missing and wait.seconds >= LEAST:
                found.setdefault(rank, []).append((wait, missing))
    return found


def _behind(culprit: int, by_mask: Mapping[int, int]) -> int:
    """Who waits for `culprit`, or for somebody who does."""
    behind, waited_for = 0, culprit
    while waited_for:
        more = 0
        for mask, ranks in by_mask.items():
            if mask & waited_for:
                more |= ranks
        waited_for = more & ~behind
        behind |= more
    return behind


def _held(held_up: HeldUp, ranks: Iterable[int]) -> tuple[Held, ...]:
    """The operations of `ranks`, those of most of them first."""
    by_key: dict[tuple[Key, str], dict[int, float]] = {}
    for rank in ranks:
        for wait, _ in held_up[rank]:
            by_key.setdefault((wait.key, wait.what), {})[rank] = wait.seconds
    held = [
        Held(what, tuple(sorted(seconds)), max(seconds.values()))
        for (_, what), seconds in by_key.items()
    ]
    return tuple(sorted(held, key=lambda one: (-len(one.ranks), one.ranks, one.what)))
