"""The last operations of one rank, in fixed memory: what the flight recorder shows.

An operation that has to wait is noted when it starts and when it ends. An operation that is done
within its call is noted once, as a plain tuple. `Records` passes on what happens in one group: to
the recorder of the rank, which all groups share, and to a trace hook if one was installed.

An `Observer` measures operations, for example for metrics. Without an observer nothing is spent on
checking for one, because `add` is replaced once there is one. A trace only makes the ring longer
(`Recorder.keep`), so an operation takes the same steps with a trace as without.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
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
from aiodist.work import SENDS, Unseen, Work

KEPT = 500
"""How many operations of a rank are kept."""

MESSAGES = SENDS | {"recv", "probe"}
"""Point-to-point operations."""

OF_WINDOWS = frozenset({"get", "put", "accumulate"})
"""Calls of a window, which name another rank, too. All other operations are collectives."""

_TO = SENDS | {"put", "accumulate"}

TELLING = (PeerLostError, CollectiveTimeoutError, MismatchError, ProtocolError)
"""Errors that write the flight recorder, because users want to know what came before."""

MOST_TEXT = 200
"""How many characters of a call, and of an error, are kept."""


class Entry(NamedTuple):
    """One operation.

    `started` is a time of the loop's clock. `seconds` is how long it took, or takes until now.
    `state` is "waits", "done", "failed" or "cancelled". `call` is what all ranks must agree on,
    with dtype and shape, or the first arrays of a message ("": not known). `peer` is the other rank
    of a message (None: any). `plans` are the algorithms of its phases, in order, as far as known.
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
        """The name for people: "all_reduce tag 'loss' #57", "send tag 0 to rank 3"."""
        if self.op in MESSAGES | OF_WINDOWS:
            tag = f" tag {self.tag!r}" if self.op in MESSAGES else ""
            whom = "any rank" if self.peer is None else f"rank {self.peer}"
            return f"{self.op}{tag} {'to' if self.op in _TO else 'from'} {whom}"
        return name_of(self.op, self.tag, self.seq)


Where = tuple[str, int, int, int, bytes]
"""A `Scope`, as a plain tuple."""
AtOnce = tuple[Where, str, Any, int | None, bytes, int | None, int, float, float]
"""An operation that was done within its call: the fields of an `Entry` up to `started`, then its
end.

A tuple of plain values only, because the garbage collector stops looking at such tuples. It would
look again and again at tuples with a `Scope`, and 200,000 of these take it milliseconds.
"""
Add = Callable[[AtOnce], None]

_Ended = tuple[str, Any, int | None, int, float, float | None, int | None]
"""What is kept of a Work that has ended: op, tag, seq, bytes, start, end, source."""


class Observer(Protocol):
    """Hears of operations that end, in the thread of their loop. Must be quick and must not
    raise."""

    def after(self, add: Add) -> Add:
        """Return a function that calls `add` and hears of an operation that was done within its
        call.

        One function for both, because each function call takes time of the program.
        """
        ...

    def ended(self, record: Record, /) -> None:
        """Hear that an operation has ended that had to wait."""
        ...


MOST_PLANS = 10_000
"""How many calls observers know the plan of, and how many groups they know the ranks of."""

FEW = 4
"""How many arrays of a message are shown."""


