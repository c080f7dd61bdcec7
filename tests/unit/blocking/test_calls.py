"""Interrupts of calls that wait, and loops that are not there."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import BlockingGroup, Group
from aiodist.blocking import calls
from aiodist.blocking.calls import BlockingWork, Home, OwnLoop
from aiodist.threads.engine import engine
from aiodist.threads.loop import Until, at_once


class Loop:
    """A loop that a thread runs, with both ranks of a group on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.groups: list[Group] = []
        ready, self.enough = threading.Event(), asyncio.Event()

        async def main() -> None:
            async with aiodist.local(2) as self.groups:
                ready.set()
                await self.enough.wait()

        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(main(),))
        self.thread.start()
        assert ready.wait(20)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.enough.set)
        self.thread.join()
        self.loop.close()


Pair = tuple[BlockingGroup, BlockingGroup]


@pytest.fixture
def foreign(no_leaks: None) -> Iterator[Pair]:
    loop = Loop()
    one, two = (group.blocking() for group in loop.groups)
    yield one, two
    loop.end()


@pytest.fixture
def own(address: str) -> Iterator[Pair]:
    async def join() -> list[Group]:
        joining = [aiodist.connect(address, rank=rank, size=2) for rank in range(2)]

        async def joined(connecting: Any) -> Group:
            group: Group = await connecting
            return group

        return await asyncio.gather(*map(joined, joining))

    one, two = (group.blocking() for group in engine().wait_for(join()))
    yield one, two
    leaving = threading.Thread(target=one.close)
    leaving.start()
    two.close()
    leaving.join()


