"""What a coordinator tells those who have its page open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from idle_time import idle_time

import aiodist
from aiodist.wire import averaging
from aiodist.wire.address import parse_address
from aiodist_server import feed
from aiodist_server.feed import Feed
from aiodist_server.http import serving
from aiodist_server.surveys import Surveys

LOCAL = parse_address("tcp://127.0.0.1:0")


@pytest.fixture(autouse=True)
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked again just because time has passed."""
    monkeypatch.setattr(feed, "PERIOD", 1000.0)
    monkeypatch.setattr(feed, "SHARE_OF_NEWS", 1e6)


@asynccontextmanager
async def session(coordinator: aiodist.Coordinator) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(coordinator, LOCAL) as url, aiohttp.ClientSession(url) as web:
        yield web


@asynccontextmanager
async def reading() -> AsyncIterator[tuple[aiodist.Coordinator, aiohttp.ClientResponse]]:
    async with (
        aiodist.Coordinator() as coordinator,
        session(coordinator) as web,
        web.get("/events") as response,
    ):
        yield coordinator, response


class Events:
    """What one reader hears."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def next(self) -> dict[str, Any] | None:
        """None: it was sent away."""
        while line := await self._response.content.readline():
            if line.startswith(b"data: "):
                data: dict[str, Any] = json.loads(line[6:])
                return data
        return None

    async def until(self, has: Any) -> dict[str, Any]:
        while (shown := await self.next()) is not None:
            if has(shown):
                return shown
        raise AssertionError("the stream ended")


def ranks(shown: dict[str, Any]) -> list[tuple[int, str]]:
    return [(row["rank"], row["how"]) for group in shown["groups"] for row in group["rows"]]


async def test_what_happens_is_told_at_once() -> None:
    async with reading() as (coordinator, response):
        assert response.content_type == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-store"
        events = Events(response)
        first = await events.next()
        assert first is not None
        assert (first["groups"], first["count"], first["problem"]) == ([], 0, "")
        joining = [aiodist.connect(coordinator.address, rank=r, size=2) for r in range(2)]
        one, two = await asyncio.gather(*joining)
        await events.until(lambda shown: ranks(shown) == [(0, ""), (1, "")])
        two.abort("its disk is full")
        shown = await events.until(lambda shown: (1, "aborted") in ranks(shown))
        assert ranks(shown) == [(0, ""), (1, "aborted")]
        (group,) = shown["groups"]
        assert group["events"][0]["text"] == "rank 1 aborted: it aborted: its disk is full"
        assert group["rows"][1]["doing"] == "aborted: it aborted: its disk is full"
        await one.close()
        ended = await events.until(lambda shown: shown["count"] == 0)
        assert ended["groups"][0]["state"] == "ended"


async def test_a_coordinator_that_stops_is_told() -> None:
    async with reading() as (coordinator, response):
        events = Events(response)
        await events.next()
        await coordinator.stop()
        member = feed.Note("lost", {"group": "g", "rank": 0})
        for observe in coordinator.observers:  # as if something had happened at the very end
            observe(member)
        said = await events.next()
        assert said == {"problem": "the coordinator has stopped"}


async def test_who_reads_when_it_ends_is_told_no_more() -> None:
    async with aiodist.Coordinator() as coordinator:
        observers = list(coordinator.observers)
        async with serving(coordinator, LOCAL) as url, aiohttp.ClientSession(url) as web:
            response = await web.get("/events")
            events = Events(response)
            assert await events.next() is not None
        assert coordinator.observers == observers
        response.close()


async def test_the_oldest_reader_goes_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MOST_READERS", 2)
    async with aiodist.Coordinator() as coordinator, session(coordinator) as web:
        responses = [await web.get("/events") for _ in range(3)]
        first, second, third = map(Events, responses)
        assert await first.next() is not None
        assert await first.next() is None
        group = await aiodist.connect(coordinator.address, rank=0, size=1)
        for events in (second, third):
            await events.until(lambda shown: ranks(shown) == [(0, "")])
        await group.close()
        for response in responses:
            response.close()


async def test_a_reader_that_does_not_read_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for it, and no more than a piece of one picture lies in its connection."""
    monkeypatch.setattr(feed, "WRITE_SECONDS", 0.2)
    made: list[Feed] = []
    init = Feed.__init__

    def making(self: Feed, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(Feed, "__init__", making)
    monkeypatch.setattr(feed, "picture", lambda *args: {"much": "x" * (32 << 20)})
    async with aiodist.Coordinator() as coordinator, serving(coordinator, LOCAL) as url:
        host, port = url.removeprefix("http://").rstrip("/").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        transport: Any = writer.transport
        transport.pause_reading()
        waiting: list[int] = []
        written = feed._write

        async def watched(response: Any, data: bytes) -> None:
            try:
                await written(response, data)
            except TimeoutError:
                waiting.append(response._payload_writer.transport.get_write_buffer_size())
                gone.set()
                raise

        gone = asyncio.Event()
        monkeypatch.setattr(feed, "_write", watched)
        await gone.wait()
        assert 0 < waiting[0] <= 4 * feed.CHUNK
        transport.resume_reading()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(32 << 20)
        assert made[0]._readers == {}
        writer.close()


async def test_a_page_that_is_gone_at_once_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    stream = Feed.stream

    async def late(self: Feed, request: Any) -> Any:
        request.transport.abort()
        task = asyncio.ensure_future(stream(self, request))
        task.add_done_callback(ended.set_result)
        return await task

    monkeypatch.setattr(Feed, "stream", late)
    async with aiodist.Coordinator() as coordinator, session(coordinator) as web:
        with pytest.raises(aiohttp.ClientError):
            await web.get("/events")
        assert (await ended).exception() is None


async def test_members_measure_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "PERIOD", 0.05)
    async with reading() as (coordinator, response):
        events = Events(response)
        joining = [aiodist.connect(coordinator.address, rank=r, size=2) for r in range(2)]
        one, two = await asyncio.gather(*joining)
        rows: list[dict[str, Any]] = []
        while not rows:
            await asyncio.gather(one.barrier(), two.barrier())
            shown = await events.next()
            assert shown is not None
            rows = shown["latencies"]["rows"]
        assert [(row["op"], row["size"]) for row in rows] == [("barrier", "1KiB")]
        await asyncio.gather(one.close(), two.close())


