"""A second thread that helps with steps of a call."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

import pytest
from interrupts import Interrupt

from aiodist.transports import second_thread
from aiodist.transports.second_thread import SecondThread, _Job

WAIT = 30.0


def test_each_step_is_done_once_by_whoever_takes_it() -> None:
    helper = SecondThread()
    for count in (0, 1, 2, 1000):
        done: list[int] = []
        assert helper.run(done.append, count, count) == count
        assert sorted(done) == list(range(count))


def test_two_threads_work_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=WAIT)
    who: list[str] = []

    def step(number: int) -> None:
        meeting.wait()  # breaks if there is no other
        who.append(threading.current_thread().name)

    assert SecondThread().run(step, 2, 2) == 2
    assert sorted(who) == sorted(["aiodist-copies", threading.current_thread().name])


def test_the_call_ends_after_the_last_step() -> None:
    begun, may_end = threading.Event(), threading.Event()
    done: list[int] = []

    def step(number: int) -> None:
        if threading.current_thread().name == "aiodist-copies":
            begun.set()
            assert may_end.wait(WAIT)
        else:
            assert begun.wait(WAIT)
            threading.Timer(0, may_end.set).start()  # once this thread has no more to do
        done.append(number)

    assert SecondThread().run(step, 2, 2) == 2
    assert len(done) == 2


@pytest.mark.parametrize("mine", [True, False])
def test_an_error_is_raised_where_the_work_was_asked_for(mine: bool) -> None:
    meeting = threading.Barrier(2, timeout=WAIT)
    helper = SecondThread()

    def step(number: int) -> None:
        meeting.wait()
        if (threading.current_thread().name != "aiodist-copies") is mine:
            raise OSError("not today")

    with pytest.raises(OSError, match="not today"):
        helper.run(step, 2, 2)
    done: list[int] = []
    helper.run(done.append, 10, 10)  # and it goes on
    assert len(done) == 10


def test_a_thread_that_has_nothing_to_do_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_thread, "IDLE", 1e-3)
    helper = SecondThread()
    for _ in range(3):
        meeting = threading.Barrier(2, timeout=WAIT)
        threads: list[threading.Thread] = []

        def step(
            number: int, meeting: Any = meeting, threads: list[threading.Thread] = threads
        ) -> None:
            threads.append(threading.current_thread())
            meeting.wait()

        helper.run(step, 2, 2)
        (other,) = set(threads) - {threading.current_thread()}
        other.join(WAIT)
        assert not other.is_alive() and not helper._runs


def test_the_first_steps_are_done_and_no_more_than_it_may_do() -> None:
    done: list[int] = []
    job = _Job(done.append, 10)
    job.do(3)
    assert job.finish() == 3  # and waits for nobody: none has come
    job.help()  # who comes late finds nothing to do
    assert done == [0, 1, 2]


def test_where_no_thread_is_to_be_had_the_first_does_what_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    helper, done = SecondThread(), list[int]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        assert helper.run(done.append, 10, 3) == 3
    assert done == [0, 1, 2] and helper._jobs.empty()
    meeting = threading.Barrier(2, timeout=WAIT)
    assert helper.run(lambda number: meeting.wait() and None, 2, 2) == 2  # and then there is one


def test_what_the_other_one_does_meanwhile_comes_on_top() -> None:
    done: list[int] = []
    job = _Job(done.append, 10)
    job.do(1)
    other = threading.Thread(target=job.help)
    other.start()
    other.join()
    job.do(3)
    assert job.finish() == 10
    assert done == list(range(10))


def test_what_an_error_leaves_is_left() -> None:
    def fail(number: int) -> None:
        raise OSError(number)

    done: list[int] = []
    job = _Job(fail, 3)
    with pytest.raises(OSError, match="0"):
        job.do(3)
    assert job.finish() == 1
    job._step = done.append
    job.help()
    assert not done


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_copy_has_a_thread_of_its_own() -> None:
    helper = second_thread.SECOND_THREAD
    helper.run(lambda number: None, 2, 2)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            meeting = threading.Barrier(2, timeout=WAIT)
            helper.run(lambda number: os.write(writing, b"x%d" % (meeting.wait() < 2)), 2, 2)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reading, 100) == b"x1x1"
    os.close(reading)
    os.close(writing)


def test_no_step_is_under_way_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_thread, "IDLE", WAIT)  # the thread is there all the while
    helper = SecondThread()
    for number in itertools.count():
        helper.run(lambda _: None, 1, 1)
        last = threading.Event()
        done: list[int] = []
        interrupt = Interrupt(("second_thread.py",), number)
        try:
            interrupt.of(lambda step=done.append: helper.run(step, 10_000, 3))  # type: ignore[misc]
            after = len(done)
        except KeyboardInterrupt:
            after = len(done)
        # It comes to this job when it has left the one before.
        helper._jobs.put(_Job(lambda _, last=last: last.set(), 1))  # type: ignore[misc]
        assert last.wait(WAIT)
        assert len(done) == after
        if not interrupt.came:
            break
    monkeypatch.undo()
    helper.run(lambda _: None, 1, 1)
