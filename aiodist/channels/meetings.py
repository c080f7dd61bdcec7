"""Groups of two participants, in which one takes versions from the other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from aiodist.channels import directory
from aiodist.channels.directory import LinePlace
from aiodist.channels.store import ChannelStore
from aiodist.channels.tasks import ChannelTasks
from aiodist.errors import AiodistError, JoinError, in_words
from aiodist.group import Group
from aiodist.session import Connecting
from aiodist.transports.surroundings import chooser_on
from aiodist.work import Work

RING = 10.0
"""Seconds that a call at a door is kept."""

TAKES, GIVES = 1, 0
"""Ranks in a group of two."""


class Meetings:
    """The groups of two of one participant of `channel`.

    `calls`: how many others have called and not yet said what they want. `feed`: the source of the
    last version, unless a task takes from it now.
    """

    def __init__(
        self, channel: str, patience: float, store: ChannelStore, tasks: ChannelTasks
    ) -> None:
        self._channel = channel
        self._patience = patience
        self._store = store
        self._tasks = tasks
        self.calls = 0
        self.feed: Feed | None = None
        self._moved = (0, 0)  # bytes to and from participants that it has left
        # A dictionary, because its order is that in which groups were added. See `ChannelTasks`.
        self._pairs: dict[Group, None] = {}
        self._left = asyncio.Event()  # set when one of them ends

    def meeting(self, name: str, rank: int) -> Meeting:
        """Meet in the group `name`: ``async with meetings.meeting(name, rank) as pair``.

        Raises what `connect` does.
        """
        return Meeting(self, self._store.connecting(name, rank, 2, self._patience))

    async def called(self, who: str) -> Meeting:
        """Call at the door of another participant, and return the group of two in which to meet.

        Raises what `ChannelStore.ask` does. Meeting raises JoinError if the other one is gone.
        """
        nonce = chooser_on(asyncio.get_running_loop()).getrandbits(64)
        name = f"{directory.meetings(self._channel, who)}{nonce:016x}"
        await self._store.set(directory.door(who), name.encode(), RING)
        return Meeting(self, self._store.connecting(name, TAKES, 2, self._patience), who)

    async def joined(self, connecting: Connecting, source: str) -> Group:
        """Join a group, but give up as soon as `source` is gone, because it will never join.

        Raises JoinError, and what `connect` does.
        """

        joining = asyncio.timeout(None)

        async def watch() -> None:
            with suppress(AiodistError):  # the coordinator is away, so only `patience` ends this
                await self._store.until_gone(source)
                joining.reschedule(0.0)

        try:
            async with joining:
                watching = asyncio.ensure_future(watch())
                self._tasks.adopt(watching)
                try:
                    return await connecting
                finally:
                    watching.cancel()
        except TimeoutError:
            if not joining.expired():
                raise
            raise JoinError(f"the participant {source} of the channel is gone") from None

    async def fed_by(self, source: LinePlace) -> Feed:
        """Meet another participant: ``async with await meetings.fed_by(source) as pair``. The group
        is kept for the next version. Raises what `called` and `connect` do."""
        # One task at a time has it, because a cancelled call's task may still take a version.
        feed, self.feed = self.feed, None
        if feed is not None and feed.source == source:
            return feed
        if feed is not None:
            await feed.close()
        meeting = await self.called(source.id)
        pair = await meeting.__aenter__()
        try:
            return Feed(self, self._tasks, source, pair)
        except BaseException:
            await self.leave(pair)
            raise

    def met_in(self, pair: Group) -> None:
        """Note that this participant is in a group of two."""
        self._pairs[pair] = None

    async def leave(self, pair: Group) -> None:
        """Leave a group of two, even if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        await asyncio.shield(loop.create_task(self._leave(pair), name="aiodist pair leave"))

    async def _leave(self, pair: Group) -> None:
        try:
            with suppress(AiodistError):  # not all has arrived: then it is asked for again
                await pair.close()
        finally:
            self._pairs.pop(pair, None)
            self._moved = _sum([self._moved, pair.bytes_moved])
            self._left.set()

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Bytes that this participant has sent to others, and received from them."""
        return _sum([self._moved, *(pair.bytes_moved for pair in self._pairs)])

    async def close(self) -> None:
        """Leave all groups."""
        if self.feed is not None:
            await self.feed.close()
        while self._pairs:
            for pair in self._pairs:
                pair.abort("it takes part no more")
            self._left.clear()
            await self._left.wait()


def _sum(moved: Iterable[tuple[int, int]]) -> tuple[int, int]:
    sent, received = zip(*moved, strict=True)
    return sum(sent), sum(received)


class Feed:
    """The source of the last version, which is asked for the next one, too.

    Finding and meeting a new source would take round trips. A feed ends if it fails, if another
    task has kept its own meanwhile, or by `close`.
    """

    def __init__(
        self, meetings: Meetings, tasks: ChannelTasks, source: LinePlace, pair: Group
    ) -> None:
        self.source = source
        self._pair = pair
        self._is_over = False
        self._meetings = meetings
        self._tasks = tasks
        # Gets no message, but fails when the source leaves.
        self._leaves = pair.recv(src=GIVES, tag="leaves", timeout=math.inf)
        self._leaves.add_done_callback(self._gone)

    def _gone(self, leaves: Work[Any]) -> None:
        if not leaves.cancelled():
            leaves.exception()
            self._tasks.adopt(asyncio.ensure_future(self.close()))

    async def close(self) -> None:
        """End it. Idempotent."""
        if self._meetings.feed is self:
            self._meetings.feed = None
        if not self._is_over:
            self._is_over = True
            self._leaves.cancel()
            await self._meetings.leave(self._pair)

    async def __aenter__(self) -> Group:
        return self._pair

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._pair.abort(in_words(error))
        elif self._meetings.feed is None and not self._is_over:
            self._meetings.feed = self
            return
        await self.close()


class Meeting:
    """A group of two, as long as the context lasts. `source`: the id of the other one, if that was
    called; "": this one was called."""

    def __init__(self, meetings: Meetings, connecting: Connecting, source: str = "") -> None:
        self._meetings = meetings
        self._connecting = connecting
        self._source = source

    async def __aenter__(self) -> Group:
        if self._source:
            self._pair = await self._meetings.joined(self._connecting, self._source)
        else:
            self._pair = await self._connecting
        self._meetings.met_in(self._pair)
        return self._pair

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._pair.abort(in_words(error))
        await self._meetings.leave(self._pair)