async def test_nobody_measures_where_nobody_looks() -> None:
    async with aiodist.Coordinator() as coordinator:
        telling = Feed(coordinator, Surveys(coordinator))
        asked: list[bool] = []

        async def found(*, counts: bool) -> Any:
            asked.append(counts)
            return {"groups": [], "channels": []}

        telling._surveys.found = found
        await telling._ask()
        telling._enter()
        await telling._ask()
        assert asked == [False, True]


async def test_a_fault_of_the_page_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing else suffers from it."""
    gone = asyncio.Event()

    async def faulty(self: Feed) -> None:
        gone.set()
        raise KeyError("a fault")

    monkeypatch.setattr(Feed, "run", faulty)
    async with aiodist.Coordinator() as coordinator, session(coordinator) as web:
        await gone.wait()
        async with web.get("/healthz") as response:
            assert response.status == 200
    (said,) = [one for one in caplog.records if one.name == "aiodist.daemon"]
    assert said.getMessage() == "the page is told nothing more"
    assert said.exc_info is not None


async def test_where_there_are_many_each_is_asked_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed, "PERIOD", 2.0)
    async with aiodist.Coordinator() as coordinator:
        telling = Feed(coordinator, Surveys(coordinator))
        assert telling._pause(2.0) == 2.0
        telling._found = {"groups": [{"members": [{}] * 2048}, {"members": [{}] * 2048}]}
        assert telling._pause(2.0) == 16.0


@idle_time
async def test_news_do_not_make_it_ask_more_members_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And notes that no open page shows do not make it ask at all."""
    monkeypatch.setattr(feed, "PERIOD", 2.0)
    monkeypatch.setattr(feed, "SHARE_OF_NEWS", 8)
    asked: list[float] = []
    telling = Feed(aiodist.Coordinator(), Surveys(aiodist.Coordinator()))
    loop = asyncio.get_running_loop()

    async def found(*, counts: bool) -> Any:
        asked.append(loop.time())
        averager = {"channel": None, "averager": "a", "members": [{}] * feed.ASKED_A_SECOND}
        return {"groups": [averager], "channels": []}

    telling._surveys.found = found
    running = asyncio.create_task(telling.run())

    async def note(times: int, name: str) -> None:
        for _ in range(times):
            await asyncio.sleep(0.39)
            telling._note(feed.Note("lost", {"group": name, "rank": 0}))

    of_averager = averaging.own_group("a", "0" * 24)
    await note(5, "g")
    await note(5, of_averager)
    telling._enter()
    await note(5, of_averager)
    await note(5, "g")
    telling._readers.clear()
    await note(2, "g")
    telling._enter()  # sees soon what was noted before
    await asyncio.sleep(1.1)
    running.cancel()
    await asyncio.wait({running})
    assert asked == pytest.approx([0.0, 2.0, 4.0, 6.0, 7.24, 8.41, 9.58])


async def test_a_picture_is_made_once_for_all_who_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(feed, "picture", lambda *args: made.append(args) or {})
    async with aiodist.Coordinator() as coordinator, session(coordinator) as web:
        responses = [await web.get("/events") for _ in range(3)]
        for response in responses:
            said = await Events(response).next()
            assert said is not None
            assert said["problem"] == ""
            response.close()
    assert len(made) == 1
