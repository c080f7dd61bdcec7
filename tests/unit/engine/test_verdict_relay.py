"""Who hears of a verdict, and from whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiodist.engine.failures import Verdict
from aiodist.engine.verdict_relay import VerdictRelay


class Wire:
    """Takes down to which rank something is sent."""

    def __init__(self, peer: int, told: list[int]) -> None:
        self._peer = peer
        self._told = told

    def send(self, header: bytes, *, urgent: bool) -> None:
        assert urgent
        self._told.append(self._peer)


def party(told: list[int], linked: set[int]) -> Any:
    """Rank 0 of four."""
    return SimpleNamespace(
        rank=0,
        size=4,
        id=b"group",
        ranks=range(4),
        endpoint=SimpleNamespace(lost={}),
        peers=[Wire(peer, told) for peer in range(4)],
        link=lambda peer: object() if peer in linked else None,
        has_lost=lambda peer: False,
    )


def test_who_leaves_passes_on_what_it_heard_to_those_it_has_links_to() -> None:
    told: list[int] = []
    relay = VerdictRelay(party(told, {2, 3}))
    relay.leave(abort=True)
    assert told == []  # nothing was heard
    verdict = Verdict("refused", "a wrong argument", 1)
    relay.hear(1, (None, 7), [*verdict.fields(), []])
    assert told == []  # who gave up has told all others itself
    relay.leave(abort=False)
    assert told == [2, 3]
    told.clear()
    relay.leave(abort=True)
    assert told == [1, 2, 3]
