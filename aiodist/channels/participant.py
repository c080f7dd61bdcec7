"""Taking part in a channel: a group of one, the store that all share, and messages in that
store."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
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
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from aiodist import environment
from aiodist.channels import directory
from aiodist.channels.changes import Differences
from aiodist.channels.directory import LinePlace, Release, Seat
from aiodist.channels.holding import ComingVersion, Holding
from aiodist.channels.lag import Lag
from aiodist.channels.lots import Lot
from aiodist.channels.memory import Spare
from aiodist.channels.ration import Ration
from aiodist.control.store import Store
from aiodist.errors import (
    AiodistError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupClosedError,
    JoinTimeoutError,
    in_words,
)
from aiodist.group import Group
from aiodist.reach import memory_of
from aiodist.session import Connecting, connect
from aiodist.transports.surroundings import chooser_on
from aiodist.wire import channels, schema
from aiodist.work import Work

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

RING = 10.0
"""Seconds that a call at a door is kept."""

TAKES, GIVES = 1, 0
"""Ranks in a group of two."""

PATIENCE = 5.0
"""The default of `patience`: seconds that a chunk may take."""

LONGEST = 128
"""The most characters of the name of a channel."""

LONGEST_PAUSE = 0.1
"""The most seconds before a record is written again that many participants write at once."""

_OWN = frozenset(
    {"group", "rank", "size", "min_size", "max_size", "join_window"}
    | {"op_timeout", "max_message_bytes", "allow_pickle"}
)
"""Options of `connect` that the channel sets itself."""


class Participant:
    """A publisher or subscriber: begun by `open`, ended by `close`.

    `releases`: the versions of the channel, as far as known here. `changed` is set when they
    change, or when this participant has failed. `holdings`: versions that are here; `lots`: slices
    of them, by version and name. `spare`: memory for the next version.

    `met(name)` is called when another participant wants to meet this one in a group of that name.
    `own()` returns the releases to list again if the store has lost them. `stay()` is called with
    each sign of life. `publishes` and `version()` are reported to the coordinator: see
    `aiodist.wire.channels.Said`.
    """

    def __init__(
        self, channel: str, address: str | None, patience: float, options: Mapping[str, Any]
    ) -> None:
        if not isinstance(channel, str) or not 0 < len(channel) <= LONGEST:
            raise ValueError(f"a channel has a name of 1 to {LONGEST} characters, not {channel!r}")
        if not patience > 0:
            raise ValueError(f"patience is more than 0 seconds, not {patience!r}")
        if wrong := sorted(_OWN & options.keys()):
            raise TypeError(f"{', '.join(wrong)}: a channel has no such options of `connect`")
        self.channel = channel
        self.patience = patience
        self.releases: list[Release] = []
        self.changed = asyncio.Event()
        self.holdings: dict[int, Holding] = {}
        self.spare = Spare()
        self.calls = 0  # how many others have called and not yet said what they want
        self._moved = (0, 0)  # bytes to and from participants that it has left
        self.publishes = False
        self.version: Callable[[], int | None] = lambda: None
        self.differences = Differences()
        self.rate = 0.0  # bytes per second of the last version that came whole; 0: unknown
        self.lots: dict[tuple[int, str], Lot] = {}
        # For each version of a publisher.
        self.rations: WeakKeyDictionary[ComingVersion, Ration] = WeakKeyDictionary()
        self.met: Callable[[str], Coroutine[Any, Any, None]]
        self.own: Callable[[], list[Release]] = list
        self.stay: Callable[[], Awaitable[object]] | None = None
        if address is None:
            address = environment.settings_from(os.environ).address
        self._address = address
        self._options = options
        self._timeout: float = options.get("timeout") or 30.0  # seconds for joining
        self._group: Group | None = None
        self._opening = asyncio.Lock()
        self._failure: AiodistError | None = None
        self._forgotten = asyncio.Event()  # what this participant has said
        self._has_lost_store = False  # the coordinator was restarted without a state file
        self.beaten = 0.0  # the time of the last sign of life
        self._lag = Lag()
        # Dictionaries, because their order is that in which tasks and groups were added. A set has
        # another order in each process, and simulated programs would not repeat exactly.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._pairs: dict[Group, None] = {}  # groups of two that it is in
        self._left = asyncio.Event()  # set when one of them ends
        self._closing: asyncio.Task[None] | None = None  # leaves; None: this takes part
        self.feed: Feed | None = None

    # Coming and going.

    async def open(self) -> None:
        """Become known. Raises what `aiodist.connect` does."""
        self._loop = asyncio.get_running_loop()
        self.id = f"{chooser_on(self._loop).getrandbits(96):024x}"
        await self._join()
        ready = [asyncio.Event(), asyncio.Event()]
        try:
            self.spawn(self._again(lambda store: self._listen(store, ready[0])), "door")
            self.spawn(self._again(lambda store: self._follow(store, ready[1])), "releases")
            await self.entering(lambda: asyncio.gather(*(self._until(event) for event in ready)))
            # Only now, because others call at the door of a participant that they see in the store.
            await self.entering(lambda: self.ask(self._beat))
            self._forgotten.clear()
            self.spawn(self._again(self._live), "beat")
        except BaseException:
            await self.close()
            raise

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
                f"the coordinator went away while the channel {self.channel!r} was entered, or had"
                f" no time: waited {self._timeout:g} s"
            ) from None

    async def until_done(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something; again, while it fails because the coordinator is away."""
        while True:
            try:
                return await work()
            except AWAY as error:
                log.debug("channel %r: %s", self.channel, error)

    async def close(self) -> None:
        """Leave. Idempotent. A cancelled call does not stop it."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(), name="aiodist channel close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._fail(GroupClosedError(f"the channel {self.channel!r} was closed here"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.feed is not None:
            await self.feed.close()
        while self._pairs:
            for pair in self._pairs:
                pair.abort("it takes part no more")
            self._left.clear()
            await self._left.wait()
        for holding in self.holdings.values():
            holding.retire()
        for lot in self.lots.values():
            lot.retire()
        self.holdings.clear()
        self.lots.clear()
        self.spare.close()
        group, self._group = self._group, None
        if group is not None and not group.closed:
            with suppress(AiodistError):  # the coordinator may be gone
                await group.store.delete(channels.at(self.id), timeout=self.patience)
            await group.close()

    def meeting(self, name: str, rank: int) -> Meeting:
        """Meet in the group `name`: ``async with participant.meeting(name, rank) as pair``.

        Raises what `connect` does.
        """
        return Meeting(self, self._connecting(name, rank, 2, self.patience))

    @contextmanager
    def at_door(self) -> Iterator[None]:
        """Count a caller, as long as it has not said what it wants."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            for holding in self.holdings.values():
                holding.tell()

    def met_in(self, pair: Group) -> None:
        """Note that this participant is in a group of two."""
        self._pairs[pair] = None

    async def leave(self, pair: Group) -> None:
        """Leave a group of two, even if the caller is cancelled."""
        await asyncio.shield(self._loop.create_task(self._leave(pair), name="aiodist pair leave"))

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

    def _connecting(self, name: str, rank: int, size: int, timeout: float) -> Connecting:
        """Connect to a group of this channel's participants."""
        options = {"name": channels.store_of(self.channel), **self._options}
        options |= {"op_timeout": self.patience, "timeout": timeout}
        return connect(self._address, group=name, rank=rank, size=size, **options)

    async def _join(self) -> None:
        connecting = self._connecting(
            channels.own_group(self.channel, self.id), 0, 1, self._timeout
        ).with_store(channels.store_of(self.channel))
        self._group = group = await connecting
        actor = group._actor
        memory = memory_of(actor.people[actor.roots[0]]).host
        self.host = memory and hashlib.blake2b(memory.encode(), digest_size=16).hexdigest()
        self.place = LinePlace(self.id, self.host)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task that ends with this participant. If it fails, so does the participant."""
        task = self._loop.create_task(work, name=f"aiodist channel {self.channel}: {name}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task when this participant ends. The caller looks at its result: see
        `outcome`."""

        def ended(task: asyncio.Task[Any]) -> None:
            self._tasks.pop(task, None)
            if not task.cancelled():
                task.exception()

        self._tasks[task] = None
        task.add_done_callback(ended)

    async def outcome(self, task: asyncio.Task[T]) -> T:
        """Wait for an adopted task, and return its result. The task goes on if this is
        cancelled."""
        await asyncio.wait({task})
        if task.cancelled():
            self.check()
        return task.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, AiodistError):
            message = f"{task.get_name()} failed"
            self._loop.call_exception_handler({"message": message, "exception": error})
            error = GroupClosedError(f"the channel {self.channel!r} failed here: {in_words(error)}")
        self._fail(error)

    def _fail(self, error: AiodistError) -> None:
        if self._failure is None:
            self._failure = error
        self.changed.set()

    def check(self) -> None:
        """Raise the error of this participant, if it has failed."""
        if self._failure is not None:
            raise self._failure

    async def _until(self, event: asyncio.Event) -> None:
        while not event.is_set():
            self.changed.clear()
            self.check()
            waits = [asyncio.ensure_future(one.wait()) for one in (event, self.changed)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits:
                    one.cancel()

    # The store.

    async def ask(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Do something with the store; again, if the coordinator was restarted meanwhile.

        Raises CoordinatorLostError if the coordinator is gone for good, CollectiveTimeoutError.
        """
        while True:
            self.check()
            group = self._group
            assert group is not None
            try:
                return await work(group.store)
            except (CoordinatorLostError, GroupClosedError) as error:
                await self._recover(group, error)

    async def _again(self, work: Callable[[Store], Awaitable[None]]) -> None:
        """Do something with the store, as `ask` does, until it is done."""
        while True:
            await self.until_done(lambda: self.ask(work))

    async def _recover(self, group: Group, error: AiodistError) -> None:
        actor = group._actor
        if actor.is_evicted:
            async with self._opening:
                if self._group is group:
                    log.warning("channel %r: joining again: %s", self.channel, error)
                    await actor.gone()
                    await self._join()
        elif actor.is_over or not actor.control.is_open:
            self._fail(error)
            raise error
        else:
            self._has_lost_store = True

    async def _listen(self, store: Store, ready: asyncio.Event) -> None:
        async with store.watch(directory.door(self.id)) as rung:
            ready.set()
            async for _, name in rung:
                if name is not None:
                    self.spawn(self.met(name.decode(errors="replace")), "meeting")

    async def _follow(self, store: Store, ready: asyncio.Event) -> None:
        async with store.watch(directory.RELEASES) as changes:
            self._know(await store.get(directory.RELEASES, timeout=self.patience))
            ready.set()
            async for _, value in changes:
                self._know(value)

    async def look(self) -> list[Release]:
        """The releases of the channel now, because `releases` may be old. Waits for the
        coordinator."""
        asking = partial(Store.get, key=directory.RELEASES, timeout=self.patience)
        return directory.unpacked(Release, await self.until_done(lambda: self.ask(asking)))

    def _know(self, value: bytes | None) -> None:
        self.releases = directory.unpacked(Release, value)
        if value is None:  # tell a restarted coordinator at once what it has forgotten
            self._forgotten.set()
        there = [releases[0].version for releases in directory.versions(self.releases)]
        self._lag.hear(there, self._loop.time())
        self.changed.set()

    async def _live(self, store: Store) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT):
                    await self._forgotten.wait()
            self._forgotten.clear()
            await self._beat(store)

    async def _beat(self, store: Store) -> None:
        self.beaten = self._loop.time()
        said = schema.pack(self._said())
        await store.set(channels.at(self.id), said, ttl=GONE, timeout=self.patience)
        if self.stay is not None:
            await self.stay()
        # A restarted coordinator has forgotten the versions of the channel.
        if directory.restored(self.releases, self.own()) is not None:
            await self.change(
                directory.RELEASES, Release, lambda known: directory.restored(known, self.own())
            )

    def has_here(self, version: int | None) -> tuple[int, int]:
        """How many bytes of a version are here, and how many it has; 0: it is not known."""
        comings = [*self.holdings.values(), *self.lots.values()]
        here = sum(one.here for one in comings if one.version == version)
        return here, self._size(version)

    def _said(self) -> channels.Said:
        version = self.version()
        newest = directory.newest(self.releases)
        here, nbytes = self.has_here(newest)
        comings = [*self.holdings.values(), *self.lots.values()]
        sent, received = self.bytes_moved
        return channels.Said(
            publishes=self.publishes,
            version=version,
            newest=newest,
            nbytes=nbytes,
            here=here,
            behind=0.0 if self.publishes else self._lag.seconds(version, self._loop.time()),
            memory=sum(one.own_bytes for one in comings) + self.spare.nbytes,
            sent=sent,
            received=received,
            saved=self.differences.saved,
            changed=self.differences.changed,
            chain=self.differences.chain,
            fallbacks=self.differences.fallbacks,
        )

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
                    value = await store.get(key, timeout=self.patience)
                before = directory.unpacked(cls, value)
                after = work(before)
                if after is None:
                    return before
                new = directory.packed(after)
                if new == value:
                    return before
                if await store.compare_set(key, value, new, timeout=self.patience):
                    return after
                value = None
                # If hundreds write at once, all but one fail, so try again after a random pause.
                await asyncio.sleep(pause * chooser_on(self._loop).random())
                pause = min(2 * pause, LONGEST_PAUSE)

        return await self.ask(attempt)

    async def delete(self, key: str) -> None:
        await self.ask(lambda store: store.delete(key, timeout=self.patience))

    async def is_there(self, who: str) -> bool:
        """Whether a participant has given a sign of life."""
        return await self._at(who) is not None

    async def lives(self, who: str) -> bool:
        """Whether a participant goes on giving signs of life.

        Its last sign in the store proves nothing, because a busy coordinator may remove it late.
        """

        async def hear(store: Store) -> bool:
            async with store.watch(channels.at(who), timeout=GONE) as signs:
                if await store.get(channels.at(who), timeout=self.patience) is None:
                    return False
                for _ in range(SIGNS):
                    if (await anext(signs))[1] is None:
                        return False
            return True

        with suppress(CollectiveTimeoutError):
            return await self.ask(hear)
        return False

    async def has_of(self, who: str, version: int) -> int | None:
        """How many bytes of a version a participant has, by its last sign of life; None without
        one."""
        said = channels.said_in(await self._at(who))
        if said is None:
            return None
        if said.newest == version:
            return said.here
        # It says only of the newest version how much it has, but its program has all of this one.
        return self._size(version) if said.version == version else 0

    def _size(self, version: int | None) -> int:
        """Bytes of a version, as far as it is known here; 0: it is not."""
        return sum(one.nbytes for one in self.releases if one.version == version)

    async def said_in_line(self, version: int) -> list[int]:
        """How many bytes of a version each living participant has that wants all of it."""
        line = [one for one in await self.line(version) if one.id != self.id and not one.wants]
        found = [await self.has_of(one.id, version) for one in line]
        return [here for here in found if here is not None]

    async def _at(self, who: str) -> bytes | None:
        return await self.ask(lambda store: store.get(channels.at(who), timeout=self.patience))

    async def gone_behind(
        self, me: LinePlace, coming: ComingVersion, failed: Container[str]
    ) -> bool:
        """Go to the end of the line of a version, if only one behind `me` can help.

        That is so if none before it has what it lacks, and one behind it has more. Then its
        receivers ask others.
        """
        coming.starve()
        version = coming.version
        for one in directory.behind(await self.line(version), me):
            if one.id not in failed and (await self.has_of(one.id, version) or 0) > coming.here:
                await self.change(
                    directory.line(version), LinePlace, lambda before: directory.at_end(before, me)
                )
                return True
        return False

    @property
    def is_restarted(self) -> bool:
        """Whether the coordinator was restarted, which forgets all participants."""
        assert self._group is not None
        return self._has_lost_store or self._group._actor.control.incarnation > 1

    async def seats(self) -> list[Seat]:
        value = await self.ask(lambda store: store.get(directory.PUBLISHER, timeout=self.patience))
        return directory.unpacked(Seat, value)

    async def line(self, version: int) -> list[LinePlace]:
        """The participants that have a version, or want it."""
        key = directory.line(version)
        value = await self.ask(lambda store: store.get(key, timeout=self.patience))
        return directory.unpacked(LinePlace, value)

    async def fed_by(self, source: LinePlace) -> Feed:
        """Meet another participant, and keep the group. Raises what `ask` and `connect` do."""
        if self.feed is not None and self.feed.source == source:
            return self.feed
        if self.feed is not None:
            await self.feed.close()
        meeting = await self.called(source.id)
        self.feed = feed = Feed(self, source, await meeting.__aenter__())
        return feed

    async def called(self, who: str) -> Meeting:
        """Call at the door of another participant, and return the group of two in which to meet.

        Raises what `ask` does.
        """
        nonce = chooser_on(self._loop).getrandbits(64)
        name = f"{directory.meetings(self.channel, who)}{nonce:016x}"
        await self.ask(
            lambda store: store.set(
                directory.door(who), name.encode(), ttl=RING, timeout=self.patience
            )
        )
        return self.meeting(name, TAKES)


def _sum(moved: Iterable[tuple[int, int]]) -> tuple[int, int]:
    sent, received = zip(*moved, strict=True)
    return sum(sent), sum(received)


class Feed:
    """The source of the last version, which is asked for the next one, too.

    Finding and meeting a new source would take round trips. A feed ends if it fails, or by `close`.
    """

    def __init__(self, participant: Participant, source: LinePlace, pair: Group) -> None:
        self.source = source
        self.pair = pair
        self._participant = participant
        # Gets no message, but fails when the source leaves.
        self._leaves = pair.recv(src=GIVES, tag="leaves", timeout=math.inf)
        self._leaves.add_done_callback(self._gone)

    def _gone(self, leaves: Work[Any]) -> None:
        if not leaves.cancelled():
            leaves.exception()
            self._participant.adopt(asyncio.ensure_future(self.close()))

    async def close(self, reason: str = "") -> None:
        """End it. `reason`: why a transfer is aborted."""
        if self._participant.feed is self:
            self._participant.feed = None
            self._leaves.cancel()
            if reason:
                self.pair.abort(reason)
            await self._participant.leave(self.pair)


class Meeting:
    """A group of two, as long as the context lasts."""

    def __init__(self, participant: Participant, connecting: Connecting) -> None:
        self._participant = participant
        self._connecting = connecting

    async def __aenter__(self) -> Group:
        self._pair = await self._connecting
        self._participant.met_in(self._pair)
        return self._pair

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._pair.abort(in_words(error))
        await self._participant.leave(self._pair)
