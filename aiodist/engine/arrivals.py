"""What comes of collectives from other ranks: handed to the operation that it belongs to, kept
while that was not called here yet, and answered where it is a question.

Ranks call at their own pace, so the frames of a fast one are here before the call of a slow one.
They are kept, and not left in the link: a link has one order, and what waits in it would hold up
all that is behind, of other collectives too. So that a rank cannot fill the memory of another by
that, what is kept of each is limited; and ranks send much only to those who are known to have
entered (`aiodist.engine.calls.MAX_UNSOLICITED`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from aiodist.engine import failures
from aiodist.engine.early import Ahead, Early, Key, entered_and_text, key_of, slot_and_call
from aiodist.engine.ends import Called, Ends
from aiodist.engine.operation import Operation
from aiodist.engine.roll_call import marked, unmarked
from aiodist.engine.waiting_calls import WaitingCalls
from aiodist.errors import ProtocolError
from aiodist.recorder import Records, name_of
from aiodist.transports.base import Landing, deliver
from aiodist.wire import kinds
from aiodist.work import Work

MAX_AHEAD_BYTES = 24 << 20
"""Most bytes that are kept of one rank for collectives that were not called here yet. Of payload,
ranks send at most `MAX_UNSOLICITED` unasked; the rest is for tens of thousands of collectives."""

AHEAD = 1024
"""What each thing that is kept costs of that, beside its bytes."""

MAX_VERDICT_BYTES = 16 << 20
"""Most bytes of verdicts that are kept on collectives that were not called here yet: the oldest
goes, and who calls that late has to wait for its deadline."""


class Posting(Protocol):
    """What the ranks of a host post."""

    def read(self) -> None:
        """Hands over all that is there."""
        ...


class Calling(Called, Protocol):
    """The collectives of a group, and what is said of them."""

    records: Records
    waiting: WaitingCalls

    @property
    def posting(self) -> Posting | None: ...

    @property
    def ends(self) -> Ends: ...

    @property
    def pending(self) -> list[Work[Any]]:
        """The Works of the group that are not done."""
        ...

    def find(self, key: Key) -> Operation | None:
        """The collective that is pending with this tag and number."""
        ...


class Arrivals:
    """The arrivals of one group.

    `early`: what has come of collectives that were not called here yet; `verdicts`: on those of
    them that others have given up.
    """

    def __init__(self, calls: Calling) -> None:
        self._calls = calls
        self.early: dict[Key, Early] = {}
        self.verdicts: OrderedDict[Key, failures.Verdict] = OrderedDict()
        # Verdicts on frozen tags, to be heard when the round about tags is over, and who told them.
        self._held: list[tuple[int, Key, failures.Verdict]] = []
        self._held_bytes = 0  # of these, see MAX_VERDICT_BYTES
        self._ahead_bytes: Counter[int] = Counter()  # by rank, see MAX_AHEAD_BYTES
        self._verdict_bytes = 0  # of `verdicts`, see MAX_VERDICT_BYTES

    # -- what has come of collectives that were not called here yet -------------------------------

    def is_quiet(self, key: Key) -> bool:
        """Whether nothing has come of this one."""
        return key not in self.verdicts and key not in self.early

    def take(self, key: Key) -> tuple[failures.Verdict | None, Early | None]:
        """What has come of a collective that is called here now."""
        verdict = self.verdicts.pop(key, None)
        if verdict is not None:
            self._verdict_bytes -= _size(key, verdict)
        return verdict, self._drop(key)

    def take_early(self, key: Key, src: int, call: bytes, into: memoryview) -> bool:
        """Whether the one frame of `src` for this one has come: its payload is `into` then."""
        early = self.early.get(key)
        if early is None or not early.take(src, call, into):
            return False
        if early.is_empty:
            self._drop(key)
        return True

    def replay(self, op: Operation, early: Early) -> bool:
        """Hand `op`, which has just got its number, what came before it. False: it failed."""
        # Questions first: who asked is owed an answer, also where the operation fails below.
        for src in early.inquirers:
            self._answer(src, (op.tag, op.seq), entered=True)
        for src in early.knockers:
            self._admit(src, (op.tag, op.seq))
        # All calls are compared before anything is delivered. So the error names every rank that
        # differs, and no frame of another call is written to memory of the user.
        calls = {src: call for src, (_, call) in early.grants.items()}
        calls |= {frame.src: frame.call for frame in early.frames}
        others = {src: call for src, call in calls.items() if unmarked(call) != op.call}
        if others:
            self._calls.ends.differ(op, others)
            return False
        for frame in early.frames:
            if op.done:
                return False
            if self._agrees(op, frame.src, frame.call):
                self._hand_over(op, frame)
        for src, (upto, call) in early.grants.items():
            if self._agrees(op, src, call):
                op.granted(src, upto)
        return not op.done

    # -- frames -----------------------------------------------------------------------------------

    # Each kind of frame is taken by the method of its name: `fields` is all of its header. They
    # return where the payload goes, and what goes on then, and raise ProtocolError.

    def message(self, src: int, fields: Sequence[Any], nbytes: int) -> Landing | None:
        key = key_of(fields)
        calls = self._calls
        calls.tags.contributed(*key)
        slot, call = slot_and_call(fields)
        taker = calls.waiting.takers.get(key)
        if taker is not None and (landing := taker.message(src, slot, call, nbytes)) is not None:
            return landing
        op = calls.find(key)
        if slot and calls.posting is not None and op is not None and op.lacks(src, slot):
            # The first one was posted, and that before this was sent: so it is there.
            calls.posting.read()
            op = calls.find(key)
        if op is not None:
            return op.message(src, slot, nbytes) if self._agrees(op, src, call) else None
        if not calls.tags.is_ahead(*key) or key in self.verdicts:
            return None
        # It counts towards the limit when it is here (`came`). Until then there is one of each peer
        # at most, for a link brings one payload after the other.
        return Ahead(self, key, src, slot, call, memoryview(bytearray(nbytes)))

    def grant(self, src: int, fields: Sequence[Any], nbytes: int) -> Landing | None:
        key = key_of(fields)
        calls = self._calls
        calls.tags.contributed(*key)
        upto, call = slot_and_call(fields)
        op = calls.find(key)
        if op is not None:
            return op.granted(src, upto) if self._agrees(op, src, call) else None
        if calls.tags.is_ahead(*key) and key not in self.verdicts:
            self._ahead(key, src, len(call)).grants[src] = (upto, call)
        return None

    def abort(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        key = key_of(fields)
        self._aborted(src, key, self._calls.ends.relay.hear(src, key, fields[4:]))

    def inquire(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        key = key_of(fields)
        calls = self._calls
        # What is neither pending nor ahead has ended here, so it was entered.
        entered = calls.find(key) is not None or not calls.tags.is_ahead(*key)
        self._answer(src, key, entered=entered)
        # The answer is on its way from here on, and must not meet a new collective of this number
        # at the one who asked.
        calls.tags.keep(key[0])
        if not entered:
            early = self._ahead(key, src)
            if src not in early.inquirers:
                early.inquirers += (src,)

    def knock(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        key = key_of(fields)
        calls = self._calls
        calls.tags.contributed(*key)
        if calls.find(key) is not None:
            self._admit(src, key)
        elif calls.tags.is_ahead(*key):
            early = self._ahead(key, src)
            if src not in early.knockers:
                early.knockers += (src,)

    def admit(self, src: int, fields: Sequence[Any], nbytes: int) -> Landing | None:
        op = self._calls.find(key_of(fields))
        return None if op is None else op.admitted(src)

    def status(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        op = self._calls.find(key_of(fields))
        entered, text = entered_and_text(fields)
        if op is not None and entered:
            op.heard.add(src)
        elif op is not None:
            op.seen[src] = text
            self._calls.ends.not_entered(op)

    def came(self, frame: Ahead) -> None:
        """A frame is here whose collective was not called when it began to come. Raises
        ProtocolError."""
        calls = self._calls
        op = calls.find(frame.key)
        if op is not None:  # called here while the payload was coming
            if self._agrees(op, frame.src, frame.call):
                self._hand_over(op, frame)
        # The group may have ended while the payload came, and the collective, too: then nobody
        # would ever take it from here.
        elif calls.party.ended is None and calls.tags.is_ahead(*frame.key):
            size = len(frame.memory) + len(frame.call)
            self._ahead(frame.key, frame.src, size).frames.append(frame)

    def thaw(self) -> None:
        """Tags are no longer frozen: hear the verdicts that had to wait."""
        held, self._held, self._held_bytes = self._held, [], 0
        for src, key, verdict in held:
            self._aborted(src, key, verdict)

    def clear(self) -> None:
        """The group has ended here."""
        self.early.clear()
        self._ahead_bytes.clear()
        self.verdicts.clear()
        self._verdict_bytes = 0

    def _ahead(self, key: Key, src: int, nbytes: int = 0) -> Early:
        """Where to keep something of `src`, of `nbytes`. Raises ProtocolError."""
        early = self.early.get(key)
        if early is None:
            early = self.early[key] = Early()
        tag = len(key[0]) if isinstance(key[0], (str, bytes)) else 0
        cost = AHEAD + nbytes + tag
        early.costs[src] = early.costs.get(src, 0) + cost
        self._ahead_bytes[src] += cost
        if self._ahead_bytes[src] > MAX_AHEAD_BYTES:
            raise ProtocolError(
                f"rank {src} sent over {MAX_AHEAD_BYTES} bytes for collectives not called here yet"
            )
        return early

    def _drop(self, key: Key) -> Early | None:
        """Keep nothing of this one any more."""
        early = self.early.pop(key, None)
        if early is not None:
            self._ahead_bytes.subtract(early.costs)
        return early

    def _agrees(self, op: Operation, src: int, call: bytes) -> bool:
        """Whether `src`, whose frame names that call, has called what `op` is: then it is for
        `op`."""
        if op.roll is None and call == op.call:
            return True
        if unmarked(call) != op.call:
            self._calls.ends.differ(op, {src: call})
            return False
        if op.roll is None:
            # It calls the roll, with an array on a device. Only this word tells it that the array
            # here is of the host: otherwise it would wait for a marked one until its deadline.
            self._say_called(src, op, op.call)
        else:
            op.called_with(src, on_device=call != op.call)
        return not op.done

    def call_roll(self, op: Operation) -> None:
        """Tell all others that the array of this rank is on a device: see `roll_call`."""
        party = self._calls.party
        for peer in range(party.size):
            if peer != party.rank:
                self._say_called(peer, op, marked(op.call))

    def _say_called(self, dst: int, op: Operation, call: bytes) -> None:
        """Grants nothing: it is there to say what was called."""
        self._calls.party.say(dst, kinds.GRANT, op.tag, op.seq, 0, call)

    def _hand_over(self, op: Operation, frame: Ahead) -> None:
        try:
            nbytes = len(frame.memory)
            deliver(op.message(frame.src, frame.slot, nbytes), (frame.memory,), nbytes)
        except ProtocolError as error:
            self._calls.ends.blame(op, frame.src, error)

    def _aborted(self, src: int, key: Key, verdict: failures.Verdict) -> None:
        op = self._calls.find(key)
        tags = self._calls.tags
        if op is not None:
            self._calls.ends.end(op, verdict)
        elif key[0] in tags.frozen:
            # It is of the number before, or after, the round.
            if self._held_bytes < MAX_VERDICT_BYTES:
                self._held.append((src, key, verdict))
                self._held_bytes += _size(key, verdict)
        elif tags.is_ahead(*key):
            if key not in self.verdicts:
                self.verdicts[key] = verdict
                self._verdict_bytes += _size(key, verdict)
            while self._verdict_bytes > MAX_VERDICT_BYTES:
                self._verdict_bytes -= _size(*self.verdicts.popitem(last=False))
            self._drop(key)

    # -- answers ----------------------------------------------------------------------------------

    def _answer(self, dst: int, key: Key, *, entered: bool) -> None:
        self._calls.party.say(dst, kinds.STATUS, *key, entered, _doing(self._calls))

    def _admit(self, dst: int, key: Key) -> None:
        self._calls.party.say(dst, kinds.ADMIT, *key)


def _size(key: Key, verdict: failures.Verdict) -> int:
    """What it costs, about, to keep a verdict."""
    tag = len(key[0]) if isinstance(key[0], (str, bytes)) else 0
    details = sum([AHEAD // 8 + len(text) for text in verdict.details.values()])
    return AHEAD + tag + len(verdict.text) + details


def _doing(calls: Calling) -> str:
    """What this rank is doing, in a few words."""
    for work in calls.pending:
        return f"in {name_of(work.op, work.tag, work.seq)} for {work.elapsed:.1f} s"
    return f"in no collective (last: {calls.records.last()})"
