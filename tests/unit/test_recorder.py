"""The ring of a rank's last operations."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest

import aiodist
from aiodist import trace
from aiodist.recorder import KEPT, AtOnce, Entry, Recorder, Records
from aiodist.trace import Scope
from aiodist.work import Work

WORLD = Scope("world", 1, 0, 2, b"12345678")
OTHER = Scope("world/dup", 1, 0, 2, b"abcdefgh")


class Clock:
    """The part of an event loop that a Work needs."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def call_soon(self, *args: Any, **kwargs: Any) -> None: ...

    def call_exception_handler(self, context: dict[str, Any]) -> None: ...


@pytest.fixture
def clock() -> Clock:
    return Clock()


def begin(clock: Any, recorder: Recorder, op: str = "all_reduce", seq: int = 0) -> Work[Any]:
    work: Work[Any] = Work.begin(clock, op, None, seq, 8)
    Records(recorder, WORLD).begin(work, b"all_reduce(SUM, float64[1])")
    return work


def at_once(
    clock: Clock,
    op: str = "all_reduce",
    tag: Any = None,
    seq: int | None = 0,
    *,
    peer: int | None = None,
    scope: Scope = WORLD,
) -> AtOnce:
    return tuple(scope), op, tag, seq, b"call", peer, 4, clock.now, clock.now + 0.5


def entries(recorder: Recorder, clock: Clock, *pending: Work[Any]) -> list[Entry]:
    return list(recorder.entries(clock.now, pending))


def test_an_operation_from_start_to_end(clock: Clock) -> None:
    recorder = Recorder()
    work = begin(clock, recorder, seq=7)
    clock.now += 2
    [entry] = entries(recorder, clock)
    assert (entry.name, entry.state, entry.seconds) == ("all_reduce #7", "waits", 2.0)
    clock.now += 1
    work.finish("value")
    clock.now += 10
    [entry] = entries(recorder, clock)
    assert (entry.state, entry.seconds, entry.nbytes) == ("done", 3.0, 8)
    assert entry.call == "all_reduce(SUM, float64[1])"


def test_failures_and_cancellations_are_told_apart(clock: Clock) -> None:
    recorder = Recorder()
    failed, cancelled = begin(clock, recorder, seq=0), begin(clock, recorder, seq=1)
    failed.fail(ValueError("no\nsecond line"))
    failed.exception()
    cancelled.cancel()
    first, second = entries(recorder, clock)
    assert (first.state, first.error) == ("failed", "ValueError: no second line")
    assert (second.state, second.error) == ("cancelled", "")


def test_a_long_text_is_cut(clock: Clock) -> None:
    recorder = Recorder()
    work: Work[Any] = Work.begin(cast(Any, clock), "all_reduce", None, 0, 8)
    Records(recorder, WORLD).begin(work, b"all_reduce(" + b"x" * 500 + b")")
    work.fail(ValueError("y" * 500))
    work.exception()
    [entry] = entries(recorder, clock)
    assert (len(entry.call), len(entry.error)) == (200, 200)


def test_only_telling_errors_are_reported(clock: Clock) -> None:
    recorder = Recorder()
    seen: list[BaseException] = []
    recorder.failed = seen.append
    errors = [
        ValueError(),
        aiodist.CollectiveAbortedError("x", rank=0, reason="r"),
        aiodist.PeerLostError("x", ranks=[1]),
        aiodist.MismatchError("x", calls={}),
        aiodist.CollectiveTimeoutError("x"),
        aiodist.ProtocolError("x"),
    ]
    for error in errors:
        work = begin(clock, recorder)
        work.fail(error)
        work.exception()
    assert seen == errors[2:]
    recorder.is_own = True
    work = begin(clock, recorder)
    work.fail(errors[-1])
    work.exception()
    assert seen == errors[2:]
    assert recorder.failures.total() == len(errors)
    assert entries(recorder, clock)[-1].error == "ProtocolError: x"


def test_results_are_not_kept_alive(clock: Clock) -> None:
    class Value:
        pass

    recorder = Recorder()
    value = Value()
    gone = weakref.ref(value)
    work = begin(clock, recorder)
    work.finish(value)
    del work, value
    gc.collect()
    assert gone() is None
    assert [entry.state for entry in entries(recorder, clock)] == ["done"]


def test_the_memory_is_fixed_and_what_waits_is_still_seen(clock: Clock) -> None:
    recorder = Recorder()
    old = begin(clock, recorder, "barrier", 0)
    for seq in range(KEPT + 10):
        recorder.add(at_once(clock, seq=seq))
    found = entries(recorder, clock)
    assert len(found) == KEPT
    assert found[-1].seq == KEPT + 9
    assert entries(recorder, clock, old)[0].name == "barrier #0"
    assert len(entries(recorder, clock, old)) == KEPT + 1
    old.finish(None)


def test_more_is_kept_for_a_trace_and_shown_to_that_alone(clock: Clock) -> None:
    recorder = Recorder()
    records = Records(recorder, WORLD)
    records.planned(b"call", "ring")
    recorder.add(at_once(clock, seq=0))
    recorder.keep(3 * KEPT)
    records.planned(b"call", "tree")
    for seq in range(1, 4 * KEPT):
        records.add(at_once(clock, seq=seq))
    assert [one.seq for one in entries(recorder, clock)] == [*range(3 * KEPT, 4 * KEPT)]
    everything = list(recorder.entries(clock.now, (), 3 * KEPT))
    assert [one.seq for one in everything] == [*range(KEPT, 4 * KEPT)]
    assert {(one.seconds, one.plans) for one in everything} == {(0.5, ("tree",))}


