"""Takes slices of a version from all participants that have some of them, the nearest first."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from aiodist.channels import directory, lots, parcels, slices
from aiodist.channels.changes import pays
from aiodist.channels.checks import crc32
from aiodist.channels.directory import LinePlace, Release, Seat
from aiodist.channels.feeding import Feeding
from aiodist.channels.holding import Holding
from aiodist.channels.into import VersionReading
from aiodist.channels.lots import Lot
from aiodist.channels.memory import VersionMemory
from aiodist.channels.participant import Participant
from aiodist.channels.search import FAILURES, NobodyError, Search
from aiodist.channels.slices import Arrays, Piece, Want, WholeVersion
from aiodist.channels.store import AWAY
from aiodist.channels.transfers import NotThereError, Parcels, UnwantedError
from aiodist.wire import channels

log = logging.getLogger("aiodist.channels")

WANT_TTL = 60.0
"""Seconds that the store keeps the wanted slices of a participant that has gone."""

MOST_WANTS = 1024
"""The most slices of others that are remembered."""

Shares = tuple[Release, ...]
"""A version: the releases of its shares."""


class Ask(NamedTuple):
    """A request to another participant. `held`: what it has, by its place, or by its share."""

    place: LinePlace
    share: int
    held: Want
    parcels: list[list[Piece]]


class Slicing:
    def __init__(self, participant: Participant, feeding: Feeding) -> None:
        self._participant = participant
        self._feeding = feeding
        self._wants: dict[str, Want] = {}  # slices that others want, by name
        self._looks: tuple[Shares, asyncio.Task[Arrays]] | None = None  # the search for manifests
        self._said = -math.inf  # when the store was last told of the slices that are wanted here

    async def attempt(self, releases: Shares, reading: VersionReading) -> Lot:
        """Take the wanted slices of a version. Raises NobodyError, and what `reading.wanted`
        does."""
        failed: set[str] = set()
        try:
            arrays = await self._arrays(releases, failed)
            want = reading.wanted(arrays)
            arrays.check(want)
            lot = Lot(arrays, want, self._participant.stock.spare)
            manifests = sum(one.manifest for one in releases)
            reading.check_size(lot.version, manifests + lot.nbytes)
            known = self._participant.stock.lots.get((lot.version, lot.name))
            if known is not None and known.releases == releases:
                lot = known
            elif known is not None:  # of publishers that are forgotten
                known.retire()
            self._participant.stock.lots[lot.version, lot.name] = lot
            self._forget_before_last(lot.version)  # their memory is used again
            reading.begin(lot)
            await self._feeding.whole(lot, lambda: self._fill(lot, failed))
        except AWAY as error:
            # The coordinator is away, and may come back.
            raise NobodyError from error
        return lot

    def forget_before(self, version: int) -> None:
        """Retire the slices of older versions. Those of the last one stay, because others may ask
        for differences from it."""
        self._forget_before_last(version)
        lots = self._participant.stock.lots
        for key, lot in list(lots.items()):
            if lot.version < version and not (lot.is_whole and lot.is_own and lot.id):
                lots.pop(key).retire()

    def _forget_before_last(self, version: int) -> None:
        """Retire the slices of versions before the last one that is here."""
        lots = self._participant.stock.lots
        older = [lot.version for lot in lots.values() if lot.version < version and lot.is_whole]
        for key in [key for key in lots if key[0] < max(older, default=0)]:
            lots.pop(key).retire()

    async def stay(self, *, anew: bool) -> None:
        """With a sign of life, renew the wanted slices in the store, for those that take them from
        here. `anew`: the store has forgotten them."""
        now = asyncio.get_running_loop().time()
        if anew or now - self._said > WANT_TTL / 3:
            self._said = now
            lots = {lot.name: lot for lot in self._participant.stock.lots.values()}
            for lot in lots.values():
                await self._tell(lot)

    async def _tell(self, lot: Lot) -> None:
        await self._participant.store.set(directory.want(lot.name), lot.packed, WANT_TTL)

    async def _arrays(self, releases: Shares, failed: set[str]) -> Arrays:
        """The arrays of a version. Raises NobodyError; ValueError if shares do not agree."""
        participant = self._participant
        for lot in participant.stock.lots.values():
            if lot.releases == releases:
                return lot.arrays
        if self._looks is None or self._looks[0] != releases or _has_failed(self._looks[1]):
            looks = asyncio.ensure_future(self._looked_up(releases, failed))
            participant.tasks.adopt(looks)
            self._looks = releases, looks
        # A call that is cancelled and made again does not begin anew.
        return await participant.tasks.outcome(self._looks[1])

    async def _looked_up(self, releases: Shares, failed: set[str]) -> Arrays:
        participant = self._participant
        version = releases[0].version
        search = Search(participant, releases, failed)
        found: dict[int, bytes] = {}

        async def look(places: Iterable[LinePlace]) -> None:
            """Ask all of these at once."""
            said = await asyncio.gather(*(self._manifests(version, one, search) for one in places))
            for packed in chain.from_iterable(said):
                check = crc32(packed)
                found.update({one.share: packed for one in releases if one.check == check})

        out = {participant.store.id, *failed}
        places, seats = await asyncio.gather(
            participant.store.line(version), participant.store.seats()
        )
        line = [one for one in reversed(places) if one.id not in out]
        publishers = [one.place for one in _of(seats, releases) if one.id not in out]
        # One subscriber has the manifests of all shares, and each publisher has one of them.
        for places in (line[:1], publishers):
            if len(found) < len(releases):
                await look(await self._that_may_have(version, places))
        if len(found) < len(releases):
            for one in await self._that_may_have(version, line[1:]):
                search.check()
                await look([one])
                if len(found) == len(releases):
                    break
            else:
                raise NobodyError
        return Arrays(releases, [found[share] for share in range(len(releases))])

    async def _that_may_have(self, version: int, places: Sequence[LinePlace]) -> list[LinePlace]:
        """Those of these participants that may have some of a version, by what they have said."""
        heard = await self._participant.heard_of(places)
        rich = channels.that_may_have(heard, version)
        return [one for one in places if one.id in rich]

    async def _manifests(self, version: int, place: LinePlace, search: Search) -> list[bytes]:
        """The manifests of shares of a version that another participant has."""
        participant = self._participant
        try:
            async with await participant.meetings.called(place.id) as pair:
                return await parcels.take_manifests(pair, version, participant.patience)
        except NotThereError:
            pass  # it waits for them itself
        except FAILURES as error:
            search.lose(place, error)
        return []

    async def _fill(self, lot: Lot, failed: set[str]) -> None:
        """Take what is missing. Raises NobodyError."""
        participant, base = self._participant, self._base(lot)
        participant.stock.differences.chain = 0
        clock = asyncio.get_running_loop().time
        begin, before = clock(), participant.meetings.bytes_moved[1]
        running: dict[asyncio.Task[None], Ask] = {}
        search = Search(participant, lot.releases, failed)
        try:
            if not lot.is_whole:
                await self._tell(lot)
            while not lot.is_whole and (lot.wanted or running):
                if lot.todo and lot.wanted:
                    search.check()
                    for ask in await self._asks(lot, search):
                        running[asyncio.ensure_future(self._take(lot, ask, base))] = ask
                if not running:
                    await search.go_behind(self._me(lot), lot)
                    continue
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    ask = running.pop(task)
                    lot.lack(ask.parcels)
                    error = task.exception()
                    if isinstance(error, FAILURES):
                        search.lose(ask.place, error)
                        lot.stir()
                    elif error is not None and not isinstance(error, UnwantedError):
                        raise error
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for ask in running.values():
                lot.lack(ask.parcels)
        if lot.is_whole:
            participant.say()
        if base is None and lot.is_own and (seconds := clock() - begin) > 0:
            participant.stock.rate = (participant.meetings.bytes_moved[1] - before) / seconds

    def _base(self, lot: Lot) -> Lot | None:
        """The version here to which differences can be applied; None if differences do not pay."""
        participant = self._participant
        always = any(one.always for one in lot.releases)
        if not lot.is_coded or not (always or pays(participant.stock.rate, lot.nbytes)):
            return None
        bases = [one for one in participant.stock.lots.values() if one.is_base_of(lot)]
        return max(bases, key=lambda one: one.version, default=None)

    def _me(self, lot: Lot) -> LinePlace:
        return replace(self._participant.store.place, wants=lot.name)

    def _is_near(self, place: LinePlace) -> bool:
        """Whether a participant is on this host, so that its memory can be mapped."""
        return bool(place.host) and place.host == self._participant.store.host

    def _is_mapped(self, lot: Lot, asks: list[Ask]) -> bool:
        """Whether everything comes from one participant on this host with the same slices.

        Then its memory is used.
        """
        place = asks[0].place
        is_same = self._is_near(place) and place.wants == lot.name
        return lot.memory is None and len(asks) == 1 and is_same

    def _mirror(self, lot: Lot, ask: Ask) -> parcels.Mirror:
        """The other participant's data, as it is in its memory."""
        if ask.place.wants:
            other = Lot(lot.arrays, ask.held)

            def over(memory: VersionMemory) -> slices.Source:
                other.take(memory)
                return other

            return parcels.Mirror(other.nbytes, over)
        release = lot.releases[ask.share]
        return parcels.Mirror(
            release.nbytes, lambda memory: WholeVersion(Holding.over(release, memory))
        )

    async def _take(self, lot: Lot, ask: Ask, base: Lot | None) -> None:
        participant, place = self._participant, ask.place
        mirror = self._mirror(lot, ask) if self._is_near(place) else None
        patience = participant.patience
        of = lot.releases if place.wants else (lot.releases[ask.share],)
        request = Parcels(
            lot.version,
            directory.identity(of),
            place.wants,
            [],
            maps=False,
            who=participant.store.id,
            base=b"",
        )
        async with await participant.meetings.called(place.id) as pair:
            if base is not None and mirror is None:
                id = base.id if place.wants else base.releases[ask.share].id
                from_base = parcels.Base(base, id, participant.stock.differences)
                with base, lot.decoding():
                    await parcels.take_differences(
                        pair, lot, request, ask.parcels, patience, from_base
                    )
            if ask.parcels:
                await parcels.take(pair, lot, request, ask.parcels, patience, mirror)

    async def _asks(self, lot: Lot, search: Search) -> list[Ask]:
        """What to ask of which participant, with memory for it. Pieces that none has stay in
        `todo`. Raises NoMemoryError."""
        participant = self._participant
        me = self._me(lot)
        # Ask again each time, because a restarted coordinator has forgotten the line.
        places, seated = await asyncio.gather(
            participant.store.stand_in_line(lot.version, me), participant.store.seats()
        )
        seats = {one.id: one.share for one in seated}
        publishers = [one.place for one in _of(seated, lot.releases)]
        known = directory.sources(places, me, publishers, maps=False)
        heard = await participant.heard_of(one for one in known if one in publishers)
        if search.refused or not channels.that_may_have(heard, lot.version):
            rich = await self._that_may_have(lot.version, known)
            known = rich and [*rich, *(one for one in known if one not in rich)]
        known = [one for one in known if one.id not in search.failed]
        there: dict[str, bool] = {}
        while True:
            holders = [one for one in known if there.get(one.id, True)]
            held = [
                lot.arrays.of_share(seats[one.id])
                if one.id in seats
                else await self._want_of(one, lot.arrays)
                for one in holders
            ]
            far = directory.distances(holders, me, publishers)
            turn = places.index(me) if me in places else 0
            asks, lacking = lots.asked_of(lot, held, far, turn)
            new = [
                one
                for one, asked in zip(holders, asks, strict=True)
                if asked and one.id not in there
            ]
            heard = await participant.heard_of(new)
            there |= {one.id: one.id in heard for one in new}
            if len(heard) == len(new):
                break
        found = [
            Ask(one, seats.get(one.id, 0), has, slices.parcels(asked, lot.arrays))
            for one, has, asked in zip(holders, held, asks, strict=True)
            if asked
        ]
        try:
            if found and not self._is_mapped(lot, found):
                await lot.make_own(shared=bool(participant.store.host))
        except MemoryError as error:
            search.lose(me, error)
        lot.todo = lacking
        return found

    async def _want_of(self, place: LinePlace, arrays: Arrays) -> Want:
        """The slices that another participant has of a version, or will have."""
        if not place.wants:
            return arrays.all()
        if place.wants not in self._wants:
            packed = await self._participant.store.get(directory.want(place.wants))
            if packed is None:
                return {}
            if len(self._wants) >= MOST_WANTS:
                self._wants.clear()
            self._wants[place.wants] = slices.unpacked_want(packed)
        return self._wants[place.wants]


def _of(seats: Iterable[Seat], releases: Shares) -> list[Seat]:
    """The publishers of a version."""
    return [one for one in seats if one.shares == len(releases)]


def _has_failed(task: asyncio.Task[Arrays]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
