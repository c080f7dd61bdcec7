"""`aiodist.subscriber`: takes versions of weights."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Unpack, overload

from aiodist import timeouts
from aiodist.channels import changes, directory, receipts, serving
from aiodist.channels.directory import Release
from aiodist.channels.fetching import Fetching
from aiodist.channels.holding import Holding, in_thread
from aiodist.channels.into import VersionReading
from aiodist.channels.lots import Lot
from aiodist.channels.manifest import Leaf
from aiodist.channels.participant import PATIENCE, ChannelRole, Participant, check_options
from aiodist.channels.receipts import Receipt
from aiodist.channels.slicing import Shares
from aiodist.errors import CollectiveTimeoutError
from aiodist.phases.base import as_int
from aiodist.types import ChannelOptions

NEWER_THAN = "newer_than is the number of a version, or -1 for any"
SINCE = "expected the number of the version to compare with"


def subscriber(
    channel: str,
    *,
    address: str | None = None,
    patience: float = PATIENCE,
    max_bytes: int | None = None,
    **options: Unpack[ChannelOptions],
) -> Subscriber:
    """Take versions of weights from a channel, at any time.

    Use it as ``async with aiodist.subscriber("policy", address=…) as weights: version, tree = await
    weights.latest()``. A publisher need not exist yet, or any more.

    `address`, `patience` and `options` are as for `aiodist.publisher`. `max_bytes`: the most bytes
    of a version, or of the slices of it that are wanted, that may come here. Without it the
    publisher decides how much memory a version takes. Entering raises what `aiodist.connect` does.

    For example::

        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            aiodist.publisher("policy", address=coordinator.address) as out,
            aiodist.subscriber("policy", address=coordinator.address) as weights,
        ):
            await out.publish([1.5], version=7)
            assert await weights.latest() == (7, [1.5])
    """
    if max_bytes is not None:
        max_bytes = as_int(max_bytes, "max_bytes is a number of bytes, an int")
        if max_bytes <= 0:
            raise ValueError(f"max_bytes is more than 0, not {max_bytes!r}")
    check_options("subscriber", options)
    return Subscriber(Participant(channel, address, patience, options), max_bytes)


class Arrived(NamedTuple):
    """How much of a version a subscriber has: `here` of `nbytes` bytes. Memory that it maps counts
    as well."""

    version: int
    here: int
    nbytes: int


class Subscriber:
    """Takes versions, and forwards them to others. Made by `aiodist.subscriber`, for ``async
    with``.

    ``async for version, tree in weights`` gives the newest version in each turn, never the same one
    twice; see `latest`.
    """

    def __init__(self, participant: Participant, max_bytes: int | None = None) -> None:
        self._participant = participant
        self._max_bytes = max_bytes
        self._fetching = Fetching(participant)
        self._turn = asyncio.Lock()
        self._mixed: int | None = None
        self._given = -1  # the newest version that was given to the user
        participant.role = ChannelRole(
            met=partial(serving.meet, participant),
            own=self._own,
            version=lambda: self._given if self._given >= 0 else None,
            stay=self._fetching.stay,
        )

    async def __aenter__(self) -> Subscriber:
        await self._participant.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._participant.is_inherited:
            await self._participant.close()

    @property
    def newest(self) -> int | None:
        """The newest version of the channel, as far as known here; None: it has none."""
        return directory.newest(self._participant.releases)

    @property
    def arrived(self) -> Arrived | None:
        """How much of the newest version is here, for example to show progress while `latest`
        waits; None: the channel has no version."""
        newest = self.newest
        return None if newest is None else Arrived(newest, *self._participant.has_here(newest))

    async def acknowledge(self, version: int, content: str = "") -> None:
        """Tell publishers that this host has a version, for example in its folder. Each host counts
        once, by the last version that it has acknowledged. `content`: tells versions of the same
        number apart, because numbers may begin anew. See `Publisher.acknowledged`.

        Waits for a coordinator that is away. Raises CoordinatorLostError, GroupClosedError, and
        TypeError or ValueError for a version that is no number of one, or a `content` that is no
        str of at most 256 characters.
        """
        version = directory.as_version(version)
        receipts.check_content(content)
        participant = self._participant
        participant.tasks.check()
        new = Receipt(version, content, participant.store.host or socket.gethostname())
        await participant.store.until_done(
            lambda: participant.store.ask(
                lambda store: receipts.give(store, new, participant.patience)
            )
        )

    async def wait(self, *, newer_than: int = -1, timeout: float | None = None) -> int:
        """Wait for a version above `newer_than`, and return its number, without taking it.

        Waits without a limit, or for `timeout` seconds.

        For example::

            async with (
                aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
                aiodist.publisher("policy", address=coordinator.address) as out,
                aiodist.subscriber("policy", address=coordinator.address) as weights,
            ):
                await out.publish([1.5], version=7)
                assert await weights.wait(newer_than=6) == 7  # take it when there is time for it
                assert await weights.latest() == (7, [1.5])

        Raises CollectiveTimeoutError (a TimeoutError); CoordinatorLostError; GroupClosedError.
        """
        newer_than = as_int(newer_than, NEWER_THAN)
        timeouts.check_wait(timeout)
        with self._within(timeout, newer_than):
            async with asyncio.timeout(timeout):
                return await self._fetching.announced(newer_than)

    @overload
    async def latest(
        self, *, newer_than: int = -1, into: None = None, timeout: float | None = None
    ) -> tuple[int, Any]: ...

    @overload
    async def latest(
        self,
        *,
        newer_than: int = -1,
        into: Any,
        convert: bool = False,
        in_place: bool = False,
        timeout: float | None = None,
    ) -> int: ...

    async def latest(
        self,
        *,
        newer_than: int = -1,
        into: Any = None,
        convert: bool = False,
        in_place: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Take the newest version above `newer_than`, and return its number and its tree.

        Returns when all of the version is here. It never returns an older version than before.
        Arrays of the tree are read-only numpy arrays, in the one copy of the version on this host,
        or tensors, which are copies. They stay valid whatever becomes of the version.

        Args:
            newer_than: wait until there is a version above this.
            into: arrays to write to, in a tree like the published one. Then only the number is
                returned. A thread writes all of them after all of the version was checked, even if
                the call is cancelled meanwhile. Until this returns, other tasks and threads may
                see some arrays of each version. If there are parts of arrays (`aiodist.Shard`,
                DTensors), only these parts come here, from all participants that have some of them.
                Arrays that are missing in `into` do not come.
            convert: floats may have another dtype in `into`, and are rounded.
            in_place: write each array as soon as it is here, which saves the time to write all of
                them at the end. Until this returns, and after an error, `into` is a mix of
                versions: see `mixed`.
            timeout: seconds; None: no limit.

        Raises TypeError and ValueError, naming the place in `into`, if a part does not fit; then
        nothing was written. Raises MessageTooLargeError (a ValueError) if the newest version is
        above `max_bytes`, before any of it comes. Raises CollectiveTimeoutError (a TimeoutError),
        CoordinatorLostError, GroupClosedError. Received parts are kept for the next call.
        """
        if into is None and (convert or in_place):
            raise ValueError("`convert` and `in_place` say how `into` is written: give that, too")
        newer_than = as_int(newer_than, NEWER_THAN)
        timeouts.check_wait(timeout)
        reading = VersionReading(into, converts=convert, max_bytes=self._max_bytes)
        with self._noted(reading), self._within(timeout, newer_than):
            async with asyncio.timeout(timeout):
                if in_place:
                    return await self._in_place(newer_than, reading)
                version, value = await self._read(newer_than, reading)
        return version if into is not None else (version, value)

    @contextmanager
    def _within(self, timeout: float | None, newer_than: int) -> Iterator[None]:
        """Say in the error what did not come in time."""
        try:
            yield
        except TimeoutError as error:
            if isinstance(error, CollectiveTimeoutError):
                raise
            channel, arrived = f"of the channel {self._participant.channel!r}", self.arrived
            if arrived is not None and arrived.version > newer_than:
                trouble = self._participant.trouble
                raise CollectiveTimeoutError(
                    f"version {arrived.version} {channel} was not taken within {timeout:g} s:"
                    f" {arrived.here} of its {arrived.nbytes} bytes are here"
                    + (f"; the last attempt failed: {trouble}" if trouble else "")
                ) from None
            raise CollectiveTimeoutError(
                f"no version over {newer_than} {channel} was known within {timeout:g} s:"
                f" {self._participant.store.absence or f'the newest there is: {self.newest}'}"
            ) from None

    async def _read(self, newer_than: int, reading: VersionReading) -> tuple[int, Any]:
        while True:
            found = await self._fetching.newest(max(newer_than + 1, self._given), reading)
            if found.version >= self._given:  # else another call was given a newer one meanwhile
                # Set before reading, which goes on to the end if this is cancelled.
                self._given = found.version
                # In turn, so that calls that write to the same arrays do not mix two versions.
                with found:
                    async with self._turn:
                        return found.version, await in_thread(partial(reading.read, found))

    async def _in_place(self, newer_than: int, reading: VersionReading) -> int:
        while True:
            least = max(newer_than + 1, self._given)
            async with self._fetch(partial(self._fetching.newest, least, reading)) as fetch:
                await reading.in_place(fetch)
            version = fetch.result().version
            if version >= self._given:
                self._given, self._mixed = version, None
                return version

    @asynccontextmanager
    async def _fetch(
        self, work: Callable[[], Awaitable[Holding | Lot]]
    ) -> AsyncIterator[asyncio.Task[Holding | Lot]]:
        """Take a version in a task, as long as the context lasts. Raises the failure of this
        participant, because that cancels the task."""
        held = ExitStack()

        async def take() -> Holding | Lot:
            found = await work()
            # At once, because another call may take a newer version and forget this one.
            held.enter_context(found)
            return found

        fetch = asyncio.ensure_future(take())
        self._participant.tasks.adopt(fetch)
        try:
            yield fetch
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if fetch.cancelled() and caller is not None and not caller.cancelling():
                self._participant.tasks.check()
            raise
        finally:
            with held:
                fetch.cancel()
                await asyncio.gather(fetch, return_exceptions=True)

    @contextmanager
    def _noted(self, reading: VersionReading) -> Iterator[None]:
        """Note in an error that `into` is mixed."""
        try:
            yield
        except BaseException as error:
            if reading.mixed is not None:
                self._mixed = reading.mixed
                error.add_note(f"`into` has some arrays of version {reading.mixed}: it is mixed")
            raise

    @property
    def mixed(self) -> int | None:
        """The version of which a failed call with ``in_place=True`` wrote only some arrays to its
        `into`.

        None if the last such call has written all of them.
        """
        return self._mixed

    def __aiter__(self) -> Versions:
        return Versions(self)

    async def stream(
        self, version: int, *, changed_since: int | None = None
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield the arrays of a version: ``async for name, array in weights.stream(version)``.

        They come in the order of the tree, each as soon as it is here and was checked, while others
        are in flight. A name is the keys of an array, joined by dots. As with `latest`, numpy
        arrays are read-only, and tensors are copies.

        `changed_since`: a version that was given before. Arrays that have the same bytes as in that
        version are left out. All arrays come if it is not in memory any more, if it has another
        tree, or if there are several publishers.

        Raises what `latest` does, and ValueError if the channel does not have the version, or if it
        is older than one that was given before. It also raises ValueError if no living participant
        has had the version for `patience`, or if two arrays have the same name.
        """
        since = None if changed_since is None else as_int(changed_since, SINCE)
        async with aclosing(self._leaves(version, since)) as leaves:
            async for coming, leaf, is_changed in leaves:
                if is_changed:
                    yield leaf.name, coming.read(leaf)

    async def changed(self, version: int, *, since: int) -> set[str]:
        """The names, as `stream` gives them, of the arrays of a version that have other bytes than
        in the version `since`. Returns when the version is here.

        Call it before `latest` gives that version. After that, older versions are forgotten, and
        all arrays count as changed. Raises what `stream` does.
        """
        async with aclosing(self._leaves(version, as_int(since, SINCE))) as leaves:
            return {leaf.name async for _, leaf, is_changed in leaves if is_changed}

    async def _leaves(
        self, version: int, since: int | None
    ) -> AsyncGenerator[tuple[Holding | Lot, Leaf, bool], None]:
        """The arrays of a version, each when it is here, and whether it has changed."""
        version = directory.as_version(version)
        releases = await self._release(version)
        reading = VersionReading(max_bytes=self._max_bytes)
        base = None if since is None else self._given_before(since)
        async with (
            self._fetch(partial(self._fetching.this, releases, reading)) as fetch,
            aclosing(reading.arrays(fetch)) as arrays,
        ):
            # The base stays until all arrays have been compared.
            with base or nullcontext():
                async for coming, leaves in arrays:
                    flags = [True] * len(leaves)
                    if isinstance(coming, Holding) and base:
                        flags = await in_thread(partial(changes.changed, base, coming, leaves))
                    for leaf, is_changed in zip(leaves, flags, strict=True):
                        yield coming, leaf, is_changed
                self._given = max(self._given, version)

    def _given_before(self, version: int) -> Holding | None:
        """A version that was given here and is still in memory."""
        found = self._participant.stock.holdings.get(version)
        return found if found is not None and found.is_whole and version <= self._given else None

    async def _release(self, version: int) -> Shares:
        there = directory.versions(await self._participant.store.look())
        releases = {one[0].version: one for one in there}
        if version < self._given or version not in releases:
            raise ValueError(
                f"version {version!r} is not available: the channel has {sorted(releases)}, and"
                f" {self._given} was given already"
            )
        return releases[version]

    def _own(self) -> list[Release]:
        # Also of slices, because other participants may have the others.
        whole = [one.releases for one in self._participant.stock.all() if one.is_whole]
        own = {(one.version, one.share): one for releases in whole for one in releases}
        return [own[at] for at in sorted(own)]


class Versions:
    """``async for version, tree in weights``."""

    def __init__(self, weights: Subscriber) -> None:
        self._weights = weights
        self._version = -1  # the last version

    def __aiter__(self) -> Versions:
        return self

    async def __anext__(self) -> tuple[int, Any]:
        self._version, tree = await self._weights.latest(newer_than=self._version)
        return self._version, tree
