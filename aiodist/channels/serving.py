"""Giving versions to others who ask for them."""

from __future__ import annotations

import logging
from typing import Any

from aiodist.channels import directory, parcels, transfers
from aiodist.channels.participant import GIVES, Participant
from aiodist.channels.slices import Whole
from aiodist.errors import AiodistError
from aiodist.group import Group
from aiodist.wire.limits import MAX_NAME

log = logging.getLogger("aiodist.channels")


async def meet(participant: Participant, name: str) -> None:
    """Meet another participant in the group `name`, and give it what it asks for."""
    mine = directory.meetings(participant.channel, participant.id)
    if not name.startswith(mine) or len(name) > MAX_NAME:
        log.warning("channel %r: asked to a group %r", participant.channel, name)
        return
    patience = participant.patience
    try:
        async with participant.meeting(name, GIVES) as pair:
            match await transfers.asked(pair, patience):
                case transfers.Rest(version, has, maps):
                    if (holding := participant.holdings.get(version)) is None:
                        await transfers.refuse(pair)
                    else:
                        await transfers.give(pair, holding, has, patience, maps=maps)
                case transfers.Parcels(version, _, []):
                    await parcels.give_manifests(pair, _manifests(participant, version))
                case transfers.Parcels(version, wants, asked):
                    await _give_parcels(participant, pair, version, wants, asked)
    except (AiodistError, OSError) as error:
        # Its affair: it looks for another one, if it lives.
        log.debug("channel %r: a subscriber is not served any more: %s", participant.channel, error)


def _manifests(participant: Participant, version: int) -> list[bytes]:
    """What is known here of the shares of a version."""
    holding = participant.holdings.get(version)
    if holding is not None and holding.filled:
        return [bytes(holding.part(0))]
    lots = [lot for lot in participant.lots.values() if lot.version == version]
    return list(lots[0].arrays.packed) if lots else []


async def _give_parcels(
    participant: Participant, pair: Group, version: int, wants: str, asked: list[Any]
) -> None:
    lot = participant.lots.get((version, wants))
    if lot is not None:
        await parcels.give(pair, lot, lot, asked, participant.patience)
        return
    holding = participant.holdings.get(version)
    if wants or holding is None or not holding.filled:
        await transfers.refuse(pair)
        return
    with holding:
        await parcels.give(pair, holding, Whole(holding), asked, participant.patience)
