"""What comes of collectives from other ranks: handed to the operation that it belongs to, kept
while that was not called here yet, and answered where it is a question."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aiodist.engine import failures
from aiodist.engine.early import Ahead, Early, Key, entered_and_text, key_of, slot_and_call
from aiodist.engine.hosting import Party
from aiodist.engine.operation import Operation
from aiodist.engine.roll_call import marked, unmarked
from aiodist.engine.tags import SETUP_TAG, TagCounts
from aiodist.engine.verdict_relay import VerdictRelay
from aiodist.errors import ProtocolError
from aiodist.recorder import Recorder, name_of
from aiodist.trace import Scope
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields

MAX_AHEAD_BYTES = 24 << 20
"""Most bytes that are kept of one rank for collectives that were not called here yet. Of payload,
ranks send at most `MAX_UNSOLICITED` unasked; the rest is for tens of thousands of collectives."""

AHEAD = 1024
"""What each thing that is kept costs of that, beside its bytes."""

MAX_VERDICT_BYTES = 16 << 20
"""Most bytes of verdicts that are kept on collectives that were not called here yet: the oldest
goes, and who calls that late has to wait for its deadline."""


class Matching(Party, Protocol):
    """The matching engine of one group: it has the collectives that were called here, `ops`, the
    numbers of all that were, `tags`, and what ends them."""

    ops: dict[Key, Operation]
    tags: TagCounts
    verdict_relay: VerdictRelay
    recorder: Recorder
    scope: Scope

    def differ(self, op: Operation, others: Mapping[int, bytes]) -> None:
        """Fails `op`, here and elsewhere: `others`, by rank, called something else."""
        ...

    def blame(self, op: Operation, src: int, error: ProtocolError) -> None:
        """Fails `op`, and gives `src` up: what it sent makes no sense."""
        ...

    def end(self, op: Operation, verdict: failures.Verdict) -> None:
        """Fails `op` here: another rank gave it up."""
        ...

    def not_entered(self, op: Operation) -> None:
        """Fails `op` if a rank is lost that gave no word of it: another has not called it yet."""
        ...

    def divert(self, src: int, into: memoryview | None) -> int:
        """Sends the rest of the payload that is coming from `src` elsewhere; None: to nowhere.
        Returns how many bytes of it are there already."""
        ...


class Arrivals:
    """The arrivals of one context.

    `early`: what has come of collectives that were not called here yet; `verdicts`: on those of
    them that others have given up.
    """

    def __init__(self, context: Matching) -> None:
        self._context = context
        self.early: dict[Key, Early] = {}
        self.verdicts: OrderedDict[Key, failures.Verdict] = OrderedDict()
        self._held: list[tuple[int, Key, failures.Verdict]] = []
        self._receiving: dict[int, Operation | Ahead] = {}
        self._ahead_bytes: Counter[int] = Counter()
        self._verdict_bytes = 0

    # -- what has come of collectives that were not called here yet -------------------------------

    def is_quiet(self, key: Key) -> bool:
        """Whether nothing has come of this one."""
        return key not in self.verdicts and key not in self.early

    def take(self, key: Key) -> tuple[failures.Verdict | None, Early | None]:
        """It is called here now: what has come of it."""
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
        for src in early.inquirers:
            self._answer(src, (op.tag, op.seq), entered=True)
        for src in early.knockers:
            self._admit(src, (op.tag, op.seq))
        calls = {src: call for src, (_, call) in early.grants.items()}
        calls |= {frame.src: frame.call for frame in early.frames}
        others = {src: call for src, call in calls.items() if unmarked(call) != op.call}
        if others:
            self._context.differ(op, others)
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

    def frame(self, src: int, fields: Sequence[Any], nbytes: int) -> memoryview | None:
        """A header of `src` came; where its payload goes. Raises ProtocolError."""
        kind = fields[0]
        key = key_of(fields)
        tags = self._context.tags
        if kind == kinds.MESSAGE or kind == kinds.GRANT or kind == kinds.KNOCK:
            tags.contributed(*key)
        op = self._context.ops.get(key)
        if kind == kinds.MESSAGE:
            return self._message(src, key, op, fields, nbytes)
        if nbytes:
            raise ProtocolError(f"a frame of kind {kind} has no payload")
        if kind == kinds.GRANT:
            self._grant(src, key, op, fields)
        elif kind == kinds.ABORT:
            self._aborted(src, key, self._context.verdict_relay.hear(src, key, fields[4:]))
        elif kind == kinds.INQUIRE:
            entered = op is not None or not tags.is_ahead(*key)
            self._answer(src, key, entered=entered)
            tags.keep(key[0])
            if not entered:
                early = self._ahead(key, src)
                if src not in early.inquirers:
                    early.inquirers += (src,)
        elif kind == kinds.KNOCK:
            if op is not None:
                self._admit(src, key)
            elif tags.is_ahead(*key):
                early = self._ahead(key, src)
                if src not in early.knockers:
                    early.knockers += (src,)
        elif kind == kinds.ADMIT:
            if op is not None:
                op.admitted(src)
        elif kind == kinds.STATUS:
            entered, text = entered_and_text(fields)
            if op is not None and entered:
                op.heard.add(src)
            elif op is not None:
                op.seen[src] = text
                self._context.not_entered(op)
        else:
            raise ProtocolError(f"no frame is of kind {kind!r}")
        return None

    def payload(self, src: int) -> None:
        """The payload of the last frame of `src` is complete."""
        receiver = self._receiving.pop(src, None)
        if isinstance(receiver, Operation):
            receiver.payload(src)
        elif receiver is not None:
            op = self._context.ops.get(receiver.key)
            if op is not None:  # called here while the payload was coming
                if self._agrees(op, src, receiver.call):
                    self._hand_over(op, receiver)
            elif self._context.tags.is_ahead(*receiver.key):
                size = len(receiver.data) + len(receiver.call)
                self._ahead(receiver.key, src, size).frames.append(receiver)

    def cut_off(self, src: int) -> None:
        """Of the last frame of `src` no `payload` comes: it was skipped, or nobody wants it."""
        self._receiving.pop(src, None)

    def thaw(self) -> None:
        """Tags are no longer frozen: hear the verdicts that had to wait."""
        held, self._held = self._held, []
        for src, key, verdict in held:
            self._aborted(src, key, verdict)

    def clear(self) -> None:
        """The context has ended."""
        self.early.clear()
        self._ahead_bytes.clear()
        self.verdicts.clear()
        self._verdict_bytes = 0
        self._receiving.clear()

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

    def _message(
        self, src: int, key: Key, op: Operation | None, fields: Sequence[Any], nbytes: int
    ) -> memoryview | None:
        slot, call = slot_and_call(fields)
        if op is not None:
            if not self._agrees(op, src, call):
                return None
            self._receiving[src] = op
            return op.message(src, slot, nbytes)
        if not self._context.tags.is_ahead(*key) or key in self.verdicts:
            return None
        ahead = Ahead(key, src, slot, call, bytearray(nbytes))
        self._receiving[src] = ahead
        return memoryview(ahead.data)

    def _agrees(self, op: Operation, src: int, call: bytes) -> bool:
        """Whether `src`, whose frame names that call, has called what `op` is: then it is for
        `op`."""
        if op.roll is None and call == op.call:
            return True
        if unmarked(call) != op.call:
            self._context.differ(op, {src: call})
            return False
        if op.roll is None:
            self._say_called(src, op, op.call)
        else:
            op.called_with(src, on_device=call != op.call)
        return not op.done

    def call_roll(self, op: Operation) -> None:
        """Tell all others that the array of this rank is on a device: see `roll_call`."""
        for peer in range(self._context.size):
            if peer != self._context.rank:
                self._say_called(peer, op, marked(op.call))

    def _say_called(self, dst: int, op: Operation, call: bytes) -> None:
        """Grants nothing: it is there to say what was called."""
        self._say(dst, kinds.GRANT, op.tag, op.seq, 0, call)

    def _hand_over(self, op: Operation, frame: Ahead) -> None:
        try:
            op.message(frame.src, frame.slot, len(frame.data))[:] = frame.data
            op.payload(frame.src)
        except ProtocolError as error:
            self._context.blame(op, frame.src, error)

    def _grant(self, src: int, key: Key, op: Operation | None, fields: Sequence[Any]) -> None:
        upto, call = slot_and_call(fields)
        if op is not None:
            if self._agrees(op, src, call):
                op.granted(src, upto)
        elif self._context.tags.is_ahead(*key) and key not in self.verdicts:
            self._ahead(key, src, len(call)).grants[src] = (upto, call)

    def _aborted(self, src: int, key: Key, verdict: failures.Verdict) -> None:
        op = self._context.ops.get(key)
        tags = self._context.tags
        if op is not None:
            self._context.end(op, verdict)
        elif key[0] in tags.frozen:
            # It is of the number before, or after, the round.
            if sum([_size(held, other) for _, held, other in self._held]) < MAX_VERDICT_BYTES:
                self._held.append((src, key, verdict))
        elif tags.is_ahead(*key):
            if key not in self.verdicts:
                self.verdicts[key] = verdict
                self._verdict_bytes += _size(key, verdict)
            while self._verdict_bytes > MAX_VERDICT_BYTES:
                self._verdict_bytes -= _size(*self.verdicts.popitem(last=False))
            self._drop(key)

    # -- answers ----------------------------------------------------------------------------------

    def _answer(self, dst: int, key: Key, *, entered: bool) -> None:
        self._say(dst, kinds.STATUS, *key, entered, _doing(self._context))

    def _admit(self, dst: int, key: Key) -> None:
        self._say(dst, kinds.ADMIT, *key)

    def _say(self, dst: int, kind: int, *fields: Any) -> None:
        context = self._context
        context.endpoint.send(
            context.ranks[dst], pack_fields(kind, context.id, *fields), urgent=True
        )


def _size(key: Key, verdict: failures.Verdict) -> int:
    """What it costs, about, to keep a verdict."""
    tag = len(key[0]) if isinstance(key[0], (str, bytes)) else 0
    details = sum([AHEAD // 8 + len(text) for text in verdict.details.values()])
    return AHEAD + tag + len(verdict.text) + details


def _doing(context: Matching) -> str:
    """What this rank is doing, in a few words."""
    for op in context.ops.values():
        if op.tag == SETUP_TAG:
            continue
        return f"in {name_of(op.work.op, op.tag, op.seq)} for {op.work.elapsed:.1f} s"
    return f"in no collective (last: {context.recorder.last(context.scope)})"
