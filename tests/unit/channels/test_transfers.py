"""What one who takes a version makes of what it is told."""

from __future__ import annotations

import asyncio

import pytest

from aiodist.channels.directory import Release
from aiodist.channels.holding import Holding
from aiodist.channels.transfers import (
    MOST_WAITS,
    NOT_HERE,
    WAIT,
    NotThereError,
    UnwantedError,
    word,
)

RELEASE = Release(version=1, manifest=1, nbytes=64, chunk=64, check=0)


class Pair:
    """A group of two whose other side says the same again and again."""

    def __init__(self, *said):
        self.said = said
        self.heard = 0

    async def recv(self, **_):
        self.heard += 1
        return self.said[min(self.heard, len(self.said)) - 1]


def test_who_is_only_ever_told_to_wait_looks_for_another_source():
    """For two who wait for each other would tell each other so for ever."""
    coming, pair = Holding(RELEASE), Pair(WAIT)
    with coming.wanting(), pytest.raises(NotThereError):
        asyncio.run(word(pair, coming, 5.0))
    assert pair.heard == coming.stirs == MOST_WAITS


def test_what_comes_after_a_while_is_heard():
    coming = Holding(RELEASE)
    with coming.wanting():
        assert asyncio.run(word(Pair(WAIT, WAIT, 7), coming, 5.0)) == 7
    assert coming.stirs == 2  # those behind it were told to wait, too
    with pytest.raises(NotThereError):
        asyncio.run(word(Pair(NOT_HERE), coming, 5.0))


def test_what_nobody_waits_for_any_more_is_not_waited_for():
    coming, pair = Holding(RELEASE), Pair(WAIT)
    with pytest.raises(UnwantedError):
        asyncio.run(word(pair, coming, 5.0))
    assert pair.heard == 1
    assert not coming.stirs
