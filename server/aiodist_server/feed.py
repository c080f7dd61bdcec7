"""The page's news: the coordinator is asked again and again, and who has the page open is told.

What is told is the whole picture each time, made and encoded once for all readers. So nobody has
to have heard what came before: a reader that is slow misses pictures, and none wait for it::

    survey, notes -> History -> picture -> bytes of the newest one <- reader, reader, reader
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web

from aiodist.coordinator.actor import Coordinator
from aiodist.errors import CoordinatorLostError
from aiodist.membership.effects import Note
from aiodist_server.channels import Channels
from aiodist_server.history import History
from aiodist_server.latencies import Latencies
from aiodist_server.picture import picture
from aiodist_server.surveys import Surveys

PERIOD = 2.0
"""Seconds from one question to the next."""
ASKED_A_SECOND = 256
"""Most members that are asked in a second: where there are many, each is asked less often."""
SHARE_OF_NEWS = 8
"""What the coordinator notes is shown at once, but it is asked at most so many times a period."""

MOST_READERS = 32
"""So many may have the page open; the oldest goes for a new one."""
WRITE_SECONDS = 10.0
"""A reader that has not taken a picture within that time is disconnected."""
CHUNK = 64 * 1024
"""Bytes that are given to a connection before it must have taken most of them."""


class Reader:
    """One who has the page open. `news`: set when there is a newer picture, or an end."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.is_over = False

    def end(self) -> None:
        self.is_over = True
        self.news.set()


class Feed:
    """What the page hears. `run` asks for as long as it runs."""

    def __init__(self, coordinator: Coordinator, surveys: Surveys) -> None:
        self._coordinator = coordinator
        self._surveys = surveys
        self._history = History()
        self._latencies = Latencies()
        self._channels = Channels()
        self._loop = asyncio.get_running_loop()
        self._found: Mapping[str, Any] | None = None  # the last answer; None: there is none yet
        self._problem = ""  # why there is no newer one
        self._at = self._loop.time()  # when that was
        self._event: bytes | None = None  # the picture of then, for readers; None: not made yet
        self._noted = asyncio.Event()  # the coordinator has noted something
        self._readers: dict[Reader, None] = {}  # the oldest first

    async def run(self) -> None:
        """Ask until cancelled."""
        self._coordinator.observers.append(self._note)
        try:
            while True:
                self._noted.clear()
                await self._ask()
                period = self._period()
                with suppress(TimeoutError):
                    async with asyncio.timeout(period):
                        await self._noted.wait()
                        await asyncio.sleep(period / SHARE_OF_NEWS)  # more of it may come
        finally:
            self._coordinator.observers.remove(self._note)
            for reader in self._readers:
                reader.end()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Tell one reader, until it goes or is sent away."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        reader = self._enter()
        try:
            while not reader.is_over:
                reader.news.clear()
                if self._found is not None or self._problem:
                    await _write(response, self._newest())
                await reader.news.wait()
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._readers.pop(reader, None)
        return response

    # Inside.

    def _note(self, note: Note) -> None:
        self._history.note(note.event, note.fields, self._loop.time())
        self._noted.set()

    def _period(self) -> float:
        groups = [] if self._found is None else self._found["groups"]
        members = sum(len(group["members"]) for group in groups)
        return max(PERIOD, members / ASKED_A_SECOND)

    async def _ask(self) -> None:
        try:
            # To measure costs members a little: only where somebody looks.
            self._found = await self._surveys.found(counts=bool(self._readers))
            self._problem = ""
        except (CoordinatorLostError, TimeoutError) as error:
            self._problem = str(error)
        self._at = self._loop.time()
        if self._found is not None and not self._problem:
            self._history.take(self._found, self._at)
            self._latencies.take(self._coordinator.totals.latencies, self._at)
            self._channels.take(self._found, self._at)
        self._event = None
        for reader in self._readers:
            reader.news.set()

    def _enter(self) -> Reader:
        if len(self._readers) >= MOST_READERS:
            oldest = next(iter(self._readers))
            del self._readers[oldest]
            oldest.end()
        reader = Reader()
        self._readers[reader] = None
        return reader

    def _newest(self) -> bytes:
        """The newest picture as an event. Made when somebody wants it, and once."""
        if self._event is None:
            shown: dict[str, Any] = {"problem": self._problem}
            if self._found is not None and not self._problem:
                shown |= picture(self._found, self._history, self._at)
                totals = self._coordinator.totals.latencies
                shown["latencies"] = self._latencies.plain(totals, self._at)
                shown["channels"] = self._channels.plain(self._found, self._at)
            text = json.dumps(shown, separators=(",", ":"))
            self._event = f"retry: 2000\ndata: {text}\n\n".encode()
        return self._event


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Raises TimeoutError for one that does not read, ConnectionError for one that is gone."""
    async with asyncio.timeout(WRITE_SECONDS):
        for start in range(0, len(data), CHUNK):
            await response.write(data[start : start + CHUNK])
