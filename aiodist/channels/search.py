"""The search for participants that give a version: it ends if a newer version comes meanwhile."""

from __future__ import annotations

import logging

from aiodist.channels import directory
from aiodist.channels.directory import LinePlace, Release
from aiodist.channels.holding import ComingVersion
from aiodist.channels.participant import Participant
from aiodist.channels.transfers import NotThereError
from aiodist.errors import AiodistError

log = logging.getLogger("aiodist.channels")

FAILURES = (AiodistError, OSError, MemoryError, NotThereError)
"""Errors after which another source is asked, or the same ones later: see `Search.lose`."""


class NobodyError(Exception):
    """No living participant could give a version. `refused`: see `Search`."""

    def __init__(self, *, refused: bool = False) -> None:
        super().__init__()
        self.refused = refused


class NoMemoryError(NobodyError):
    """There is no memory here for a version, even if other participants have it."""


class Search:
    """Begins when it is made.

    `failed`: the ids of the participants that could not give the version. `refused`: one of them
    had nothing to give. Then those that have said that they have some are asked first, because each
    refusal takes some round trips.
    """

    def __init__(
        self, participant: Participant, releases: tuple[Release, ...], failed: set[str]
    ) -> None:
        self._participant = participant
        self._releases = releases
        self._newest = directory.newest(participant.releases)
        self.failed = failed
        self.refused = False

    def check(self) -> None:
        """Raise NobodyError if a newer version has come.

        Others take that one now, and soon have this one no longer. Asking them one after the other
        would take so long that the next version is replaced, too.
        """
        known = self._participant.releases
        if directory.newest(known) != self._newest or directory.is_gone(known, self._releases):
            raise NobodyError

    def lose(self, place: LinePlace, error: BaseException) -> None:
        """Note that a participant has failed. Raises the failure of this one, and NoMemoryError
        if it has no memory."""
        participant = self._participant
        participant.tasks.check()
        before, why = participant.trouble, str(error) or "it is not there any more"
        participant.trouble = why
        if isinstance(error, MemoryError):
            # There may be some later, for example when an older version is not used any more.
            if why != before:
                log.warning("channel %r: trying again and again: %s", participant.channel, why)
            raise NoMemoryError from error
        log.info(
            "channel %r: version %d comes from another one: %s",
            participant.channel,
            self._releases[0].version,
            why,
        )
        self.failed.add(place.id)
        self.refused = self.refused or isinstance(error, NotThereError)

    async def go_behind(self, me: LinePlace, coming: ComingVersion) -> None:
        """Go to the end of the line, because no participant before `me` can help. Raises
        NobodyError if none behind it can, either."""
        if not await self._participant.gone_behind(me, coming, self.failed):
            raise NobodyError(refused=self.refused)
