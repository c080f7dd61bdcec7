"""Whose silence it is: a member's own, or the coordinator's, which nobody reaches any more."""

from __future__ import annotations

from collections.abc import Iterable

RETURN_SECONDS = 600.0
"""How long a group that fell silent as a whole may stay so before its members are lost. Nobody
waits for them meanwhile: whoever does, begins their lease."""

OVERDUE = 0.5
"""A member that is well is heard three times a lease: after this part of one it is overdue."""


def is_cut_off(lives: Iterable[tuple[float, float]]) -> bool:
    """Whether all of a group are overdue, given the lease of each and what is left of it.

    A single one that was heard in time shows that the coordinator can be reached: then the others
    are silent on their own account.
    """
    return all(left <= OVERDUE * lease for lease, left in lives)
