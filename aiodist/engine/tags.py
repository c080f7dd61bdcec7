"""Sequence numbers by tag, and how the ranks agree to forget those of idle tags.

Collectives match by (tag, sequence number), so every rank counts the calls of each tag. A service
that uses a tag a request would count without end. Once rank 0 sees many idle tags, it leads a
round of a two-phase agreement: PREPARE names tags with their counts; each rank *freezes* those
that are idle there with the same count (a call with a frozen tag waits until the end of the round)
and says which in READY; COMMIT names those that all ranks have frozen: they are forgotten, so the
next call with such a tag is number 0 again. A rank that gets a contribution to a number that it has
counted already, for a tag that it has frozen, knows that the tag was committed and forgets it, too:
COMMIT is on its way.

Always kept are no tag at all, and tags on which a collective failed, or that were inquired about:
words of others may still be on their way then, and must not meet a new collective of that number.

**Why a number may be forgotten at all.** It tells the collectives of a tag apart while anything of
them may be on its way. A tag is idle at count c on a rank when its collectives 0 … c - 1 have all
ended there, and well. Once it is idle at the same count on all ranks, all of these have ended
everywhere. Then no frame of their data is on its way: in a plan each Send has its Recv (the
simulator refuses others), so who has come to the end of a plan has received all that was sent to
it; and grants are as many as frames, so who has sent the last one has got the last grant. Nothing
is left that the numbers tell apart, if all forget together.

**What freezes, and why.** They cannot forget at one moment, and a rank that called number c while
another took it for number 0 would wait for ever. Between the moment when a rank says that a tag is
idle at c, and the moment when it learns what came of that, it must not change::

    rank 0   PREPARE a: 3 ─┐      ┌──────┐                  ┌─ COMMIT a: all have ─┐  calls a: 0
             a is frozen   │      │      │                  │  a is forgotten      │      │
    rank 1                 ├─> READY: yes, frozen ──────────┤                      ├─> forgets, too
                           │                                │                      │      │ frame
    rank 2                 └─> READY: yes, frozen ──────────┘      calls a: waits ─│──────▼─ a: 0
                                                                                   └─> number 0

Calls with a frozen tag wait, for one round trip to rank 0. Tags that are not frozen are called as
ever, and so is one that was named, where the rank has answered that it is not idle at that count:
one such answer, and all keep it.

**Why no frame is taken for another.** A rank that has heard COMMIT may call number 0 at once, and
its frames may overtake the COMMIT for a third rank, for they travel on other links. There the tag
is frozen at c, and all numbers below c have ended everywhere: so a contribution to one of them
cannot be old. It is a new one, and proves that COMMIT is on its way: the rank forgets at once
(`contributed`). A contribution to number c or above is kept as of a collective that was not called
here yet, and is of that number in either case: the new one after a COMMIT, the old one without. A
verdict on a frozen tag is of one or the other, which only the end of the round tells: it is held
back until then (`Arrivals._aborted`).

**Verdicts, questions, losses.** Verdicts are sent of collectives that fail: their tag is kept by
who gave up, and that rank alone is enough for a no. Who inquires keeps the tag before it asks, and
whoever is asked keeps it, too, so that no answer comes to a new collective. When a rank is lost,
the round will not end: it is called off, and all keep what they have not forgotten. After a loss
the group does no further collective, so it does not matter whether all have forgotten the same.
There is no further round either, for it would freeze its tags for ever; and words of the one that
was called off may come from ranks that hear of the loss later: they are dropped.

Pure: what is to be sent is returned as (rank, fields).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiodist.errors import ProtocolError

SETUP_TAG = b"memory"
"""The tag of the collectives by which ranks agree on shared memory."""

MANY = 1024
"""Idle tags that rank 0 keeps before it starts a round."""
BATCH = 256
"""Most tags of a round."""
BATCH_BYTES = 16 * 1024
"""Most bytes of the tags of a round, so that PREPARE fits in a header."""

PREPARE, READY, COMMIT = range(3)

Sends = list[tuple[int, tuple[Any, ...]]]


class TagCounts:
    """The numbers of one rank in one group."""

    def __init__(self, rank: int, size: int) -> None:
        self.frozen: set[object] = set()  # tags whose count must not change until the round is over
        self._rank = rank
        self._size = size
        self.numbers: dict[object, int] = {}  # by tag, that of its next collective: its count
        self._pending: dict[object, int] = {}  # by tag, how many collectives have not ended here
        self._kept: set[object] = set()  # tags whose number is never forgotten
        # Tags that may be forgotten, the oldest first; and the count of each when it was put there.
        self.idle: dict[object, int] = {}
        self._forgotten = 0  # collectives of tags that were forgotten: they count as called
        # The round under way: its number and tags; at rank 0 also who has answered, and what.
        self._round = 0
        self._named: list[object] = []  # the tags; empty: no round is under way
        self._answers: dict[int, Sequence[bool]] = {}  # by rank: whether it has frozen each of them
        self._disbanded = False  # a rank was lost, so there are no more rounds

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def called(self) -> int:
        """How many collectives were called, with any tag. Any thread may ask."""
        # The list is made in one step, so the loop may add a tag meanwhile in its own thread. To
        # sum the values themselves would raise then.
        return self._forgotten + sum(list(self.numbers.values()))

    def take(self, tag: object) -> int:
        """The number of the collective that is called now."""
        seq = self.numbers.get(tag, 0)
        self.numbers[tag] = seq + 1
        self._pending[tag] = self._pending.get(tag, 0) + 1
        self.idle.pop(tag, None)
        return seq

    def pass_over(self, tag: object) -> None:
        """A collective was called that is over already."""
        self.numbers[tag] = self.numbers.get(tag, 0) + 1
        # One that is there stays where it is: this is done in each call, `propose` is not.
        if tag is not None and tag not in self.idle:
            self.passed(tag)

    def passed(self, tag: object) -> None:
        """Do what is left of `pass_over` once the number is counted."""
        if tag not in self._pending and tag not in self._kept:
            self.idle.setdefault(tag, self.numbers[tag])

    def upcoming(self, tag: object) -> int:
        """The number of the next collective."""
        return self.numbers.get(tag, 0)

    def release(self, tag: object, *, failed: bool) -> None:
        """A collective with `tag` has ended here."""
        if failed:
            self._kept.add(tag)
        left = self._pending[tag] - 1
        if left:
            self._pending[tag] = left
            return
        del self._pending[tag]
        if tag is not None and tag not in self._kept:
            self.idle[tag] = self.numbers[tag]

    def keep(self, tag: object) -> None:
        """Never forget the number of `tag`."""
        self._kept.add(tag)
        self.idle.pop(tag, None)

    def is_ahead(self, tag: object, seq: int) -> bool:
        """Whether number `seq` of `tag` was not called here yet."""
        return seq >= self.numbers.get(tag, 0)

    def contributed(self, tag: object, seq: int) -> None:
        """A contribution to number `seq` of `tag` has come."""
        if tag in self.frozen and seq < self.numbers.get(tag, 0):
            self._forget(tag)

    # -- rounds -----------------------------------------------------------------------------------

    @property
    def many(self) -> bool:
        """Whether there are so many idle tags that something should be done about it."""
        return len(self.idle) > MANY

    def propose(self) -> Sends:
        """At rank 0: start a round if there are many idle tags."""
        if self._rank or self._named or not self.many or self._disbanded:
            return []
        named: list[object] = []
        room = BATCH_BYTES
        used: list[object] = []
        for tag, count in self.idle.items():
            if self.numbers[tag] != count:  # called since then
                used.append(tag)
                continue
            room -= 16 + (len(tag) * 4 if isinstance(tag, (str, bytes)) else 0)
            if room < 0 or len(named) == BATCH:
                break
            named.append(tag)
        for tag in used:  # they come last from now on
            del self.idle[tag]
            self.idle[tag] = self.numbers[tag]
        if not named:
            return []
        self._round += 1
        self._named = named
        self._answers = {0: self._freeze(named, [self.numbers[tag] for tag in named])}
        if self._size == 1:
            self._commit(self._answers[0])
            return []
        fields = (PREPARE, self._round, named, [self.numbers[tag] for tag in named])
        return [(rank, fields) for rank in range(1, self._size)]

    def heard(self, src: int, fields: Sequence[Any]) -> tuple[Sends, bool]:
        """A word of `src`. Returns what to send, and whether the frozen tags are free again."""
        step, number, *rest = _checked(fields)
        if self._disbanded:
            return [], False  # who sent it has not heard of the loss yet
        if step == PREPARE and src == 0 and self._rank:
            named, counts = rest
            # Rank 0 leads one round at a time, and its words come in order: the round before is
            # over.
            self._round, self._named = number, named
            frozen = self._freeze(named, counts)
            return [(0, (READY, number, frozen))], False
        if step == READY and not self._rank and number == self._round and self._named:
            (answer,) = rest
            if len(answer) != len(self._named) or src in self._answers:
                raise ProtocolError(f"an answer of rank {src} that fits no round")
            self._answers[src] = answer
            if len(self._answers) < self._size:
                return [], False
            agreed = [all(each) for each in zip(*self._answers.values(), strict=True)]
            self._commit(agreed)
            fields = (COMMIT, number, agreed)
            return [(rank, fields) for rank in range(1, self._size)], True
        if step == COMMIT and src == 0 and self._rank and number == self._round:
            (agreed,) = rest
            if len(agreed) != len(self._named):
                raise ProtocolError("a commit that fits no round")
            self._commit(agreed)
            return [], True
        raise ProtocolError(f"a word of rank {src} about tags that fits no round")

    def disband(self) -> None:
        """A rank is lost: the round will not end, and there will be no other one."""
        self._disbanded = True
        self._end()

    def _freeze(self, named: Sequence[object], counts: Sequence[int]) -> list[bool]:
        frozen: list[bool] = []
        for tag, count in zip(named, counts, strict=True):
            same = tag in self.idle and self.numbers[tag] == count
            if same:
                self.frozen.add(tag)
            frozen.append(same)
        return frozen

    def _commit(self, agreed: Sequence[bool]) -> None:
        for tag, all_have in zip(self._named, agreed, strict=True):
            if all_have and tag in self.frozen:
                self._forget(tag)
        self._end()

    def _forget(self, tag: object) -> None:
        self.frozen.discard(tag)
        self._forgotten += self.numbers.pop(tag, 0)
        self.idle.pop(tag, None)

    def _end(self) -> None:
        self.frozen.clear()
        self._named = []
        self._answers = {}


def _checked(fields: Sequence[Any]) -> Sequence[Any]:
    step = fields[0] if fields else None
    if step == PREPARE and len(fields) == 4:
        named, counts = fields[2:]
        sound = (
            type(named) is list
            and type(counts) is list
            and 0 < len(named) == len(counts) <= BATCH
            and all(tag is None or type(tag) in (str, int, bytes) for tag in named)
            and all(type(count) is int for count in counts)
        )
    elif step in (READY, COMMIT) and len(fields) == 3:
        sound = type(fields[2]) is list and all(type(flag) is bool for flag in fields[2])
    else:
        sound = False
    if not sound or type(fields[1]) is not int:
        raise ProtocolError("malformed TAGS frame")
    return fields
