"""`aiodist.epochs`: ranks that die, come and are turned out, while the others go on."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from idle_time import on_idle_time

import aiodist
from aiodist.services.keeper import Keeper
from aiodist.wire.recovery import Unreachable

ELASTIC = {"min_size": 2, "join_window": 0.01}

inproc = pytest.mark.parametrize("stage", ["inproc"], indirect=True)


async def until(condition):
    """Turn by turn of the loop."""
    for _ in iter(lambda: bool(condition()), True):
        await asyncio.sleep(0)


class Worker:
    """One rank that counts steps with the others, epoch after epoch, until it is told to stop.

    `seen`: (epoch, rank, size) of each group; `steps`: the state that is handed on.
    """

    def __init__(self, cast, **options):
        self.cast = cast
        self.options = {**cast.options, **ELASTIC, **options}
        self.seen = []
        self.steps = 0
        self.stop = False
        self.group = None
        self.task = asyncio.ensure_future(self.run())

    async def run(self):
        async for group in aiodist.epochs(self.cast.address, **self.options):
            self.group = group
            async with group:
                self.seen.append((group.epoch, group.rank, group.size))
                self.steps = max(await group.all_gather(self.steps))
                await self.work(group)
        assert self.group.closed

    async def work(self, group):
        while not await group.all_reduce(self.stop, op=aiodist.ReduceOp.LOR):
            self.steps += 1
            await asyncio.sleep(0)

    async def sees(self, size):
        """Until it is in a group of `size`, and has made a step there."""
        await until(lambda: self.seen and self.seen[-1][2] == size)
        steps = self.steps
        await until(lambda: self.steps > steps)

    async def die(self):
        self.cast.actors.append(self.group._actor)
        await self.cast.kill(self.group)
        self.task.cancel()
        await asyncio.wait({self.task})


async def ended(workers):
    workers[0].stop = True
    await asyncio.gather(*[worker.task for worker in workers])
    assert len({worker.steps for worker in workers}) == 1


def test_a_rank_dies_and_others_come(run, stage):
    async def main():
        async with stage() as cast:
            workers = [Worker(cast, min_size=3)]
            workers += [Worker(cast, min_size=3) for _ in range(2)]
            for worker in workers:
                await worker.sees(3)
            await workers.pop().die()
            # Three it takes: the two that are left wait for another one, in the next epoch.
            workers.append(Worker(cast, min_size=3))
            await workers[-1].sees(3)
            assert workers[-1].steps > 0  # what the others had come to
            # One more is taken in though nobody's operation fails.
            workers.append(Worker(cast, min_size=3))
            for worker in workers:
                await worker.sees(4)
            assert {worker.seen[-1][0] for worker in workers} == {3}
            await ended(workers)
            assert cast.coordinator.status()["groups"] == []

    run(main())


@inproc
def test_joiners_wait_where_they_are_not_admitted(run, stage):
    async def main():
        async with stage() as cast:
            workers = [Worker(cast, admit=False) for _ in range(2)]
            await workers[0].sees(2)
            workers.append(Worker(cast, admit=False))
            await cast.waiting(1)
            steps = workers[0].steps
            await until(lambda: workers[0].steps >= steps + 10)
            assert cast._waiting() == 1
            workers[1].group.revoke()  # the program says when
            await workers[2].sees(3)
            await ended(workers)

    run(main())


@inproc
def test_nobody_is_called_for_a_joiner_without_room(run, stage):
    async def main():
        full = {**ELASTIC, "max_size": 2, "join_window": 0.0}
        async with stage() as cast:
            workers = [Worker(cast, **full) for _ in range(2)]
            await workers[0].sees(2)
            third = asyncio.ensure_future(cast.join(**full))
            await cast.waiting(1)
            steps = workers[0].steps
            await until(lambda: workers[0].steps >= steps + 20)
            assert len(workers[0].seen) == 1
            third.cancel()
            await asyncio.wait({third})
            await ended(workers)

    run(main())


class Waiting(Worker):
    """One that waits for something else than the group, in its first group of three."""

    def __init__(self, cast, **options):
        super().__init__(cast, **options)
        self.waits = False
        self.news = asyncio.Event()

    async def work(self, group):
        if group.size == 3 and not self.waits:
            self.waits = True
            await self.news.wait()
            await group.store.get("k")
        await super().work(group)


@inproc
def test_who_waits_for_something_else_is_cancelled_there(run, stage):
    async def main():
        async with stage() as cast:
            workers = [Worker(cast), Worker(cast), Waiting(cast, patience=0.0)]
            await until(lambda: workers[2].waits)
            workers[0].group.revoke()
            await workers[2].sees(3)
            assert workers[2].task.cancelling() == 0
            await ended(workers)

    run(main())


@pytest.mark.parametrize(
    ("patience", "error", "text"),
    [
        (float("nan"), ValueError, "patience is more than 0 seconds, not nan"),
        (-1, ValueError, "patience is more than 0 seconds, not -1"),
        ("x", TypeError, "patience is a number of seconds, not 'x'"),
        (None, TypeError, "patience is a number of seconds, not None"),
        (True, TypeError, "patience is a number of seconds, not True"),
    ],
)
def test_a_patience_that_no_timer_has_is_refused_at_once(patience, error, text):
    with pytest.raises(error, match=text):
        aiodist.epochs("inproc://absent", min_size=1, patience=patience)


@inproc
def test_who_is_cancelled_by_others_is_cancelled(run, stage):
    async def main():
        async with stage() as cast:
            workers = [Worker(cast), Worker(cast), Waiting(cast)]
            await until(lambda: workers[2].waits)
            workers[2].task.cancel()
            await asyncio.wait({workers[2].task})
            assert workers[2].task.cancelled()
            workers.pop()
            await workers[0].sees(2)
            await ended(workers)

    run(main())


class Failing(Worker):
    """One whose body raises in its first epoch."""

    async def work(self, group):
        if len(self.seen) == 1:
            raise self.error
        await super().work(group)


def lost():
    return aiodist.PeerLostError("gone", ranks=[1])


@inproc
@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (lost(), True),
        (aiodist.CoordinatorLostError("gone"), True),
        (ExceptionGroup("of tasks", [lost(), ExceptionGroup("deeper", [lost()])]), True),
        (ExceptionGroup("of tasks", [lost(), ValueError("a bug")]), False),
        (ValueError("a bug"), False),
        (aiodist.CollectiveTimeoutError("late"), False),
        (aiodist.MismatchError("odd", calls={}), False),
        (aiodist.GroupClosedError("closed by the program"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_errors_end_the_epoch_alone(run, stage, error, goes_on):
    async def main():
        async with stage() as cast:
            workers = [Worker(cast), Worker(cast), Failing(cast)]
            workers[2].error = error
            if not goes_on:
                failing = workers.pop()
                await asyncio.wait({failing.task})
                assert failing.task.exception() is error
            for worker in workers:
                await worker.sees(2 + goes_on)
            await ended(workers)

    run(main())


class Elsewhere(Worker):
    """One that gets an error of another group in its first epoch, and raises it."""

    other: aiodist.Group

    async def work(self, group):
        if len(self.seen) == 1:
            await self.fails(group)
        await super().work(group)

    async def fails(self, group):
        await self.other.barrier()


class OfChild(Elsewhere):
    """The other group was made of the first one."""

    async def fails(self, group):
        async with await group.subgroup([group.rank]) as own:
            own.revoke()
            await own.barrier()


@inproc
@on_idle_time
@pytest.mark.parametrize("kind", [Elsewhere, OfChild])
def test_an_error_of_another_group_is_raised(run, stage, kind):
    async def main():
        async with stage() as cast:
            kind.other = await cast.join(group="other", size=1)
            kind.other.revoke()
            workers = [Worker(cast), Worker(cast), kind(cast)]
            failing = workers.pop()
            await asyncio.wait({failing.task})
            assert isinstance(failing.task.exception(), aiodist.GroupRevokedError)
            assert len(failing.seen) == 1
            for worker in workers:
                await worker.sees(2)
            await ended(workers)
            await kind.other.close()

    run(main())


@inproc
def test_one_that_is_cancelled_after_an_error_of_another_group(run, stage, monkeypatch):
    monkeypatch.setattr("aiodist.services.keeper.PATIENCE", 60.0)

    async def main():
        async with stage() as cast:
            workers = [Worker(cast, min_size=3) for _ in range(2)]
            worker = OfChild(cast, min_size=3)
            await until(lambda: worker.group and worker.group._line.keeper._eager)
            worker.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await worker.task
            workers.append(Worker(cast, min_size=3))  # in its place, because it has left
            for other in workers:
                await until(lambda other=other: other.seen and other.seen[-1][0] == 2)
            await ended(workers)

    run(main())


@inproc
def test_an_error_of_another_group_comes_before_that_of_this_one(run, stage, monkeypatch):
    """The loss of one process breaks two groups, and this rank hears of it in the other one."""
    monkeypatch.setattr("aiodist.services.keeper.PATIENCE", 60.0)

    async def main():
        failed = asyncio.Event()

        class First(OfChild):
            async def fails(self, group):
                failed.set()
                await super().fails(group)

        async with stage() as cast:
            workers = [Worker(cast, min_size=3), Worker(cast, min_size=3), First(cast, min_size=3)]
            await failed.wait()
            await workers.pop(0).die()
            workers.append(Worker(cast, min_size=3))
            for worker in workers:
                await worker.sees(3)
            await ended(workers)

    run(main())


class Deaf:
    """Who begins to listen now hears nothing of the members, and fails once this is `broken`."""

    def __init__(self, monkeypatch):
        self.listen = asyncio.Event()
        self.broken = asyncio.Event()
        monkeypatch.setattr(aiodist.Group, "views", self.views)

    async def views(self):
        self.listen.set()
        await self.broken.wait()
        raise LookupError("no news")
        yield


@inproc
@pytest.mark.parametrize("busy", [True, False])
def test_a_rank_that_hears_no_more_of_the_others_leaves_and_says_why(
    run, stage, monkeypatch, caplog, busy
):
    """Whether its block is in an operation then, or waits for something else."""
    kind, options = (Worker, {}) if busy else (Waiting, {"patience": 0.0})

    async def main():
        async with stage() as cast:
            workers = [Worker(cast), Worker(cast)]
            await workers[0].sees(2)
            with monkeypatch.context() as patch:
                deaf = Deaf(patch)
                workers.append(kind(cast, **options))
                await deaf.listen.wait()
            await until(lambda: workers[2].steps)
            deaf.broken.set()
            failed = workers.pop().task
            await asyncio.wait({failed})
            if busy:
                assert isinstance(failed.exception(), aiodist.GroupClosedError)
                assert "LookupError: no news" in str(failed.exception())
            else:
                assert isinstance(failed.exception(), LookupError)
            for worker in workers:
                await worker.sees(2)
            await ended(workers)

    run(main())
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == "group 'world': no news of its members any more"
    assert record.exc_info
    caplog.clear()  # what it was raised in holds the group


@inproc
def test_a_keeper_that_ends_hears_nothing_more(run, stage, monkeypatch):
    async def main():
        async with stage() as cast:
            Deaf(monkeypatch)
            keepers = [
                Keeper(aiodist.connect(cast.address, **cast.options, **ELASTIC)) for _ in range(2)
            ]
            groups = await asyncio.gather(*[keeper.next() for keeper in keepers])
            await asyncio.gather(*[keeper.end() for keeper in keepers])
            assert all(group.closed for group in groups)
            assert all(keeper._watch.cancelled() for keeper in keepers)

    run(main())


@inproc
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_coordinator_that_is_gone_for_good_before_it_tells_of_the_members(run, stage, caplog):
    """Operations go on: only the membership cannot change any more."""

    async def main():
        async with stage(returns=False) as cast:
            keepers = [
                Keeper(aiodist.connect(cast.address, **cast.options, **ELASTIC)) for _ in range(2)
            ]
            groups = await asyncio.gather(*[keeper._join() for keeper in keepers])
            await cast.stop_coordinator()
            await until(lambda: not any(group._actor.control.is_open for group in groups))
            for keeper, group in zip(keepers, groups, strict=True):
                keeper._begin(group)
            await asyncio.wait([keeper._watch for keeper in keepers])
            for keeper in keepers:
                keeper._watch.result()
            await asyncio.gather(*[group.barrier() for group in groups])
            await cast.start_coordinator()
            await asyncio.gather(*[keeper.end() for keeper in keepers])

    run(main())


class Leaving(Worker):
    """One that leaves in the midst of its block, by `return`."""

    async def run(self):
        async for group in aiodist.epochs(self.cast.address, **self.options):
            async with group:
                await group.barrier()
                return


@inproc
def test_who_returns_has_left_in_order(run, stage, caplog):
    async def main():
        async with stage() as cast:
            leaving = [Leaving(cast), Leaving(cast)]
            await asyncio.gather(*[worker.task for worker in leaving])
            assert cast.coordinator.status()["groups"] == []

    run(main())
    assert "lost" not in caplog.text


@inproc
def test_a_rank_that_was_turned_out_joins_again(run, stage):
    async def main():
        async with stage() as cast:
            workers = [Worker(cast) for _ in range(3)]
            for worker in workers:
                await worker.sees(3)
            workers.sort(key=lambda worker: worker.group.rank)
            first, _, last = [worker.group for worker in workers]
            # Of two that do not reach each other, the higher rank is turned out; now, as they vote.
            first._actor.control.tell(Unreachable(first.members[2].id, "a cable was pulled", False))
            first.revoke()
            await until(lambda: workers[2].group is not last)
            assert last._actor.is_evicted
            for worker in workers:
                await worker.sees(3)
            assert workers[2].seen[-1][:2] == (last.epoch + 2, 2)
            await ended(workers)

    run(main())


@inproc
def test_a_coordinator_that_is_gone_for_good_is_followed_by_another(run, stage):
    async def main():
        async with stage(returns=False, timeout=20.0) as cast:
            workers = [Worker(cast) for _ in range(3)]
            for worker in workers:
                await worker.sees(3)
            await cast.stop_coordinator()
            await cast.start_coordinator()
            first = workers[0].steps
            workers[1].group.revoke()
            await until(lambda: all(len(worker.seen) > 1 for worker in workers))
            for worker in workers:
                await worker.sees(3)
            assert workers[0].steps > first  # nothing of what they had come to is lost
            await ended(workers)

    run(main())


@inproc
def test_who_waits_for_something_else_is_cancelled_if_the_coordinator_is_gone_for_good(run, stage):
    async def main():
        async with stage(returns=False, timeout=20.0) as cast:
            workers = [Waiting(cast, patience=0.0) for _ in range(3)]
            await until(lambda: all(one.waits for one in workers))
            await cast.stop_coordinator()
            await until(lambda: not any(one.group._actor.control.is_open for one in workers))
            await cast.start_coordinator()
            workers[0].news.set()
            for worker in workers:
                await worker.sees(3)
            await ended(workers)

    run(main())


@inproc
def test_without_a_block_the_program_handles_errors_itself(run, stage):
    async def one(cast, name, seen):
        async for group in aiodist.epochs(cast.address, **cast.options, **ELASTIC):
            try:
                seen.append((name, group.epoch))
                await group.barrier()
                if group.epoch == 1:
                    group.revoke()
                    await group.barrier()
            except aiodist.GroupRevokedError:
                continue
            await group.close()

    async def main():
        seen = []
        async with stage() as cast:
            await asyncio.gather(one(cast, "a", seen), one(cast, "b", seen))
            assert sorted(seen) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]

    run(main())


@inproc
@on_idle_time
def test_an_epoch_that_does_not_form_says_who_does_not_come(run, stage):
    async def main():
        async with stage(timeout=0.2) as cast:
            keeper, other = [
                Keeper(aiodist.connect(cast.address, **cast.options, **ELASTIC)) for _ in range(2)
            ]
            await asyncio.gather(keeper.next(), other.next())
            with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
                await keeper.next()
            assert caught.value.missing == (other.group.rank,)
            groups = await asyncio.gather(keeper.next(), other.next())
            assert [group.size for group in groups] == [2, 2]
            await asyncio.gather(keeper.end(), other.end())

    run(main())


@inproc
@pytest.mark.parametrize("how", ["close", "close, then lost", "abort", "no files", "a bug"])
def test_a_rank_that_leaves_while_an_epoch_forms(run, stage, how):
    """If its program did not ask for it, it joins again."""

    async def main():
        async with stage() as cast:
            keepers = [
                Keeper(aiodist.connect(cast.address, **cast.options, **ELASTIC)) for _ in range(2)
            ]
            group, _ = await asyncio.gather(*[keeper.next() for keeper in keepers])
            forming = asyncio.ensure_future(keepers[0].next())
            await until(lambda: group._actor.votes)
            if how == "close":
                await group.close()
            elif how == "close, then lost":
                leaving = asyncio.ensure_future(group.close())
                await until(lambda: group._actor.is_over)
                group._actor.is_evicted = True
                await leaving
            elif how == "abort":
                group.abort("no more")
            elif how == "no files":
                group._actor.exhausted(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            else:
                group._actor.task_failed(LookupError(how))
            await group._actor.gone()
            if how not in ("no files", "a bug"):
                assert await forming is None
            else:
                await asyncio.gather(forming, keepers[1].next())
                assert keepers[0].group.size == 2
            await asyncio.gather(*[keeper.end() for keeper in keepers])

    run(main())
