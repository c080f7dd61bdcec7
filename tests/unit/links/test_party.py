"""A group as one rank reaches it: what was sent is its owner's again, for all peers in one go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.links.party import Party
from aiodist.transports.copies import LARGE, Copies

TOKEN = object()


class Links:
    """Links that copy what has one token, each by itself."""

    def __init__(self, copies: Copies, memory: bytearray, broken: bool = False) -> None:
        self.copies, self.memory, self.broken = copies, memory, broken
        self.made: list[memoryview] = []

    def settle(self, token: object) -> None:
        assert token is TOKEN
        if self.broken:
            raise RuntimeError("of another mistake")
        self.made.append(self.copies.of([memoryview(self.memory)], len(self.memory)))


def party(*links: Any) -> Any:
    """As far as `settle` goes."""
    made: Any = object.__new__(Party)
    made.peers = [SimpleNamespace(link=link) for link in links]
    made.endpoint = SimpleNamespace(copies=links[0].copies)
    return made


def test_what_went_to_several_is_copied_once() -> None:
    copies, memory = Copies(), bytearray(b"a" * LARGE)
    one, two = Links(copies, memory), Links(copies, memory)
    group = party(one, None, two)
    group.settle_all([0, 1, 2], TOKEN)
    memory[:] = b"b" * LARGE
    group.settle_all({2}, TOKEN)
    assert one.made[0] is two.made[0]
    assert one.made[0] == b"a" * LARGE
    assert two.made[1] == memory


def test_after_an_error_nothing_old_is_taken_for_the_same() -> None:
    copies, memory = Copies(), bytearray(b"a" * LARGE)
    one = Links(copies, memory)
    with pytest.raises(RuntimeError, match="another mistake"):
        party(one, Links(copies, memory, broken=True)).settle_all([0, 1], TOKEN)
    memory[:] = b"b" * LARGE
    one.settle(TOKEN)
    assert one.made[1] == memory