@pytest.fixture(params=["foreign", "own"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(request.param)
    return found


def interrupted(monkeypatch: pytest.MonkeyPatch, group: BlockingGroup, at: str) -> None:
    """The next time that this thread gets to `at`, it is interrupted after that."""
    home = group._home
    original: Callable[..., None] = getattr(home, at)

    def method(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        original(*args, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(home, at, method)


@pytest.mark.parametrize("at", ["submit", "help"])
def test_an_interrupt_withdraws_the_call(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    one, two = pair
    out = np.zeros(4)
    interrupted(monkeypatch, one, at)
    with pytest.raises(KeyboardInterrupt):
        one.recv(src=1, out=out)
    # Nobody receives any more, so the message is there for the next one, and `out` is untouched.
    two.send(np.ones(4), 0)
    assert out.tolist() == [0] * 4
    assert one.recv(src=1).tolist() == [1] * 4


def test_an_interrupt_withdraws_what_was_started(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    interrupted(monkeypatch, one, "submit")
    with pytest.raises(KeyboardInterrupt):
        one.irecv(src=1)
    two.send(7, 0)
    assert one.recv(src=1) == 7


def test_the_others_hear_of_an_interrupt(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    interrupted(monkeypatch, one, "help")
    with pytest.raises(KeyboardInterrupt):
        one.barrier()
    with pytest.raises(aiodist.CollectiveAbortedError):
        two.barrier()


def interrupted_when_done(monkeypatch: pytest.MonkeyPatch, kind: type[Home] = OwnLoop) -> None:
    """The next call of this thread is interrupted when its result is there, and not taken."""
    submit, caller = kind.submit, threading.get_ident()

    def submit_and_wait(home: Home, call: Callable[[], None], until: Any) -> None:
        if threading.get_ident() != caller:
            return submit(home, call, until)
        monkeypatch.undo()
        submit(home, call, until)
        home.wait(until.__self__.wait, home.disorders)
        signal.raise_signal(signal.SIGINT)
        return None

    monkeypatch.setattr(kind, "submit", submit_and_wait)


def test_an_interrupt_leaves_the_group_that_was_joined(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease would be renewed for ever, and no other member could take its place."""
    interrupted_when_done(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        aiodist.connect_blocking(address, rank=0, size=1)
    aiodist.connect_blocking(address, rank=0, size=1, timeout=10).close()


def test_an_interrupt_neither_loses_nor_doubles_a_change_of_a_watch(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = pair[0]
    with group.store.watch("k") as changes:
        for value in (b"1", b"2"):
            group.store.set("k", value)
        if isinstance(group._home, OwnLoop):
            interrupted_when_done(monkeypatch)
        else:
            interrupted(monkeypatch, group, "wait")
        with pytest.raises(KeyboardInterrupt):
            next(changes)
        group.store.set("k", b"3")
        assert [next(changes) for _ in range(3)] == [("k", b"1"), ("k", b"2"), ("k", b"3")]


@pytest.mark.parametrize("op", ["subgroup", "split", "dup", "expose", "shrink", "rendezvous"])
def test_an_interrupt_leaves_the_group_that_was_made(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """The program has no handle of it, and the others would wait for this rank in it."""
    one, two = pair
    given: tuple[Any, ...] = {"subgroup": ([0, 1],), "split": (0,)}.get(op, ())
    with ThreadPoolExecutor(1) as thread:
        theirs = thread.submit(getattr(two, op), *given)
        interrupted_when_done(monkeypatch, type(one._home))
        with pytest.raises(KeyboardInterrupt):
            getattr(one, op)(*given)
        made = theirs.result()
        with pytest.raises(aiodist.PeerLostError, match="KeyboardInterrupt"):
            made.fence(timeout=2) if op == "expose" else made.barrier(timeout=2)
        if op in ("shrink", "rendezvous"):
            made.close()
        else:
            theirs = thread.submit(two.barrier)
            one.barrier()
            theirs.result()


def test_a_running_loop_is_not_stopped(pair: Pair) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="would stop the event loop"):
            pair[0].barrier()

    asyncio.run(main())


@pytest.mark.parametrize("pending", [True, False])
def test_nor_is_it_by_a_work_that_is_pending(pair: Pair, pending: bool) -> None:
    one, two = pair
    work = one.irecv(src=1)
    if not pending:
        two.send("x", 0)
        assert work.wait() == "x"

    async def main() -> None:
        if pending:
            for call in (lambda: work.wait(timeout=0), work.cancel):
                with pytest.raises(RuntimeError, match="would stop the event loop"):
                    call()
        else:
            assert work.wait() == "x"
            assert not work.cancel()

    asyncio.run(main())
    if pending:
        two.send("x", 0)
        assert work.wait() == "x"


def test_a_wait_takes_every_timeout_that_makes_sense(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    work = one.irecv(src=1)
    wrong: Any
    for wrong in ("1", math.nan):
        with pytest.raises((TypeError, ValueError), match="timeout is"):
            work.wait(timeout=wrong)
    with pytest.raises(TimeoutError):
        work.wait(timeout=-1)
    waits: list[float] = []

    def send_meanwhile(until: object, seconds: float) -> None:
        waits.append(seconds)
        two.send("x", 0)

    monkeypatch.setattr(one._home, "help", send_meanwhile)
    assert work.wait(timeout=math.inf) == "x"
    assert waits == [threading.TIMEOUT_MAX]


@pytest.mark.parametrize("look", ["none", "wait", "wait before", "cancel"])
def test_an_error_that_was_never_retrieved_is_reported(pair: Pair, look: str) -> None:
    one, two = pair
    told: list[BaseException] = []
    loop = one._home._loop
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    work = one.start(one.all_reduce, np.ones(2))
    if look == "wait before":
        with pytest.raises(TimeoutError):
            work.wait(timeout=0)
    with pytest.raises(aiodist.MismatchError):
        two.all_reduce(np.ones(3))
    while not work.done():
        threading.Event().wait(0.001)
    if look == "wait":
        with pytest.raises(aiodist.MismatchError):
            work.wait()
    if look == "cancel":
        assert not work.cancel()
    one.store.get("k")  # the loop has let go of it
    del work
    gc.collect()
    loop.set_exception_handler(None)
    wanted = [aiodist.MismatchError] if look == "none" else []
    assert [type(error) for error in told] == wanted


def test_views_may_be_closed_beside_a_running_loop(pair: Pair) -> None:
    watched = pair[0]._behind._actor.changed
    before = list(watched)
    views = pair[0].views()
    next(views)
    assert list(watched) != before

    async def main() -> None:
        views.close()

    asyncio.run(main())
    pair[0].store.get("k")
    assert list(watched) == before


def test_a_loop_that_is_gone() -> None:
    loop = Loop()
    group = loop.groups[0].blocking()
    loop.end()
    with pytest.raises(aiodist.GroupClosedError, match="the event loop of the group is closed"):
        group.barrier()


class Heard(Home):
    """A loop that no thread runs at first. `calls` counts what was submitted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.calls = threading.Semaphore(0)

    def submit(self, call: Callable[[], None], until: Until = at_once) -> None:
        super().submit(call, until)
        self.calls.release()


@pytest.mark.parametrize("call", ["start", "run", "run and wait", "cancel"])
def test_a_loop_that_is_closed_during_a_call(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(calls, "LOOK", 0.001)
    loop = asyncio.new_event_loop()
    home, entered = Heard(loop), loop.create_future()

    def never() -> asyncio.Future[None]:
        entered.set_result(None)
        return loop.create_future()

    work = BlockingWork[None](home, never)
    with ThreadPoolExecutor(1) as thread:
        outcome: Future[Any] = thread.submit(work.run if "run" in call else work.start)
        home.calls.acquire()
        if call in ("run and wait", "cancel"):
            loop.run_until_complete(entered)
        if call == "cancel":
            outcome.result()
            outcome = thread.submit(work.cancel)
            home.calls.acquire()
        loop.close()
        with pytest.raises(aiodist.GroupClosedError, match="the event loop of the group is closed"):
            outcome.result()


def test_which_home() -> None:
    loop = asyncio.new_event_loop()
    assert type(Home.of(loop)) is Home
    loop.close()
    assert type(Home.of(engine().loop)) is OwnLoop


def test_what_is_raised_in_the_loop_is_raised_here(pair: Pair) -> None:
    def wrong() -> None:
        raise LookupError("of the call")

    with pytest.raises(LookupError, match="of the call"):
        BlockingWork[None](pair[0]._home, wrong).run()
    assert BlockingWork[int](pair[0]._home, lambda: 5).start().wait() == 5


IN_A_CHILD: dict[str, Callable[[BlockingGroup, BlockingWork[Any]], object]] = {
    "call": lambda group, _: group.barrier(),
    "start": lambda group, _: group.start(group.barrier),
    "call the store": lambda group, _: group.store.get("k"),
    "call it anew": lambda group, _: group._behind.blocking().barrier(),
    "wait": lambda _, work: work.wait(),
    "cancel": lambda _, work: work.cancel(),
}


@pytest.mark.parametrize("what", IN_A_CHILD)
def test_a_fork_has_no_part_in_the_group(pair: Pair, what: str) -> None:
    pending = pair[0].irecv(src=1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # the test ends even if the child does not
        try:
            IN_A_CHILD[what](pair[0], pending)
        except aiodist.GroupClosedError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert "fork" in pipe.read()
    os.waitpid(child, 0)
    pair[1].send("x", 0)
    assert pending.wait() == "x"


@pytest.mark.parametrize("raises", [True, False])
def test_a_fork_leaves_a_block_as_it_wants_to(address: str, raises: bool) -> None:
    parent, code = os.getpid(), 1
    try:
        with (
            aiodist.connect_blocking(address, rank=0, size=1) as group,
            group.expose(np.zeros(3)),
            group.store.watch("key"),
        ):
            if (child := os.fork()) == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(60)  # the test ends even if the child does not
                if raises:
                    raise KeyError("planted")
            else:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                group.barrier()
        code = 0
    except KeyError:
        code = 0
    finally:
        if os.getpid() != parent:
            os._exit(code)


def test_a_group_ends_even_if_a_part_of_it_is_half_done(
    own: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(*_: object) -> None:
        raise KeyError("half done")

    one, two = own
    monkeypatch.setattr(one._behind._context.p2p.receiver, "close", close)
    with pytest.raises(KeyError, match="half done"):
        one.abort()
    with pytest.raises(aiodist.GroupClosedError):
        one.barrier()
    with pytest.raises(aiodist.PeerLostError):
        two.barrier()
