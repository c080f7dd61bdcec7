"""The last minutes, in bounded memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from surveyed import doing, finding, found, group, member, wait

from aiodist.wire import averaging, channels
from aiodist_server import history
from aiodist_server.history import MOST_BYTES, WINDOW, GroupHistory, History, Point, Rate, Row

KEY = ("train", "r")


def taken(*answers: tuple[float, dict[str, Any]]) -> History:
    """A history that has taken these answers at these times."""
    made = History()
    for now, answer in answers:
        made.take(answer, now)
    return made


def of(known: History) -> GroupHistory:
    return known.groups[KEY]


def spans(row: Row) -> list[tuple[float, float, str]]:
    return [(span.start, span.end, span.kind) for span in row.spans]


def rank(number: int, **said: Any) -> dict[str, Any]:
    return member(number, doing=doing(**said))


def test_a_wait_is_one_span_from_its_start_on() -> None:
    waits = [found(group(rank(0, waits=[wait(seconds)]))) for seconds in (1.5, 3.5)]
    others = [found(group(rank(0, waits=[wait(2.0, what="barrier #4")]))), found(group(rank(0)))]
    known = taken((10, waits[0]), (12, waits[1]), (15, others[0]), (17, others[1]))
    (row,) = of(known).rows.values()
    assert spans(row) == [(8.5, 12, "waits"), (13, 15, "waits")]


def test_the_same_words_after_a_pause_are_another_wait() -> None:
    first, later = (found(group(rank(0, waits=[wait(2.0)]))) for _ in range(2))
    (row,) = of(taken((10, first), (12, found(group(rank(0)))), (15, later))).rows.values()
    assert spans(row) == [(8, 10, "waits"), (13, 15, "waits")]


def test_what_a_rank_is_in_begins_after_what_it_was_in() -> None:
    """A culprit held up others before that was seen."""
    culprit = found(group(rank(0), findings=[finding(0)]))  # for 4 s
    (row,) = of(taken((10, found(group(rank(0, waits=[wait(3.0)])))), (11, culprit))).rows.values()
    assert spans(row) == [(7, 10, "waits"), (10, 11, "culprit")]


def test_rates_are_of_what_was_said_last_and_before() -> None:
    known = taken(
        (10, found(group(rank(0, collectives=100), rank(1, collectives=0)))),
        (
            12,
            found(
                group(
                    rank(0, collectives=140, sent=1000, received=10, age=0.0),
                    rank(1, collectives=10, sent=50, received=6, age=1.0),
                )
            ),
        ),
    )
    first, second = of(known).rows.values()
    assert first.rate == Rate(20, 500, 5)
    assert second.rate == Rate(10, 50, 6)
    assert list(of(known).points) == [
        Point(10, None, None, None, None, None, 0.0),
        Point(12, 10, 15, 20, 550, 11, 0.0),
    ]


def test_the_same_word_again_tells_no_rate() -> None:
    """Of a rank that is busy: it says nothing new."""
    said = [found(group(rank(0, busy=4.0, collectives=9, age=age))) for age in (1.0, 3.0)]
    (row,) = of(taken((10, said[0]), (12, said[1]))).rows.values()
    assert row.rate is None
    assert spans(row) == [(6, 12, "busy")]


def test_the_longest_wait_is_one_for_others() -> None:
    answer = found(
        group(
            rank(0, waits=[wait(3.0)]),
            rank(1, waits=[wait(8.0)]),
            rank(2, waits=[wait(99.0, missing="")]),
        )
    )
    assert of(taken((10, answer))).points[0].wait == 8.0


def test_who_goes_is_kept_for_a_while() -> None:
    known = taken((10, found(group(rank(0), rank(1), rank(2)))))
    known.note("lost", {"group": "train", "run_id": "r", "rank": 1, "reason": "it died"}, 11, "id1")
    known.take(found(group(rank(0))), 12)
    rows = list(of(known).rows.values())
    assert [(row.gone, row.how, row.reason) for row in rows] == [
        (None, "", ""), (11, "lost", "it died"), (12, "", ""),
    ]  # fmt: skip
    known.take(found(group(rank(0), rank(1), rank(2))), 13)  # they are there again
    assert [(row.gone, row.how, row.reason) for row in rows] == [(None, "", "")] * 3
    known.take(found(group(rank(0))), 13 + WINDOW)
    known.take(found(group(rank(0))), 14 + WINDOW)
    assert [row.rank for row in of(known).rows.values()] == [0, 1, 2]
    known.take(found(group(rank(0))), 14 + 2 * WINDOW)
    assert [row.rank for row in of(known).rows.values()] == [0]


def test_a_member_that_goes_is_known_although_its_rank_has_changed() -> None:
    known = taken((10, found(group(rank(0), rank(1), rank(2), rank(3)))))
    for which, one in ((1, "id1"), (2, "id3")):  # the others have shrunk the group meanwhile
        fields = {"group": "train", "run_id": "r", "rank": which, "reason": f"of {one}"}
        known.note("lost", fields, 11, one)
    known.take(found(group(rank(0), rank(2) | {"rank": 1})), 12)
    assert [row.reason for row in of(known).rows.values()] == ["", "of id1", "", "of id3"]


def test_what_happens_to_many_at_once_is_one_event() -> None:
    known = History()
    for when, which in ((1.0, 0), (1.1, 1), (1.2, 3), (5.0, 4)):
        known.note("left", {"group": "train", "run_id": "r", "rank": which}, when)
    known.note("deleted", {"group": "train", "run_id": "r"}, 6)
    texts = [(event.when, event.text) for event in of(known).events]
    assert texts == [(1.0, "ranks 0-1, 3 left"), (5.0, "rank 4 left"), (6, "the group has ended")]
    assert of(known).ended == 6


def test_whoever_is_refused_makes_no_group() -> None:
    known = History()
    known.note("join refused", {"group": "train", "kind": "taken", "who": "n1"}, 1)
    assert known.groups == {}
    assert [event.text for event in known.events] == ["group 'train': n1 may not join: taken"]


def test_a_group_that_ends_is_kept_for_a_while() -> None:
    known = taken((10, found(group(rank(0)))), (12, found()))
    assert of(known).ended == 12
    assert [row.gone for row in of(known).rows.values()] == [12]
    known.take(found(), 12 + WINDOW)
    assert KEY in known.groups
    known.take(found(), 13 + WINDOW)
    assert known.groups == {}
    known.take(found(group(rank(0))), 400)  # one of the same name
    assert of(known).ended is None


def test_what_is_old_goes() -> None:
    known = History()
    for now in range(0, 400, 2):
        # One waits again and again, the other for as long as the first 300 s last.
        short = wait(1.5, what=f"barrier #{now}")
        long = [wait(now + 2.0)] if now < 300 else []
        known.take(found(group(rank(0, waits=[short]), rank(1, waits=long))), float(now))
    first, second = of(known).rows.values()
    assert of(known).points[0].when == 398 - WINDOW
    # The first went; one that goes on keeps those that came after it, up to MOST_SPANS.
    assert [len(first.spans), [span.end for span in second.spans]] == [199, [298]]
    known.take(found(group(rank(0), rank(1))), 300 + WINDOW)
    assert first.spans[0].end >= 300
    assert not second.spans


def test_there_is_room_for_so_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_GROUPS", 2)
    one, two, three = (group(rank(0), name=name) for name in ("one", "two", "three"))
    known = taken((1, found(one, two)), (2, found(one, two, three)))
    assert [name for name, _ in known.groups] == ["one", "two"]
    for name in ("three", "four"):
        known.note("lost", {"group": name, "rank": 0, "who": name, "reason": "silent"}, 2.5)
    texts = [event.text for event in known.events]
    assert texts == ["group 'three': rank 0 lost: silent", "group 'four': rank 0 lost: silent"]
    known.take(found(one, three), 3)  # the first time, two is still taken for there
    known.take(found(one, three), 4)
    assert [name for name, _ in known.groups] == ["one", "three"]


def test_it_takes_bounded_memory() -> None:
    """However many there are, with the longest names that there can be."""
    wide = "\N{CJK UNIFIED IDEOGRAPH-4E00}\N{GRINNING FACE}" * 128

    def answer(now: int) -> dict[str, Any]:
        return found(
            *[
                group(
                    *[
                        member(
                            one, id=f"{name} {one}", name=f"{one}{wide}", host=f"{now}{wide}",
                            doing=doing(waits=[wait(1.5, what=f"{now} {one} {name}{wide}")]),
                        )
                        for one in range(size)
                    ],
                    name=f"{name}{wide}",
                    run_id=wide,
                )
                for name, size in [("large", 3000), *((f"g{number}", 20) for number in range(80))]
            ]
        )  # fmt: skip

    tracemalloc.start()
    try:
        known = History()
        for now in range(3):
            known.take(answer(now), float(now))
            for number in range(80):
                for which in range(100):
                    fields = {"group": f"g{number}{wide}", "run_id": wide, "rank": which}
                    known.note("lost", {**fields, "reason": f"{which}{wide}"}, now + which)
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(len(one.rows) for one in known.groups.values()) == history.MOST_ROWS
    assert len(known.groups) == history.MOST_GROUPS
    assert taken_bytes < MOST_BYTES


def test_members_of_averagers_are_no_groups() -> None:
    """Not when one of them comes, and not when it is lost."""
    name = averaging.own_group("outer", f"{7:024x}")
    known = taken((1, found(group(rank(0), name=name, averager="outer"))))
    for kind in ("formed", "lost"):
        known.note(kind, {"group": name, "run_id": "r", "rank": 0, "epoch": 1, "size": 1}, 2)
    assert not known.groups
    assert not known.events


def test_participants_of_channels_are_no_groups() -> None:
    """Each transfer is a group of a new name: they would take the place of all others."""
    name = channels.own_group("policy", f"{7:024x}")
    known = taken((1, found(group(rank(0), name=name, channel="policy"))))
    known.note("formed", {"group": name, "run_id": "r", "epoch": 1, "size": 1}, 1.0)
    known.note("lost", {"group": f"{name}/{7:016x}", "run_id": "r", "rank": 0}, 1.0)
    assert known.groups == {}
    assert not known.events