class Record:
    """An operation that was not done within its call."""

    __slots__ = (
        "_recorder", "_work", "arrays", "call", "context", "ended", "error", "peer", "plans",
        "scope", "state",
    )  # fmt: skip

    def __init__(
        self, recorder: Recorder, scope: Scope, work: Work[Any], call: bytes, peer: int | None
    ) -> None:
        self.scope = scope  # its group
        self.call = call  # what all ranks must agree on, in words
        self.peer = peer  # the other rank of a message; None: any, or all
        self.arrays: Sequence[object] = ()  # those of a message; their texts are dtype and shape
        self.state = "waits"  # "waits", "done", "failed" or "cancelled"
        self.error = ""  # the error in one line
        # The algorithms of its phases, in order. A tuple, because the garbage collector follows
        # lists.
        self.plans: tuple[str, ...] = ()
        # The context of the call, for observers; None without them.
        self.context = copy_context() if recorder.observers else None
        self._recorder = recorder  # hears of failures
        self._work: Work[Any] | None = work
        self.ended: _Ended | None = None  # what is kept of `_work` after its end

    def end(self, state: str, error: BaseException | None = None) -> None:
        """Note that the operation has ended. `state`: "done", "failed" or "cancelled"."""
        assert self._work is not None
        self.ended = _of(self._work)
        self._work = None  # it may hold an array
        self.state = state
        if error is not None:
            self.error = in_words(error)[:MOST_TEXT]
            self._recorder.note(error)
        for observer in self._recorder.observers:
            observer.ended(self)
        self.context = None  # it may hold objects of the program

    def numbered(self, seq: int) -> None:
        """Note the number of an operation that has ended before it got one."""
        if self.ended is not None:
            op, tag, _, nbytes, started, ended, source = self.ended
            self.ended = op, tag, seq, nbytes, started, ended, source

    def carries(self, arrays: Sequence[object]) -> None:
        """Note the arrays of a message or of a window. Their texts are dtype and shape."""
        self.arrays = arrays[:FEW]

    def entry(self, now: float) -> Entry:
        """Return what is known by now."""
        work = self._work  # read once, because it may end meanwhile in the loop's thread
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
    """The operations of one rank, over all of its groups and epochs.

    `failed` is called after one of the errors in `TELLING`, and by `left`. `add` takes an
    `AtOnce`.
    """

    def __init__(self) -> None:
        self.failed: Callable[[BaseException], None] = lambda error: None
        self.is_own = False
        """Whether these operations are aiodist's own. If one of them fails, aiodist handles that,
        so it does not count as a failure."""
        self._ring: deque[AtOnce | Record] = deque(maxlen=KEPT)
        self.add: Add = self._ring.append
        self.observers: tuple[Observer, ...] = ()
        self.keeps = False  # see `keep`
        self.failures: Counter[type[BaseException]] = Counter()
        """How many operations have failed, by the error."""
        self.plans: dict[tuple[bytes, bytes], str] = {}
        """The algorithms of calls, by id of the group and call. For observers."""
        self.roots: dict[bytes, Sequence[int]] = {}
        """The ranks of each group, by its id. Known only with `keep`."""
        self.all: WeakSet[Records] = WeakSet()
        """The records of all groups."""

    def note(self, error: BaseException) -> None:
        """Note that an operation has failed."""
        if not self.is_own:
            self.failures[type(error)] += 1
            if isinstance(error, TELLING):
                self.failed(error)

    def left(self, error: Exception) -> None:
        """Note that the program leaves the group by `error`, which is why the others lose it."""
        if not self.is_own:
            self.failed(error)

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of all operations that end from now on."""
        self.observers = (*self.observers, observer)
        self._tell()

    def keep(self, most: int) -> None:
        """Keep this many operations from now on, and the algorithms and groups of all."""
        self._ring = deque(self._ring, maxlen=most)
        self.keeps = True
        for records in self.all:
            self.know(records)
        self._tell()

    def know(self, records: Records) -> None:
        """Note the ranks of a group."""
        if self.keeps and len(self.roots) < MOST_PLANS:
            self.roots[records.scope.id] = records.roots

    def _tell(self) -> None:
        self.add = self._ring.append
        for observer in self.observers:
            self.add = observer.after(self.add)
        for records in self.all:
            records.pass_on()

    def entries(
        self, now: float, pending: Iterable[Work[Any]] = (), most: int = KEPT
    ) -> Iterator[Entry]:
        """Yield the last `most` operations in the order of their calls.

        Before them come those of the works `pending` that started too long ago to be among them.
        """
        ring = self._last(most)
        known = {id(one) for one in ring}
        for work in {id(work): work for work in pending}.values():
            if isinstance(work.record, Record) and id(work.record) not in known:
                yield work.record.entry(now)
        for one in ring:
            yield one.entry(now) if isinstance(one, Record) else self.entry_of(one)
        groups: list[Records] = []
        with contextlib.suppress(RuntimeError):  # the loop may go on meanwhile, in its own thread
            groups = list(self.all)
        for records in groups:
            for work, call in records.waiting():
                if work.record is None:
                    yield Record(self, records.scope, work, call, None).entry(now)

    def entry_of(self, one: AtOnce) -> Entry:
        """Make the entry of an operation that was done within its call."""
        where, op, tag, seq, call, peer, nbytes, started, ended = one
        plan = self.plans.get((where[-1], call))
        return Entry(
            Scope(*where), op, tag, seq, _text(call), peer, nbytes, started, ended - started,
            "done", "", () if plan is None else (plan,),
        )  # fmt: skip

    def _last(self, most: int) -> list[AtOnce | Record]:
        # In one step, because the loop may go on meanwhile in its own thread.
        return list(islice(reversed(self._ring), most))[::-1]

    def last(self, scope: Scope) -> str:
        """Describe the last collective that ended. Safe to call from any thread."""
        ended: tuple[Any, ...] | None
        for one in reversed(self._last(KEPT)):
            if isinstance(one, Record):
                where: Where | Scope = one.scope
                ended, state = one.ended, one.state
            else:
                where, ended, state = one[0], one[1:4], "done"
            # Make no entries, because callers may ask often.
            if where == scope and state != "waits" and ended is not None:
                op, tag, seq = ended[:3]
                if op not in MESSAGES | OF_WINDOWS:
                    return f"{name_of(op, tag, seq)} {state}"
        return "nothing yet" if len(self._ring) < KEPT else f"none of the last {KEPT} operations"


class Records:
    """Notes the operations of one group. `roots` are its ranks in the group of `connect`."""

    def __init__(self, recorder: Recorder, scope: Scope, roots: Sequence[int] = ()) -> None:
        self.scope = scope
        self.roots = roots
        # The scope as a tuple, for `add`.
        self.where: Where = scope.group, scope.epoch, scope.rank, scope.size, scope.id
        self.trace = bound(scope)  # hears of each operation; None without a hook
        self.add = recorder.add  # see `Recorder`
        self.hides_messages = False  # see `hide_messages`
        # The Works that wait without a record of their own, and what was called: see `waits`.
        self.waiting: Callable[[], Sequence[tuple[Work[Any], bytes]]] = tuple
        self._recorder = recorder
        self.unseen = Unseen()
        """Works that the program may not have looked at: see `Work.for_user`."""
        recorder.all.add(self)
        recorder.know(self)

    def begin(self, work: Work[Any], call: bytes = b"", peer: int | None = None) -> None:
        """Note that `work` has started. It tells its end itself."""
        if self.hides_messages and work.op in MESSAGES:
            self.started(work)
            return
        work.record = record = Record(self._recorder, self.scope, work, call, peer)
        self._recorder._ring.append(record)
        if self.trace is not None:
            self.started(work)

    def waits(self, work: Work[Any], call: bytes) -> None:
        """Note that `work` waits, if there is an observer.

        Without one it is noted at its end, because most such works end soon. An observer needs its
        start.
        """
        if self._recorder.observers:
            self.begin(work, call)

    def started(self, work: Work[Any]) -> None:
        """Tell the trace hook that `work` begins."""
        if self.trace is not None:
            work.trace = self.trace
            self.trace("start", work, None)

    def hide_messages(self) -> None:
        """Record no messages of this group from now on, because the program has not called them.

        A window carries out its calls by messages, and records the calls.
        """
        self.hides_messages = True
        self.pass_on()

    def pass_on(self) -> None:
        """Let `add` do what that of the recorder does now."""
        add = self._recorder.add
        self.add = partial(_add_calls, add) if self.hides_messages else add

    def planned(self, call: bytes, plan: str) -> None:
        """Note that `plan` is the algorithm of `call` whenever that is done within its call."""
        recorder = self._recorder
        if (recorder.observers or recorder.keeps) and len(recorder.plans) < MOST_PLANS:
            recorder.plans[self.scope.id, call] = plan

    def last(self) -> str:
        """Describe the last collective of this group that ended. Safe to call from any thread."""
        return self._recorder.last(self.scope)


def _add_calls(add: Add, one: AtOnce) -> None:
    if one[1] not in MESSAGES:
        add(one)


def name_of(op: str, tag: Any, seq: int | None) -> str:
    """Name a collective for errors and tables: "all_reduce tag 'loss' #57"."""
    # Tags of bytes are aiodist's own, and mean nothing to the program.
    text = op if tag is None or isinstance(tag, bytes) else f"{op} tag {tag!r}"
    return text if seq is None else f"{text} #{seq}"


def _text(call: bytes) -> str:
    return call[:MOST_TEXT].decode(errors="replace")
