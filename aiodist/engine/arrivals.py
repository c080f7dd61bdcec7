"""Frames of collectives that come from other ranks.

A frame is handed to the operation that it belongs to. If this rank has not called that collective
yet, the frame is kept. Questions are answered.

Ranks call at their own pace, so the frames of a fast rank arrive before a slow rank has called.
They cannot stay in the link, because a link keeps one order: a frame that waits there would hold up
the frames of other collectives.

The memory for kept frames is limited for each peer, so that no rank can fill the memory of another.
Also, a rank sends only little to a peer that may not have entered
(`aiodist.engine.calls.MAX_UNSOLICITED`).
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
"""The most bytes that are kept of one rank for collectives that this rank has not called. Ranks
send at most `MAX_UNSOLICITED` bytes of payload unasked. The rest is for tens of thousands of
collectives."""

AHEAD = 1024
"""What each kept thing adds to that limit, besides its bytes."""

MAX_VERDICT_BYTES = 16 << 20
"""The most bytes of verdicts that are kept on collectives that this rank has not called. Above it
the oldest verdict is dropped. A call that comes so late has to wait for its deadline."""


class PostedArrivals(Protocol):
    """The collectives with a tag that ranks of a host post in shared memory."""

    def read(self) -> None:
        """Takes everything that was posted."""
        ...


class Calling(Called, Protocol):
    """The collectives of a group, as this module needs them."""

    records: Records
    waiting: WaitingCalls

    @property
    def posting(self) -> PostedArrivals | None: ...

    @property
    def ends(self) -> Ends: ...

    @property
    def pending(self) -> list[Work[Any]]:
        """The Works of the group that are not done."""
        ...

    def find(self, key: Key) -> Operation | None:
        """Returns the pending collective with this tag and number."""
        ...


class Arrivals:
    """What arrives for the collectives of one group.

    `early` has what came for collectives that were not called here yet. `verdicts` has the verdicts
    on those that another rank has given up.
    """

    def __init__(self, calls: Calling) -> None:
        self._calls = calls
        self.early: dict[Key, Early] = {}
        self.verdicts: OrderedDict[Key, failures.Verdict] = OrderedDict()
        # Verdicts on frozen tags, with the ranks that told them. They wait for the end of the round
        # about tags.
        self._held: list[tuple[int, Key, failures.Verdict]] = []
        self._held_bytes = 0  # of `_held`, see MAX_VERDICT_BYTES
        self._ahead_bytes: Counter[int] = Counter()  # by rank, see MAX_AHEAD_BYTES
        self._verdict_bytes = 0  # of `verdicts`, see MAX_VERDICT_BYTES

    # -- what has come of collectives that were not called here yet -------------------------------

    def is_quiet(self, key: Key) -> bool:
        """Return whether nothing has come for this collective."""
        return key not in self.verdicts and key not in self.early

    def take(self, key: Key) -> tuple[failures.Verdict | None, Early | None]:
        """Remove and return what has come for a collective that is called now."""
        verdict = self.verdicts.pop(key, None)
        if verdict is not None:
            self._verdict_bytes -= _size(key, verdict)
        return verdict, self._drop(key) if key in self.early else None

    def take_early(self, key: Key, src: int, call: bytes, into: memoryview) -> bool:
        """Copy the one early frame of `src` to `into`. False: there is no such frame."""
        early = self.early.get(key)
        if early is None or not early.take(src, call, into):
            return False
        if early.is_empty:
            self._drop(key)
        return True

    def replay(self, op: Operation, early: Early) -> bool:
        """Hand everything that came early to `op`, which has just got its number. False: `op`
        failed."""
        # Answer questions first, because their senders need an answer even if the operation fails
        # below.
        for src in early.inquirers:
            self._answer(src, (op.tag, op.seq), entered=True)
        for src in early.knockers:
            self._admit(src, (op.tag, op.seq))
        # Compare all calls before anything is delivered. Then the error names every rank that
        # differs, and no frame of another call is written to the user's memory.
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

    # Each kind of frame has a method of its name. `fields` is the whole header. A method returns
    # the landing of the payload, and raises ProtocolError.

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
            # The first frame was posted before this one was sent, so it must be there.
            calls.posting.read()
            op = calls.find(key)
        if op is not None:
            return op.message(src, slot, nbytes) if self._agrees(op, src, call) else None
        if not calls.tags.is_ahead(*key) or key in self.verdicts:
            return None
        # It counts towards the limit only when it has arrived (`came`). Until then each peer has at
        # most one such frame, because a link brings one payload after the other.
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
        # A collective that is neither pending nor ahead has ended here, so this rank had entered
        # it.
        entered = calls.find(key) is not None or calls.tags.has_entered(*key)
        self._answer(src, key, entered=entered)
        # The number must not be used again while the answer is in flight: the answer could meet a
        # new collective of this number.
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
        """Take a complete frame whose collective was not called when the frame began. Raises
        ProtocolError."""
        calls = self._calls
        op = calls.find(frame.key)
        if op is not None:  # called while the payload came
            if self._agrees(op, frame.src, frame.call):
                self._hand_over(op, frame)
        # Group and collective may have ended while the payload came. Then the frame would stay here
        # for ever.
        elif calls.party.ended is None and calls.tags.is_ahead(*frame.key):
            size = len(frame.memory) + len(frame.call)
            self._ahead(frame.key, frame.src, size).frames.append(frame)

    def thaw(self) -> None:
        """Handle the verdicts that had to wait, because tags are no longer frozen."""
        held, self._held, self._held_bytes = self._held, [], 0
        for src, key, verdict in held:
            self._aborted(src, key, verdict)

    def clear(self) -> None:
        """Drop everything, because the group has ended here."""
        self.early.clear()
        self._ahead_bytes.clear()
        self.verdicts.clear()
        self._verdict_bytes = 0

    def _ahead(self, key: Key, src: int, nbytes: int = 0) -> Early:
        """Return the place for something of `src` with `nbytes`, and count it. Raises
        ProtocolError."""
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
        """Remove and return everything that is kept for this collective."""
        early = self.early.pop(key, None)
        if early is not None:
            self._ahead_bytes.subtract(early.costs)
        return early

    def _agrees(self, op: Operation, src: int, call: bytes) -> bool:
        """Check that `src` has called the same as `op`. If so, its frame is for `op`."""
        if op.roll is None and call == op.call:
            return True
        if unmarked(call) != op.call:
            self._calls.ends.differ(op, {src: call})
            return False
        if op.roll is None:
            # `src` calls the roll, because its array is on a device. This answer tells it that the
            # array here is on the host. Without it, `src` would wait for a marked answer until its
            # deadline.
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
        """Send a GRANT that grants nothing. It only says what was called."""
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
            # It is about the number before the round, or after it.
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
    """Return roughly how many bytes it takes to keep a verdict."""
    tag = len(key[0]) if isinstance(key[0], (str, bytes)) else 0
    details = sum([AHEAD // 8 + len(text) for text in verdict.details.values()])
    return AHEAD + tag + len(verdict.text) + details


def _doing(calls: Calling) -> str:
    """Say in a few words what this rank is doing."""
    for work in calls.pending:
        return f"in {name_of(work.op, work.tag, work.seq)} for {work.elapsed:.1f} s"
    return f"in no collective (last: {calls.records.last()})"
