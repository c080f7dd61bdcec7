"""Sequence numbers by tag, and how the ranks agree to forget those of idle tags.

Collectives match by (tag, sequence number), so every rank counts the calls of each tag. If a
service uses a new tag for each request, these counts would grow without end. So once rank 0 sees
many idle tags, it leads a round of a two-phase agreement:

1. PREPARE names tags with their counts.
2. Each rank *freezes* the named tags that are idle there with the same count, and says in READY
   which ones. A call with a frozen tag waits until the round is over.
3. COMMIT names the tags that all ranks have frozen. They are forgotten, so the next call with such
   a tag has number 0.

If a contribution comes for a number that a rank has counted already, and the tag is frozen, then
the tag was committed and COMMIT is on its way. The rank forgets the tag at once.

Calls without a tag are never forgotten, nor are tags on which a collective failed or was inquired
about. Messages about these may still be on their way, and must not meet a new collective of the
same number. A round does not help here, because READY comes only behind what a rank has sent to
rank 0. What it has sent to a third rank may come after COMMIT.

**Why may a number be forgotten?** It tells the collectives of a tag apart while a frame of them may
be in flight. A tag is idle at count c on a rank if its collectives 0 … c - 1 have all ended well
there. If it is idle at the same count on all ranks, they have ended everywhere. Then none of their
data is in flight. A plan has a Recv for each Send (the simulator checks that), so a rank at the end
of a plan has received everything. There are as many grants as frames, so a rank that has sent its
last frame has received the last grant.

**Why are tags frozen?** Ranks cannot forget at the same moment. If one rank called number c and
another one took that call for number 0, both would wait for ever. So a tag must not change between
the moment when a rank says that it is idle at c, and the moment when the rank learns the result::

    rank 0   PREPARE a: 3 ─┐      ┌──────┐                  ┌─ COMMIT a: all have ─┐  calls a: 0
             a is frozen   │      │      │                  │  a is forgotten      │      │
    rank 1                 ├─> READY: yes, frozen ──────────┤                      ├─> forgets, too
                           │                                │                      │      │ frame
    rank 2                 └─> READY: yes, frozen ──────────┘      calls a: waits ─│──────▼─ a: 0
                                                                                   └─> number 0

Calls with a frozen tag wait for one round trip to rank 0. Other tags are not delayed. If a rank
answers that a tag is not idle at that count, all ranks keep the tag.

**Why is no frame taken for another one?** A rank may call number 0 as soon as it has COMMIT. Its
frames may reach a third rank before COMMIT does, because they use another link. On that rank the
tag is frozen at c, and all numbers below c have ended everywhere. So a contribution to one of them
is new, and proves that COMMIT is on its way. The rank forgets the tag at once (`contributed`).

A contribution to number c or above is kept as one for a collective that was not called here yet.
That is right in both cases: it is new if COMMIT comes, and old if not. A verdict on a frozen tag
may also be either. Only the end of the round tells, so it is held until then (`Arrivals._aborted`).

**Verdicts, questions, losses.** The rank that gives up a collective keeps its tag, and its answer
alone is enough for all to keep it. A rank that inquires keeps the tag before it asks, and the asked
rank keeps it, too, so that no answer meets a new collective.

If a rank is lost, the round cannot end. It is called off, and all ranks keep what they have not
forgotten. The group does no further collective after a loss, so it does not matter if ranks have
forgotten different tags. There is no further round, because its tags would stay frozen for ever.
Late messages of the round are dropped, because some ranks hear of the loss later.

This module is pure: it returns what to send as (rank, fields).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiodist.errors import ProtocolError

SETUP_TAG = b"memory"
"""The tag of the collectives by which ranks agree on shared memory."""

MANY = 1024
"""How many idle tags rank 0 keeps before it starts a round."""
BATCH = 256
"""The most tags of a round."""
BATCH_BYTES = 16 * 1024
"""The most bytes of the tags of a round, so that PREPARE fits in a header."""

PREPARE, READY, COMMIT = range(3)

Sends = list[tuple[int, tuple[Any, ...]]]


class TagCounts:
    """The numbers of one rank in one group."""

    def __init__(self, rank: int, size: int) -> None:
        self.frozen: set[object] = set()  # tags whose count must not change in this round
        self._rank = rank
        self._size = size
        self.numbers: dict[object, int] = {}  # by tag: the number of the next call, its count
        self._pending: dict[object, int] = {}  # by tag: how many collectives have not ended here
        self._kept: set[object] = set()  # tags whose number is never forgotten
        # Tags that may be forgotten, the oldest first, each with its count at that time.
        self.idle: dict[object, int] = {}
        # The last call that was `begun`: its tag and number.
        self._begun: tuple[object, int] | None = None
        self._forgotten = 0  # the calls of forgotten tags, which still count as called
        # The current round: its number and tags, and at rank 0 the answers.
        self._round = 0
        self._named: list[object] = []  # empty: there is no round
        self._answers: dict[int, Sequence[bool]] = {}  # by rank: which tags it has frozen
        self._disbanded = False  # a rank was lost, so there are no more rounds

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def called(self) -> int:
        """How many collectives were called, with any tag. Any thread may ask."""
        # The list is made in one step. A sum over the dict itself would raise if the loop added a
        # tag meanwhile in its own thread.
        return self._forgotten + sum(list(self.numbers.values()))

    def begin(self, tag: object) -> None:
        """Note that a call begins that reads links before it takes its number.

        Until then, this rank has entered it, and its tag is not idle.
        """
        self.idle.pop(tag, None)
        self._begun = tag, self.numbers.get(tag, 0)

    def take(self, tag: object) -> int:
        """Return the number of the collective that is called now."""
        seq = self.numbers.get(tag, 0)
        self.numbers[tag] = seq + 1
        self._pending[tag] = self._pending.get(tag, 0) + 1
        self.idle.pop(tag, None)
        return seq

    def pass_over(self, tag: object) -> None:
        """Count a collective that is over already."""
        self.numbers[tag] = self.numbers.get(tag, 0) + 1
        # A tag that is idle keeps its place, because each call does this, and `propose` sorts it
        # out.
        if tag is not None and tag not in self.idle:
            self.passed(tag)

    def passed(self, tag: object) -> None:
        """Do the rest of `pass_over`, after the number was counted."""
        if tag not in self._pending and tag not in self._kept:
            self.idle.setdefault(tag, self.numbers[tag])

    def upcoming(self, tag: object) -> int:
        """Return the number of the next collective."""
        return self.numbers.get(tag, 0)

    def release(self, tag: object, *, failed: bool) -> None:
        """Note that a collective with `tag` has ended here."""
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
        """Return whether number `seq` of `tag` was not called here yet."""
        return seq >= self.numbers.get(tag, 0)

    def has_entered(self, tag: object, seq: int) -> bool:
        """Return whether number `seq` of `tag` was called here, even if it is not counted yet."""
        return not self.is_ahead(tag, seq) or (tag, seq) == self._begun

    def contributed(self, tag: object, seq: int) -> None:
        """Note that a contribution to number `seq` of `tag` has come."""
        if tag in self.frozen and seq < self.numbers.get(tag, 0):
            self._forget(tag)

    # -- rounds -----------------------------------------------------------------------------------

    @property
    def many(self) -> bool:
        """Whether there are enough idle tags for a round."""
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
        """Handle a message of `src`. Return what to send, and whether the frozen tags are free
        again.

        Raises ProtocolError.
        """
        step, number, *rest = _checked(fields)
        if self._disbanded:
            return [], False  # `src` has not heard of the loss yet
        if step == PREPARE and src == 0 and self._rank:
            named, counts = rest
            # Rank 0 leads one round at a time and its messages keep their order, so the last round
            # is over.
            self._round, self._named = number, named
            frozen = self._freeze(named, counts)
            return [(0, (READY, number, frozen))], False
        if step == READY and not self._rank and number == self._round and self._named:
            (answer,) = rest
            if len(answer) != len(self._named) or src in self._answers:
                raise ProtocolError(f"rank {src} sent an answer about tags that fits no round")
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
                raise ProtocolError("rank 0 sent a commit about tags that fits no round")
            self._commit(agreed)
            return [], True
        raise ProtocolError(f"rank {src} sent a message about tags that fits no round")

    def disband(self) -> None:
        """Have no further round, because a rank is lost, so that the current one will not end."""
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
        if self._begun is not None and self._begun[0] == tag:
            self._begun = None
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
