"""Find the ranks that hold up others, from what all members say that they are doing.

A rank waits for the ranks that have not entered its collective, or for the peer of its message. A
rank is a culprit if others wait for it and it waits for no other rank. A rank that does not answer,
or whose event loop is blocked, is a culprit, too. Ranks that wait for each other and for no culprit
are in a deadlock. Waits that no rank is known to owe, such as a missing key of the store, are
reported separately.

A wait counts only after `LEAST` seconds, because answers come at different times while the program
goes on. Sets of ranks are bits of an int, because thousands of ranks may wait for thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from aiodist.wire.activity import bits_of, ranks_in

LEAST = 1.0
"""Seconds after which a waiting operation counts as held up."""

Key = tuple[bytes, str, int | None]
"""The identity of an operation on all ranks: context, tag, number (None: a message)."""


class PendingOperation(NamedTuple):
    """A pending operation; `what` describes it.

    `missing`: as bits, the ranks that it waits for, as far as its own rank knows. `lacking`: in
    words, what else it waits for.
    """

    key: Key
    what: str
    seconds: float
    missing: int
    lacking: str = ""


class Doing(NamedTuple):
    """What a rank says. `is_stuck`: its event loop is blocked."""

    waits: tuple[PendingOperation, ...] = ()
    is_stuck: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """`ranks` wait in the operation `what`, the longest of them for `seconds`."""

    what: str
    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Finding:
    """`culprits` hold up others in the operations `held`; in a `deadlock` they hold up each other.

    There are no culprits if something else is `lacking`.
    """

    culprits: tuple[int, ...]
    held: tuple[Held, ...]
    deadlock: bool = False
    lacking: str = ""


def find(doings: Mapping[int, Doing | None]) -> list[Finding]:
    """Find what is wrong with a group, the worst culprits first.

    `doings`: by rank, what each rank says (None: it did not answer). Ranks that are gone are left
    out.
    """
    # In this example of ranks 0 to 5, rank 3 computes, 0 and 1 wait for 3, and 2 waits for 1. Ranks
    # 4 and 5 wait for each other::
    #
    #     waiting   0: 001000  1: 001000  2: 000010  4: 100000  5: 010000
    #     by_mask   001000: {0, 1}   000010: {2}   100000: {4}   010000: {5}
    #     awaited & ~stuck  = {3}: waited for, and waits for nobody. Behind it are 0 and 1, and 2 by
    #                         way of 1
    #     stuck & ~reached  = {4, 5}: they wait, and for nobody who is to blame: a deadlock
    #
    # Ranks that wait for the same others share one entry of `by_mask`. Thousands of ranks have only
    # a few masks, so the walk over them is short.
    held_up = _held_up(doings)
    waiting: dict[int, int] = {}  # rank -> the ranks it waits for
    for rank, waits in held_up.items():
        for _, missing in waits:
            waiting[rank] = waiting.get(rank, 0) | missing
    # ranks that are waited for -> the ranks that wait for exactly these
    by_mask: dict[int, int] = {}
    for rank, mask in waiting.items():
        by_mask[mask] = by_mask.get(mask, 0) | 1 << rank
    awaited = 0
    for mask in by_mask:
        awaited |= mask
    stuck = bits_of(waiting)
    behind: dict[int, int] = {}  # ranks that wait for a culprit, directly or not -> the culprits
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
    """The ranks that have entered each operation, as bits."""
    found: dict[Key, int] = {}
    for rank, doing in doings.items():
        for wait in doing.waits if doing is not None else ():
            found[wait.key] = found.get(wait.key, 0) | 1 << rank
    return found


def _lacking(doings: Mapping[int, Doing | None]) -> list[Finding]:
    """Waits that no rank is known to owe; the wait of most ranks comes first."""
    by_text: dict[str, HeldUp] = {}
    for rank, doing in doings.items():
        for wait in doing.waits if doing is not None else ():
            if wait.lacking and wait.seconds >= LEAST:
                by_text.setdefault(wait.lacking, {}).setdefault(rank, []).append((wait, 0))
    found = [Finding((), _held(held, held), lacking=text) for text, held in by_text.items()]
    return sorted(found, key=lambda one: (-len(by_text[one.lacking]), one.lacking))


HeldUp = dict[int, list[tuple[PendingOperation, int]]]
"""rank -> its operations that are held up, each with the ranks it waits for."""


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
                # If all ranks have entered, only ranks whose loop is blocked hold it up. They tell
                # of no waits, so nothing shows whether they are of the subgroup of this operation.
                # All count, because an operation that all have entered rarely takes so long
                # otherwise.
                missing = missing & ~known[wait.key] or mute
            missing &= ~(1 << rank)
            if missing and wait.seconds >= LEAST:
                found.setdefault(rank, []).append((wait, missing))
    return found


def _behind(culprit: int, by_mask: Mapping[int, int]) -> int:
    """The ranks that wait for `culprit`, directly or through others."""
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
    """The operations of `ranks`; the operation of most ranks comes first."""
    by_key: dict[tuple[Key, str], dict[int, float]] = {}
    for rank in ranks:
        for wait, _ in held_up[rank]:
            by_key.setdefault((wait.key, wait.what), {})[rank] = wait.seconds
    held = [
        Held(what, tuple(sorted(seconds)), max(seconds.values()))
        for (_, what), seconds in by_key.items()
    ]
    return tuple(sorted(held, key=lambda one: (-len(one.ranks), one.ranks, one.what)))
