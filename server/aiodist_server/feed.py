"""The page's news: the coordinator is asked again and again, and open pages get the answers.

Each time the whole picture is sent, made and encoded once for all readers. So a reader needs no
earlier picture: a slow one misses pictures, and the others do not wait for it::

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
from aiodist_server.averagers import averagers
from aiodist_server.channels import Channels
from aiodist_server.history import History
from aiodist_server.latencies import Latencies
from aiodist_server.picture import picture
from aiodist_server.surveys import Surveys

PERIOD = 2.0
"""Seconds from one question to the next."""
ASKED_A_SECOND = 256
"""The most members that are asked in a second. With more members, each is asked less often."""
SHARE_OF_NEWS = 8
"""Readers soon see notes of the coordinator, but it is asked at most this many times a period."""

MOST_READERS = 32
"""How many pages may be open. The oldest is closed for a new one."""
WRITE_SECONDS = 10.0
"""A reader that has not taken a picture within this time is disconnected."""
CHUNK = 64 * 1024
"""Bytes for a connection before it must have taken most of them."""


class Reader:
    """An open page. `news` is set when there is a newer picture, or at the end."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.is_over = False

    def end(self) -> None:
        self.is_over = True
        self.news.set()


class Feed:
    """What open pages hear. `run` asks for as long as it runs."""

    def __init__(self, coordinator: Coordinator, surveys: Surveys) -> None:
        self._coordinator = coordinator
        self._surveys = surveys
        self._history = History()
        self._latencies = Latencies()
        self._channels = Channels()
        self._loop = asyncio.get_running_loop()
        self._found: Mapping[str, Any] | None = None  # the last answer; None: none yet
        self._problem = ""  # why there is no newer one
        self._at = self._loop.time()  # the time of the last answer
        self._event: bytes | None = None  # its picture for readers; None: not made yet
        self._noted = asyncio.Event()  # there is something that readers should soon see
        self._is_old = False  # something was noted since the last answer
        self._readers: dict[Reader, None] = {}  # the oldest first

    async def run(self) -> None:
        """Ask until cancelled."""
        self._coordinator.observers.append(self._note)
        try:
            while True:
                self._noted.clear()
                self._is_old = False
                await self._ask()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause(PERIOD)):
                        await self._noted.wait()
                        await asyncio.sleep(self._pause(PERIOD / SHARE_OF_NEWS))  # for more notes
        finally:
            self._coordinator.observers.remove(self._note)
            for reader in self._readers:
                reader.end()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send pictures to one reader, until it goes or is disconnected."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        reader = self._enter()
        try:
            await response.prepare(request)
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
        is_kept = self._history.note(note.event, note.fields, self._loop.time(), note.member)
        self._is_old |= is_kept
        if is_kept and self._readers:
            self._noted.set()

    def _pause(self, seconds: float) -> float:
        """Return that many seconds, or more if there are many members."""
        groups = [] if self._found is None else self._found["groups"]
        members = sum(len(group["members"]) for group in groups)
        return max(seconds, members / ASKED_A_SECOND)

    async def _ask(self) -> None:
        counted = bool(self._readers)  # only for readers, because measuring costs members a little
        try:
            self._found = await self._surveys.found(counts=counted)
            self._problem = ""
        except (CoordinatorLostError, TimeoutError) as error:
            self._problem = str(error)
        self._at = self._loop.time()
        if self._found is not None and not self._problem:
            self._history.take(self._found, self._at)
            self._latencies.take(self._coordinator.totals.latencies, self._at, counted=counted)
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
        if self._is_old:
            self._noted.set()
        return reader

    def _newest(self) -> bytes:
        """Return the newest picture as an event. It is made on demand, and once."""
        if self._event is None:
            shown: dict[str, Any] = {"problem": self._problem}
            if self._found is not None and not self._problem:
                shown |= picture(self._found, self._history, self._at)
                totals = self._coordinator.totals.latencies
                shown["latencies"] = self._latencies.plain(totals, self._at)
                shown["channels"] = self._channels.plain(self._found, self._at)
                shown["averagers"] = averagers(self._found)
            text = json.dumps(shown, separators=(",", ":"))
            self._event = f"retry: 2000\ndata: {text}\n\n".encode()
        return self._event


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Raises TimeoutError if the reader does not read, ConnectionError if it is gone."""
    async with asyncio.timeout(WRITE_SECONDS):
        for start in range(0, len(data), CHUNK):
            await response.write(data[start : start + CHUNK])
