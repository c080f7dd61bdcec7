"""Arrays that ranks share: what peers may say of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from aiodist.errors import ProtocolError
from aiodist.shared_memory import heap as heaps
from aiodist.shared_memory.heap import Heap
from aiodist.wire import kinds


class Party:
    """A group of three, of which nothing is run."""

    rank, size = 0, 3

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.endpoint = self

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self.loop.create_task(coroutine, name=name)
        task.cancel()
        return task

    def tell(self, peer: int, kind: int, *fields: Any) -> None: ...


async def test_a_peer_shares_so_many_arrays_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heaps, "MOST", 3)
    party: Any = Party()
    heap = Heap(party, shares=True)

    def shared(peer: int, number: int) -> None:
        heap.heard(peer, [kinds.REGION, 0, number, "", b"", 8])

    for number in range(3):
        shared(1, number)
    for number in range(2):  # those of another count for themselves
        shared(2, number)
    with pytest.raises(ProtocolError, match="rank 1 shares over 3 arrays at a time"):
        shared(1, 3)
    with pytest.raises(ProtocolError, match="rank 2 shares array 1 twice"):
        shared(2, 1)
    heap.heard(1, [kinds.UNMAP, 0, 0])
    shared(1, 3)
    heap.close()
    await asyncio.sleep(0)
