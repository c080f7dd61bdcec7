"""The last operations of one rank, in fixed memory: what the flight recorder shows.

An operation that has to wait is noted when it starts, and again when it ends. What is done within
its call is noted once, as a plain tuple; and so is one of many that wait, when it is done.
`Records` is how one group says what goes on in it: to the recorder of its rank, which all groups
share, and to a hook, if one was installed when it was made.

Whoever measures operations (metrics, say) is an `Observer` of the recorder. Without one, nothing
looks whether there is one: `add` is another function once there is. A trace is not even that: it
has the ring remember more (`Recorder.keep`). So an operation takes the same steps with a trace as
without one.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from itertools import islice
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from aiodist.errors import (
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    in_words,
)
from aiodist.trace import Scope, bound
from aiodist.work import Work

KEPT = 500
"""How many operations of a rank are remembered."""

MESSAGES = frozenset({"send", "ssend", "recv", "probe"})
"""The operations of point to point: all others are collectives."""

TELLING = (PeerLostError, CollectiveTimeoutError, MismatchError, ProtocolError)
"""After these errors one wants to know what came before."""

MOST_TEXT = 200
"""Most characters of a call, and of an error, that are kept."""


class Entry(NamedTuple):
    """One operation. `started` is of the loop's clock; `seconds` it took, or takes until now.

    `state`: "waits", "done", "failed" or "cancelled". `call`: what all ranks must agree on, with
    dtype and shape; of a message, the first of its arrays ("": not known). `peer`: the other rank
    of a message; None: any. `plans`: the algorithms of its phases, in order, as far as known.
    """

    scope: Scope
    op: str
    tag: Any
    seq: int | None
    call: str
    peer: int | None
    nbytes: int
    started: float
    seconds: float
    state: str
    error: str
    plans: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What it is called: "all_reduce tag 'loss' #57", "send tag 0 to rank 3"."""
        if self.op in MESSAGES:
            whom = "any rank" if self.peer is None else f"rank {self.peer}"
            return f"{self.op} tag {self.tag!r} {'to' if self.op == 'send' else 'from'} {whom}"
        return name_of(self.op, self.tag, self.seq)


Where = tuple[str, int, int, int, bytes]
"""A `Scope`, as a plain tuple."""
AtOnce = tuple[Where, str, Any, int | None, bytes, int | None, int, float, float]
"""Done within the call: the fields of an `Entry` up to `started`, and when it ended.

A plain tuple of nothing but plain values: the garbage collector finds that there is nothing in it
to follow, and never looks at it again. Of a tuple with a `Scope` in it, which is a class, it would
not; and of 200,000 of these, it takes milliseconds to look at all."""
Add = Callable[[AtOnce], None]

_Ended = tuple[str, Any, int | None, int, float, float | None, int | None]
"""Of a work that has ended: op, tag, seq, bytes, start, end, source."""


class Observer(Protocol):
    """Hears of operations that end, in the thread of their loop. Quick, and never raises."""

    def after(self, add: Add) -> Add:
        """Returns what does `add`, and hears of what was done within its call, which ends now. One
        function for both, as each call of one takes time of the user's."""
        ...

    def ended(self, record: Record, /) -> None:
        """An operation that had to wait has ended, in whatever way."""
        ...


MOST_PLANS = 10_000
"""Of so many calls the plan is known to observers, see `Records.planned`; and of so many groups the
ranks."""

FEW = 4
"""Most arrays of a message that are shown."""


