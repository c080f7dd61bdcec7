"""`Group.share` of arrays of the host: one copy, and how long it is there."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import heard, processes

import aiodist
from aiodist import CollectiveAbortedError, CollectiveTimeoutError, Group, PeerLostError
from aiodist.buffers.segment import Segment
from aiodist.collectives import host_loans

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")


async def shared(groups: list[Group], x: Any, src: int = 0, **kwargs: Any) -> list[Any]:
    works = [group.share(x if group.rank == src else None, src, **kwargs) for group in groups]
    return list(await asyncio.gather(*works))


async def raised(groups: list[Group], x: Any, src: int = 0) -> list[BaseException]:
    works = [group.share(x if group.rank == src else None, src) for group in groups]
    ends = await asyncio.gather(*works, return_exceptions=True)
    assert all(isinstance(end, BaseException) for end in ends), ends
    return list(ends)


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("aiodist-share")


@pytest.mark.parametrize("tag", [None, "tagged"])
def test_all_have_the_same_memory(run: Any, tag: str | None) -> None:
    async def main() -> None:
        async with aiodist.local(3) as groups:
            tree = {
                "w": torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3),
                "more": [np.arange(12).reshape(3, 4).T, np.empty((0, 2)), np.array(5.0)],
                "step": 7,
                "name": "layer",
                3: None,
            }
            got = await shared(groups, tree, 1, tag=tag)
            for one in got:
                assert list(one) == list(tree) and (one["step"], one["name"]) == (7, "layer")
                assert isinstance(one["w"], torch.Tensor) and one["w"].dtype == torch.bfloat16
                assert torch.equal(one["w"], tree["w"])
                for array, given in zip(one["more"], tree["more"], strict=True):
                    np.testing.assert_array_equal(array, given)
                    assert array.dtype == given.dtype and array.shape == given.shape
            got[2]["w"][1, 2] = 40.0
            got[0]["more"][0][:] = 9
            assert [float(one["w"][1, 2]) for one in got] == [40.0] * 3
            assert all((one["more"][0] == 9).all() for one in got)
            assert float(tree["w"][1, 2]) == 5.0, "that of the owner is left alone"

    run(main())


def test_what_is_large_is_copied_in_a_thread(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_loans, "AT_ONCE", 100)

    async def main() -> None:
        async with aiodist.local(2) as groups:
            for got in await shared(groups, np.arange(1000)):
                assert (got == np.arange(1000)).all()

    run(main())


def test_it_is_there_until_the_last_view_is_gone(run: Any) -> None:
    async def main() -> None:
        async with aiodist.local(2) as groups:
            first, second = await shared(groups, np.arange(5000.0))
            assert maps() == 2
            del first
            part = second[-3:]
            del second
        gc.collect()
        assert maps() == 1
        assert list(part) == [4997.0, 4998.0, 4999.0]
        del part
        gc.collect()
        assert maps() == 0

    run(main())


def test_where_one_cannot_map_it_all_fail(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attach = Segment.attach
    attached = []

    def refuse(fd: int, nbytes: int, *, writes: bool = False, keep: bool = False) -> Segment:
        if writes:
            attached.append(fd)
            if len(attached) == 2:
                os.close(fd)
                raise OSError("no room for a mapping")
        return attach(fd, nbytes, writes=writes, keep=keep)

    async def main() -> None:
        async with aiodist.local(3) as groups:
            await asyncio.gather(*[group.barrier() for group in groups])
            monkeypatch.setattr(Segment, "attach", refuse)
            errors = await raised(groups, np.ones(10))
            assert all(isinstance(error, OSError) for error in errors)
            assert all("no room for a mapping; use broadcast" in str(error) for error in errors)
            assert maps() == 0
            got = await shared(groups, np.ones(10))
            assert all((one == 1).all() for one in got)

    run(main())


@pytest.mark.parametrize(
    ("error", "text"), [(OSError("no memory"), "no memory"), (OSError(), "OSError")]
)
def test_where_the_owner_has_no_memory_all_fail(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: OSError, text: str
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Segment:
        raise error

    async def main() -> None:
        async with aiodist.local(2) as groups:
            await asyncio.gather(*[group.barrier() for group in groups])
            with monkeypatch.context() as patch:
                patch.setattr(Segment, "create", refuse)
                errors = await raised(groups, np.ones(10))
            assert all(f"rank 0: {text}; use broadcast" in str(one) for one in errors)
            assert await asyncio.gather(*[group.all_reduce(1) for group in groups]) == [2, 2]

    run(main())


@pytest.mark.parametrize("what", ["Work", "task"])
@pytest.mark.parametrize("stage", ["copy", "fetch"])
def test_cancelled_while_it_waits(
    run: Any, monkeypatch: pytest.MonkeyPatch, stage: str, what: str
) -> None:
    """All ranks hear of it, nothing is left, and the group goes on. A program that cancels all
    tasks of its loop cancels the task of the operation, too."""
    waiting = asyncio.Event()

    async def never(*args: Any, **kwargs: Any) -> Any:
        waiting.set()
        await asyncio.Event().wait()

    async def main() -> None:
        async with aiodist.local(2) as groups:
            with monkeypatch.context() as patch:
                if stage == "copy":
                    patch.setattr(host_loans.Lent, "copy", never)
                else:
                    patch.setattr(host_loans, "take", never)
                works = [group.share(np.ones(9) if group.rank == 0 else None) for group in groups]
                await waiting.wait()
                if what == "Work":
                    works[1].cancel()
                    with pytest.raises(CollectiveAbortedError):
                        await works[0]
                else:
                    [task] = [
                        task for task in asyncio.all_tasks() if task.get_name() == "aiodist phase"
                    ]
                    task.cancel()
                    await asyncio.wait(works)
                    errors = [work.exception() for work in works]
                    assert {type(each) for each in errors} == {RuntimeError, CollectiveAbortedError}
                    assert all("has cancelled the task" in str(each) for each in errors)
            assert maps() == 0
            got = await shared(groups, np.ones(9))
            assert all((one == 1).all() for one in got)

    run(main())


def _gives_up(how: str, group: Group, work: Any) -> None:
    if how == "cancelled":
        work.cancel()
    else:
        group.abort("enough")


def _is_told(end: Any, how: str) -> bool:
    """Whether this is the error of a rank if rank 0 gave up like this."""
    if how == "cancelled":
        return isinstance(end, CollectiveAbortedError) and end.rank == 0
    return isinstance(end, PeerLostError) and 0 in end.ranks


@pytest.mark.parametrize("how", ["cancelled", "aborted"])
def test_the_owner_gives_up_at_any_time(run: Any, groups: Any, how: str) -> None:
    """What the others raise is never that they cannot reach its memory."""

    async def main() -> None:
        is_over = False
        turns = 0
        while not is_over:
            async with groups(3) as ranks:
                await asyncio.gather(*[group.barrier() for group in ranks])
                works = [group.share(np.ones(9) if group.rank == 0 else None) for group in ranks]
                for _ in range(turns):
                    await asyncio.sleep(0)
                is_over = all(work.done() for work in works)
                _gives_up(how, ranks[0], works[0])
                for end in await asyncio.gather(*works[1:], return_exceptions=True):
                    assert isinstance(end, np.ndarray) or _is_told(end, how), (turns, end)
            turns += 1

    run(main())


@pytest.mark.parametrize("how", ["cancelled", "aborted"])
def test_the_owner_gives_up_while_another_fetches(
    run: Any, groups: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its memory is gone before it is known that it gave up, and its word is there that all is
    well."""

    async def share(turns: int) -> Any:
        async with groups(2) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])

            async def take(*args: Any, **kwargs: Any) -> Any:
                for _ in range(turns):
                    await asyncio.sleep(0)
                _gives_up(how, ranks[0], works[0])
                raise ConnectionResetError("it is gone")

            monkeypatch.setattr(host_loans, "take", take)
            works = [group.share(np.ones(9) if group.rank == 0 else None) for group in ranks]
            return (await asyncio.gather(works[1], return_exceptions=True))[0]

    async def main() -> None:
        for turns in range(6):
            end = await share(turns)
            assert _is_told(end, how), (turns, end)

    run(main())


