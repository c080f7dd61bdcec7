"""What programs for MPI expect of messages: less than a buffer, sends that wait for their receive,
envelopes, tags of their own for either direction; who is lost."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiodist
from aiodist import ANY_TAG, Envelope

pytestmark = pytest.mark.strength(2)

SMALL, LARGE = 3, 100_000  # one frame; announced, and pulled in pieces


@pytest.mark.parametrize("length", [0, SMALL, LARGE])
@pytest.mark.parametrize("waits", [False, True])
def test_less_than_the_buffer(run, groups, length, waits):
    async def main():
        async with groups(2) as (one, two):
            out = np.full(length + 5, -1.0)
            if waits:
                work = two.recv(src=0, out=out, partial=True)
                await asyncio.sleep(0)
            await one.send(np.arange(float(length)), 1) if length < LARGE else None
            sending = one.send(np.arange(float(length)), 1) if length == LARGE else None
            if not waits:
                work = two.recv(src=0, out=out, partial=True)
            got = await work
            if sending is not None:
                await sending
            assert len(got) == length
            assert got.base is out
            assert out[:length].tolist() == list(range(length))
            assert out[length:].tolist() == [-1.0] * 5
            assert work.nbytes == 8 * length

    run(main())


def test_rows_of_a_matrix(run, groups):
    async def main():
        async with groups(2) as (one, two):
            out = np.zeros((4, 2), np.int32)
            await one.send(np.ones((3, 2), np.int32), 1)
            got = await two.recv(out=out, partial=True)
            assert got.shape == (3, 2)
            assert out.tolist() == [[1, 1]] * 3 + [[0, 0]]

    run(main())


@pytest.mark.parametrize("value", [np.zeros(9), np.zeros(2, np.int32), np.zeros((2, 2)), 1.0, [1]])
def test_what_does_not_fit_stays(run, groups, value):
    async def main():
        async with groups(2) as (one, two):
            await one.send(value, 1)
            with pytest.raises(aiodist.MismatchError, match="stays queued"):
                await two.recv(src=0, out=np.zeros(8), partial=True)
            got = await two.recv(src=0)
            assert np.array_equal(got, value)

    run(main())


def test_a_cancelled_receive_of_less_loses_nothing(run, groups):
    async def main():
        async with groups(2) as (one, two):
            out = np.zeros(LARGE)
            work = two.recv(src=0, out=out, partial=True)
            sending = one.send(np.ones(LARGE - 1), 1)
            work.cancel()
            got = await two.recv(src=0, out=out, partial=True)
            await sending
            assert got.sum() == LARGE - 1 == out.sum()

    run(main())


async def cancelled_too_late(task: asyncio.Task[object], work: asyncio.Future[object]) -> None:
    """Cancel `task` when the message that it awaits by `work` has come, and before it runs."""
    while not work.done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


TAKES = {
    "recv": lambda group, out: group.recv(src=0),
    "deadline": lambda group, out: group.recv(src=0, timeout=30),
    "out": lambda group, out: group.recv(src=0, out=out),
    "partial": lambda group, out: group.recv(src=0, out=out, partial=True),
    "sendrecv": lambda group, out: group.sendrecv("answer", 0, src=0, out=out, timeout=30),
}


@pytest.mark.parametrize("how", TAKES)
@pytest.mark.parametrize("length", [SMALL, LARGE])
@pytest.mark.parametrize("again", [False, True])
def test_a_message_whose_receive_is_cancelled_before_its_task_runs(run, groups, how, length, again):
    """`asyncio.timeout` does that if the loop was busy."""

    async def main():
        async with groups(2) as (one, two):
            out = np.zeros(length)
            taken = []

            async def take():
                taken.append(TAKES[how](two, out))
                return await taken[0]

            task = asyncio.create_task(take())
            await asyncio.sleep(0)
            sending = one.send(np.arange(float(length)), 1)
            next_one = one.send("next", 1)
            await cancelled_too_late(task, taken[0])
            assert taken[0].done()
            assert taken[0].cancelled()
            with pytest.raises(asyncio.CancelledError):
                await taken[0]
            out[:] = -1.0  # it is the program's again
            got = await two.recv(src=0, out=np.empty(length) if again else None)
            assert np.array_equal(got, np.arange(float(length)))
            assert await two.recv(src=0) == "next"
            await asyncio.gather(sending, next_one)
            if how == "sendrecv":
                assert await one.recv(src=1) == "answer"
            assert (out == -1.0).all()

    run(main())


@pytest.mark.parametrize(
    ("name", "found"), [("cancel", False), ("done", True), ("result", 7), ("exception", None)]
)
async def test_a_method_that_is_older_than_the_await_works(name: str, found: object) -> None:
    """For example ``loop.call_later(5, work.cancel)``."""
    async with aiodist.local(1) as (group,):
        group.send(7, 0)
        came = [group.recv(), group.broadcast(7)]
        methods = [getattr(work, name) for work in came]
        assert [await work for work in came] == [7, 7]
        assert [method() for method in methods] == [found, found]


@pytest.mark.parametrize("deadline", [False, True])
def test_a_message_that_was_here_when_its_sendrecv_was_cancelled(run, groups, deadline):
    async def main():
        async with groups(2) as (one, two):
            await one.send("first", 1)
            while two.iprobe() is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            # The other rank does not receive that.
            both = two.sendrecv(np.zeros(3_000_000), 0, src=0, timeout=0.01 if deadline else None)
            await asyncio.sleep(0)
            assert not both.done()
            if deadline:
                with pytest.raises(aiodist.CollectiveTimeoutError):
                    await both
            else:
                both.cancel()
            assert await two.recv(src=0) == "first"

    run(main())


@pytest.mark.parametrize("look", ["result", "exception", "await", "callback"])
def test_a_message_that_the_program_has_seen_does_not_come_back(run, groups, look):
    async def main():
        async with groups(1) as (group,):
            work = group.recv()

            async def take():
                return await work

            task = asyncio.create_task(take())
            await asyncio.sleep(0)
            await group.send(1, 0)
            assert work.done()
            if look == "await":
                assert await work == 1
            elif look == "callback":
                work.add_done_callback(lambda work: None)
            else:
                getattr(work, look)()
            task.cancel()
            await asyncio.wait([task])
            assert work.result() == 1
            assert group.iprobe() is None

    run(main())


def test_a_message_does_not_come_back_to_a_group_that_has_ended(run, groups):
    async def main():
        async with groups(1) as (group,):
            task = asyncio.ensure_future(group.messages().__anext__())
            await asyncio.sleep(0)
            await group.send(1, 0)
            point_to_point = group._context.p2p
            group.abort()
            task.cancel()
            await asyncio.wait([task])
            assert point_to_point.idle

    run(main())


def test_a_message_that_comes_back_goes_to_a_receive_that_waits(run, groups):
    async def main():
        async with groups(1) as (group,):
            first = asyncio.ensure_future(group.messages().__anext__())
            await asyncio.sleep(0)
            waiting = group.recv()
            await group.send(1, 0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert await waiting == 1

    run(main())


def test_a_message_that_another_task_awaits_does_not_come_back(run, groups):
    async def main():
        async with groups(1) as (group,):
            work = group.recv()

            async def take():
                return await work

            tasks = [asyncio.create_task(take()) for _ in range(2)]
            await asyncio.sleep(0)
            await group.send(1, 0)
            tasks[0].cancel()
            assert await tasks[1] == 1
            assert work.result() == 1
            assert group.iprobe() is None

    run(main())


@pytest.mark.parametrize("out", [None, np.zeros(()), [np.zeros(3)]])
def test_a_part_of_what_is_no_array(run, groups, out):
    async def main():
        async with groups(1) as (one,):
            with pytest.raises(TypeError, match="at least one dimension"):
                one.recv(out=out, partial=True)

    run(main())


@pytest.mark.parametrize("length", [0, SMALL, LARGE])
@pytest.mark.parametrize("dst", [0, 1])
def test_a_synchronous_send_waits_for_its_receive(run, groups, length, dst):
    async def main():
        async with groups(2) as ranks:
            value = np.arange(float(length))
            work = ranks[0].issend(value, dst, tag="s")
            # What is behind it in its line does not come before it.
            behind = ranks[0].send("behind", dst, tag="s")
            await ranks[dst].probe(src=0, tag="s")
            await asyncio.gather(*[group.barrier() for group in ranks])
            assert not work.done()
            assert work.op == "ssend"
            assert (await ranks[dst].recv(src=0, tag="s")).tolist() == value.tolist()
            await work
            assert await ranks[dst].recv(src=0, tag="s") == "behind"
            await behind

    run(main())


def test_close_waits_for_a_synchronous_send(run, groups):
    async def main():
        async with groups(2) as (one, two):
            work = one.ssend("last", 1)
            closing = asyncio.ensure_future(one.close())
            await two.probe(src=0)
            assert not closing.done()
            assert await two.recv(src=0) == "last"
            await closing
            assert await work is None

    run(main())


def test_a_synchronous_send_ends_with_its_receiver(run, groups):
    async def main():
        async with groups(3) as ranks:
            work = ranks[0].ssend(1, 1)
            cancelled = ranks[0].ssend(2, 2)
            await ranks[2].probe(src=0)
            cancelled.cancel()
            late = ranks[0].ssend(3, 2, timeout=0.01)
            ranks[1].abort("enough")
            with pytest.raises(aiodist.PeerLostError, match="enough"):
                await work
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await late
            with pytest.raises(ValueError, match="dst"):
                ranks[0].ssend(1, 3)
            await ranks[0].send("after", 2)
            assert await ranks[2].recv(src=0) == "after"

    run(main())


def test_tags_of_their_own_for_either_direction(run, groups):
    async def main():
        async with groups(3) as ranks:

            async def shift(group):
                right, left = (group.rank + 1) % 3, (group.rank - 1) % 3
                await group.send("other", right, tag="not this")
                got = await group.sendrecv(
                    group.rank, right, src=left, tag=f"from {group.rank}", recv_tag=f"from {left}"
                )
                rest = await group.sendrecv("x", right, src=left, tag="x", recv_tag=ANY_TAG)
                return got, rest

            got = await asyncio.gather(*map(shift, ranks))
            assert got == [((rank - 1) % 3, "other") for rank in range(3)]

    run(main())


@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_envelopes(run, groups, length):
    async def main():
        async with groups(2) as (one, two):
            sending = one.send(np.zeros((length, 2), np.float32), 1, tag="a")
            found = await two.probe(src=0)
            source, tag, nbytes = found
            assert found == (source, tag, nbytes) == (0, "a", 8 * length) == two.iprobe()
            assert (found.dtype, found.shape) == (np.dtype(np.float32), (length, 2))
            assert isinstance(found, Envelope)
            out = np.empty(found.shape, found.dtype)
            await two.recv(src=0, out=out)
            await sending
            for value in (7, [np.zeros(3)], {"a": np.zeros(3)}, ["x" * 5000]):
                await one.send(value, 1)
                found = await two.probe()
                assert (found.dtype, found.shape) == (None, None)
                await two.recv()

    run(main())


def test_the_envelope_of_a_tensor(run, groups):
    torch = pytest.importorskip("torch")

    async def main():
        async with groups(2) as (one, two):
            await one.send(torch.zeros(3, dtype=torch.bfloat16), 1)
            found = await two.probe()
            assert (found.dtype, found.shape) == (torch.bfloat16, (3,))
            await two.recv()

    run(main())


def test_who_is_lost_and_whether_it_is_revoked(run, groups):
    async def main():
        async with groups(3) as ranks:
            assert [(group.lost, group.revoked) for group in ranks] == [({}, False)] * 3
            ranks[2].abort("enough")
            for group in ranks[:2]:
                with pytest.raises(aiodist.PeerLostError):
                    await group.recv(src=2)
                assert list(group.lost) == [2]
                assert "enough" in group.lost[2]
            ranks[0].revoke()
            assert ranks[0].revoked
            with pytest.raises(aiodist.GroupRevokedError):
                await ranks[1].recv(src=0)
            assert ranks[1].revoked
            new = await asyncio.gather(*[group.shrink() for group in ranks[:2]])
            assert [(group.lost, group.revoked) for group in new] == [({}, False)] * 2
            assert ranks[0].revoked
            await asyncio.gather(*[group.close() for group in new])

    run(main())


@pytest.mark.parametrize("name", ["recv", "irecv", "sendrecv"])
def test_a_read_only_place_is_refused_at_the_call(run, groups, name):
    async def main():
        async with groups(2) as (one, two):
            out = np.ones(3)
            out.flags.writeable = False
            args = ("aside", 1) if name == "sendrecv" else ()
            with pytest.raises(ValueError, match="is read-only"):
                getattr(two, name)(*args, src=0, tag=1, out=out)
            await one.send("first", 1, tag=1)
            assert await two.recv(src=0, tag=1) == "first"

    run(main())
