"""The future of an operation: how it ends, and who is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import linecache
import math
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.composing import both
from aiodist.work import Work


class Record:
    def __init__(self) -> None:
        self.ends: list[Any] = []

    def end(self, state: str, error: BaseException | None = None) -> None:
        self.ends.append((state, error))


def begin(op: str = "scan", **given: Any) -> Work[Any]:
    work: Work[Any] = Work.begin(asyncio.get_running_loop(), op, **given)
    work.record = Record()
    return work


def ends(work: Work[Any]) -> list[Any]:
    assert isinstance(work.record, Record)
    return work.record.ends


async def test_what_it_is_at_first() -> None:
    work = begin(tag="t", seq=3, nbytes=8)
    assert (work.op, work.tag, work.seq, work.nbytes, work.source) == ("scan", "t", 3, 8, None)
    assert repr(work) == "<Work scan tag='t' #3 pending>"
    assert work.elapsed >= 0
    with pytest.raises(RuntimeError, match="pending: await it"):
        work.synchronize()
    work.cancel()


async def test_the_first_end_counts() -> None:
    error = ValueError("why")
    done, failed, cancelled = begin(), begin(), begin()
    done.finish(1)
    failed.fail(error)
    assert cancelled.cancel() is True
    for work in (done, failed, cancelled):
        work.finish(2)
        work.fail(KeyError())
        assert work.cancel() is False
        assert len(ends(work)) == 1
        work.synchronize()
        assert work.elapsed == work.elapsed
    assert await done == 1
    assert (failed.error, failed.exception(), done.error) == (error, error, None)
    assert [repr(one) for one in (done, failed, cancelled)] == [
        f"<Work scan tag=None {state}>" for state in ("done", "failed", "cancelled")
    ]
    assert [*ends(done), *ends(failed), *ends(cancelled)] == [
        ("done", None), ("failed", error), ("cancelled", None),
    ]  # fmt: skip


async def test_the_engine_hears_of_a_cancel_before_anybody_else() -> None:
    heard: list[bool] = []
    work = begin(on_cancel=lambda work: heard.append(work.done()))
    work.cancel()
    assert heard == [False]
    other = begin(on_cancel=lambda work: heard.append(work.done()))
    other.finish(None)
    other.cancel()
    assert heard == [False]


async def test_a_hook_hears_of_each_end_before_it() -> None:
    heard: list[Any] = []
    error = ValueError()
    for end in ("finish", "fail"):
        work = begin()
        work.trace = lambda point, work, value: heard.append((point, work.done(), value))
        getattr(work, end)(error)
        if end == "fail":
            assert work.exception() is error
    assert heard == [("before_complete", False, error), ("failed", False, error)]


async def test_a_stop_iteration_is_raised_as_another_error() -> None:
    work = begin()
    work.fail(StopIteration(7))
    with pytest.raises(RuntimeError, match=r"StopIteration\(7\) was raised"):
        await work


@pytest.mark.parametrize("timeout", [None, math.inf, 30.0])
async def test_waiting_gives_the_result_or_the_error(timeout: float | None) -> None:
    work, failing = begin(), begin()
    asyncio.get_running_loop().call_soon(work.finish, 5)
    assert await work.wait(timeout) == 5
    asyncio.get_running_loop().call_soon(failing.fail, TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        await failing.wait(timeout)


@pytest.mark.parametrize("timeout", ["1", math.nan, True])
async def test_a_wait_refuses_what_is_no_timeout(timeout: Any) -> None:
    work = begin()
    with pytest.raises((TypeError, ValueError), match="timeout is"):
        await work.wait(timeout)
    assert not work.done()
    work.cancel()


@pytest.mark.parametrize("timeout", [None, 0.0, -1.0])
async def test_waiting_cancels_nothing(timeout: float | None) -> None:
    work = begin()
    waiting = asyncio.create_task(work.wait(timeout))
    await asyncio.sleep(0)
    if timeout is None:
        waiting.cancel()
    says = None if timeout is None else f"not done within {timeout} s: it goes on"
    with pytest.raises((TimeoutError, asyncio.CancelledError), match=says):
        await waiting
    assert not work.done()
    work.cancel()


async def pair() -> tuple[Work[None], Work[Any], Work[Any]]:
    loop = asyncio.get_running_loop()
    sending, receiving = begin("send", tag="t", nbytes=4), begin("recv")
    return sending, receiving, both(loop, sending, receiving)


@pytest.mark.parametrize("first", [0, 1])
async def test_both_are_done_when_the_second_is(first: int) -> None:
    *works, together = await pair()
    works[1].source = 2
    works[first].finish("a")
    await asyncio.sleep(0)
    assert not together.done()
    works[1 - first].finish("b")
    assert await together == ("b" if first == 0 else "a")
    assert (together.op, together.tag, together.nbytes) == ("sendrecv", "t", 4)
    assert together.source == 2


@pytest.mark.parametrize("which", [0, 1])
async def test_both_fail_with_the_first_error(which: int) -> None:
    *works, together = await pair()
    works[which].fail(ValueError("why"))
    with pytest.raises(ValueError, match="why"):
        await together
    assert works[1 - which].cancelled()


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_both_are_withdrawn_together(which: int) -> None:
    works = await pair()
    works[which].cancel()
    await asyncio.wait(works)
    assert works[2].cancelled()
    assert works[0].cancelled() and works[1].cancelled()


async def test_both_of_two_that_are_done_already() -> None:
    sending, receiving = begin("send"), begin("recv")
    sending.finish(None)
    receiving.finish(3)
    assert both(asyncio.get_running_loop(), sending, receiving).result() == 3


def line_of(warning):
    return linecache.getline(warning.filename, warning.lineno).strip()


def test_a_work_that_was_dropped_unseen_is_told_with_its_line(run):
    async def main():
        async with aiodist.local(2) as groups:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                groups[0].barrier()
                await groups[1].barrier()
                groups[0].recv(tag="x")
                await groups[1].send(7, 0, tag="x")
                groups[0].all_reduce(np.ones(3), tag="sum")
                await groups[1].all_reduce(np.ones(3), tag="sum")
                groups[0].all_reduce(np.ones(3))
                await groups[1].all_reduce(np.ones(3))
                await asyncio.gather(*[group.barrier() for group in groups])
                gc.collect()  # a message and its receive know each other
        return told

    told = run(main())
    assert sorted([line_of(one) for one in told]) == [
        "groups[0].all_reduce(np.ones(3))",
        'groups[0].all_reduce(np.ones(3), tag="sum")',
        "groups[0].barrier()",
        'groups[0].recv(tag="x")',
    ]
    assert {one.category for one in told} == {RuntimeWarning}
    assert "the Work of barrier was dropped before the program looked at it" in str(told[0].message)


def test_a_work_that_is_pending_when_the_group_closes_is_told_with_its_line(run):
    async def main():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            async with aiodist.local(2) as groups:
                groups[0].all_reduce(np.ones(1_000_000))
                groups[0].barrier()
                seen = groups[0].barrier()
                seen.add_done_callback(lambda _: None)

                async def late():
                    await asyncio.sleep(0)  # rank 0 closes
                    for _ in range(2):
                        await groups[1].barrier(tag=1)

                groups[0].barrier(tag=1).add_done_callback(lambda _: None)
                awaited = asyncio.ensure_future(groups[0].barrier(tag=1))
                waiting = asyncio.ensure_future(asyncio.shield(awaited))
                closing = asyncio.ensure_future(groups[0].close())
                await late()
                await groups[1].all_reduce(np.ones(1_000_000))
                for _ in range(2):
                    await groups[1].barrier()
                await closing
                await waiting
        return told

    told = run(main())
    assert sorted([line_of(one) for one in told]) == [
        "groups[0].all_reduce(np.ones(1_000_000))",
        "groups[0].barrier()",
    ]
    assert all("is pending while the group closes" in str(one.message) for one in told)


def test_a_work_that_is_done_and_held_when_the_group_closes_is_told_with_its_line(run):
    async def main():
        held = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            async with aiodist.local(2) as groups:
                one, other = groups
                held.append(one.barrier())
                await other.barrier()
                held.append(one.sendrecv(1, 1))
                await other.sendrecv(2, 0)
                looked_at = one.barrier()
                await other.barrier()
                await looked_at
                assert told == []
        return told

    told = run(main())
    assert sorted([line_of(one) for one in told]) == [
        "held.append(one.barrier())",
        "held.append(one.sendrecv(1, 1))",
    ]
    assert all("is done while the group closes" in str(one.message) for one in told)


def test_a_work_that_is_done_within_its_call_is_told_with_its_line(run):
    async def main():
        async with aiodist.local(1) as groups:
            group, x = groups[0], np.ones(3)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("default")
                group.all_reduce(x)
                y = group.broadcast(x)
                assert y.done()
                for _ in range(100):
                    await group.all_gather(x)
                for _ in range(100):
                    group.all_gather(x)  # in a row
        return told

    assert sorted([line_of(one) for one in run(main())]) == [
        "group.all_gather(x)  # in a row",
        "group.all_reduce(x)",
    ]


def test_a_work_that_was_watched_for_a_while_is_told_of_nothing(run):
    async def main():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            async with aiodist.local(2) as groups:
                work = groups[0].barrier()
                _, pending = await asyncio.wait([work], timeout=0)
                assert pending == {work}
                cancelled = groups[0].barrier(tag="cancelled")
                cancelled.cancel()
                closing = asyncio.ensure_future(groups[0].close())
                await groups[1].barrier()
                await closing
        return told

    assert run(main()) == []


CALLS = {
    "agree": lambda group: group.agree(),
    "dup": lambda group: group.dup(),
    "split": lambda group: group.split(0),
    "subgroup": lambda group: group.subgroup([0, 1]),
    "expose": lambda group: group.expose(np.zeros(1)),
    "shrink": lambda group: group.shrink(),
    "rendezvous": lambda group: group.rendezvous(),
    "get": lambda group: group.store.get("key"),
    "set": lambda group: group.store.set("key", b""),
    "add": lambda group: group.store.add("number"),
}
"""Calls that begin as coroutines (`aiodist.composing.started`)."""


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("op", CALLS)
def test_a_forgotten_coroutine_is_told_with_its_line(run, op, held):
    """The other rank awaits the same call. Nothing is told of the calls that these two make."""
    call = CALLS[op]

    async def main():
        kept = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            async with aiodist.local(2) as groups:
                work = call(groups[0])  # forgotten
                await call(groups[1])
                await groups[0].store.get("key")  # what came before has come
                if held:
                    kept.append(work)
                del work
                gc.collect()
        return told

    (one,) = run(main())
    assert one.category is RuntimeWarning
    assert line_of(one).startswith(f'"{op}": lambda')
    assert ("closes" if held else "was dropped") in str(one.message)


def test_who_cancels_a_coroutine_or_hears_its_error_is_told_of_nothing(run):
    async def main():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            async with aiodist.local(2) as groups:
                one, other = groups
                one.agree().cancel()
                assert not await other.agree()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(one.store.wait("never"), 0)
                await one.store.set("key", b"no number")
                with pytest.raises(ValueError, match="a decimal number"):
                    await one.store.add("key")
                windows = await asyncio.gather(one.expose(None), other.expose(None))
                await asyncio.gather(*[window.close() for window in windows])
        return told

    assert run(main()) == []


@pytest.mark.parametrize("done", [False, True])
def test_who_leaves_by_an_exception_is_told_of_nothing(run, done):
    async def main():
        loop, told = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: told.append(context))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with pytest.raises(ZeroDivisionError):
                async with aiodist.local(2) as groups:
                    work = groups[0].barrier()
                    if done:
                        await groups[1].barrier()
                    raise ZeroDivisionError
            assert work.done()
            del work
            gc.collect()
        return told + warned

    assert run(main()) == []


def test_a_group_is_closed_also_where_warnings_are_errors(run):
    async def main():
        async with aiodist.local(2) as groups:
            work = groups[0].barrier(tag="error")
            closing = asyncio.ensure_future(groups[0].close())
            await groups[1].barrier(tag="error")
            with pytest.raises(RuntimeWarning, match="is pending while the group closes"):
                await closing
            assert groups[0].closed
            assert await work is None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(main())


def test_a_line_is_told_once(run):
    async def main():
        async with aiodist.local(2) as groups:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("default")
                for _ in range(3):
                    groups[0].barrier()
                    await groups[1].barrier()
        return told

    assert len(run(main())) == 1


@pytest.mark.parametrize(
    "look",
    [
        lambda work: work.done(),
        lambda work: work.result(),
        lambda work: work.exception(),
        lambda work: work.add_done_callback(lambda done: None),
        asyncio.gather,
        lambda work: asyncio.ensure_future(waited(work)),
    ],
)
def test_who_looks_later_is_told_nothing(run, look):
    async def main():
        async with aiodist.local(2) as groups:
            work = groups[0].barrier()
            await groups[1].barrier()
            assert type(work) is not aiodist.Work
            found = look(work)
            assert isinstance(work, aiodist.Work) or asyncio.isfuture(found)
            del work
            if asyncio.isfuture(found):
                await found

    run(main())


async def waited(work):
    return await work


def test_sends_may_be_dropped(run):
    async def main():
        async with aiodist.local(2) as groups:
            groups[0].send(np.zeros(1_000_000), 1)
            assert len(await groups[1].recv()) == 1_000_000

    run(main())


async def test_a_send_to_a_rank_that_is_gone_is_not_reported_as_never_retrieved() -> None:
    """Nobody has to look at a send; that the rank is gone is told in other ways."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what["message"]))
    for op in ("send", "recv"):
        begin(op).fail(aiodist.PeerLostError("rank 1 has left", ranks=[1]))
        begin(op).fail(aiodist.GroupRevokedError("the epoch is over"))
    begin("send").fail(aiodist.CollectiveTimeoutError("not matched"))
    gc.collect()
    assert len(told) == 3
    assert all("never retrieved" in text for text in told)