class Counts:
    """An observer."""

    heard = 0

    def after(self, add: Any) -> Any:
        def added(one: AtOnce) -> None:
            add(one)
            self.heard += 1

        return added

    def ended(self, record: Any) -> None:
        self.heard += 1


def test_who_observes_hears_of_all_whether_or_not_more_is_kept(clock: Clock) -> None:
    recorder, counts = Recorder(), Counts()
    records = Records(recorder, WORLD)
    recorder.observe(counts)
    records.add(at_once(clock))
    recorder.keep(3)
    records.add(at_once(clock))
    assert (counts.heard, len(entries(recorder, clock))) == (2, 2)


class Meddling(Counts):
    """An observer that cancels and fails a Work whose end it hears of."""

    def __init__(self, work: Work[Any]) -> None:
        self.work = work

    def ended(self, record: Any) -> None:
        super().ended(record)
        assert not self.work.cancel()
        self.work.fail(KeyError("planted"))


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (lambda work: work.finish(5), "done"),
        (lambda work: work.cancel(), "cancelled"),
        (lambda work: work.fail(ValueError("planted")), "failed"),
    ],
)
def test_an_observer_cannot_end_what_ends(clock: Clock, end: Any, state: str) -> None:
    recorder = Recorder()
    work: Work[Any] = Work.begin(cast(Any, clock), "barrier")
    recorder.observe(meddling := Meddling(work))
    Records(recorder, WORLD).begin(work)
    end(work)
    assert state in repr(work)
    assert [one.state for one in entries(recorder, clock)] == [state]
    assert meddling.heard == 1
    assert work.cancelled() or work.exception() or work.result() == 5


def test_messages_say_with_whom(clock: Clock) -> None:
    recorder = Recorder()
    loop: Any = clock
    work: Work[Any] = Work.begin(loop, "recv", "t")
    Records(recorder, WORLD).begin(work)
    assert [entry.name for entry in entries(recorder, clock)] == ["recv tag 't' from any rank"]
    work.source = 3
    work.finish(None)
    recorder.add(at_once(clock, "send", 0, None, peer=1))
    assert [entry.name for entry in entries(recorder, clock)] == [
        "recv tag 't' from rank 3",
        "send tag 0 to rank 1",
    ]


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("send", "send tag 't' to rank 1"),
        ("ssend", "ssend tag 't' to rank 1"),
        ("recv", "recv tag 't' from rank 1"),
        ("probe", "probe tag 't' from rank 1"),
        ("put", "put to rank 1"),
        ("accumulate", "accumulate to rank 1"),
        ("get", "get from rank 1"),
    ],
)
def test_the_name_of_a_call_that_names_a_rank(clock: Clock, op: str, name: str) -> None:
    recorder = Recorder()
    recorder.add(at_once(clock, op, "t", None, peer=1))
    assert entries(recorder, clock)[0].name == name
    assert recorder.last(WORLD) == "nothing yet"  # it is no collective


@pytest.mark.parametrize("observed_first", [False, True])
def test_messages_of_a_window_are_hidden_from_all(clock: Clock, observed_first: bool) -> None:
    recorder, counts = Recorder(), Counts()
    recorder.failed = pytest.fail
    records, others = Records(recorder, WORLD), Records(recorder, OTHER)
    steps = [records.hide_messages, lambda: recorder.observe(counts)]
    for step in reversed(steps) if observed_first else steps:
        step()
    for op in ("send", "recv", "barrier", "get"):
        records.add(at_once(clock, op))
        others.add(at_once(clock, op, scope=OTHER))
        work: Work[Any] = Work.begin(cast(Any, clock), op)
        records.begin(work)
        if op in ("send", "recv"):
            work.fail(aiodist.PeerLostError("x", ranks=[1]))
            work.exception()
        else:
            work.finish(None)
    found = entries(recorder, clock)
    assert [one.op for one in found if one.scope == OTHER] == ["send", "recv", "barrier", "get"]
    assert [one.op for one in found if one.scope == WORLD] == ["barrier"] * 2 + ["get"] * 2
    assert counts.heard == len(found)
    assert not recorder.failures


def test_the_last_collective_of_a_group(clock: Clock) -> None:
    recorder = Recorder()
    assert recorder.last(WORLD) == "nothing yet"
    recorder.add(at_once(clock, seq=4))
    begin(clock, recorder, "barrier", 5)  # has not ended
    recorder.add(at_once(clock, seq=9, scope=OTHER))
    recorder.add(at_once(clock, "send", 0, None, peer=1))
    assert recorder.last(WORLD) == "all_reduce #4 done"
    recorder.add(at_once(clock, "dup", b"made", 0))
    assert recorder.last(WORLD) == "dup #0 done"  # the tag is aiodist's own
    for _ in range(KEPT):
        recorder.add(at_once(clock, seq=9, scope=OTHER))
    assert recorder.last(WORLD) == f"none of the last {KEPT} operations"


def test_who_records_for_a_group_tells_the_ring_and_the_hook(clock: Clock) -> None:
    heard: list[tuple[Scope, str]] = []
    ring = Recorder()
    quiet = Records(ring, OTHER)
    trace.install(lambda scope, point, work, value: heard.append((scope, point)))
    try:
        loud = Records(ring, WORLD)
    finally:
        trace.install(None)
    for records, op in ((quiet, "barrier"), (loud, "all_reduce")):
        work: Work[Any] = Work.begin(clock, op, None, 3)
        records.begin(work)
        work.finish(None)
    assert heard == [(WORLD, "start"), (WORLD, "before_complete")]
    assert [entry.op for entry in ring.entries(clock.time())] == ["barrier", "all_reduce"]
    assert (quiet.last(), loud.last()) == ("barrier #3 done", "all_reduce #3 done")