class Record:
    """An operation that was not done within its call."""

    __slots__ = (
        "_recorder", "_work", "arrays", "call", "context", "ended", "error", "peer", "plans",
        "scope", "state",
    )  # fmt: skip

    def __init__(
        self, recorder: Recorder, scope: Scope, work: Work[Any], call: bytes, peer: int | None
    ) -> None:
        self.scope = scope  # which group it is of
        self.call = call  # what all ranks must agree on, in words
        self.peer = peer  # the other rank of a message; None: any, or all
        self.arrays: Sequence[object] = ()  # those of a message; as texts, dtype and shape
        self.state = "waits"  # "waits", "done", "failed" or "cancelled"
        self.error = ""  # what it failed with, in one line
        # The algorithms of its phases, in order. No list, which the garbage collector would follow.
        self.plans: tuple[str, ...] = ()
        # Of the call, for observers; None: there is none.
        self.context = copy_context() if recorder.observers else None
        self._recorder = recorder  # is told where it failed
        self._work: Work[Any] | None = work
        self.ended: _Ended | None = None  # what is left of `_work` once that has ended

    def end(self, state: str, error: BaseException | None = None) -> None:
        """The operation has ended. `state`: "done", "failed" or "cancelled"."""
        assert self._work is not None
        self.ended = _of(self._work)
        self._work = None  # it may hold an array
        self.state = state
        if error is not None:
            self._recorder.failures[type(error)] += 1
            self.error = in_words(error).partition("\n")[0][:MOST_TEXT]
            if isinstance(error, TELLING):
                self._recorder.failed(error)
        for observer in self._recorder.observers:
            observer.ended(self)
        self.context = None  # it may hold anything of the program's

    def carries(self, arrays: Sequence[object]) -> None:
        """The operation is a message with these arrays, whose texts are their dtype and shape."""
        self.arrays = arrays[:FEW]

    def entry(self, now: float) -> Entry:
        """What is known of it by now."""
        work = self._work  # once: it may end meanwhile, where this is another thread
        known = self.ended if work is None else _of(work)
        assert known is not None
        op, tag, seq, nbytes, started, ended, source = known
        seconds = (now if ended is None else ended) - started
        peer = self.peer if source is None else source
        number = seq if seq is not None and seq >= 0 else None
        call = _text(self.call) or ", ".join(map(str, self.arrays))[:MOST_TEXT]
        return Entry(
            self.scope, op, tag, number, call, peer, nbytes, started,
            max(0.0, seconds), self.state, self.error, tuple(dict.fromkeys(self.plans)),
        )  # fmt: skip


def _of(work: Work[Any]) -> _Ended:
    return work.op, work.tag, work.seq, work.nbytes, work._started, work._ended, work.source


class Recorder:
    """The ring of one rank, over all of its groups and epochs. `failed` is called after one of
    the errors `TELLING`.

    `add`: takes an `AtOnce`.
    """

    def __init__(self) -> None:
        self.failed: Callable[[BaseException], None] = lambda error: None
        self._ring: deque[AtOnce | Record] = deque(maxlen=KEPT)
        self.add: Add = self._ring.append
        self.observers: tuple[Observer, ...] = ()
        self.keeps = False  # see `keep`
        self.failures: Counter[type[BaseException]] = Counter()
        """What operations have failed with."""
        self.plans: dict[tuple[bytes, bytes], str] = {}
        """What observers are told of calls: their algorithms, by the id of the group."""
        self.roots: dict[bytes, Sequence[int]] = {}
        """Where more is kept: who the ranks of a group are, by its id."""
        self.all: WeakSet[Records] = WeakSet()
        """Those of all groups, which call `add`."""

    def observe(self, observer: Observer) -> None:
        """Let `observer` hear of all that ends from now on."""
        self.observers = (*self.observers, observer)
        self._tell()

    def keep(self, most: int) -> None:
        """Remember so many operations from now on, and of all their algorithms and groups."""
        self._ring = deque(self._ring, maxlen=most)
        self.keeps = True
        for records in self.all:
            self.know(records)
        self._tell()

    def know(self, records: Records) -> None:
        """These are of a group that is there."""
        if self.keeps and len(self.roots) < MOST_PLANS:
            self.roots[records.scope.id] = records.roots

    def _tell(self) -> None:
        self.add = self._ring.append
        for observer in self.observers:
            self.add = observer.after(self.add)
        for records in self.all:
            records.add = self.add

    def begin(
        self, scope: Scope, work: Work[Any], call: bytes = b"", peer: int | None = None
    ) -> None:
        """`work` was started, and says itself when it ends."""
        work.record = record = Record(self, scope, work, call, peer)
        self._ring.append(record)

    def entries(
        self, now: float, pending: Iterable[Work[Any]] = (), most: int = KEPT
    ) -> Iterator[Entry]:
        """The last `most` that are remembered, in the order of the calls; before them those of the
        works `pending` that started too long ago."""
        ring = self._last(most)
        known = {id(one) for one in ring}
        for work in {id(work): work for work in pending}.values():
            if isinstance(work.record, Record) and id(work.record) not in known:
                yield work.record.entry(now)
        for one in ring:
            yield one.entry(now) if isinstance(one, Record) else self.entry_of(one)
        groups: list[Records] = []
        with contextlib.suppress(RuntimeError):  # the loop goes on meanwhile, in its thread
            groups = list(self.all)
        for records in groups:
            for work, call in records.waiting():
                if work.record is None:
                    yield Record(self, records.scope, work, call, None).entry(now)

    def entry_of(self, one: AtOnce) -> Entry:
        """What is known of what was done within its call."""
        where, op, tag, seq, call, peer, nbytes, started, ended = one
        plan = self.plans.get((where[-1], call))
        return Entry(
            Scope(*where), op, tag, seq, _text(call), peer, nbytes, started, ended - started,
            "done", "", () if plan is None else (plan,),
        )  # fmt: skip

    def _last(self, most: int) -> list[AtOnce | Record]:
        # In one go, as the loop may go on meanwhile, in its thread.
        return list(islice(reversed(self._ring), most))[::-1]

    def last(self, scope: Scope) -> str:
        """What became of the last collective that ended; safe to call from any thread."""
        ended: tuple[Any, ...] | None
        for one in reversed(self._last(KEPT)):
            if isinstance(one, Record):
                where: Where | Scope = one.scope
                ended, state = one.ended, one.state
            else:
                where, ended, state = one[0], one[1:4], "done"
            # No entries are made: whoever asks again and again must not cost much.
            if where == scope and state != "waits" and ended is not None:
                op, tag, seq = ended[:3]
                if op not in MESSAGES:
                    return f"{name_of(op, tag, seq)} {state}"
        return "nothing yet" if len(self._ring) < KEPT else f"none of the last {KEPT} operations"


