"""Taking part in a channel: what a participant knows of it, has of it, and says with its signs of
life."""

from __future__ import annotations

import asyncio
import os
from collections.abc import (
    Awaitable,
    Callable,
    Container,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiodist import timeouts
from aiodist.channels import directory
from aiodist.channels.directory import LinePlace, Release
from aiodist.channels.holding import ComingVersion
from aiodist.channels.lag import Lag
from aiodist.channels.meetings import Meetings
from aiodist.channels.stock import Stock
from aiodist.channels.store import BEAT, GONE, ChannelStore
from aiodist.channels.tasks import ChannelTasks
from aiodist.control.store import Store
from aiodist.types import ChannelOptions, unexpected
from aiodist.wire import channels, schema

PATIENCE = 5.0
"""The default of `patience`: seconds that a chunk may take."""

LONGEST = 128
"""The most characters of the name of a channel."""


def check_options(call: str, options: Mapping[str, Any]) -> None:
    """Raise TypeError if `call` does not have all of these options."""
    if unknown := options.keys() - ChannelOptions.__optional_keys__:
        raise unexpected(call, dict.fromkeys(sorted(unknown)), {})


@dataclass
class ChannelRole:
    """What a publisher or a subscriber does as a participant.

    `met(name)` is called when another participant wants to meet this one in a group of that name.
    `own()` returns the releases to list again if the store has lost them. `version()` and
    `publishes` are reported to the coordinator: see `aiodist.wire.channels.Said`. `stay()` is
    called with each sign of life.
    """

    met: Callable[[str], Coroutine[Any, Any, None]]
    own: Callable[[], list[Release]]
    version: Callable[[], int | None]
    publishes: bool = False
    stay: Callable[[], Awaitable[object]] | None = None


class Participant:
    """A publisher or subscriber, by its `role`: begun by `open`, ended by `close`.

    `releases`: the versions of the channel, as far as known here. `beaten`: the time of the last
    sign of life. `trouble`: why the last attempt failed, if no version has come since.
    """

    role: ChannelRole

    def __init__(
        self, channel: str, address: str | None, patience: float, options: Mapping[str, Any]
    ) -> None:
        if not isinstance(channel, str) or not 0 < len(channel) <= LONGEST:
            raise ValueError(f"a channel has a name of 1 to {LONGEST} characters, not {channel!r}")
        timeouts.check_seconds("patience", patience)
        self.channel = channel
        self.patience = patience
        self.tasks = ChannelTasks(channel)
        self.store = ChannelStore(channel, address, patience, options, self.tasks)
        self.meetings = Meetings(channel, patience, self.store, self.tasks)
        self.stock = Stock()
        self.releases: list[Release] = []
        self.beaten = 0.0
        self.trouble = ""
        self._has_news = asyncio.Event()  # others must hear of this participant at once
        self._lag = Lag()
        self._was_entered = False
        self._closing: asyncio.Task[None] | None = None  # leaves; None: this takes part
        self._pid = os.getpid()

    @property
    def changed(self) -> asyncio.Event:
        """Set when `releases` change, or when this participant fails. Then this is a new one."""
        return self.tasks.changed

    async def open(self) -> None:
        """Become known. Raises what `aiodist.connect` does, and RuntimeError the second time."""
        store, tasks = self.store, self.tasks
        if self._was_entered or self._closing is not None:
            raise RuntimeError(
                f"this publisher or subscriber of the channel {self.channel!r} was entered before:"
                " make a new one each time"
            )
        self._was_entered = True
        await store.join()
        tasks.begin()
        ready = [asyncio.Event(), asyncio.Event()]
        try:
            tasks.spawn(store.again(lambda store: self._listen(store, ready[0])), "door")
            tasks.spawn(store.again(lambda store: self._follow(store, ready[1])), "releases")
            await store.entering(lambda: asyncio.gather(*(tasks.until(event) for event in ready)))
            # Only now, because others call at the door of a participant that they see in the store.
            await store.entering(lambda: store.ask(self._beat))
            self._has_news.clear()
            tasks.spawn(store.again(self._live), "beat")
        except BaseException:
            await self.close()
            raise

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that takes part. Then there is nothing to
        leave."""
        return os.getpid() != self._pid

    async def close(self) -> None:
        """Leave. Idempotent. A cancelled call does not stop it."""
        if self._closing is None:
            loop = asyncio.get_running_loop()
            self._closing = loop.create_task(self._close(), name="aiodist channel close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self.tasks.close()
        await self.meetings.close()
        self.stock.close()
        await self.store.close()

    def say(self) -> None:
        """Give the next sign of life at once, because others look there for the version that is
        here now."""
        self._has_news.set()

    @contextmanager
    def at_door(self) -> Iterator[None]:
        """Count a caller, as long as it has not said what it wants."""
        self.meetings.calls += 1
        try:
            yield
        finally:
            self.meetings.calls -= 1
            for holding in self.stock.holdings.values():
                holding.tell()

    async def _listen(self, store: Store, ready: asyncio.Event) -> None:
        async with store.watch(directory.door(self.store.id)) as rung:
            ready.set()
            async for _, name in rung:
                if name is not None:
                    self.tasks.spawn(self.role.met(name.decode(errors="replace")), "meeting")

    async def _follow(self, store: Store, ready: asyncio.Event) -> None:
        async with store.watch(directory.RELEASES) as changes:
            self._know(await store.get(directory.RELEASES, timeout=self.patience))
            ready.set()
            async for _, value in changes:
                self._know(value)

    def _know(self, value: bytes | None) -> None:
        self.releases = directory.unpacked(Release, value)
        if value is None:  # tell a restarted coordinator at once what it has forgotten
            self.say()
        there = [releases[0].version for releases in directory.versions(self.releases)]
        self._lag.hear(there, asyncio.get_running_loop().time())
        self.tasks.tell()

    async def _live(self, store: Store) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT):
                    await self._has_news.wait()
            self._has_news.clear()
            await self._beat(store)

    async def _beat(self, store: Store) -> None:
        self.beaten = asyncio.get_running_loop().time()
        said = schema.pack(self._said())
        await store.set(channels.at(self.store.id), said, ttl=GONE, timeout=self.patience)
        if self.role.stay is not None:
            await self.role.stay()
        # A restarted coordinator has forgotten the versions of the channel.
        own = self.role.own
        if directory.restored(self.releases, own()) is not None and await self._is_missed(own()):
            await self.store.change(
                directory.RELEASES, Release, lambda known: directory.restored(known, own())
            )

    async def _is_missed(self, own: Sequence[Release]) -> bool:
        """Whether the store lost releases of `own` by accident.

        They may also have been deleted, because their numbers began anew while this participant was
        stopped.
        """
        if self.store.has_forgotten:
            return True
        published = directory.published(await self.store.get(directory.PUBLISHED))
        return any(one.version >= own[-1].version for one in published)

    def has_here(self, version: int | None) -> tuple[int, int]:
        """How many bytes of a version are here, and how many it has; 0: it is not known."""
        return self.stock.here(version), self._size(version)

    def _said(self) -> channels.Said:
        role, differences = self.role, self.stock.differences
        version = role.version()
        newest = directory.newest(self.releases)
        here, nbytes = self.has_here(newest)
        sent, received = self.meetings.bytes_moved
        now = asyncio.get_running_loop().time()
        return channels.Said(
            publishes=role.publishes,
            version=version,
            newest=newest,
            nbytes=nbytes,
            here=here,
            behind=0.0 if role.publishes else self._lag.seconds(version, now),
            memory=self.stock.own_bytes,
            sent=sent,
            received=received,
            saved=differences.saved,
            changed=differences.changed,
            chain=differences.chain,
            fallbacks=differences.fallbacks,
            whole=self.stock.whole(newest),
        )

    async def heard_of(self, places: Iterable[LinePlace]) -> dict[str, channels.Said | None]:
        """What these participants have said with their last signs of life, by id.

        A participant without a sign of life is left out. All are looked up at once, because one
        after the other would take a round trip each. None: it cannot be read.
        """
        ids = list(dict.fromkeys(one.id for one in places))
        found = await asyncio.gather(*map(self.store.said, ids))
        return {
            who: channels.said_in(said)
            for who, said in zip(ids, found, strict=True)
            if said is not None
        }

    def _has_of(self, said: channels.Said | None, version: int, *, sliced: bool) -> int:
        """How many bytes of a version a participant has for sure that has said this, with those of
        slices or without."""
        if said is None:
            return 0
        if said.newest == version:
            return said.here if sliced else said.whole
        # It says only of the newest version how much it has, but its program has all of this one.
        return self._size(version) if said.version == version else 0

    def _size(self, version: int | None) -> int:
        """Bytes of a version, as far as it is known here; 0: it is not."""
        return sum(one.nbytes for one in self.releases if one.version == version)

    async def said_in_line(self, version: int) -> list[int]:
        """How many bytes of a version each living participant has that wants all of it."""
        line = [
            one
            for one in await self.store.line(version)
            if one.id != self.store.id and not one.wants
        ]
        heard = await self.heard_of(line)
        return [self._has_of(said, version, sliced=False) for said in heard.values()]

    async def gone_behind(
        self, me: LinePlace, coming: ComingVersion, failed: Container[str]
    ) -> bool:
        """Go to the end of the line of a version, if only one behind `me` can help.

        That is so if none before it has what it lacks, and one behind it has more. Then its
        receivers ask others.
        """
        coming.starve()
        version = coming.version
        behind = directory.behind(await self.store.line(version), me)
        heard = await self.heard_of(one for one in behind if one.id not in failed)
        known = [self._has_of(one, version, sliced=bool(me.wants)) for one in heard.values()]
        if max(known, default=0) <= coming.here:
            return False
        key = directory.line(version)
        await self.store.change(key, LinePlace, lambda before: directory.at_end(before, me))
        return True
