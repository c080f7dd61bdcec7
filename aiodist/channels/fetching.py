"""Takes versions from others: chooses the source, and another one if it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from aiodist.channels import chains, directory, transfers
from aiodist.channels.changes import lie_alike, pays
from aiodist.channels.directory import LinePlace, Release
from aiodist.channels.feeding import Feeding
from aiodist.channels.holding import ComingVersion, Holding
from aiodist.channels.into import VersionReading
from aiodist.channels.lots import Lot
from aiodist.channels.pace import ParticipantPace
from aiodist.channels.participant import Participant
from aiodist.channels.search import FAILURES, NobodyError, NoMemoryError, Search
from aiodist.channels.slicing import Shares, Slicing
from aiodist.errors import ProtocolError
from aiodist.group import Group
from aiodist.wire import channels

log = logging.getLogger("aiodist.channels")

NEAR = 1 / 4
"""The share of `patience` to wait for the publisher's memory on this host, before other ways are
tried."""

PAUSE = 0.25
"""Seconds before a version is looked for again that no participant could give. Each pause is twice
as long as the one before, because every search takes the coordinator several requests."""

LONGEST_PAUSE = 8.0
"""The longest of these pauses. A version that is published ends it at once, but not a participant
that has an old version and is back."""


class Fetching:
    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        # Calls take versions in turn, because they share the source of the last version. A call
        # that waits for news of the channel holds up no other one.
        self._turn = asyncio.Lock()
        self._unlisted: set[ComingVersion] = set()  # what is here, but not listed in its line
        self._start: tuple[str, int] | None = None  # of the coordinator that has the lines
        self._feeding = Feeding(participant)
        self.slicing = Slicing(participant, self._feeding)

    async def announced(self, newer_than: int) -> int:
        """Wait for a version above `newer_than`, and return the number of the newest."""
        participant = self._participant
        while True:
            participant.tasks.check()
            newest = directory.newest(participant.releases)
            if newest is not None and newest > newer_than:
                return newest
            await participant.changed.wait()

    async def newest(self, least: int, reading: VersionReading) -> Holding | Lot:
        """Wait for the newest available version from `least` on, and take it, or the wanted slices
        of it.

        Raises what `reading.wanted` does.
        """
        participant = self._participant
        pause = PAUSE
        while True:
            changed = participant.changed
            async with self._turn:
                participant.tasks.check()
                known = reversed(directory.versions(participant.releases))
                fit = [releases for releases in known if releases[0].version >= least]
                for releases in fit:
                    with suppress(NobodyError):
                        return await self._attempt(releases, reading)
                    if directory.newest(participant.releases) != fit[0][0].version:
                        break  # a newer one has come
            pause = await self._pause(changed, pause if fit else None)

    async def this(self, releases: Shares, reading: VersionReading) -> Holding | Lot:
        """Take this version. Raises ValueError if newer versions have replaced it, or if no living
        participant has had it for `patience`."""
        participant, version = self._participant, releases[0].version
        clock = asyncio.get_running_loop().time
        pause = PAUSE
        # Since when no participant has it: by which coordinator, and with so many bytes here. One
        # that was restarted has to hear of all participants again.
        missed: tuple[tuple[str, int], int] | None = None
        since = clock()
        while True:
            changed = participant.changed
            if directory.is_gone(await participant.store.look(), releases):
                self._forget_gone()
                raise ValueError(f"the channel does not have version {version} any more")
            try:
                async with self._turn:
                    return await self._attempt(releases, reading)
            except NoMemoryError:
                missed = None  # participants may have it, and there may be memory later
            except NobodyError as error:
                # A publisher gives a version once, and then leaves it to others for a while.
                if error.refused and await self._is_there(releases):
                    missed = None
            now = participant.store.start, reading.coming.here if reading.coming else 0
            if now != missed:
                missed, since = now, clock()
            elif clock() > since + participant.patience:
                raise ValueError(f"no living participant has version {version} of the channel")
            pause = await self._pause(changed, pause)

    async def _is_there(self, releases: Shares) -> bool:
        """Whether all publishers of this version live, and say that they have it."""
        places = [one.place for one in await self._participant.store.seats()]
        heard = await self._participant.heard_of(places)
        return len(heard) == len(releases) and all(
            said is not None and said.newest == releases[0].version and said.whole > 0
            for said in heard.values()
        )

    async def _pause(self, changed: asyncio.Event, seconds: float | None) -> float:
        """Wait for news of the channel, for at most so long. Returns how long to wait the next
        time."""
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            assert seconds is not None
            return min(2 * seconds, LONGEST_PAUSE)
        return PAUSE

    async def _attempt(self, releases: Shares, reading: VersionReading) -> Holding | Lot:
        """Take a version from those that may have it. Raises NobodyError, MessageTooLargeError."""
        self._forget_gone()
        version = releases[0].version
        is_whole = len(releases) == 1 and not reading.is_sliced
        # The size of slices is not known yet.
        reading.check_size(
            version, sum(one.nbytes if is_whole else one.manifest for one in releases)
        )
        if is_whole:
            found: Holding | Lot = await self._whole(releases[0], reading)
        else:
            found = await self.slicing.attempt(releases, reading)
        self._forget_before(version)
        self._participant.trouble = ""
        return found

    def holding(self, release: Release) -> Holding:
        """The holding of a version here, made if needed."""
        holdings = self._participant.stock.holdings
        known = holdings.get(release.version)
        if known is None or known.release != release:
            if known is not None:  # of a publisher that is forgotten
                known.retire()
            known = holdings[release.version] = Holding(release, self._participant.stock.spare)
            self._participant.tasks.tell()  # another participant may have asked for it already
        known.release = release  # it may be elsewhere in memory now
        return known

    async def _whole(self, release: Release, reading: VersionReading) -> Holding:
        """Take a version from one source after the other. Raises NobodyError."""
        holding = self.holding(release)
        reading.begin(holding)
        await self._feeding.whole(holding, lambda: self._fill(holding))
        return holding

    async def _fill(self, holding: Holding) -> None:
        participant, release = self._participant, holding.release
        if (
            participant.store.host
            and release.host == participant.store.host
            and holding.memory is None
        ):
            try:
                await transfers.take_offered(holding, NEAR * participant.patience)
                self._unlisted.add(holding)
                return
            except (ProtocolError, OSError) as error:
                log.debug("channel %r: %s", participant.channel, error)
        search = Search(participant, (release,), set())
        if await self._fed(holding):
            return
        while not holding.is_whole and holding.wanted:
            search.check()
            source = await self._source(holding, search)
            if source is None:
                await search.go_behind(participant.store.place, holding)
                continue
            try:
                await self._take(source, holding)
            except transfers.UnwantedError:
                pass  # another call may wait for it by now
            except FAILURES as error:
                search.lose(source, error)
                holding.stir()
        if holding.is_whole:
            participant.say()

    async def _fed(self, holding: Holding) -> bool:
        """Take a version from the source of the last version, because finding a source takes round
        trips.

        Returns False if the version is not whole then. This participant joins the line of the
        version only when it has all of it. So no participant before it in the line can wait for it,
        and there is no circle.
        """
        feed = self._participant.meetings.feed
        if feed is None or holding.filled or holding.memory is not None:
            return False
        try:
            await self._take(feed.source, holding)
        except transfers.UnwantedError:
            pass
        except FAILURES as error:
            self._participant.tasks.check()
            log.debug("channel %r: looking for a source: %s", self._participant.channel, error)
            holding.stir()
        if holding.is_whole:
            self._unlisted.add(holding)
        return holding.is_whole or not holding.wanted

    async def _source(self, holding: Holding, search: Search) -> LinePlace | None:
        """The next participant to ask, which has the version, or will get it from another one.

        None: no living one has all of it.
        """
        participant, release = self._participant, holding.release
        me = participant.store.place
        # Ask again each time, because a restarted coordinator has forgotten the line.
        places, seats = await asyncio.gather(
            participant.store.stand_in_line(release.version, me), participant.store.seats()
        )
        publishers = [one.place for one in seats]
        known = directory.sources(places, me, publishers, maps=not release.lent)
        left = [one for one in known if one.id not in search.failed]

        def can_end(heard: Mapping[str, channels.Said | None]) -> bool:
            """Whether one of these may have all of it. Otherwise no participant ever gets it."""
            return bool(channels.that_may_have(heard, release.version, release.nbytes - 1))

        # Usually the first one gets it from the publisher. Only otherwise is it worthwhile to look
        # up all of them.
        heard = await participant.heard_of(
            [*left[:1], *(one for one in publishers if one in known)]
        )
        if search.refused or not can_end(heard) or not {one.id for one in left[:1]} <= heard.keys():
            heard = await participant.heard_of(known)
            if not can_end(heard):
                return None
        if search.refused:
            rich = channels.that_may_have(heard, release.version, holding.here)
            left.sort(key=lambda one: one.id not in rich)
        return next((one for one in left if one.id in heard), None)

    async def stay(self) -> None:
        """List versions that were mapped from the publisher, so that others find them if it dies.
        List all versions again if the coordinator was restarted, because it has forgotten the
        lines.

        This waits for the next sign of life, because all that mapped it write to one record, and
        the publisher is surely alive at first.
        """
        participant, stock = self._participant, self._participant.stock
        start = participant.store.start
        if start != self._start:
            self._unlisted |= {one for one in stock.all() if one.is_whole}
        await self.slicing.stay(anew=start != self._start)
        for one in sorted(self._unlisted, key=lambda one: (one.version, one.name)):
            if one in stock.all() and not directory.is_gone(participant.releases, one.releases):
                me = replace(participant.store.place, wants=one.name)
                await participant.store.stand_in_line(one.version, me)
            self._unlisted.discard(one)
        self._start = start

    async def _take(self, source: LinePlace, holding: Holding) -> None:
        participant = self._participant
        memory = holding.memory
        is_near = bool(participant.store.host) and source.host == participant.store.host
        # Keep data in own memory rather than map another one's memory.
        maps = is_near and not (memory is not None and memory.is_own and holding.filled)
        if not maps:
            await holding.make_own(shared=bool(participant.store.host))
        async with await participant.meetings.fed_by(source) as pair:
            if (base := None if maps else self._base(holding)) is not None:
                known = participant.stock.differences
                with holding.decoding():
                    if await chains.take(pair, holding, base, known, participant.patience):
                        return
            else:
                holding.is_begun = True
                await transfers.ask(pair, holding, maps=maps)
            await self._take_rest(pair, holding, maps=maps)

    async def _take_rest(self, pair: Group, holding: Holding, *, maps: bool) -> None:
        """Receive whole what was asked for."""
        participant = self._participant
        clock = asyncio.get_running_loop().time
        begin, before = clock(), holding.here
        pace = ParticipantPace(holding, lambda: participant.meetings.calls, participant.patience)
        await transfers.take(pair, holding, participant.patience, pace, maps=maps)
        if not maps and (seconds := clock() - begin) > 0:
            participant.stock.rate = (holding.here - before) / seconds

    def _base(self, coming: Holding) -> Holding | None:
        """The version here to which differences can be applied; None if differences do not pay."""
        participant, release = self._participant, coming.release
        if not (release.id and coming.is_coded):
            return None
        if not (release.always or pays(participant.stock.rate, release.nbytes)):
            return None
        bases = [
            one
            for one in participant.stock.holdings.values()
            if one.is_whole and one.release.id and one.version < release.version
            if lie_alike(one.release, release)
        ]
        return max(bases, key=lambda one: one.version, default=None)

    def _forget_gone(self) -> None:
        """Retire what is here of versions that newer ones have replaced before all of it was here.
        Otherwise a participant that is too slow for each version would keep some of all."""
        stock, known = self._participant.stock, self._participant.releases
        for version, one in list(stock.holdings.items()):
            is_used = one.is_whole or one.wanted or one.readers
            if not is_used and directory.is_gone(known, one.releases):
                stock.holdings.pop(version).retire()
        for key, lot in list(stock.lots.items()):
            is_used = lot.is_whole or lot.wanted or lot.readers
            if not is_used and directory.is_gone(known, lot.releases):
                stock.lots.pop(key).retire()

    def _forget_before(self, version: int) -> None:
        participant = self._participant
        for old in [one for one in participant.stock.holdings if one < version]:
            participant.stock.holdings.pop(old).retire()
        self.slicing.forget_before(version)