class Records:
    """Those who hear of the operations of one group, which they know by its `scope`. `roots`: of
    its ranks."""

    def __init__(self, recorder: Recorder, scope: Scope, roots: Sequence[int] = ()) -> None:
        self.scope = scope
        self.roots = roots
        # For `add`.
        self.where: Where = scope.group, scope.epoch, scope.rank, scope.size, scope.id
        self.trace = bound(scope)  # hears of each operation; None: nobody listens
        self.add = recorder.add  # see `Recorder`
        # The Works that wait without a record of their own, and what was called: see `waits`.
        self.waiting: Callable[[], Sequence[tuple[Work[Any], bytes]]] = tuple
        self._recorder = recorder
        self.unseen: WeakSet[Work[Any]] = WeakSet()
        """Works of the program's, of which some have not been looked at: see `Work.for_user`."""
        recorder.all.add(self)
        recorder.know(self)

    def begin(self, work: Work[Any], call: bytes = b"", peer: int | None = None) -> None:
        """`work` was started, and says itself when it ends."""
        self._recorder.begin(self.scope, work, call, peer)
        self.started(work)

    def waits(self, work: Work[Any], call: bytes) -> None:
        """`work` is one of many that wait, and of which most are done before anybody asks: it is
        noted once it is. An observer hears of it as of others, for it sees where that began."""
        if self._recorder.observers:
            self.begin(work, call)

    def started(self, work: Work[Any]) -> None:
        """`work` begins: let who traces know."""
        if self.trace is not None:
            work.trace = self.trace
            self.trace("start", work, None)

    def planned(self, call: bytes, plan: str) -> None:
        """Whenever `call` is done within its call, `plan` is its algorithm."""
        recorder = self._recorder
        if (recorder.observers or recorder.keeps) and len(recorder.plans) < MOST_PLANS:
            recorder.plans[self.scope.id, call] = plan

    def last(self) -> str:
        """What became of the last collective of this group; safe to call from any thread."""
        return self._recorder.last(self.scope)


def name_of(op: str, tag: Any, seq: int | None) -> str:
    """A collective, as errors and tables name it: "all_reduce tag 'loss' #57"."""
    text = op if tag is None else f"{op} tag {tag!r}"
    return text if seq is None else f"{text} #{seq}"


def _text(call: bytes) -> str:
    return call[:MOST_TEXT].decode(errors="replace")
