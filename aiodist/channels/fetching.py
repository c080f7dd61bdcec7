"""Taking versions from others: of whom, and what is done when one of them fails."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from aiodist.channels import directory, serving, transfers
from aiodist.channels.directory import Place, Release
from aiodist.channels.holding import Holding
from aiodist.channels.participant import Participant
from aiodist.channels.transfers import NotThereError
from aiodist.errors import AiodistError, CollectiveTimeoutError
from aiodist.transports.surroundings import chooser_on

log = logging.getLogger("aiodist.channels")

PAUSE = 0.25
"""Seconds before a version that nobody could give is looked for again."""

RING = 10.0
"""Seconds that a call at a door is kept."""


class NobodyError(Exception):
    """Nobody who is there could give a version."""


class Fetching:
    """How a participant gets versions."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._turns: dict[int, asyncio.Lock] = {}

    async def newest(self, least: int) -> Holding:
        """The newest version from `least` on that can be had, whole. Waits until there is one."""
        participant = self._participant
        while True:
            participant.changed.clear()
            participant.check()
            wanted = [one for one in reversed(participant.releases) if one.version >= least]
            for release in wanted:
                with suppress(NobodyError):
                    return await self._attempt(release)
            with suppress(TimeoutError):
                async with asyncio.timeout(PAUSE if wanted else None):
                    await participant.changed.wait()

    async def this(self, release: Release) -> Holding:
        """This version, whole. Raises ValueError once the channel has newer ones instead."""
        while not directory.is_gone(await self._participant.look(), release):
            with suppress(NobodyError):
                return await self._attempt(release)
            await asyncio.sleep(PAUSE)
        raise ValueError(f"the channel does not have version {release.version} any more")

    def holding(self, release: Release) -> Holding:
        """What there is of a version here."""
        holdings = self._participant.holdings
        known = holdings.get(release.version)
        if known is None or known.release != release:
            if known is not None:  # of a publisher that nobody remembers
                known.retire()
            known = holdings[release.version] = Holding(release)
        return known

    async def _attempt(self, release: Release) -> Holding:
        """Take a version from one after the other of those who may have it. Raises NobodyError."""
        participant = self._participant
        holding = self.holding(release)
        # Two who ask for it at once, by `latest` and by `stream`, take it once.
        async with self._turns.setdefault(release.version, asyncio.Lock()):
            failed: set[str] = set()
            while not holding.is_whole:
                try:
                    source = await self._source(release, failed)
                except CollectiveTimeoutError as error:
                    # The coordinator is away, and may come back.
                    raise NobodyError from error
                try:
                    await self._take(source, holding)
                except (AiodistError, OSError, MemoryError, NotThereError) as error:
                    participant.check()
                    log.info(
                        "channel %r: version %d comes from another one: %s",
                        participant.channel,
                        release.version,
                        error or "it is not there any more",
                    )
                    failed.add(source.id)
                    holding.stir()
        self._forget_before(release.version)
        return holding

    async def _source(self, release: Release, failed: set[str]) -> Place:
        participant = self._participant
        me = participant.place
        # Anew each time: a coordinator that was restarted has forgotten who stands in line.
        places = await participant.change(
            directory.line(release.version), Place, lambda before: directory.in_line(before, me)
        )
        for one in directory.sources(places, me, await participant.publisher()):
            if one.id not in failed and await participant.is_there(one.id):
                return one
        raise NobodyError

    async def _take(self, source: Place, holding: Holding) -> None:
        participant = self._participant
        memory = holding.memory
        is_near = bool(participant.host) and source.host == participant.host
        # What is in memory of its own already is not thrown away for a mapping.
        maps = is_near and not (memory is not None and memory.is_own and holding.filled)
        if not maps:
            await holding.make_own(shared=bool(participant.host))
        nonce = chooser_on(asyncio.get_running_loop()).getrandbits(64)
        name = f"{serving.prefix(participant.channel, source.id)}{nonce:016x}"
        await participant.ask(
            lambda store: store.set(
                directory.door(source.id), name.encode(), ttl=RING, timeout=participant.patience
            )
        )
        patience = participant.patience
        async with participant.meeting(name, transfers.TAKES) as pair:
            await transfers.take(pair, holding, patience, maps=maps)

    def _forget_before(self, version: int) -> None:
        holdings = self._participant.holdings
        for old in [one for one in holdings if one < version]:
            holdings.pop(old).retire()
            self._turns.pop(old, None)
