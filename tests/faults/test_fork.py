"""After a fork the child's copy of a group is closed, and the parent's works on."""

from __future__ import annotations

import asyncio
import os

import pytest

import aiodist


def in_child(group, call: str = "barrier") -> str:
    """What a forked child says about its copy of `group`, of which it makes this call."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                getattr(group, call)()
                said = "no error"
            except (RuntimeError, aiodist.GroupClosedError) as error:
                said = f"{type(error).__name__} closed={group.closed}"
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said


def test_a_forked_child_holds_nothing(run):
    async def main():
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            await asyncio.gather(*[g.barrier() for g in ranks])
            assert in_child(ranks[0]).endswith("closed=True")
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [2, 2]

    run(main())


@pytest.mark.parametrize("call", ["abort", "revoke", "dup", "shrink", "acknowledge_lost"])
def test_each_call_tells_a_child_of_the_fork(run, call):
    async def main():
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            assert in_child(ranks[0], call) == "GroupClosedError closed=True"
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [2, 2]

    run(main())


def test_a_child_takes_part_in_nothing_even_if_closing_fails(run, monkeypatch):
    def fail():
        raise OSError("planted")

    async def main():
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            await asyncio.gather(*[g.barrier() for g in ranks])
            for group in ranks:
                monkeypatch.setattr(group._actor, "close_in_child", fail)
            assert in_child(ranks[0]) == "GroupClosedError closed=True"
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [2, 2]

    run(main())
