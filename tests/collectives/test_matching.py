"""Which calls belong together: tags, order, overlap, groups of some ranks."""

from __future__ import annotations

import asyncio
import enum
import random

import numpy as np
import pytest

import aiodist


def test_tags_match_in_any_order(run, groups, everyone):
    async def main():
        async with groups(3) as ranks:
            tags = [None, "a", 1, "1", -(2**40), "b"] * 3

            async def body(group):
                order = list(enumerate(tags))
                random.Random(group.rank).shuffle(order)
                count = dict.fromkeys(tags, 0)
                works = []
                for _, tag in order:
                    nth = count[tag]
                    count[tag] += 1
                    value = np.full(10 if nth else 30_000, nth * 100 + group.rank)
                    works.append((nth, group.all_reduce(value, tag=tag)))
                for nth, work in works:
                    assert (await work == nth * 300 + 3).all()

            await asyncio.gather(*[body(group) for group in ranks])

    run(main())


def test_operations_overlap_in_call_order(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            works = [[g.all_gather((g.rank, i)) for i in range(50)] for g in ranks]
            for mine in works:
                for i, work in enumerate(mine):
                    assert work.seq == i
                    assert await work == [(0, i), (1, i)]

    run(main())


def test_what_a_work_tells(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            works = [g.all_reduce(np.ones(10, np.float32), tag="t") for g in ranks]
            work = works[0]
            assert (work.op, work.tag, work.seq, work.nbytes) == ("all_reduce", "t", 0, 40)
            await asyncio.gather(*works)
            assert work.elapsed >= 0
            assert await work is await work
            assert "all_reduce" in repr(work)

    run(main())


class Place(enum.IntEnum):
    """Ranks by name."""

    FIRST = 0
    LAST = 1


@pytest.mark.parametrize("kind", [np.int64, np.uint8, Place])
def test_ranks_that_are_integers_of_other_types(run, groups, everyone, kind):
    """As numpy finds them, for one: they are what the plain ints are that others give."""

    async def main():
        async with groups(2) as ranks:

            async def each(call):
                """The results of calls with rank 1 as `kind` at rank 0, as an int at rank 1."""
                return await everyone(ranks, lambda g: call(g, kind(1) if g.rank == 0 else 1))

            x = np.ones(3)
            assert await each(lambda g, one: g.broadcast(g.rank, one)) == [1, 1]
            assert await each(lambda g, one: g.reduce(5, one)) == [None, 10]
            total = await each(lambda g, one: g.reduce(x * (g.rank + 1), dst=one))
            assert total[0] is None
            assert total[1].tolist() == [3, 3, 3]
            assert await each(lambda g, one: g.gather(g.rank, one)) == [None, [0, 1]]
            xs = [None, ["a", "b"]]
            assert await each(lambda g, one: g.scatter(xs[g.rank], one)) == ["a", "b"]
            for send in ("send", "ssend"):
                sent = getattr(ranks[0], send)("c", kind(1))
                assert await ranks[1].probe(src=kind(0)) is not None
                assert ranks[1].iprobe(src=kind(0)) is not None
                work = ranks[1].recv(src=kind(0))
                assert await work == "c"
                assert type(work.source) is int
                await sent
            exchanged = [
                g.sendrecv(x * g.rank, kind(1 - g.rank), src=kind(1 - g.rank)) for g in ranks
            ]
            assert [values[0] for values in await asyncio.gather(*exchanged)] == [1, 0]
            parts = await each(lambda g, one: g.split(one, key=-one if g.rank else kind(1)))
            assert [part.rank for part in parts] == [1, 0]
            colors = [np.str_("a"), "a"]
            parts = await everyone(ranks, lambda g: g.split(colors[g.rank]))
            assert [part.size for part in parts] == [2, 2]

    run(main())


def test_subgroups(run, groups, everyone):
    async def main():
        async with groups(5) as ranks:
            chosen = [3, 1, 4]
            parts = await asyncio.gather(*[ranks[rank].subgroup(chosen) for rank in chosen])
            assert [part.rank for part in parts] == [0, 1, 2]
            assert await everyone(parts, lambda g: g.all_gather(g.rank)) == [[0, 1, 2]] * 3
            assert [member.rank for member in parts[0].members] == [0, 1, 2]
            # They match apart from each other and from the parent.
            found = np.array(chosen)  # by numpy: the same ranks
            again = await asyncio.gather(*[ranks[rank].subgroup(found) for rank in chosen])
            first = [part.barrier() for part in parts]
            second = [part.all_reduce(1) for part in again]
            assert await asyncio.gather(*second) == [3, 3, 3]
            await asyncio.gather(*first)
            for group in parts + again:
                await group.close()
            await everyone(ranks, lambda g: g.barrier())
            with pytest.raises(ValueError, match="not in ranks"):
                await ranks[0].subgroup(chosen)
            with pytest.raises(ValueError, match="twice"):
                await ranks[1].subgroup([1, 1])
            with pytest.raises(TypeError, match=r"ranks is a sequence of ranks, .*\[1\], not 1"):
                await ranks[1].subgroup(1)
            for wrong in (True, 1.0, "1"):
                with pytest.raises(TypeError, match="each of ranks is a rank, an int"):
                    await ranks[1].subgroup([1, wrong])

    run(main())


def test_a_subgroup_that_a_rank_closed(run, groups, everyone):
    async def main():
        async with groups(3) as ranks:
            pairs = await asyncio.gather(*[g.subgroup([0, 1]) for g in ranks[:2]])
            await pairs[0].close()
            with pytest.raises(aiodist.PeerLostError, match="rank 0 is lost: it closed the group"):
                await pairs[1].barrier()
            with pytest.raises(aiodist.PeerLostError):
                await pairs[1].recv(src=0)
            # Elsewhere rank 0 is as alive as before.
            assert await everyone(ranks, lambda g: g.all_reduce(1)) == [3] * 3

    run(main())


def test_split_and_dup(run, groups, everyone):
    async def main():
        async with groups(5) as ranks:
            parts = await everyone(
                ranks, lambda g: g.split(None if g.rank == 4 else g.rank % 2, key=-g.rank)
            )
            assert parts[4] is None
            assert [part.rank for part in parts[:4]] == [1, 1, 0, 0]
            assert await everyone(parts[:4], lambda g: g.all_reduce(1)) == [2] * 4
            copies = await everyone(ranks, lambda g: g.dup())
            works = [g.all_gather(g.rank) for g in copies]
            await everyone(ranks, lambda g: g.barrier())
            assert await asyncio.gather(*works) == [list(range(5))] * 5

    run(main())


def test_point_to_point(run, groups, everyone):
    async def main():
        async with groups(3) as ranks:
            a, b, c = ranks
            for length in (0, 1, 5000, 400_000):
                x = np.arange(length, dtype=np.float32)
                sent = a.isend(x, 1, tag="t")
                work = b.irecv(src=0, tag="t")
                np.testing.assert_array_equal(await work, x)
                assert (work.source, work.tag, work.nbytes) == (0, "t", x.nbytes)
                await sent
                out = np.empty_like(x)
                sent = a.send(x, 2)
                assert await c.recv(src=0, out=out) is out
                np.testing.assert_array_equal(out, x)
                await sent
            # Any source, any tag, and the envelope.
            works = [b.send("from b", 0, tag=7), c.send("from c", 0, tag="x")]
            envelope = await a.probe(src=2)
            assert (envelope.source, envelope.tag) == (2, "x")
            got = set()
            for _ in range(2):
                work = a.recv()
                got.add((await work, work.source, work.tag))
            assert got == {("from b", 1, 7), ("from c", 2, "x")}
            assert a.iprobe() is None
            await asyncio.gather(*works)
            # Both ways at once, around a ring.
            passed = await everyone(
                ranks, lambda g: g.sendrecv(g.rank, (g.rank + 1) % 3, src=(g.rank - 1) % 3)
            )
            assert passed == [2, 0, 1]
            assert await a.sendrecv("me", 0, src=0) == "me"

    run(main())


def test_messages_are_an_iterator(run, groups, everyone):
    async def main():
        async with groups(3) as ranks:

            async def serve():
                seen = []
                async for value, source, tag in ranks[0].messages(tag="job"):
                    seen.append((value, source, tag))
                    if len(seen) == 20:
                        return seen
                return seen

            server = asyncio.ensure_future(serve())
            for i in range(10):
                for group in ranks[1:]:
                    await group.send(i, 0, tag="job")
            seen = await server
            for source in (1, 2):
                assert [value for value, src, _ in seen if src == source] == list(range(10))
            closing = asyncio.ensure_future(anext(ranks[1].messages(), None))
            await asyncio.sleep(0)
            await ranks[1].close()
            assert await closing is None

    run(main())


def test_point_to_point_deadline(run, groups):
    async def main():
        async with groups(2) as ranks:
            with pytest.raises(aiodist.CollectiveTimeoutError, match="rank 1") as caught:
                await ranks[0].recv(src=1, timeout=0.05)
            assert caught.value.missing == (1,)
            sent = ranks[1].send("later", 0)
            assert await ranks[0].recv() == "later"
            await sent

    run(main())


def test_the_store(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            one, two = (group.store for group in ranks)
            waiting = asyncio.ensure_future(two.wait(["k"], timeout=30))
            await one.set("k", b"v")
            await waiting
            assert await two.get("k") == b"v"
            assert await one.add("n", 2) == 2
            assert await two.add("n", 3) == 5
            await one.delete("k")
            assert await two.get("k") is None

    run(main())


def test_blocking_calls_from_threads(run, groups, everyone):
    async def main():
        async with groups(3) as ranks:

            def body(group):
                blocking = group.blocking()
                total = blocking.all_reduce(np.ones(10))
                blocking.barrier()
                part = blocking.split(0)
                assert part.size == 3
                with pytest.raises(aiodist.CollectiveTimeoutError):
                    blocking.recv(src=0, timeout=0.05)
                return total.tolist()

            results = await asyncio.gather(*[asyncio.to_thread(body, group) for group in ranks])
            assert results == [[3.0] * 10] * 3
            with pytest.raises(RuntimeError, match="event loop"):
                ranks[0].blocking().barrier()

    run(main())


def test_members(run, groups, transport):
    async def main():
        async with groups(3, name="me", metadata={"gpus": [1]}) as ranks:
            group = ranks[1]
            assert [member.rank for member in group.members] == [0, 1, 2]
            assert group.members[2].metadata == {"gpus": [1]}
            ranks[0].members[2].metadata["gpus"].append(2)  # what it sees is its own
            assert group.members[2].metadata == {"gpus": [1]}
            assert group.members[2].name == "me"
            assert (group.rank, group.size) == (1, 3)
            local = (0, 2) if transport == "hosts" else (1, 3)
            assert (group.local_rank, group.local_size) == local
            assert group.epoch == 1
            assert group.address.startswith("tcp://" if transport == "hosts" else "inproc://")

    run(main())


@pytest.mark.strength(1)  # thousands of operations take their time
@pytest.mark.sample(2)
def test_a_tag_a_request_costs_nothing(run, groups, everyone):
    async def main():
        async with groups(3) as ranks:

            async def serve(group):
                for start in range(0, 2500, 50):
                    works = [
                        group.all_reduce(request, tag=f"request {request}")
                        for request in range(start, start + 50)
                    ]
                    for request, work in enumerate(works, start):
                        assert await work == 3 * request
                    # A tag that is used now and then goes on.
                    assert await group.all_reduce(start, tag="often") == 3 * start

            await asyncio.gather(*[serve(group) for group in ranks])
            await everyone(ranks, lambda g: g.barrier())
            for group in ranks:
                assert len(group._context.calls.tags) < 2000

    run(main())


def test_a_rank_far_ahead_does_not_fill_the_memory_of_others(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            arrays = [np.full(16 * 1024, i, np.float32) for i in range(200)]
            ahead = [ranks[0].all_reduce(array) for array in arrays]
            # All that rank 0 may send has been sent when this is through.
            await everyone(ranks, lambda g: g.barrier(tag="meanwhile"))
            early = ranks[1]._context.calls.arrivals.early.values()
            kept = sum(len(frame.memory) for one in early for frame in one.frames)
            assert 0 < kept <= 4 << 20
            behind = [ranks[1].all_reduce(array.copy()) for array in arrays]
            for i, (work, late) in enumerate(zip(ahead, behind, strict=True)):
                assert (await work == 2 * i).all()
                assert (await late == 2 * i).all()
            for group in ranks:
                assert group._context.calls._unsolicited == [0, 0]
                assert not group._context.calls.arrivals.early

    run(main())
