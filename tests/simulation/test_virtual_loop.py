"""The event loop in virtual time, and processes that are stopped and ended on it."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextvars import Context, ContextVar

import pytest

from aiodist.testing import DeadlockError, Process, VirtualLoop
from aiodist.testing.virtual_loop import SLOWEST_DISK, abandon
from aiodist.work import Work


@pytest.fixture
def loop():
    loop = VirtualLoop()
    yield loop
    loop.close()


def test_time_jumps_to_the_next_timer(loop):
    async def main():
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(0.5))
        return loop.time()

    assert loop.run_until_complete(main()) == pytest.approx(3600, abs=1e-6)


def test_time_stands_still_while_something_is_ready(loop):
    async def main():
        for _ in range(1000):
            await asyncio.sleep(0)
        return loop.time()

    assert loop.run_until_complete(main()) == 0


def test_many_turns_take_about_as_long_as_on_a_real_loop(loop):
    async def main():
        async with asyncio.timeout(1.0):
            for _ in range(20_000):
                await asyncio.sleep(0)
        return loop.time()

    assert 0.1 < loop.run_until_complete(main()) < 0.3


def test_time_stands_still_however_much_is_due(loop):
    async def main():
        for _ in range(3000):
            due = loop.create_future()
            loop.call_at(loop.time(), due.set_result, None)
            await due
            await asyncio.sleep(0)
        return loop.time()

    assert loop.run_until_complete(main()) == 0


def test_waiting_for_nothing_is_an_error_that_names_who_waits(loop):
    async def main():
        await loop.create_future()

    task = loop.create_task(main(), name="the culprit")
    line = r"simulation/test_virtual_loop\.py:\d+ in .*main: await loop\.create_future\(\)"
    with pytest.raises(DeadlockError, match=rf"the culprit: {line}$"):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)


def test_what_threads_do_is_done_in_the_one_there_is(loop):
    async def main():
        began = loop.time()
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        assert 0 < loop.time() - began <= SLOWEST_DISK
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        with pytest.raises(pytest.fail.Exception):  # no Exception, but a BaseException
            await asyncio.to_thread(pytest.fail, "in a thread")

    loop.run_until_complete(main())


def test_an_interrupt_in_what_threads_do_ends_the_loop(loop):
    async def main():
        call = asyncio.to_thread(signal.raise_signal, signal.SIGINT)
        await asyncio.gather(call, return_exceptions=True)

    task = loop.create_task(main())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    abandon(task)


def test_an_error_is_told_though_its_owner_is_not_known(loop):
    work = Work.begin(loop, "all_reduce", None)
    work.fail(KeyError("lost"))
    del work
    assert loop.errors == ["Work exception was never retrieved: KeyError: 'lost'"]


def test_tasks_that_a_program_makes_in_its_own_way(loop):
    async def child():
        return 1

    async def main():
        context = Context()
        assert await context.run(lambda: loop.create_task(child(), context=context)) == 1
        assert loop.get_task_factory() is None
        loop.set_task_factory(lambda loop, coro: asyncio.Task(coro, loop=loop))
        assert await loop.create_task(child()) == 1

    loop.run_until_complete(main())


def test_there_are_no_sockets_without_a_network(loop):
    async def main():
        with pytest.raises(OSError, match="no network"):
            loop.new_socket(2, 1)

    loop.run_until_complete(main())


@pytest.mark.parametrize(
    "call",
    [
        lambda: asyncio.create_subprocess_exec("false"),
        lambda: asyncio.create_subprocess_shell("false"),
        lambda: asyncio.open_connection("127.0.0.1", 9),
        lambda: asyncio.start_server(lambda *_: None, "127.0.0.1", 0),
    ],
    ids=["subprocess", "shell", "connection", "server"],
)
def test_what_is_not_simulated_is_refused(loop, call):
    async def main():
        with pytest.raises(NotImplementedError, match="no signals, subprocesses and connections"):
            await call()
        with pytest.raises(NotImplementedError, match="no signals"):
            loop.add_signal_handler(signal.SIGUSR1, print)

    loop.run_until_complete(main())


def test_a_stopped_process_goes_on_where_it_was(loop):
    process = Process(loop, "worker")
    ticks: list[float] = []

    async def work():
        while len(ticks) < 4:
            await asyncio.sleep(1)
            ticks.append(round(loop.time(), 6))

    task = process.spawn(work())
    loop.call_later(1.5, process.stop)
    loop.call_later(9.0, process.resume)
    loop.run_until_complete(task)
    assert ticks == [1, 9, 10, 11]
    assert process.stopped_seconds == pytest.approx(7.5)


def test_a_process_goes_on_when_the_last_of_its_stops_is_over(loop):
    process = Process(loop, "worker")
    ran: list[tuple[str, float]] = []

    async def work():
        loop.call_in_thread(0.5, lambda: ran.append(("thread", loop.time())))
        await asyncio.sleep(0.5)
        ran.append(("loop", loop.time()))

    async def stops():
        stopped, blocked = process.stop(), process.block()
        for seconds, end in ((1, stopped), (1, stopped), (1, blocked)):
            await asyncio.sleep(seconds)
            end()

    task = process.spawn(work())
    loop.run_until_complete(stops())
    loop.run_until_complete(task)
    assert ran == [("thread", 1.0), ("loop", 3.0)]
    assert process.stopped_seconds == pytest.approx(3.0)


def test_what_was_cancelled_while_it_was_held_does_not_run(loop):
    process = Process(loop, "worker")
    ran: list[str] = []

    async def work():
        late = loop.call_later(1, ran.append, "cancelled")
        loop.call_later(0.5, late.cancel)
        await asyncio.sleep(2)

    task = process.spawn(work())
    loop.call_later(0.1, process.stop)
    loop.call_later(5, process.resume)
    loop.run_until_complete(task)
    assert ran == []


def test_a_task_that_was_held_keeps_its_context(loop):
    process = Process(loop, "worker")
    request: ContextVar[int] = ContextVar("request", default=0)

    async def work():
        process.stop()
        await asyncio.sleep(0)  # its next step is held
        token = request.set(7)
        await asyncio.sleep(0)
        assert request.get() == 7
        request.reset(token)

    task = process.spawn(work())
    loop.call_later(1, process.resume)
    loop.run_until_complete(task)


@pytest.mark.parametrize("call", ["call_soon", "call_soon_threadsafe"])
def test_nothing_of_an_ended_process_runs_again(loop, call):
    process = Process(loop, "worker")
    ran: list[str] = []

    def end():
        process.end()
        process.context.copy().run(getattr(loop, call), ran.append, "a callback")

    async def work():
        try:
            await asyncio.sleep(1)
            ran.append("after the sleep")
        finally:
            ran.append("finally")

    task = process.spawn(work())
    loop.call_later(0.5, end)
    loop.run_until_complete(asyncio.sleep(5))
    assert ran == []
    assert not task.done()


def test_threads_may_call_the_loop_in_debug_mode(loop):
    async def main():
        called = loop.create_future()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(called.set_result, 1))
        thread.start()
        thread.join()
        return await asyncio.wait_for(called, 1)

    loop.set_debug(True)
    assert loop.run_until_complete(main()) == 1


def test_a_task_in_a_context_of_its_own_ends_with_its_process(loop):
    process = Process(loop, "worker")
    ran: list[float] = []

    async def child():
        await asyncio.sleep(1)
        ran.append(loop.time())

    async def work():
        return loop.create_task(child(), context=Context())

    task = loop.run_until_complete(process.spawn(work()))
    process.end()
    loop.run_until_complete(asyncio.sleep(2))
    assert not ran and not task.done()


def test_a_set_of_tasks_has_the_same_order_in_every_run():
    kept = []  # so that no task of the second run has the address of one of the first

    async def main():
        tasks = [asyncio.create_task(asyncio.sleep(1)) for _ in range(50)]
        kept.append(tasks)
        done, _ = await asyncio.wait(tasks)
        return [tasks.index(task) for task in done]

    orders = []
    for _ in range(2):
        loop = VirtualLoop()
        orders.append(loop.run_until_complete(main()))
        loop.close()
    assert orders[0] == orders[1]


def test_errors_nobody_handled_are_kept(loop):
    def fail():
        raise LookupError("a mistake")

    loop.call_soon(fail)
    loop.run_until_complete(asyncio.sleep(1))
    assert len(loop.errors) == 1
    assert "a mistake" in loop.errors[0]


class LostTransport:
    """Behaves like asyncio's own once the connection is lost: it has let go of its loop."""

    def abort(self):
        raise AttributeError("'NoneType' object has no attribute 'call_soon'")


class OpenTransport:
    def __init__(self):
        self.said = []

    def abort(self):
        self.said.append("abort")

    def _call_connection_lost(self, error):
        self.said.append("lost")


def test_one_connection_that_is_lost_already_keeps_no_other_from_being_buried(loop):
    lost, still_open = LostTransport(), OpenTransport()
    loop._transports[901], loop._transports[902] = lost, still_open
    loop.close()
    assert still_open.said == ["abort", "lost"] and not loop.errors
