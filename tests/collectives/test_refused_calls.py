"""Calls that raise for their arguments: the ranks stay in step, and hear of it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import numpy as np
import pytest

import aiodist

pytestmark = pytest.mark.strength(2)

NOTHING = object()  # what nobody can send, or reduce
READ_ONLY = np.ones(3)
READ_ONLY.flags.writeable = False

# By name: the call as rank 1 makes it, and as all others do.
NO_FLOAT = 10**400
"""Seconds that no timer can wait for."""

REFUSED: dict[str, tuple[Any, Any]] = {
    "all_reduce objects": (
        lambda g: g.all_reduce(np.array([NOTHING])),
        lambda g: g.all_reduce(np.ones(1)),
    ),
    "all_reduce read-only": (
        lambda g: g.all_reduce(READ_ONLY),
        lambda g: g.all_reduce(np.ones(3)),
    ),
    "all_reduce large": (
        lambda g: g.all_reduce([np.ones(100_000), NOTHING]),
        lambda g: g.all_reduce([np.ones(100_000), np.ones(3)]),
    ),
    "all_reduce op": (
        lambda g: g.all_reduce(np.ones(3), "SUM"),
        lambda g: g.all_reduce(np.ones(3)),
    ),
    "all_reduce op of dtype": (
        lambda g: g.all_reduce(np.ones(3), aiodist.ReduceOp.BAND),
        lambda g: g.all_reduce(np.ones(3)),
    ),
    "all_reduce out": (
        lambda g: g.all_reduce(np.ones(3), out=np.ones(4)),
        lambda g: g.all_reduce(np.ones(3), out=np.ones(3)),
    ),
    "all_reduce codec": (
        lambda g: g.all_reduce(np.ones(3, np.float32), codec=aiodist.codecs.int8),
        lambda g: g.all_reduce(np.ones(3, np.float32), codec=aiodist.codecs.int8()),
    ),
    "all_reduce number": (lambda g: g.all_reduce(2**64), lambda g: g.all_reduce(1)),
    "all_reduce timeout": (
        lambda g: g.all_reduce(np.ones(3), timeout=-1),
        lambda g: g.all_reduce(np.ones(3)),
    ),
    "reduce dst": (lambda g: g.reduce(np.ones(3), 7), lambda g: g.reduce(np.ones(3), 0)),
    "reduce root": (lambda g: g.reduce(1, root=0), lambda g: g.reduce(1, 0)),
    "reduce out": (
        lambda g: g.reduce(np.ones(3), 0, out=np.ones(3)),
        lambda g: g.reduce(np.ones(3), 0),
    ),
    "broadcast src": (lambda g: g.broadcast(None, -1), lambda g: g.broadcast(1, 0)),
    "broadcast root": (lambda g: g.broadcast(None, root=0), lambda g: g.broadcast(1, 0)),
    "broadcast leaf": (lambda g: g.broadcast([NOTHING], 1), lambda g: g.broadcast(None, 1)),
    "all_gather leaf": (lambda g: g.all_gather({"a": NOTHING}), lambda g: g.all_gather(1)),
    "all_gather out": (
        lambda g: g.all_gather(np.ones(1), out=[np.ones(1)]),
        lambda g: g.all_gather(np.ones(1)),
    ),
    "gather dst": (lambda g: g.gather(1, True), lambda g: g.gather(1, 0)),
    "scatter src": (lambda g: g.scatter(None, 7), lambda g: g.scatter(None, 1)),
    "scatter slots": (lambda g: g.scatter([1], 1), lambda g: g.scatter(None, 1)),
    "scatter xs": (
        lambda g: g.scatter([1, 2, 3], 0),
        lambda g: g.scatter(None if g.rank else [1, 2, 3], 0),
    ),
    "reduce_scatter slots": (
        lambda g: g.reduce_scatter([np.ones(1)]),
        lambda g: g.reduce_scatter([np.ones(1)] * 3),
    ),
    "all_to_all slots": (lambda g: g.all_to_all([1]), lambda g: g.all_to_all([1, 2, 3])),
    "scan op": (
        lambda g: g.scan(np.ones(3), aiodist.ReduceOp.AVG),
        lambda g: g.scan(np.ones(3)),
    ),
    "exscan x": (lambda g: g.exscan("x"), lambda g: g.exscan(np.ones(3))),
    "barrier timeout": (lambda g: g.barrier(timeout="soon"), lambda g: g.barrier()),
    "all_reduce long timeout": (
        lambda g: g.all_reduce(np.ones(3), timeout=NO_FLOAT),
        lambda g: g.all_reduce(np.ones(3)),
    ),
    "barrier long timeout": (lambda g: g.barrier(timeout=NO_FLOAT), lambda g: g.barrier()),
    "share nothing": (lambda g: g.share(1, 1), lambda g: g.share(None, 1)),
}

UNKNOWN: dict[str, tuple[Any, ...]] = {
    "all_reduce": (np.ones(3),),
    "reduce": (np.ones(3),),
    "broadcast": (1,),
    "all_gather": (1,),
    "gather": (1,),
    "scatter": ([1, 2],),
    "reduce_scatter": ([1, 2],),
    "all_to_all": ([1, 2],),
    "reshard": (None, None),
    "scan": (np.ones(3),),
    "exscan": (np.ones(3),),
    "barrier": (),
    "share": (None,),
}
"""Arguments of each collective, to which the tests add one that it does not have."""


async def in_step(ranks: list[Any], tag: Any = None) -> None:
    """Small ones take the short way, large ones the long one."""
    for length in (1, 1, 100_000):
        arrays = [np.full(length, group.rank + 1.0) for group in ranks]
        await asyncio.gather(*[g.all_reduce(arrays[g.rank], tag=tag) for g in ranks])
        for array in arrays:
            assert (array == sum(range(1, len(ranks) + 1))).all()


async def heard(work: Any, by: int = 1) -> None:
    with pytest.raises(aiodist.CollectiveAbortedError) as caught:
        await work
    assert caught.value.rank == by
    assert caught.value.reason.startswith(("TypeError: ", "ValueError: ", "OverflowError: "))


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.sample(23)
def test_a_refused_call_uses_up_its_number(run, groups, name):
    refused, accepted = REFUSED[name]

    async def main():
        async with groups(3) as ranks:
            await in_step(ranks)
            early = accepted(ranks[0])
            with pytest.raises((TypeError, ValueError, OverflowError)):
                refused(ranks[1])
            late = accepted(ranks[2])
            await heard(early)
            await heard(late)
            await in_step(ranks)

    run(main())


@pytest.mark.parametrize("op", sorted(UNKNOWN))
@pytest.mark.parametrize("tag", [None, "t"])
async def test_an_argument_that_a_collective_does_not_have(op: str, tag: Any) -> None:
    async with aiodist.local(2) as ranks:
        with pytest.raises(TypeError, match=rf"^group\.{op}\(\) got an unexpected .* 'rot'$"):
            getattr(ranks[0], op)(*UNKNOWN[op], tag=tag, rot=True)
        await heard(ranks[1].barrier(tag=tag), by=0)
        await in_step(ranks, tag)


@pytest.mark.parametrize("tag", ["t", 5])
def test_with_a_tag(run, groups, tag):
    async def main():
        async with groups(3) as ranks:
            early = ranks[0].all_reduce(np.ones(3), tag=tag)
            with pytest.raises(TypeError):
                ranks[1].all_reduce(NOTHING, tag=tag)
            late = ranks[2].all_reduce(np.ones(3), tag=tag)
            await heard(early)
            await heard(late)
            await in_step(ranks, tag)
            await in_step(ranks)

    run(main())


def test_what_is_no_tag_has_no_number(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            with pytest.raises(TypeError):
                ranks[0].barrier(tag=1.5)
            with pytest.raises(ValueError, match="a tag is text that UTF-8 can encode"):
                ranks[0].barrier(tag="\ud800")
            with pytest.raises(ValueError, match="64 bits"):
                ranks[0].all_reduce(NOTHING, tag=2**64)
            await in_step(ranks)

    run(main())


def test_before_shared_memory_is_agreed_on(run, groups):
    """The first collective without a tag sets up shared memory; further ones wait meanwhile."""

    async def main():
        async with groups(3) as ranks:
            calls = 6
            works = []
            for number in range(calls):
                for group in ranks:
                    if group.rank == 1 and number % 2:
                        with pytest.raises(TypeError):
                            group.all_reduce(NOTHING)
                    else:
                        works.append((number, group.all_reduce(np.full(2, 1.0))))
                await asyncio.sleep(0)
            for number, work in works:
                if number % 2:
                    await heard(work)
                else:
                    assert (await work == 3).all()
            await in_step(ranks)

    run(main())


def test_all_ranks_may_be_refused(run, groups):
    async def main():
        async with groups(3) as ranks:
            for _ in range(3):
                for group in ranks:
                    with pytest.raises(TypeError):
                        group.all_reduce(np.array([NOTHING]))
            await in_step(ranks)

    run(main())


def test_alone(run, groups):
    async def main():
        async with groups(1) as ranks:
            for tag in (None, "t"):
                with pytest.raises(TypeError):
                    ranks[0].all_reduce(NOTHING, tag=tag)
                work = ranks[0].barrier(tag=tag)
                await work
                assert work.seq == 1
            await in_step(ranks)

    run(main())


def test_whatever_an_argument_raises_counts_as_well(run, groups):
    """Whatever it is: the ranks would be out of step."""

    class Timeout(float):
        def __new__(cls, error):
            self = super().__new__(cls, 1.0)
            self.error = error
            return self

        def __gt__(self, other):
            raise self.error

    async def main():
        async with groups(2) as ranks:
            for error in (KeyError("by hand"), StopIteration(3), SystemExit(2)):
                work = ranks[0].barrier()
                with pytest.raises(type(error)):
                    ranks[1].barrier(timeout=Timeout(error))
                with pytest.raises(aiodist.CollectiveAbortedError, match=type(error).__name__):
                    await work
            await in_step(ranks)

    run(main())


def test_a_closed_or_revoked_group_has_no_numbers(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            part = (await everyone(ranks, lambda g: g.dup()))[0]
            part.revoke()
            with pytest.raises(aiodist.GroupRevokedError):
                part.all_reduce(NOTHING)

            def elsewhere():
                with pytest.raises(RuntimeError, match="event loop"):
                    ranks[0].all_reduce(NOTHING)

            await asyncio.to_thread(elsewhere)
            await in_step(ranks)

    run(main())


def test_blocking_calls(run, groups):
    async def main():
        async with groups(2) as ranks:
            early = ranks[0].all_reduce(np.ones(3))

            def elsewhere():
                with pytest.raises(TypeError):
                    ranks[1].blocking().all_reduce(NOTHING)

            await asyncio.to_thread(elsewhere)
            await heard(early)
            await in_step(ranks)

    run(main())


@pytest.mark.parametrize(
    "refused",
    [
        lambda g: g.split(1.5),
        lambda g: g.split(1, key="first"),
        lambda g: g.split(1, timeout=0),
        lambda g: g.split(1, timeout=NO_FLOAT),
    ],
)
def test_a_refused_split(run, groups, everyone, refused):
    async def main():
        async with groups(3) as ranks:
            early = asyncio.ensure_future(ranks[0].split(1))
            await asyncio.sleep(0)
            with pytest.raises((TypeError, ValueError)):
                await refused(ranks[1])
            await heard(early)
            await heard(ranks[2].split(1))
            for _ in range(2):
                parts = await everyone(ranks, lambda g: g.split(g.rank % 2))
                assert [part.size for part in parts] == [2, 1, 2]

    run(main())


def test_a_cancelled_split_uses_up_no_more_than_one(run, groups, everyone):
    async def main():
        async with groups(3) as ranks:
            mine = asyncio.ensure_future(ranks[0].split(1))
            await asyncio.sleep(0)
            mine.cancel()
            with pytest.raises(asyncio.CancelledError):
                await mine
            for group in ranks[1:]:
                with pytest.raises(aiodist.CollectiveAbortedError):
                    await group.split(1)
            parts = await everyone(ranks, lambda g: g.split(1))
            assert [part.size for part in parts] == [3, 3, 3]

    run(main())


@pytest.mark.parametrize("timeout", [-1, NO_FLOAT])
def test_a_refused_dup(run, groups, everyone, timeout):
    async def main():
        async with groups(2) as ranks:
            early = asyncio.ensure_future(ranks[0].dup())
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="timeout"):
                await ranks[1].dup(timeout=timeout)
            await heard(early)
            await in_step(await everyone(ranks, lambda g: g.dup()))

    run(main())


@pytest.mark.parametrize("arguments", [{"flag": 1}, {"timeout": -1}, {"timeout": NO_FLOAT}])
def test_a_refused_agreement(run, groups, everyone, arguments):
    async def main():
        async with groups(3) as ranks:
            early = asyncio.ensure_future(ranks[0].agree())
            await asyncio.sleep(0)
            with pytest.raises((TypeError, ValueError)):
                await ranks[1].agree(**arguments)
            await heard(early)
            await heard(ranks[2].agree())
            assert await everyone(ranks, lambda g: g.agree()) == [True] * 3

    run(main())


@pytest.mark.parametrize("name", ["send", "ssend", "recv", "sendrecv", "probe"])
def test_a_message_with_a_timeout_that_is_none(run, groups, name):
    """It is refused before anything is sent or taken."""

    async def main():
        async with groups(2) as ranks:
            a, b = ranks
            options = {"send": {"x": 1, "dst": 1}, "recv": {"src": 1}, "probe": {}}
            options["ssend"] = options["send"]
            options["sendrecv"] = {"x": 1, "dst": 1, "src": 1}
            with pytest.raises(ValueError, match="timeout is at most"):
                getattr(a, name)(**options[name], timeout=NO_FLOAT)
            for x, y in ((a, b), (b, a)):
                x.send("next", y.rank)
                assert await y.recv(src=x.rank) == "next"

    run(main())


@pytest.mark.parametrize(
    "wrong", [{"src": 2}, {"recv_tag": 1.5}, {"out": np.broadcast_to(np.zeros(1), 3)}], ids=repr
)
def test_a_sendrecv_that_cannot_receive_sends_nothing(run, groups, wrong):
    """Otherwise the other rank would get the message twice when the program corrects the call."""

    async def main():
        async with groups(2) as (a, b):
            with pytest.raises((TypeError, ValueError)):
                a.sendrecv("refused", 1, **{"src": 1, **wrong})
            works = a.sendrecv("first", 1, src=1), b.sendrecv("other", 0, src=0)
            assert await asyncio.gather(*works) == ["other", "first"]

    run(main())


def test_a_rank_that_is_far_ahead_of_refusals(run, groups):
    """Many of them, before anyone else has called a thing: each is recorded."""

    async def main():
        async with groups(2) as ranks:
            works = []
            for number in range(50):
                with contextlib.suppress(TypeError):
                    works.append(ranks[0].all_reduce(np.ones(2) if number % 3 else NOTHING))
            for number in range(50):
                work = ranks[1].all_reduce(np.ones(2), timeout=math.inf)
                if number % 3:
                    assert (await work == 2).all()
                else:
                    await heard(work, by=0)
            await asyncio.gather(*works)
            await in_step(ranks)

    run(main())


@pytest.mark.parametrize(
    ("op", "given", "hint"),
    [
        ("broadcast", {"x": 1, "root": 0}, "'root': use src="),
        ("reduce", {"x": 1, "root": 0}, "'root': use dst="),
        ("gather", {"x": 1, "root": 0}, "'root': use dst="),
        ("scatter", {"xs": [1], "root": 0}, "'root': use src="),
        ("gather", {"x": 1, "src": 0}, "'src': use dst="),
        ("broadcast", {"x": 1, "dst": 0}, "'dst': use src="),
        ("all_reduce", {"x": 1, "tensor": 1}, "'tensor': use x="),
        ("all_reduce", {"x": 1, "async_op": True}, "'async_op': leave it out, because .* a Work"),
        ("barrier", {"group": None}, "'group': call this method of that group"),
        ("gather", {"x": 1, "tensor": 1}, "'tensor': use x="),
        ("gather", {"x": 1, "gather_list": []}, "'gather_list': use out="),
        ("scatter", {"tensor": 1, "src": 0, "scatter_list": []}, "'tensor': use out="),
        ("scatter", {"scatter_list": [1]}, "'scatter_list': use xs="),
        ("all_gather", {"x": 1, "tensor_list": []}, "'tensor_list': use out="),
        ("reduce_scatter", {"xs": [1], "input": 1}, "'input': use xs="),
        ("all_to_all", {"xs": [1], "output_tensor_list": 1}, "'output_tensor_list': use out="),
        ("send", {"x": 1, "dst": 0, "tensor": 1}, "'tensor': use x="),
        ("isend", {"x": 1, "dst": 0, "dest": 0}, "'dest': use dst="),
        ("ssend", {"x": 1, "dst": 0, "obj": 1}, "'obj': use x="),
        ("recv", {"tensor": 1, "src": 0}, "'tensor': use out="),
        ("irecv", {"source": 0}, "'source': use src="),
        ("recv", {"src": 0, "status": None}, "'status': .* has source, tag and nbytes"),
        ("sendrecv", {"x": 1, "dst": 0, "sendobj": 1}, "'sendobj': use x="),
        ("sendrecv", {"x": 1, "dst": 0, "recvtag": 1}, "'recvtag': use recv_tag="),
        ("probe", {"source": 0}, "'source': use src="),
        ("iprobe", {"source": 0}, "'source': use src="),
    ],
)
async def test_names_of_other_libraries(op: str, given: dict[str, Any], hint: str) -> None:
    async with aiodist.local(1) as [group]:
        says = rf"^group\.\w+\(\) got an unexpected keyword argument {hint}$"
        with pytest.raises(TypeError, match=says):
            await getattr(group, op)(**given)

        def in_a_thread() -> None:
            with pytest.raises(TypeError, match=says):
                getattr(group.blocking(), op)(**given).wait()  # of isend or irecv

        await asyncio.to_thread(in_a_thread)
        assert await group.all_reduce(1) == 1
