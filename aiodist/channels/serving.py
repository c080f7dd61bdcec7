"""Giving versions to others who ask for them."""

from __future__ import annotations

import logging

from aiodist.channels import transfers
from aiodist.channels.participant import Participant
from aiodist.errors import AiodistError
from aiodist.wire.limits import MAX_NAME

log = logging.getLogger("aiodist.channels")


async def meet(participant: Participant, name: str) -> None:
    """Meet another participant in the group `name`, and give it what it asks for."""
    if not name.startswith(prefix(participant.channel, participant.id)) or len(name) > MAX_NAME:
        log.warning("channel %r: asked to a group %r", participant.channel, name)
        return
    patience = participant.patience
    try:
        async with participant.meeting(name, transfers.GIVES) as pair:
            version, has, maps = await transfers.asked(pair, patience)
            await transfers.give(pair, participant.holdings.get(version), has, maps=maps)
    except (AiodistError, OSError) as error:
        # Its affair: it looks for another one, if it lives.
        log.debug("channel %r: a subscriber is not served any more: %s", participant.channel, error)


def prefix(channel: str, owner: str) -> str:
    """How the names of groups begin in which that participant is met."""
    return f"channel {channel}/{owner}/"
