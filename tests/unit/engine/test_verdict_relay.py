"""Who hears of a verdict, and from whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiodist.engine.failures import Verdict
from aiodist.engine.verdict_relay import VerdictRelay
from aiodist.wire.frames import unpack_fields


class Wire:
    """Takes down to which rank something is sent."""

    def __init__(self, peer: int, told: list[int]) -> None:
        self._peer = peer
        self._told = told

    def send(self, header: bytes, *, urgent: bool, dial: bool) -> None:
        assert urgent
        self._told.append(self._peer if dial else -self._peer)


def party(told: list[int]) -> Any:
    """Rank 0 of four."""
    return SimpleNamespace(
        rank=0,
        size=4,
        id=b"group",
        ranks=range(4),
        endpoint=SimpleNamespace(lost={}),
        peers=[Wire(peer, told) for peer in range(4)],
        has_lost=lambda peer: False,
    )


def test_who_leaves_passes_on_all_that_it_heard() -> None:
    told: list[int] = []
    relay = VerdictRelay(party(told))
    relay.leave(abort=True)
    assert told == []  # nothing was heard
    verdict = Verdict("refused", "a wrong argument", 1)
    relay.hear(1, (None, 7), [*verdict.fields(), []])
    assert told == []  # who gave up has told all others itself
    relay.hear(2, (None, 7), [*verdict.fields(), []])  # the same
    relay.hear(2, (None, 8), [*verdict.fields(), []])
    relay.leave(abort=False)
    assert told == [-1, -2, -3] * 2  # in order: no link is made for that
    told.clear()
    relay.leave(abort=True)
    assert told == [1, 2, 3] * 2


def test_who_hears_a_verdict_passes_it_on_to_those_that_its_sender_cannot_reach() -> None:
    told: list[int] = []
    relay = VerdictRelay(party(told))
    verdict = Verdict("lost", "no link", 1, {3: ""})
    assert relay.hear(1, (None, 7), [*verdict.fields(), [3]]) == verdict
    assert told == [3]


def test_the_verdicts_of_a_rank_that_dies_are_told_for_it() -> None:
    # It may have told this rank, and died before it told the others.
    told: list[int] = []
    relay = VerdictRelay(party(told))
    verdict = Verdict("cancelled", "the operation was cancelled", 1)
    relay.hear(1, (None, 7), [*verdict.fields(), []])
    relay.lose(2)
    assert told == []
    relay.lose(1)
    assert told == [1, 2, 3]
    told.clear()
    relay.lose(1)
    assert told == []  # once is enough


def test_ranks_that_are_lost_here_are_told_by_others() -> None:
    told: list[int] = []
    own = party(told)
    own.endpoint.lost[2] = "no link"
    headers: list[bytes] = []

    def send(header: bytes, *, urgent: bool, dial: bool) -> None:
        headers.append(header)

    own.peers[1].send = send
    relay = VerdictRelay(own)
    relay.tell((None, 7), Verdict("cancelled", "the operation was cancelled", 0))
    assert told == [3]
    assert unpack_fields(headers[0])[-1] == [2]  # asked to pass it on
