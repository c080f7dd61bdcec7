"""The store that all participants of a channel share, as one of them uses it.

A participant is a group of one, which has this store (`aiodist.wire.channels`). If the coordinator
is restarted, everything here is tried again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from aiodist import environment, timeouts
from aiodist.channels import directory
from aiodist.channels.directory import LinePlace, Release, Seat
from aiodist.channels.tasks import ChannelTasks
from aiodist.control.store import Store
from aiodist.errors import (
    AiodistError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupClosedError,
    JoinTimeoutError,
)
from aiodist.group import Group
from aiodist.reach import memory_of
from aiodist.session import Connecting, connect
from aiodist.transports.surroundings import chooser_on
from aiodist.wire import channels

log = logging.getLogger("aiodist.channels")

T = TypeVar("T")
R = TypeVar("R", bound=Release | LinePlace | Seat)

AWAY = (CollectiveTimeoutError, JoinTimeoutError)
"""Raised while the coordinator is away, and may come back."""

BEAT = 1.0
"""Seconds between signs of life in the store of the channel."""

GONE = 3.5 * BEAT
"""Seconds without a sign of life after which a participant counts as gone."""

SIGNS = 4
"""The number of signs of life that prove that a participant lives. The first one may have waited
unread when it died, and a participant that is ending needs time."""

LONGEST_PAUSE = 0.1
"""The most seconds before a record is written again that many participants write at once."""


class ChannelStore:
    """The store of `channel`, by a group of one that `join` makes and `close` leaves.

    `patience`: seconds for a request. `options`: of `aiodist.connect`. `tasks`: of the participant,
    which fails if the coordinator is gone for good.
    """

    def __init__(
        self,
        channel: str,
        address: str | None,
        patience: float,
        options: Mapping[str, Any],
        tasks: ChannelTasks,
    ) -> None:
        if address is None:
            address = environment.settings_from(os.environ).address
        self._channel = channel
        self._address = address
        self._patience = patience
        self._options = options
        self._tasks = tasks
        timeouts.check_timeout(options.get("timeout"))
        self._timeout: float = options.get("timeout") or 30.0  # seconds for joining
        self._awaited = "the coordinator went away, or had no time"  # for `entering`
        self._group: Group | None = None
        self._opening = asyncio.Lock()
        self._is_lost = False  # the coordinator was restarted without a state file

    # Coming and going.

    async def join(self) -> None:
        """Make the group of one. Raises what `aiodist.connect` does."""
        self.id = f"{chooser_on(asyncio.get_running_loop()).getrandbits(96):024x}"
        await self._join()
        self._first = self.start

    async def _join(self) -> None:
        name = channels.own_group(self._channel, self.id)
        connecting = self.connecting(name, 0, 1, self._timeout)
        self._group = group = await connecting.with_store(channels.store_of(self._channel))
        actor = group._actor
        memory = memory_of(actor.people[actor.roots[0]]).host
        host = memory and hashlib.blake2b(memory.encode(), digest_size=16).hexdigest()
        self.place = LinePlace(self.id, host)

    @property
    def host(self) -> str:
        """The host whose memory this participant can map; "": none."""
        return self.place.host

    def connecting(self, name: str, rank: int, size: int, timeout: float) -> Connecting:
        """Connect to a group of this channel's participants."""
        options = {"name": channels.store_of(self._channel), **self._options}
        options |= {"op_timeout": self._patience, "timeout": timeout}
        return connect(self._address, group=name, rank=rank, size=size, **options)

    async def entering(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do something that is needed for taking part; again, if the coordinator is away.

        Raises JoinTimeoutError, and what `work` does.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await self.until_done(work)
        except TimeoutError as error:
            if isinstance(error, AiodistError):
                raise
            raise JoinTimeoutError(
                f"the channel {self._channel!r} was not entered within {self._timeout:g} s:"
                f" {self.absence or self._awaited}"
            ) from None

    @contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Wait for something else than the coordinator: `entering` says so if its time is over."""
        try:
            yield
        except asyncio.CancelledError:
            self._awaited = what
            raise

    async def close(self) -> None:
        """Leave, and withdraw the sign of life."""
        group, self._group = self._group, None
        if group is not None and not group.closed:
            with suppress(AiodistError):  # the coordinator may be gone
                await group.store.delete(channels.at(self.id), timeout=self._patience)
            await group.close()

    # Asking again.

    async def until_done(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something; again, while it fails because the coordinator is away."""
        while True:
            try:
                return await work()
            except AWAY as error:
                log.debug("channel %r: %s", self._channel, error)

    async def ask(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Do something with the store; again, if the coordinator was restarted meanwhile.

        Raises CoordinatorLostError if the coordinator is gone for good, CollectiveTimeoutError.
        """
        while True:
            self._tasks.check()
            group = self._group
            assert group is not None
            try:
                return await work(group.store)
            except (CoordinatorLostError, GroupClosedError) as error:
                await self._recover(group, error)

    async def again(self, work: Callable[[Store], Awaitable[None]]) -> None:
        """Do something with the store, as `ask` does, again and again."""
        while True:
            await self.until_done(lambda: self.ask(work))

    async def _recover(self, group: Group, error: AiodistError) -> None:
        actor = group._actor
        if actor.is_evicted:
            async with self._opening:
                self._tasks.check()
                if self._group is group:
                    log.warning("channel %r: joining again: %s", self._channel, error)
                    await actor.gone()
                    await self._join()
                    try:
                        self._tasks.check()
                    except AiodistError:  # it was closed meanwhile, so only this knows the group
                        await self.close()
                        raise
        elif actor.is_over or not actor.control.is_open:
            self._tasks.fail(error)
            raise error
        else:
            self._is_lost = True

    @property
    def absence(self) -> str:
        """Say that the coordinator is away, and why: see `Line.absence`."""
        return "" if self._group is None else self._group._actor.control.absence

    @property
    def is_restarted(self) -> bool:
        """Whether the coordinator was restarted, which forgets all participants."""
        assert self._group is not None
        return self._is_lost or self._group._actor.control.incarnation > 1

    @property
    def start(self) -> tuple[str, int]:
        """Which start of which coordinator has these records: another one has forgotten them."""
        assert self._group is not None
        return self._group._actor.control.start

    @property
    def has_forgotten(self) -> bool:
        """Whether the coordinator was restarted since `join`, which forgets the records here."""
        return self.start != self._first

    # The records of the channel.

    async def look(self) -> list[Release]:
        """The releases of the channel now, because those that are known here may be old. Waits for
        the coordinator."""
        asking = partial(Store.get, key=directory.RELEASES, timeout=self._patience)
        return directory.unpacked(Release, await self.until_done(lambda: self.ask(asking)))

    async def seats(self) -> list[Seat]:
        """The publishers."""
        return directory.unpacked(Seat, await self.get(directory.PUBLISHER))

    async def line(self, version: int) -> list[LinePlace]:
        """The participants that have a version, or want it."""
        return directory.unpacked(LinePlace, await self.get(directory.line(version)))

    async def stand_in_line(self, version: int, me: LinePlace) -> list[LinePlace]:
        """Tell others that a version is at `me` or wanted there, and return its line."""
        return await self.change(
            directory.line(version), LinePlace, lambda before: directory.in_line(before, me)
        )

    async def get(self, key: str) -> bytes | None:
        return await self.ask(lambda store: store.get(key, timeout=self._patience))

    async def set(self, key: str, value: bytes, ttl: float) -> None:
        """`ttl`: seconds after which the key is gone."""
        await self.ask(lambda store: store.set(key, value, ttl=ttl, timeout=self._patience))

    async def delete(self, key: str) -> None:
        await self.ask(lambda store: store.delete(key, timeout=self._patience))

    async def change(
        self,
        key: str,
        cls: type[R],
        work: Callable[[list[R]], list[R] | None],
        known: Sequence[R] | None = None,
    ) -> list[R]:
        """Change the records of a key, and return them.

        `work` returns the new records, or None to leave them. `known`: the last known records,
        which save a round trip.
        """

        async def attempt(store: Store) -> list[R]:
            pause = 0.001
            value = directory.packed(known) if known else None
            while True:
                if value is None:
                    value = await store.get(key, timeout=self._patience)
                before = directory.unpacked(cls, value)
                after = work(before)
                if after is None:
                    return before
                new = directory.packed(after)
                if new == value:
                    return before
                if await store.compare_set(key, value, new, timeout=self._patience):
                    return after
                value = None
                # If hundreds write at once, all but one fail, so try again after a random pause.
                chooser = chooser_on(asyncio.get_running_loop())
                await asyncio.sleep(pause * chooser.random())
                pause = min(2 * pause, LONGEST_PAUSE)

        return await self.ask(attempt)

    # Other participants.

    async def said(self, who: str) -> bytes | None:
        """What a participant has said with its last sign of life; None without one."""
        return await self.get(channels.at(who))

    async def until_gone(self, who: str) -> None:
        """Wait until a participant has left, or counts as gone.

        Raises AiodistError if the coordinator goes away: a new one may not know who is there.
        """
        assert self._group is not None
        store = self._group.store
        # `closing` also ends a watch that has not begun yet when this is cancelled.
        with closing(store.watch(channels.at(who))) as signs:
            said = await store.get(channels.at(who), timeout=self._patience)
            while said is not None:
                said = (await anext(signs))[1]

    async def lives(self, who: str) -> bool:
        """Whether a participant goes on giving signs of life.

        Its last sign in the store proves nothing, because a busy coordinator may remove it late.
        """

        async def hear(store: Store) -> bool:
            async with store.watch(channels.at(who), timeout=GONE) as signs:
                if await store.get(channels.at(who), timeout=self._patience) is None:
                    return False
                for _ in range(SIGNS):
                    if (await anext(signs))[1] is None:
                        return False
            return True

        with suppress(CollectiveTimeoutError):
            return await self.ask(hear)
        return False
