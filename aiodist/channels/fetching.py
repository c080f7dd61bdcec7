"""Taking versions from others: of whom, and what is done when one of them fails."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from aiodist.channels import chains, directory, transfers
from aiodist.channels.changes import PAYS, SMALL, lie_alike
from aiodist.channels.directory import Place, Release
from aiodist.channels.feeding import Feeding
from aiodist.channels.holding import Holding
from aiodist.channels.into import Reading
from aiodist.channels.lots import Lot
from aiodist.channels.pace import Pace
from aiodist.channels.participant import AWAY, Participant
from aiodist.channels.slicing import FAILURES, NobodyError, Shares, Slicing
from aiodist.errors import ProtocolError
from aiodist.group import Group

log = logging.getLogger("aiodist.channels")

NEAR = 1 / 4
"""Of `patience`: for so long the publisher of this host is waited for, before it is asked as any
other participant is."""

PAUSE = 0.25
"""Seconds before a version that nobody could give is looked for again."""


class Fetching:
    """How a participant gets versions."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._turns: dict[int, asyncio.Lock] = {}
        self._unlisted: set[int] = set()  # versions that are here, which nobody knows
        self._feeding = Feeding(participant)
        self.slicing = Slicing(participant, self._feeding)

    async def announced(self, newer_than: int) -> int:
        """The number of the newest version, once there is one over that."""
        participant = self._participant
        while True:
            participant.changed.clear()
            participant.check()
            newest = directory.newest(participant.releases)
            if newest is not None and newest > newer_than:
                return newest
            await participant.changed.wait()

    async def newest(self, least: int, reading: Reading) -> Holding | Lot:
        """The newest version from `least` on that can be had, whole, or what is wanted of it. Waits
        until there is one. Raises what `reading.wanted` does."""
        participant = self._participant
        while True:
            participant.changed.clear()
            participant.check()
            known = reversed(directory.versions(participant.releases))
            fit = [releases for releases in known if releases[0].version >= least]
            for releases in fit:
                with suppress(NobodyError):
                    return await self._attempt(releases, reading)
            with suppress(TimeoutError):
                async with asyncio.timeout(PAUSE if fit else None):
                    await participant.changed.wait()

    async def this(self, releases: Shares, reading: Reading) -> Holding | Lot:
        """This version. Raises ValueError once the channel has newer ones instead."""
        while not directory.is_gone(await self._participant.look(), releases):
            with suppress(NobodyError):
                return await self._attempt(releases, reading)
            await asyncio.sleep(PAUSE)
        raise ValueError(f"the channel does not have version {releases[0].version} any more")

    async def _attempt(self, releases: Shares, reading: Reading) -> Holding | Lot:
        """Take a version from those who may have it. Raises NobodyError, MessageTooLargeError."""
        version = releases[0].version
        is_whole = len(releases) == 1 and not reading.is_sliced
        # Of slices it is not known yet how large they are.
        reading.check_size(
            version, sum(one.nbytes if is_whole else one.manifest for one in releases)
        )
        # Two who ask for it at once, by `latest` and by `stream`, take it once.
        async with self._turns.setdefault(version, asyncio.Lock()):
            if is_whole:
                found: Holding | Lot = await self._whole(releases[0], reading)
            else:
                found = await self.slicing.attempt(releases, reading)
        self._forget_before(version)
        return found

    def holding(self, release: Release) -> Holding:
        """What there is of a version here."""
        holdings = self._participant.holdings
        known = holdings.get(release.version)
        if known is None or known.release != release:
            if known is not None:  # of a publisher that nobody remembers
                known.retire()
            known = holdings[release.version] = Holding(release, self._participant.spare)
            self._participant.changed.set()  # another participant may have asked for it already
        known.release = release  # it may lie elsewhere now
        return known

    async def _whole(self, release: Release, reading: Reading) -> Holding:
        """Take a version from one after the other of those who may have it. Raises NobodyError."""
        holding = self.holding(release)
        reading.begin(holding)
        await self._feeding.whole(holding, lambda: self._fill(holding))
        return holding

    async def _fill(self, holding: Holding) -> None:
        participant, release = self._participant, holding.release
        if participant.host and release.host == participant.host and holding.memory is None:
            try:
                await transfers.take_offered(holding, NEAR * participant.patience)
                self._unlisted.add(release.version)
                return
            except (ProtocolError, OSError) as error:
                log.debug("channel %r: %s", participant.channel, error)
        if await self._fed(holding):
            return
        failed: set[str] = set()
        while not holding.is_whole and holding.wanted:
            try:
                source = await self._source(release, failed)
                if source is None:
                    if await participant.gone_behind(participant.place, holding, failed):
                        continue
                    raise NobodyError
            except AWAY as error:
                # The coordinator is away, and may come back.
                holding.starve()
                raise NobodyError from error
            try:
                await self._take(source, holding)
            except transfers.UnwantedError:
                pass  # by now somebody may wait for it again
            except FAILURES as error:
                participant.check()
                log.info(
                    "channel %r: version %d comes from another one: %s",
                    participant.channel,
                    release.version,
                    error or "it is not there any more",
                )
                failed.add(source.id)
                holding.stir()

    async def _fed(self, holding: Holding) -> bool:
        """Take a version from the source of the version before, because to look for a source takes
        round trips. False: it is not whole then.

        This participant joins the line of a version only once it has all of it. So no participant
        before it in a line can wait for it, and there is no circle."""
        feed = self._participant.feed
        if feed is None or holding.filled or holding.memory is not None:
            return False
        try:
            await self._take(feed.source, holding)
        except transfers.UnwantedError:
            pass
        except FAILURES as error:
            self._participant.check()
            log.debug("channel %r: looking for a source: %s", self._participant.channel, error)
            holding.stir()
        if holding.is_whole:
            self._unlisted.add(holding.version)
        return holding.is_whole or not holding.wanted

    async def _source(self, release: Release, failed: set[str]) -> Place | None:
        participant = self._participant
        me = participant.place
        # Anew each time: a coordinator that was restarted has forgotten who stands in line.
        places = await self._stand_in_line(release.version)
        publishers = [one.place for one in await participant.seats()]
        for one in directory.sources(places, me, publishers, maps=not release.lent):
            if one.id not in failed and await participant.is_there(one.id):
                return one
        return None

    async def _stand_in_line(self, version: int) -> list[Place]:
        """Let others know that a version is here, or wanted: who stands there."""
        me = self._participant.place
        return await self._participant.change(
            directory.line(version), Place, lambda before: directory.in_line(before, me)
        )

    async def stay(self) -> None:
        """A sign of life: what was mapped of the publisher is to be found should that die. Not at
        once, for all who have mapped it want to say so in one record, and it has just lived."""
        await self.slicing.stay()
        for version in sorted(self._unlisted):
            there = {one.version for one in self._participant.releases}
            if version in self._participant.holdings.keys() & there:
                await self._stand_in_line(version)
            self._unlisted.discard(version)

    async def _take(self, source: Place, holding: Holding) -> None:
        participant = self._participant
        memory = holding.memory
        is_near = bool(participant.host) and source.host == participant.host
        # What is in memory of its own already is not thrown away for a mapping.
        maps = is_near and not (memory is not None and memory.is_own and holding.filled)
        if not maps:
            await holding.make_own(shared=bool(participant.host))
        feed = await participant.fed_by(source)
        base = None if maps else self._base(holding.release)
        try:
            if base is not None:
                known = participant.differences
                if await chains.take(feed.pair, holding, base, known, participant.patience):
                    return
            else:
                holding.is_begun = True
                await transfers.ask(feed.pair, holding, maps=maps)
            await self._take_rest(feed.pair, holding, maps=maps)
        except BaseException as error:
            await feed.close(f"{type(error).__name__}: {error}")
            raise

    async def _take_rest(self, pair: Group, holding: Holding, *, maps: bool) -> None:
        """What was asked for comes whole."""
        participant = self._participant
        clock = asyncio.get_running_loop().time
        begin, before = clock(), holding.here
        pace = Pace(holding, lambda: participant.calls, participant.patience)
        await transfers.take(pair, holding, participant.patience, pace, maps=maps)
        if not maps and (seconds := clock() - begin) > 0:
            participant.rate = (holding.here - before) / seconds

    def _base(self, release: Release) -> Holding | None:
        """The version here from which on differences will do. None: they do not pay."""
        participant = self._participant
        is_fast = release.nbytes < SMALL or participant.rate > PAYS
        if not release.id or (is_fast and not release.always):
            return None
        bases = [
            one
            for one in participant.holdings.values()
            if one.is_whole and one.release.id and one.version < release.version
            if lie_alike(one.release, release)
        ]
        return max(bases, key=lambda one: one.version, default=None)

    def _forget_before(self, version: int) -> None:
        participant = self._participant
        for old in [one for one in participant.holdings if one < version]:
            participant.holdings.pop(old).retire()
        for key in [key for key in participant.lots if key[0] < version]:
            participant.lots.pop(key).retire()
        for old in [one for one in self._turns if one < version]:
            self._turns.pop(old)
