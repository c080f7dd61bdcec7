"""Whether a silent member has failed, or the coordinator is cut off from its whole group.

A member whose lease ends is lost, and its group goes on without it. But if the cable of the
coordinator is pulled, it hears no member at all. It must not end groups that work well. One silent
member does not show the difference, but a group does: its members do not all fail at once, and if
they do, waiting hurts no one.

**When is the coordinator cut off?** Members send a message three times a lease. If all fall silent
at one moment, the last message of each is at most a third of its lease older than that moment. So
when the first lease ends, no other has more than a third of it left::

              one lease = 6 s: words of A, B and C            left when that of A ends, at 9 s
    A   at 1  at 3  ───────────────────────────> 9            none
    B     at 2  at 4  ─────────────────────────────> 10       1 s     overdue, too
    C        at 2.9  at 4.9  ────────────────────────> 10.9   1.9 s   overdue, too: all are silent
    C, if it is well: at 4.9  at 6.9  at 8.9  ...            5.9 s   so A is silent on its own

The limit is half a lease (`OVERDUE`). It lies between that third, with room for a late message, and
the two thirds that a healthy member has left. One member that was heard in time is enough to show
that messages get through; then the silent ones are evicted. (A member with a much longer lease
sends more rarely, and may count as heard for longer than the short lease lasts.)

**What happens then?** No member is evicted. All become absent, as after a restart of the
coordinator, and come back over new connections by themselves. They are not told anything, because
they could read it only when the cable is back. Their leases to return begin when the first of them
is heard (`Books.got_word`). If they all died, only a process that wants to join waits for them. Its
request counts as a sign of life, even if it is refused, so it waits one lease. Without one, the
group stays listed for `RETURN_SECONDS`.

The coordinator in a rank or launcher ends with that process, so members do not come back to it.
There a group that falls silent is lost, because such a process waits for it before it ends.
"""

from __future__ import annotations

from collections.abc import Iterable

RETURN_SECONDS = 600.0
"""Seconds that a silent group may stay before its members are lost. No process waits for them
meanwhile: a joiner would start their leases."""

OVERDUE = 0.5
"""The part of a lease after which a member is overdue. A healthy member is heard three times a
lease."""


def is_cut_off(lives: Iterable[tuple[float, float]]) -> bool:
    """Whether all members of a group are overdue, given the lease of each and what is left of it.

    If one was heard in time, the coordinator can be reached, and the others have failed.
    """
    return all(left <= OVERDUE * lease for lease, left in lives)