def test_a_deadline_covers_it(run: Any) -> None:
    async def main() -> None:
        async with aiodist.local(2) as groups:
            with pytest.raises(CollectiveTimeoutError) as caught:
                await groups[0].share(np.ones(3), timeout=0.05)
            assert caught.value.missing == (1,)

    run(main())


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (None, "^x has no array: share takes"),
        ({"a": 1}, "^x has no array: share takes"),
        ([object()], "does not travel"),
        (np.array([object()]), "does not travel"),
    ],
)
async def test_what_cannot_be_shared(x: Any, text: str) -> None:
    async with aiodist.local(1) as (group,):
        with pytest.raises(TypeError, match=text):
            group.share(x)


async def test_only_the_owner_gives_something() -> None:
    async with aiodist.local(2) as groups:
        with pytest.raises(ValueError, match="pass None here"):
            groups[1].share(np.ones(2))


async def _share_between_processes(group: Group) -> list[float]:
    got = await group.share(np.zeros(4) if group.rank == 1 else None, 1)
    for rank in range(group.size):
        if group.rank == rank:
            got[rank] = rank + 1
        await group.barrier()
    return list(map(float, got))


@pytest.mark.long
def test_between_processes() -> None:
    results = aiodist.run(_share_between_processes, nprocs=3)
    assert results == [[1.0, 2.0, 3.0, 0.0]] * 3


KILLED = """
import asyncio, json, os, signal, sys
import aiodist, numpy as np
from aiodist.transports.handover import SegmentOffer

async def main():
    address, rank, transports = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
    group = await aiodist.connect(address, rank=rank, size=3, transports=transports)
    assert (await group.share(np.ones(4) if rank == 0 else None) == 1).all()
    SegmentOffer._asked = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    try:
        await group.share(np.ones(4) if rank == 2 else None, 2)
    except aiodist.PeerLostError as error:
        print(json.dumps(error.ranks), flush=True)
    await asyncio.Event().wait()  # until the test ends it, so that only rank 2 is lost

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
def test_the_owner_is_killed_while_others_fetch(run: Any, transports: str) -> None:
    async def main() -> None:
        async with processes(KILLED, 3, transports) as ranks:
            for process in ranks[:2]:
                assert await heard(process) == [2]

    run(main())
