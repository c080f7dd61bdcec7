"""Recovery as ordinary calls, from threads."""

from __future__ import annotations

import asyncio

import pytest

import aiodist


def test_all_of_it(run, stage):
    def work(group):
        assert group.agree(group.rank == 0) is False
        if group.rank == 0:
            group.revoke()
        with pytest.raises(aiodist.GroupRevokedError):
            group.recv()
        group = group.shrink()
        assert group.all_reduce(1) == 2
        group = group.rendezvous(min_size=1)
        return group.all_reduce(1)

    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            working = [asyncio.to_thread(work, group.blocking()) for group in ranks]
            assert await asyncio.gather(*working) == [2, 2]

    run(main())
