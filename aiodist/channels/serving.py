"""Gives versions to participants that ask for them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from aiodist.channels import chains, directory, parcels, slices, transfers
from aiodist.channels.holding import Holding
from aiodist.channels.lots import Lot
from aiodist.channels.meetings import GIVES
from aiodist.channels.participant import Participant
from aiodist.channels.slices import Source, WholeVersion
from aiodist.errors import AiodistError
from aiodist.group import Group
from aiodist.wire.limits import MAX_NAME

log = logging.getLogger("aiodist.channels")


async def meet(participant: Participant, name: str) -> None:
    """Meet another participant in the group `name`, and give it what it asks for."""
    mine = directory.meetings(participant.channel, participant.store.id)
    if not name.startswith(mine) or len(name) > MAX_NAME:
        log.warning("channel %r: asked to a group %r", participant.channel, name)
        return
    patience = participant.patience
    try:
        # The memory stays until the receiver has it, or has left, because it may belong to a user.
        with ExitStack() as read, ExitStack() as door:
            door.enter_context(participant.at_door())
            async with participant.meetings.meeting(name, GIVES) as pair:
                asked = await transfers.asked(pair, patience)
                door.close()
                while True:
                    await _answer(participant, pair, asked, read)
                    # Links keep sent memory until they hear that it has arrived. The next message
                    # may take long, so wait for that now.
                    await pair._actor.endpoint.delivered(patience)
                    read.close()
                    asked = await transfers.asked(pair, math.inf)
                    await _until_begun(participant, asked)
    except (AiodistError, OSError) as error:
        # The other participant will look for another source, if it lives.
        log.debug("channel %r: a subscriber is not served any more: %s", participant.channel, error)
    except Exception:
        # The request of one participant must not end the service of all others.
        log.exception("channel %r: a subscriber could not be served", participant.channel)


async def _answer(
    participant: Participant,
    pair: Group,
    asked: transfers.RestRequest | transfers.Parcels,
    read: ExitStack,
) -> None:
    """Give what is asked for. Its memory stays until `read` is closed."""
    holding = participant.stock.holdings.get(asked.version)
    if holding is not None:
        read.enter_context(holding)
    match asked:
        case transfers.RestRequest() if holding is not None:
            await _give(participant, pair, holding, asked)
        case transfers.Parcels(version, parcels=[]):
            await parcels.give_manifests(pair, _manifests(participant, version))
        case transfers.Parcels() if found := _source(participant, asked):
            read.enter_context(found)
            base = _base(participant, found, asked.base)
            if base is not None:
                read.enter_context(base)
            await _give_pieces(participant, pair, found, base, asked)
        case _:
            await transfers.refuse(pair)


async def _until_begun(
    participant: Participant, asked: transfers.RestRequest | transfers.Parcels
) -> None:
    """Wait until this participant takes what is asked for.

    Another one may ask for it before this one has heard of it, or before the program here wants it.
    """
    stock, version = participant.stock, asked.version
    wants = asked.wants if isinstance(asked, transfers.Parcels) else ""
    with suppress(TimeoutError):
        async with asyncio.timeout(transfers.KNOWN * participant.patience):
            while stock.of(version, wants) is None and not participant.role.publishes:
                newest = directory.newest(participant.releases)
                if newest is not None and version < newest:
                    return  # it is not taken here any more
                participant.tasks.check()
                await participant.changed.wait()


async def _give(
    participant: Participant, pair: Group, holding: Holding, asked: transfers.RestRequest
) -> None:
    ration = participant.stock.rations.get(holding)
    if ration is None or (asked.maps and holding.can_be_mapped):
        await _give_rest(participant, pair, holding, asked)
        return
    release, has = holding.release, asked.has
    here = release.span(has - 1)[1] if has else 0
    rest = release.nbytes - here
    ration.want()
    if ration.has(rest) or ration.has_to(here, await participant.said_in_line(holding.version)):
        with ration.giving(rest, _sent_by(pair)):
            await _give_rest(participant, pair, holding, asked)
    else:
        await transfers.refuse(pair)


async def _give_rest(
    participant: Participant, pair: Group, holding: Holding, asked: transfers.RestRequest
) -> None:
    has: int | None = asked.has
    if asked.base:
        known = participant.stock.differences
        known.asked = asyncio.get_running_loop().time()
        has = await chains.give(pair, holding, asked.base, asked.has, known, participant.patience)
    if has is not None and has < holding.release.parts:
        await transfers.give(pair, holding, has, participant.patience, maps=asked.maps)


async def _give_pieces(
    participant: Participant,
    pair: Group,
    coming: Holding | Lot,
    base: Holding | Lot | None,
    asked: transfers.Parcels,
) -> None:
    if asked.base and base is None:
        await parcels.end_codes(pair)
        return
    source = _pieces_of(coming)
    wanted = [slices.pieces_in(parcel) for parcel in asked.parcels]
    give = partial(parcels.give, pair, coming, source, wanted, participant.patience)
    if base is not None:
        give = partial(give, base=_pieces_of(base))
    ration = participant.stock.rations.get(coming)
    is_mapped = asked.maps and coming.can_be_mapped
    if ration is None or is_mapped or not isinstance(source, WholeVersion):
        await give(maps=asked.maps)
        return
    boxes, nbytes = source.around(piece for parcel in wanted for piece in parcel)
    ration.want(boxes)
    if ration.has(nbytes) or ration.insists(asked.who):
        with ration.giving(nbytes, _sent_by(pair)):
            await give(maps=asked.maps)
    else:
        await transfers.refuse(pair)


def _sent_by(pair: Group) -> Callable[[], int]:
    """A counter of the bytes that are sent from now on."""
    before, _ = pair.bytes_moved
    return lambda: pair.bytes_moved[0] - before


def _manifests(participant: Participant, version: int) -> list[bytes]:
    holding = participant.stock.holdings.get(version)
    if holding is not None and holding.filled:
        return [bytes(holding.part(0))]
    lots = [lot for lot in participant.stock.lots.values() if lot.version == version]
    return list(lots[0].arrays.packed) if lots else []


def _source(participant: Participant, asked: transfers.Parcels) -> Holding | Lot | None:
    """The data here that is asked for.

    It may be of an older version of that number, because the number began anew while this
    participant was stopped.
    """
    found = participant.stock.of(asked.version, asked.wants)
    is_same = found is not None and found.has_leaves and found.identity == asked.identity
    return found if is_same else None


def _base(participant: Participant, coming: Holding | Lot, base: bytes) -> Holding | Lot | None:
    """The version of that id, if the same data of it is here."""
    if isinstance(coming, Lot):
        lots = [one for one in participant.stock.lots.values() if one.is_base_of(coming)]
        return next((one for one in lots if one.id == base), None)
    holdings = [one for one in participant.stock.holdings.values() if one.is_whole and one.id]
    return next((one for one in holdings if one.id == base), None)


def _pieces_of(coming: Holding | Lot) -> Source:
    return coming if isinstance(coming, Lot) else WholeVersion(coming)
