"""`aiodist.lifespan` without a web server: applications that start, ask and end, in one loop."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest
from idle_time import on_idle_time
from over_links import until

import aiodist

pytestmark = pytest.mark.parametrize("stage", ["inproc"], indirect=True)


def application():
    return SimpleNamespace(state=SimpleNamespace())


class Worker:
    """A worker with a Starlette-like application, from its start to its end."""

    def __init__(self, cast, **options):
        self.app = application()
        settings = {"min_size": 2, "join_window": 0.0, **cast.options, **options}
        self.lifespan = aiodist.lifespan(cast.address, **settings)
        self.started = asyncio.Event()
        self.stop = asyncio.Event()
        self.task = asyncio.ensure_future(self.run())

    async def run(self):
        async with self.lifespan(self.app):
            self.started.set()
            await self.stop.wait()

    async def end(self):
        self.stop.set()
        await self.task


async def started(*workers):
    await asyncio.gather(*[worker.started.wait() for worker in workers])


async def barrier(group, size):
    """What a request does; with too few workers it waits for more."""
    await group.barrier(tag="request")
    if group.size != size:
        await group.recv(tag="never")  # until the epoch is over
    return group.epoch


def test_requests_go_on_in_the_next_epoch(run, stage):
    async def main():
        async with stage() as cast:
            workers = [Worker(cast) for _ in range(3)]
            await started(*workers)
            # The third one may have come behind the others: then they meet again.
            met = [asyncio.ensure_future(w.lifespan.call(barrier, 3)) for w in workers]
            base, *others = await asyncio.gather(*met)
            assert others == [base, base]
            assert workers[0].app.state.group is workers[0].lifespan.group
            assert workers[0].app.state.lifespan is workers[0].lifespan
            # Of three workers, one is never asked for this: it dies instead.
            asked = [asyncio.ensure_future(w.lifespan.call(barrier, 2)) for w in workers[:2]]
            await asyncio.sleep(0)
            victim = workers.pop()
            cast.actors.append(victim.lifespan.group._actor)
            await cast.kill(victim.lifespan.group)
            assert await asyncio.gather(*asked) == [base + 1] * 2
            assert workers[0].app.state.group.epoch == base + 1
            victim.task.cancel()
            await asyncio.wait({victim.task})
            # Somebody comes, and somebody leaves in order.
            workers.append(Worker(cast))
            asked = [w.lifespan.call(barrier, size=3) for w in workers if await started(w) is None]
            assert await asyncio.gather(*asked) == [base + 2] * 3
            await workers.pop(0).end()
            asked = [w.lifespan.call(barrier, 2) for w in workers]
            assert await asyncio.gather(*asked) == [base + 3] * 2
            await asyncio.gather(*[worker.end() for worker in workers])
            assert cast.coordinator.status()["groups"] == []
            with pytest.raises(RuntimeError, match="has not started"):
                await workers[0].lifespan.call(barrier, 2)

    run(main())


def test_what_a_request_raises_itself_is_raised(run, stage):
    async def main():
        async with stage() as cast:
            workers = [Worker(cast) for _ in range(2)]
            await started(*workers)

            async def fails(group, error):
                raise error

            for error in (ValueError("a bug"), aiodist.MismatchError("odd", calls={})):
                with pytest.raises(type(error)) as caught:
                    await workers[0].lifespan.call(fails, error)
                assert caught.value is error
            given_up = aiodist.CollectiveAbortedError("no", rank=1, reason="cancelled")
            for error in (given_up, ExceptionGroup("of a TaskGroup", [given_up])):
                with pytest.raises(type(error)):
                    await asyncio.wait_for(workers[0].lifespan.call(fails, error), 60)
            assert workers[0].lifespan.group.epoch == 1
            await asyncio.gather(*[worker.end() for worker in workers])

    run(main())


@on_idle_time
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("derives", [False, True])
def test_an_error_of_another_group_is_raised(run, stage, asks, derives):
    async def main():
        calls = []

        async def fails(argument):
            calls.append(argument)
            if derives:
                child = await worker.lifespan.group.dup()
                child.revoke()
                await child.barrier()
            await other.barrier()

        async with stage() as cast:
            worker = Worker(cast, answer=fails, min_size=1)
            await started(worker)
            other = await cast.join(group="other", size=1)
            other.revoke()
            lifespan = worker.lifespan
            with pytest.raises(aiodist.GroupRevokedError) as raised:
                await (lifespan.ask("x", timeout=60) if asks else lifespan.call(fails))
            assert raised.value.group == ("world/dup" if derives else "other")
            assert len(calls) == lifespan.group.epoch == 1
            await other.close()
            await worker.end()

    run(main())


def test_a_request_that_is_cancelled_after_an_error_of_another_group(run, stage, monkeypatch):
    monkeypatch.setattr("aiodist.services.keeper.PATIENCE", 60.0)

    async def fails(group):
        async with await group.dup() as child:
            child.revoke()
            await child.barrier()

    async def main():
        async with stage() as cast:
            worker = Worker(cast, min_size=1)
            await started(worker)
            before = worker.lifespan._keeper._eager
            requests = [asyncio.create_task(worker.lifespan.call(fails)) for _ in range(2)]
            await until(lambda: worker.lifespan._keeper._eager == before + 2)
            for request in requests:
                request.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await request
            assert worker.lifespan._keeper._eager == before
            await worker.end()

    run(main())


@on_idle_time
def test_an_error_of_another_group_comes_before_that_of_this_one(run, stage):
    """The loss of one process breaks two groups, and the worker hears of it in the other one."""

    async def main():
        failed = asyncio.Event()

        async def request(group):
            if not failed.is_set():
                child = await group.subgroup([group.rank])
                child.revoke()
                failed.set()
                await child.barrier()
            return group.epoch

        async with stage() as cast:
            workers = [Worker(cast, min_size=1, max_size=2) for _ in range(2)]
            await started(*workers)
            await asyncio.gather(*(worker.lifespan.call(barrier, 2) for worker in workers))
            asked = asyncio.ensure_future(workers[0].lifespan.call(request))
            await failed.wait()
            before = workers[0].lifespan.group.epoch
            await workers.pop().end()
            assert await asked == before + 1
            await workers[0].end()

    run(main())


def test_what_serves_is_begun_in_each_epoch_and_ended_with_it(run, stage):
    async def main():
        began, ended = [], []

        async def serve(group):
            began.append((group.epoch, group.rank))
            try:
                await asyncio.Event().wait()
            finally:
                ended.append((group.epoch, group.rank))

        async with stage() as cast:
            workers = [Worker(cast, serve=serve) for _ in range(2)]
            await started(*workers)
            workers.append(Worker(cast))
            await started(workers[2])
            for worker in workers[:2]:
                await worker.lifespan.call(at_epoch, 2)
            assert sorted(ended) == [(1, 0), (1, 1)]
            await asyncio.gather(*[worker.end() for worker in workers])
            assert sorted(began) == sorted(ended) == [(1, 0), (1, 1), (2, 0), (2, 1)]

    run(main())


@on_idle_time
@pytest.mark.parametrize("awaits", [False, True])
def test_workers_that_end_together_do_not_hold_up_requests_of_others(run, stage, awaits):
    """Each of them has joined in a request that the other one has not heard of."""

    async def main():
        entered = [asyncio.Event() for _ in range(4)]
        ended = [asyncio.Event() for _ in range(4)]

        async def serve(group):
            rank = group.rank
            try:
                async for name, _, _ in group.messages(tag="name"):
                    work = group.all_reduce(1, tag=name)
                    work.add_done_callback(lambda done: done.cancelled() or done.exception())
                    entered[rank].set()
                    if awaits:
                        await work
            finally:
                ended[rank].set()

        async def count(group, first):
            name = f"of rank {group.rank}"
            others = {*range(group.size)} - {group.rank}
            if group.size == 4:
                await group.send(name, first, tag="name")
                await entered[first].wait()
                asked[group.rank].set()
                await asyncio.gather(ended[1].wait(), ended[3].wait())
                others.remove(first)
            await asyncio.gather(*(group.send(name, rank, tag="name") for rank in others))
            return await group.all_reduce(1, tag=name)

        async with stage() as cast:
            options = {"max_size": 4, "join_window": 20.0}  # all four, and then the two that stay
            workers = [Worker(cast, serve=serve, **options) for _ in range(4)]
            await started(*workers)
            by_rank = {worker.lifespan.group.rank: worker for worker in workers}
            asked = {rank: asyncio.Event() for rank in (0, 2)}
            requests = [
                asyncio.ensure_future(by_rank[rank].lifespan.call(count, first))
                for rank, first in ((0, 3), (2, 1))
            ]
            await asyncio.gather(*(event.wait() for event in asked.values()))
            await asyncio.gather(by_rank[1].end(), by_rank[3].end())
            assert await asyncio.gather(*requests) == [2, 2]
            await asyncio.gather(by_rank[0].end(), by_rank[2].end())

    run(main())


async def at_epoch(group, epoch):
    if group.epoch < epoch:
        await group.recv(tag="never")  # until the epoch is over
    await asyncio.sleep(0)


async def buggy(group):
    raise ValueError("a bug")


async def awaits_a_cancelled_task(group):
    task = asyncio.create_task(asyncio.Event().wait())
    task.cancel()
    await task


@pytest.mark.parametrize(
    ("serve", "error", "text"),
    [
        (buggy, ValueError, "a bug"),
        (lambda group: 3, TypeError, "serve must be an async function; it returned 3"),
        (awaits_a_cancelled_task, RuntimeError, "serve ended by CancelledError"),
    ],
)
def test_what_serves_badly_is_said_to_all_who_ask(run, stage, caplog, serve, error, text):
    async def main():
        async with stage() as cast:
            workers = [Worker(cast, serve=serve), Worker(cast, min_size=2)]
            await started(*workers)
            with pytest.raises(error, match=text):
                await workers[0].lifespan.call(barrier, 3)
            with pytest.raises(error, match=text):
                _ = workers[0].lifespan.group
            workers[0].stop.set()
            with pytest.raises(error, match=text):
                await workers[0].task
            await workers[1].end()

    run(main())
    assert "this worker has no group any more" in caplog.text


def test_a_group_that_is_closed_while_the_next_epoch_forms_is_said_to_all_who_ask(run, stage):
    async def main():
        async with stage() as cast:
            workers = [Worker(cast) for _ in range(2)]
            await started(*workers)
            lifespan = workers[0].lifespan
            await workers[1].end()
            await until(lambda: lifespan.group._actor.votes)
            asked = asyncio.ensure_future(lifespan.call(barrier, 2))
            await lifespan.group.close()
            for waits in (asked, lifespan.call(barrier, 2), workers[0].task):
                with pytest.raises(aiodist.GroupClosedError, match="program has closed its group"):
                    await waits
                workers[0].stop.set()

    run(main())


@on_idle_time
def test_a_worker_that_waits_to_join_tells_where_the_lifespan_was_made(run, stage, caplog):
    async def main():
        async with stage(timeout=20.0) as cast:
            worker = Worker(cast)
            with pytest.raises(aiodist.JoinTimeoutError):
                await worker.task

    run(main())
    assert "waiting to join for 10 s" in caplog.text
    assert "; at recovery/test_lifespan.py:" in caplog.text
    assert "in Worker.__init__" in caplog.text


def test_a_worker_does_not_start_without_its_group(run, stage):
    async def main():
        async with stage(timeout=0.05) as cast:
            worker = Worker(cast)
            with pytest.raises(aiodist.JoinTimeoutError):
                await worker.task
            with pytest.raises(RuntimeError, match="has not started"):
                _ = worker.lifespan.group

    run(main())


@on_idle_time
def test_too_few_workers_are_waited_for_again_and_again(run, stage, caplog, monkeypatch):
    monkeypatch.setattr("aiodist.services.lifespan._PAUSE", 0.0)
    again = asyncio.Event()

    class Heard(logging.Handler):
        def emit(self, record):
            again.set()

    handler = Heard()
    logging.getLogger("aiodist.services").addHandler(handler)

    async def main():
        async with stage(timeout=0.1) as cast:
            workers = [Worker(cast) for _ in range(2)]
            await started(*workers)
            await workers.pop().end()
            with pytest.raises(aiodist.CollectiveTimeoutError):  # nobody waits for ever
                await workers[0].lifespan.call(barrier, 2)
            await again.wait()
            workers.append(Worker(cast, timeout=20.0))
            await started(workers[1])
            asked = [worker.lifespan.call(barrier, 2) for worker in workers]
            assert await asyncio.gather(*asked) == [2, 2]
            await asyncio.gather(*[worker.end() for worker in workers])

    try:
        run(main())
    finally:
        logging.getLogger("aiodist.services").removeHandler(handler)
    assert "the workers have no group" in caplog.text


def test_aiohttp_has_it_as_a_cleanup_context(run, stage):
    async def main():
        async with stage() as cast:
            lifespan = aiodist.lifespan(cast.address, size=1, **cast.options)
            context = lifespan.cleanup_ctx(object())
            await anext(context)
            assert await lifespan.call(barrier, 1) == 1
            with pytest.raises(RuntimeError, match="make another one"):
                await anext(lifespan.cleanup_ctx(object()))
            with pytest.raises(StopAsyncIteration):
                await anext(context)
            assert cast.coordinator.status()["groups"] == []

    run(main())


def test_all_workers_are_asked(run, stage):
    async def main():
        async with stage() as cast:

            def answering(number):
                async def answer(question):
                    if question == "fail" and number == 1:
                        raise ValueError("a bug")
                    return [question, number]

                return answer

            workers = [Worker(cast, answer=answering(number)) for number in range(2)]
            await started(*workers)
            one, two = [worker.lifespan for worker in workers]
            numbers = {number for _, number in await one.ask("x", timeout=60)}
            assert numbers == {0, 1}
            found = await asyncio.gather(*(two.ask(number) for number in range(20)))
            assert [[question for question, _ in each] for each in found] == [
                [number] * 2 for number in range(20)
            ]
            with pytest.raises(RuntimeError, match="did not answer: ValueError: a bug"):
                await one.ask("fail")
            with pytest.raises(ValueError, match="a bug"):
                await two.ask("fail")
            # The others are asked again in the next epoch.
            workers.append(Worker(cast, answer=answering(2)))
            await started(*workers)
            await asyncio.gather(*(each.lifespan.call(barrier, 3) for each in workers))
            found = await one.ask("y")
            assert sorted(number for _, number in found) == [0, 1, 2]
            await asyncio.gather(*[worker.end() for worker in workers])
            assert not one._asking._waiting

    run(main())


@pytest.mark.parametrize("size", [1, 2])
def test_the_own_answer_travels_as_those_of_others(run, stage, size):
    async def main():
        cache = {"hits": [1]}

        async def answer(question):
            question.append("seen")
            return object() if "object" in question else cache

        async with stage() as cast:
            workers = [Worker(cast, answer=answer, min_size=size) for _ in range(size)]
            await started(*workers)
            ask, asked = workers[0].lifespan.ask, ["x"]
            for found in await ask(asked):
                assert found == cache
                assert found is not cache
                assert found["hits"] is not cache["hits"]
            assert asked == ["x"]
            with pytest.raises(TypeError, match="does not travel"):
                await ask(object())
            with pytest.raises((TypeError, RuntimeError), match="does not travel"):
                await ask(["object"])
            await asyncio.gather(*[worker.end() for worker in workers])

    run(main())


def test_a_question_of_another_loop_is_refused(run, stage):
    async def main():
        async def answer(question):
            return question

        async with stage() as cast:
            worker = Worker(cast, answer=answer, size=1, min_size=None)
            await started(worker)
            lifespan = worker.lifespan
            for asked in (lifespan.ask("x"), lifespan.call(barrier, 1)):
                with pytest.raises(RuntimeError, match="belong to the event loop of the worker"):
                    await asyncio.to_thread(asyncio.run, asked)
            await worker.end()

    run(main())


@pytest.mark.parametrize(
    ("wrong", "raised"),
    [
        ("large question", aiodist.MessageTooLargeError),
        ("large answer", RuntimeError),
        ("large error", RuntimeError),
        ("cancelled answer", RuntimeError),
    ],
)
def test_a_question_that_fails_harms_no_other_one(run, stage, wrong, raised):
    async def main():
        large = bytes(1 << 18)

        async def answer(question):
            if question == "large answer":
                return large
            if question == "large error":
                raise ValueError("x" * len(large))
            if question == "cancelled answer":
                raise asyncio.CancelledError
            return question

        async def fine(question):
            return question

        async with stage(max_message_bytes=1 << 16) as cast:
            # The start of the second one completes the group.
            workers = [Worker(cast, answer=each, max_size=2) for each in (fine, answer)]
            await started(*workers)
            asks = [worker.lifespan.ask for worker in workers]
            with pytest.raises(raised):
                await asks[0](large if wrong == "large question" else wrong, timeout=60)
            if wrong == "cancelled answer":  # by the worker that asks, too
                with pytest.raises(raised, match="ended by CancelledError"):
                    await asks[1](wrong, timeout=60)
            assert [await ask("x", timeout=60) for ask in asks] == [["x", "x"]] * 2
            await asyncio.gather(*[worker.end() for worker in workers])

    run(main())


def test_an_own_answer_ends_before_the_question_is_asked_again(run, stage):
    async def main():
        answering, most, first = [], [], asyncio.Event()

        async def slow(question):
            answering.append(question)
            most.append(len(answering))
            try:
                first.set()
                if len(most) == 1:
                    await asyncio.Event().wait()
            finally:
                answering.pop()

        async def quick(question):
            return None

        async with stage() as cast:
            workers = [Worker(cast, answer=each, max_size=2) for each in (slow, quick)]
            await started(*workers)
            asked = asyncio.ensure_future(workers[0].lifespan.ask("x", timeout=60))
            await first.wait()
            workers[1].lifespan.group.revoke()
            assert await asked == [None, None]
            assert most == [1, 1]
            await asyncio.gather(*[worker.end() for worker in workers])

    run(main())


def test_who_gives_no_answer_asks_nobody(run, stage):
    async def main():
        async with stage() as cast:
            worker = Worker(cast, min_size=1)
            await started(worker)
            with pytest.raises(RuntimeError, match="ask needs workers that answer"):
                await worker.lifespan.ask("x")
            await worker.end()

    run(main())


@pytest.mark.parametrize("argument", ["serve", "answer"])
def test_what_is_no_function_is_refused_at_once(stage, argument):
    with pytest.raises(TypeError, match=f"{argument} must be an async function, not 3"):
        aiodist.lifespan("inproc://absent", **{argument: 3})


def test_an_answer_by_a_plain_function_is_refused(run, stage):
    async def main():
        async with stage() as cast:
            workers = [Worker(cast, answer=lambda question: 3) for _ in range(2)]
            await started(*workers)
            with pytest.raises(TypeError, match="answer must be an async function; it returned 3"):
                await workers[0].lifespan.ask("x", timeout=60)
            await asyncio.gather(*[worker.end() for worker in workers])

    run(main())


@on_idle_time
@pytest.mark.parametrize(("op_timeout", "timeout"), [(0.01, None), (60.0, 0.01)])
def test_a_question_that_is_not_answered_is_given_up(run, stage, op_timeout, timeout):
    async def main():
        async def hang(question):
            await asyncio.Event().wait()

        async def answer(question):
            return question

        async with stage() as cast:
            options = {"min_size": 3, "max_size": 3, "op_timeout": op_timeout}
            workers = [Worker(cast, answer=each, **options) for each in (answer, hang, hang)]
            await started(*workers)
            silent = sorted(worker.lifespan.group.rank for worker in workers[1:])
            for worker in workers[:2]:  # one that answers itself, and one that does not
                with pytest.raises(TimeoutError) as given_up:
                    await worker.lifespan.ask("x", timeout=timeout)
                assert str(given_up.value) == (
                    f"not all have answered within 0.01 s: rank {silent[0]}, rank {silent[1]}"
                )
            with pytest.raises(TypeError, match="timeout is a number of seconds or None"):
                await workers[0].lifespan.ask("x", timeout="1")
            await asyncio.gather(*[worker.end() for worker in workers[1:]])
            with pytest.raises(TimeoutError, match="s: the group is being formed"):
                await workers[0].lifespan.ask("x", timeout=0.01)
            await workers[0].end()

    run(main())