async def test_a_loop_that_catches_each_failure_lets_others_run() -> None:
    async def fails() -> None:
        while not is_over:
            work = begin()
            work.fail(OSError("at once"))
            with contextlib.suppress(OSError):
                await work

    is_over = False
    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    is_over = True
    await task


async def test_who_is_cancelled_while_a_failure_is_raised_has_seen_it() -> None:
    async def fails() -> None:
        work = begin()
        work.fail(OSError("at once"))
        await work

    unseen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unseen.append(what))
    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    gc.collect()
    assert unseen == []


@pytest.mark.parametrize("tag", [None, "tag"])
@pytest.mark.parametrize("how", ["dropped", "assigned", "held"])
def test_a_late_forgotten_await_of_a_kind_that_was_called_before_is_told(run, how, tag):
    """Such calls are done before they return. Each one is told, not only the first of its kind."""

    async def forgets(group):
        if how == "dropped":
            group.all_reduce(np.ones(3), tag=tag)
        else:
            y = group.all_reduce(np.ones(3), tag=tag)
            return [y] if how == "held" else y.op
        return None

    async def main():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            async with aiodist.local(2, transports=("shm",)) as groups:
                for _ in range(15):
                    works = [group.all_reduce(np.ones(3), tag=tag) for group in groups]
                    await asyncio.gather(*works)
                for _ in range(3):
                    other = groups[0].all_reduce(np.ones(3), tag=tag)
                    held = await forgets(groups[1])
                    await other
            assert len(told) == (2 if how == "held" else 3)
            del held
        return told

    told = run(main())
    assert len(told) == 3
    assert all(one.category is RuntimeWarning for one in told)
    assert all("the Work of all_reduce was dropped here" in str(one.message) for one in told)
    if how == "dropped":
        assert {line_of(one) for one in told} == {"group.all_reduce(np.ones(3), tag=tag)"}


