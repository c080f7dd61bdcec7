"""Whose silence it is: a member's own, or the coordinator's, which nobody reaches any more.

A member whose lease ends without a word of it is lost, and its group goes on without it. But if a
cable of the coordinator is pulled, it hears nothing of anybody, and its word would end groups that
are well: the members talk to each other, and would be told that they were evicted as soon as the
cable is back. The coordinator cannot see the difference in one member. It can in a group: its
members do not fail all at once, or if they do, nobody is left whom it hurts to wait.

**When it is taken for the coordinator's own.** Members say a word three times a lease. If all of
them fall silent at one moment, the last word of each is at most a third of its lease older than
that moment. So when the first lease ends, no other one has more than a third of it left::

              one lease = 6 s: words of A, B and C            left when that of A ends, at 9 s
    A   at 1  at 3  ───────────────────────────> 9            none
    B     at 2  at 4  ─────────────────────────────> 10       1 s     overdue, too
    C        at 2.9  at 4.9  ────────────────────────> 10.9   1.9 s   overdue, too: all are silent
    C, if it is well: at 4.9  at 6.9  at 8.9  ...            5.9 s   so A is silent on its own

Half a lease (`OVERDUE`) lies between that third, with room for a word that is late, and the two
thirds or more that are left to a member that is well. One member that was heard in time is enough
to show that words get through, and then the rule is the usual one. (A member whose lease is many
times that of another one says its words more rarely, and so it may count as heard for longer than
the short lease lasts: then the other one is evicted.)

**What happens then.** Nobody is evicted. All members are absent, as after a restart of the
coordinator, and may come back over new connections, which they do by themselves. They are not told
anything, for what is written to their connections now may be read when the cable is back. Their
leases to return begin with the first that is heard (`Books.got_word`), for until then it is still
nobody's fault. If they really all died, nobody waits for them but who wants to join: and that is
such a word, so it takes one lease. Else the group is listed for `RETURN_SECONDS`.
"""

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
