"""Members that send more than can be meant: what is kept of it has an end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

import aiodist
from aiodist.engine import arrivals
from aiodist.links import peer
from aiodist.p2p import credit
from aiodist.p2p import frames as p2p_frames
from aiodist.shared_memory import heap
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields

pytestmark = pytest.mark.usefixtures("no_ruling")

Ranks = list[aiodist.Group]


def send(ranks: Ranks, *fields: Any, payload: bytes = b"") -> None:
    """Rank 1 sends rank 0 a frame; `fields` but for the context."""
    kind, *rest = fields
    link = ranks[1]._actor.endpoint.peer(0).link
    assert link is not None
    link.send(pack_fields(kind, ranks[0]._context.id, *rest), (memoryview(payload),))


async def settled(ranks: Ranks) -> None:
    """Rank 0 has taken in all that rank 1 has sent so far."""
    received = ranks[0].recv(src=1, tag="settled")
    await ranks[1].send(None, 0, tag="settled")
    await received


async def turned_away(ranks: Ranks, pending: aiodist.Work[Any], text: str, log: Any) -> None:
    """Rank 1 is lost to rank 0, for that reason, and to nobody else does anything happen."""
    with pytest.raises(aiodist.PeerLostError, match="rank 1"):
        await pending
    assert text in log.text
    sent = ranks[2].send("hello", 0)
    assert await ranks[0].recv(src=2) == "hello"
    await sent


FLOODS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "messages": lambda n: (kinds.MESSAGE, f"tag {n}", 0, 0, b"barrier()"),
    "messages of one": lambda n: (kinds.MESSAGE, None, 5, n, b"barrier()"),
    "grants": lambda n: (kinds.GRANT, None, 5 + n, 1, b"barrier()"),
    "questions": lambda n: (kinds.INQUIRE, f"tag {n}", 0),
    "knocks": lambda n: (kinds.KNOCK, f"tag {n}", 0),
}


@pytest.mark.parametrize("what", FLOODS)
def test_what_comes_of_collectives_that_were_not_called(
    run: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(arrivals, "MAX_AHEAD_BYTES", 100_000)

    async def main() -> None:
        async with aiodist.local(3, transports=("tcp",)) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            pending = ranks[0].recv(src=1)
            for n in range(200):
                send(ranks, *FLOODS[what](n))
            await turned_away(ranks, pending, "collectives not called here yet", caplog)

    run(main())


def test_what_was_taken_does_not_count(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of early frames may come, one after the other."""
    monkeypatch.setattr(arrivals, "MAX_AHEAD_BYTES", 20_000)

    async def main() -> None:
        async with aiodist.local(2, transports=("tcp",)) as (first, second):
            for n in range(100):
                ahead = second.all_gather({"n": n}, tag=n % 3)
                received = first.recv(src=1)
                await second.send(None, 0)
                await received  # what the collective sent at once has come
                assert await first.all_gather({"n": n}, tag=n % 3) == [{"n": n}] * 2
                await ahead
            assert not +first._context.calls.arrivals._ahead_bytes

    run(main())


def test_the_oldest_verdicts_go(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_VERDICT_BYTES", 20_000)

    async def main() -> None:
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            for n in range(50):
                send(ranks, kinds.ABORT, f"tag {n}", 0, "error", "why", 1, {0: "x" * 100}, [])
            await settled(ranks)
            kept = [tag for tag, _ in ranks[0]._context.calls.arrivals.verdicts]
            assert kept == [f"tag {n}" for n in range(50 - len(kept), 50)]
            assert 10 < len(kept) < 20
            with pytest.raises(aiodist.CollectiveAbortedError, match="why"):
                await ranks[0].barrier(tag="tag 49")
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await ranks[0].barrier(tag="tag 0", timeout=0.01)

    run(main())


def test_who_asks_without_listening(run: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MAX_UNHEARD", 300)

    async def main() -> None:
        async with aiodist.local(3, transports=("tcp",)) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            link = ranks[1]._actor.endpoint.peer(0).link
            assert link is not None
            monkeypatch.setattr(type(link), "_own", lambda self, code, number: None)  # says nothing
            pending = ranks[0].recv(src=1)
            for _ in range(1000):
                send(ranks, kinds.INQUIRE, None, 0)
            await turned_away(ranks, pending, "rank 1 asks, but has not taken in", caplog)

    run(main())


def test_arrays_at_addresses_that_make_no_sense(run: Any) -> None:
    async def main() -> None:
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            for number, address in enumerate(["", "/nowhere", "unix-abstract:" + "x" * 200]):
                send(ranks, kinds.REGION, number, address, b"", 8)
            send(ranks, kinds.REGION, 7, "unix-abstract:aiodist-none", b"", 8)
            await settled(ranks)
            await asyncio.gather(*ranks[0]._context.heap._coming.values())
            assert not ranks[0]._context.heap._coming
            assert await asyncio.gather(*[group.all_reduce(1) for group in ranks]) == [2, 2]

    run(main())


def test_arrays_that_never_come(run: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(words: object, nbytes: object) -> memoryview:
        await asyncio.sleep(math.inf)
        raise AssertionError

    monkeypatch.setattr(heap, "take", never)
    monkeypatch.setattr(heap, "MOST", 10)

    async def main() -> None:
        async with aiodist.local(3, transports=("tcp",)) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            coming = ranks[0]._context.heap._coming
            for number in range(10):
                send(ranks, kinds.REGION, number, "address", b"", 8)
            await settled(ranks)
            assert len(coming) == 10
            fetching = coming[1, 3]
            send(ranks, kinds.UNMAP, 3)  # it is gone before it was mapped
            await settled(ranks)
            assert len(coming) == 9
            assert fetching.cancelled()
            pending = ranks[0].recv(src=1)
            send(ranks, kinds.REGION, 3, "address", b"", 8)
            send(ranks, kinds.REGION, 11, "address", b"", 8)
            await turned_away(ranks, pending, "shares over 10 arrays at a time", caplog)
            tasks = list(coming.values())
        assert all(task.cancelled() for task in tasks)

    run(main())


def test_an_array_that_is_shared_twice(run: Any, caplog: Any) -> None:
    async def main() -> None:
        async with aiodist.local(3, transports=("tcp",)) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            pending = ranks[0].recv(src=1)
            for _ in range(2):
                send(ranks, kinds.REGION, 1, "unix-abstract:aiodist-none", b"", 8)
            await turned_away(ranks, pending, "rank 1 shares array 1 twice", caplog)

    run(main())


def test_wants_are_bounded(run: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit, "MAX_WANTS", 10)

    async def main() -> None:
        async with aiodist.local(3, transports=("tcp",)) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            pending = ranks[0].recv(src=1)
            for number in range(11):
                send(ranks, kinds.P2P, p2p_frames.WANT, number)
            await turned_away(ranks, pending, "one too many", caplog)

    run(main())