def test_who_leaves_by_an_exception_is_told_of_nothing_that_was_done_in_its_call(run):
    async def main():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with pytest.raises(ZeroDivisionError):
                async with aiodist.local(2, transports=("shm",)) as groups:
                    for _ in range(15):
                        works = [group.all_reduce(1) for group in groups]
                        await asyncio.gather(*works)
                    other = groups[0].all_reduce(1)
                    works = [groups[1].all_reduce(1)]
                    await other
                    raise ZeroDivisionError
            del works
        return told

    assert run(main()) == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_group_that_is_not_closed_tells_at_the_end_of_the_process(fails):
    program = f"""
import asyncio, aiodist
async def main():
    await aiodist.Coordinator("inproc://here").__aenter__()
    group = await aiodist.connect("inproc://here", rank=0, size=1)
    group.recv(src=0)
    {"1 / 0" if fails else ""}
asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    told = "<string>:6: RuntimeWarning: the Work of recv is pending while the process ends"
    assert (told in done.stderr) != fails
    assert ("RuntimeWarning" in done.stderr) != fails
    assert done.returncode == int(fails)


@pytest.mark.parametrize("tag", [None, "tag"])
def test_a_late_forgotten_await_that_has_to_wait_is_told(run, tag):
    async def main():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            async with aiodist.local(2, transports=("shm",)) as groups:
                for _ in range(15):
                    works = [group.all_reduce(np.ones(3), tag=tag) for group in groups]
                    await asyncio.gather(*works)
                groups[0].all_reduce(np.ones(3), tag=tag)
                await groups[1].all_reduce(np.ones(3), tag=tag)
                await asyncio.gather(*[group.barrier() for group in groups])
        return told

    (one,) = run(main())
    assert line_of(one) == "groups[0].all_reduce(np.ones(3), tag=tag)"


@pytest.mark.parametrize("op", ["send", "ssend"])
def test_a_send_to_a_lost_rank_need_not_be_looked_at(run, op):
    """A program hears of the loss in other ways, whichever of the two it has called."""

    async def main():
        said = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: said.append(context))
        work = begin(op)
        work.fail(aiodist.PeerLostError("rank 1 is lost", ranks=[1]))
        del work
        gc.collect()
        loop.set_exception_handler(None)
        assert not said

    run(main())
