"""Arrays that ranks share: what peers may say of theirs."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from aiodist.errors import ProtocolError
from aiodist.shared_memory import heap as heaps
from aiodist.shared_memory.heap import Heap, address_of
from aiodist.wire import kinds

FILES = "/proc/self/fd"


class Party:
    """A group of three, of which nothing is run."""

    rank, size = 0, 3

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.endpoint = self
        self.told: list[tuple[int, int, int]] = []  # peer, kind, number of the array

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self.loop.create_task(coroutine, name=name)
        task.cancel()
        return task

    def tell(self, peer: int, kind: int, *fields: Any) -> None:
        self.told.append((peer, kind, fields[0]))


async def test_a_peer_shares_so_many_arrays_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heaps, "MOST", 3)
    party: Any = Party()
    heap = Heap(party, shares=True)

    def shared(peer: int, number: int, nbytes: int = 8) -> None:
        heap.heard(peer, [kinds.REGION, 0, number, "", b"", nbytes])

    for number in range(3):
        shared(1, number)
    for number in range(2):  # those of another count for themselves
        shared(2, number)
    with pytest.raises(ProtocolError, match="rank 1 shares over 3 arrays at a time"):
        shared(1, 3)
    with pytest.raises(ProtocolError, match="rank 2 shares array 1 twice"):
        shared(2, 1)
    for nbytes in (-1, 0, (1 << heaps.OFFSET_BITS) + 1):
        with pytest.raises(ProtocolError, match=f"rank 2 shares an array of {nbytes} bytes"):
            shared(2, 2, nbytes)
    heap.heard(1, [kinds.UNMAP, 0, 0])
    shared(1, 3)
    heap.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("by_thread", [False, True])
async def test_a_dropped_array_is_not_found_by_its_address(by_thread: bool) -> None:
    """The next array may get that address before the loop has turned."""
    party: Any = Party()
    heap = Heap(party, shares=True)

    def shared() -> Any:
        array = heap.empty(1000, "f8", None)
        for peer in (1, 2):
            heap.heard(peer, [kinds.MAPPED, 0, party.told[-1][2]])
        return array

    kept, dropped = shared(), [shared()]
    (first, second), address = map(heap.place_of, ([kept], dropped)), address_of(dropped[0])
    assert 0 < first != second > 0
    view = dropped[0][10:20]
    dropped.clear()
    assert heap.locate(address, 8000) == second  # a view is enough
    del view
    if by_thread:
        views = [shared()]
        address = address_of(views[0])
        thread = threading.Thread(target=views.clear)
        thread.start()
        thread.join()
    assert not heap.locate(address, 8000)
    assert heap.place_of([kept]) == first
    assert party.told[-2:] == [(peer, kinds.UNMAP, 1 + by_thread) for peer in (1, 2)]
    heap.close()


async def test_what_the_others_would_refuse_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such arrays are arrays like others."""
    monkeypatch.setattr(heaps, "MOST", 3)
    party: Any = Party()
    heap = Heap(party, shares=True)

    def shares(nbytes: int = 8) -> bool:
        party.told.clear()
        kept.append(heap.empty(nbytes, "u1", None))
        return kinds.REGION in [kind for _, kind, _ in party.told]

    kept: list[Any] = []
    assert [shares() for _ in range(5)] == [True] * 3 + [False] * 2
    del kept[0]
    assert shares()  # one was dropped, though the loop has not turned
    assert not shares()
    kept.clear()
    assert not shares(0)
    monkeypatch.setattr(heap, "_next", heaps.NUMBERS - 1)
    assert shares()
    for peer in (1, 2):
        heap.heard(peer, [kinds.MAPPED, 0, heaps.NUMBERS - 1])
    assert 0 < heap.place_of([kept[-1][7:]]) < 1 << 63
    assert not shares()
    heap.close()


async def test_arrays_that_the_others_have_not_mapped_take_few_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They share one socket. Beyond half of the files of the process, arrays are like others."""
    monkeypatch.setattr(heaps, "most_offered", lambda: 3)
    monkeypatch.setattr(heaps, "_offered", set())
    party: Any = Party()
    heap, other = Heap(party, shares=True), Heap(party, shares=True)
    before = len(os.listdir(FILES))

    def is_shared(heap: Heap) -> bool:
        party.told.clear()
        kept.append(heap.empty(8, "u1", None))
        return bool(party.told)

    kept: list[Any] = []
    assert [is_shared(heap) for _ in range(5)] == [True] * 3 + [False] * 2
    assert not is_shared(other)
    assert len(os.listdir(FILES)) == before + 4
    heap.heard(1, [kinds.MAPPED, 0, 0])
    assert not is_shared(heap)
    heap.heard(2, [kinds.MAPPED, 0, 0])  # now all have it
    assert [is_shared(heap) for _ in range(2)] == [True, False]
    del kept[1]
    assert [is_shared(heap) for _ in range(2)] == [True, False]
    assert len(os.listdir(FILES)) == before + 4
    for number in (2, 3, 4):
        for rank in (1, 2):
            heap.heard(rank, [kinds.MAPPED, 0, number])
    assert len(os.listdir(FILES)) == before
    assert is_shared(other) and is_shared(heap)
    heap.close()
    assert [is_shared(other) for _ in range(3)] == [True, True, False]
    other.close()
    assert len(os.listdir(FILES)) == before


def test_what_a_process_offers_takes_no_files_of_its_children() -> None:
    heaps._offered.add(block := heaps.Block(0, 0, 8, {1}))
    if (child := os.fork()) == 0:
        os._exit(len(heaps._offered))
    assert os.waitpid(child, 0)[1] == 0
    heaps._offered.remove(block)


def test_a_process_with_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 512), (heaps.resource.RLIM_INFINITY, heaps.MOST)):
        monkeypatch.setattr(heaps.resource, "getrlimit", lambda kind, soft=soft: (soft, soft))
        assert heaps.most_offered() == most


async def test_few_arrays_of_a_peer_are_fetched_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another peer are not held up. If there is no file, the array is fetched again."""
    monkeypatch.setattr(heaps, "AGAIN", 0)
    party: Any = Party()
    monkeypatch.setattr(party, "spawn", lambda coroutine, name: party.loop.create_task(coroutine))
    under_way: list[tuple[str, asyncio.Future[memoryview]]] = []

    async def take(words: tuple[str, bytes], nbytes: int) -> memoryview:
        under_way.append((words[0], party.loop.create_future()))
        return await under_way[-1][1]

    async def turns() -> list[str]:
        for _ in range(20):
            await asyncio.sleep(0)
        return [name for name, fetched in under_way if not fetched.done()]

    monkeypatch.setattr(heaps, "take", take)
    heap = Heap(party, shares=True)
    for number in range(5):
        heap.heard(1, [kinds.REGION, 0, number, "busy", b"", 8])
    heap.heard(2, [kinds.REGION, 0, 0, "other", b"", 8])
    assert await turns() == ["busy", "busy", "other"]
    under_way[2][1].set_exception(OSError(errno.EMFILE, "no files"))
    assert await turns() == ["busy", "busy", "other"]
    under_way[3][1].set_result(memoryview(bytes(8)))
    under_way[0][1].set_exception(ConnectionResetError("it went away"))
    assert await turns() == ["busy", "busy"]
    assert len(party.told) == 1
    heap.close()
