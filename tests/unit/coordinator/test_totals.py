"""What has happened at a coordinator, of all members, also those that are gone."""

from __future__ import annotations

from aiodist.coordinator.totals import Totals
from aiodist.membership.effects import Note
from aiodist.wire.counts import SECONDS, Counts, Payload, Times

NONE = [0] * (len(SECONDS) + 1)


def said(lost: int = 0, sent: int = 0, ended: int = 0, *, op: str = "barrier") -> Counts:
    return Counts(
        (lost, 0, 0, 0),
        (Payload("tcp", sent, 0),),
        (Times(op, 1, (ended, *NONE[1:]), ended / 2),),
    )


def test_what_is_new_is_added() -> None:
    totals = Totals()
    totals.heard(1, said(1, 100, 4))
    totals.heard(1, said(3, 150, 5))
    totals.heard(2, said(1, 7, 1))
    assert totals.failures["lost"] == 4
    assert totals.sent == {"tcp": 157}
    latency = totals.latencies["barrier", 1]
    assert (latency.counts[0], latency.seconds) == (6, 3.0)


def test_a_total_does_not_go_back_when_a_member_goes() -> None:
    totals = Totals()
    totals.heard(1, said(1, 100, 4))
    totals.gone(1)
    totals.gone(1)
    assert (totals.failures["lost"], totals.sent["tcp"]) == (1, 100)
    totals.heard(2, said(1, 5, 1))
    assert (totals.failures["lost"], totals.sent["tcp"]) == (2, 105)


def test_nor_when_a_member_says_less_than_before() -> None:
    totals = Totals()
    totals.heard(1, said(2, 100, 4))
    totals.heard(1, said(1, 50, 3))
    totals.heard(1, Counts())
    assert (totals.failures["lost"], totals.sent["tcp"]) == (2, 100)
    assert totals.latencies["barrier", 1].counts[0] == 4


def test_what_a_member_that_comes_back_had_counted_before_is_not_counted_again() -> None:
    totals = Totals()
    totals.returns(1)
    totals.heard(1, said(5, 1000, 9))
    assert (totals.failures["lost"], dict(totals.sent), dict(totals.latencies)) == (0, {}, {})
    totals.heard(1, said(6, 1010, 10))
    assert (totals.failures["lost"], totals.sent["tcp"]) == (1, 10)


def test_names_that_nobody_knows_have_one_total() -> None:
    totals = Totals()
    for number in range(100):
        totals.heard(number, said(0, 1, 1, op=f"x{number}"))
        totals.heard(-1 - number, Counts((), (Payload(f"t{number}", 1, 2),)))
        totals.note(Note(f"event {number}"))
    assert {*totals.latencies} == {("other", 1)}
    assert (totals.sent["other"], totals.received["other"]) == (100, 200)
    assert sum(totals.events.values()) == 0


def test_notes_are_counted_by_what_happened() -> None:
    totals = Totals()
    for event in ("lost", "lost", "formed"):
        totals.note(Note(event))
    assert (totals.events["lost"], totals.events["formed"], totals.events["left"]) == (2, 1, 0)
