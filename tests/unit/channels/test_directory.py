"""What a channel says of itself, and of whom one takes a version."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.channels.directory import (
    LinePlace,
    Release,
    Seat,
    as_version,
    at_end,
    behind,
    check_higher,
    distances,
    identity,
    in_line,
    is_gone,
    newest,
    packed,
    restored,
    rivals,
    seated,
    sources,
    unpacked,
    versions,
    with_release,
    without_begun,
)
from aiodist.errors import ProtocolError


def release(version, **fields):
    return Release(
        **{"manifest": 100, "nbytes": 1000, "chunk": 256, "check": 7, **fields}, version=version
    )


@given(
    manifest=st.integers(1, 300),
    data=st.integers(0, 1000),
    chunk=st.integers(1, 8).map(lambda n: n * 64),
)
def test_parts_cover_a_version_without_gaps(manifest, data, chunk):
    start = manifest + -manifest % 64
    one = release(1, manifest=manifest, nbytes=start + data, chunk=chunk)
    assert one.span(0) == (0, manifest)
    spans = [one.span(part) for part in range(1, one.parts)]
    assert [at for span in spans for at in range(*span)] == list(range(start, start + data))
    for end in range(0, data + 1, 37):
        there = one.parts_to(end)
        assert there <= one.parts
        assert one.span(there - 1)[1] >= start + end or end == 0
        assert there == 1 or one.span(there - 2)[1] < start + end


def test_what_is_written_is_read():
    releases = [release(1), release(2)]
    assert unpacked(Release, packed(releases)) == releases
    assert unpacked(Release, None) == []
    for nonsense in (
        b"",
        b"\xc1",
        packed([LinePlace("a", "")]),
        b"\x91\x95\x01\x00\x01\x01\x01",
        b"\x07",
    ):
        with pytest.raises(ProtocolError, match="no Release"):
            unpacked(Release, nonsense)


@pytest.mark.parametrize(
    ("version", "error"),
    [("x", TypeError), (1.0, TypeError), (True, TypeError), (-1, ValueError), (2**63, ValueError)],
)
def test_what_is_no_version(version, error):
    with pytest.raises(error, match=r"a version is an int from 0 to 2\*\*62"):
        as_version(version)


def test_a_version_may_be_an_integer_of_any_type():
    for number in (0, np.int64(7), np.uint64(2**62)):
        version = as_version(number)
        assert version == int(number) and type(version) is int


def test_versions_only_grow():
    known = [release(1), release(3)]
    assert with_release(known, release(4), 2) == [release(3), release(4)]
    assert with_release(known, release(3), 2) == known  # said again
    assert with_release(known, release(3), 1) == known[1:]
    for version in (0, 3):
        with pytest.raises(ValueError, match=f"version {version} .* the newest is 3"):
            check_higher(known, version)
    with pytest.raises(ValueError, match="the newest is 3"):
        with_release(known, release(3, check=8), 2)
    check_higher([], 0)


def test_what_a_store_has_lost_is_said_again():
    own = [release(2), release(3)]
    assert restored([], own) == own
    assert restored([release(2)], own) == own
    assert restored(own, own) is None
    assert restored([release(4)], own) is None  # they are forgotten for good reason
    assert restored([release(3, check=8)], own) is None  # so are these, if numbers began anew
    assert restored([], []) is None


@pytest.mark.parametrize("field", ["check", "nbytes", "share", "version", "host", "id"])
def test_releases_have_one_identity_if_they_are_equal(field):
    one = release(1)
    other = replace(one, **{field: {"host": "h", "id": b"x"}.get(field, 2000)})
    assert (identity([one]) == identity([other])) == (one == other)
    assert identity([one]) != identity([one, other])


def test_a_version_is_gone_when_others_took_its_place():
    there, newer = [release(3)], [release(3), release(4)]
    assert not is_gone(there, (release(3),))
    assert is_gone(newer, (release(2),))
    assert is_gone(there, (release(3, check=8),))  # another publisher has that number now
    assert not is_gone([], (release(3),))  # the store has forgotten it, and will be told
    assert not is_gone([release(2)], (release(3),))
    assert not is_gone(shares(3, 2)[:1], tuple(shares(3, 2)))  # half of it is said again


PLACES = st.lists(st.sampled_from("ABC"), max_size=12).map(
    lambda hosts: [LinePlace(f"p{at}", host) for at, host in enumerate(hosts)]
)


@given(places=PLACES, me=st.integers(0, 12), host=st.sampled_from("ABC"), maps=st.booleans())
def test_nobody_takes_from_one_who_came_later(places, me, host, maps):
    mine = LinePlace(f"p{me}", places[me].host if me < len(places) else host)
    publisher = LinePlace("publisher", "A")
    found = sources(places, mine, [publisher], maps=maps)
    before = places[: min(me, len(places))]
    assert sorted(one.id for one in found) == sorted(one.id for one in [publisher, *before])
    near = [one for one in found if one.host == mine.host]
    far = [one for one in found if one.host != mine.host]
    assert found == near + far
    # On one host all map the memory of one, or take from one.
    own = [publisher, *before] if maps else [*before, publisher]
    assert near == [one for one in own if one.host == mine.host]
    assert publisher.host == mine.host or far[-1] == publisher
    assert {*sources(places, mine, [], maps=maps)} == {*before}


@given(PLACES, st.booleans())
def test_each_host_gets_one_copy_and_sends_one(places, maps):
    """Whoever comes, from whatever host, in whatever order: where nobody is lost."""
    publisher = LinePlace("publisher", "A")
    gets, sends = [], []
    for at, me in enumerate(places):
        source = sources(places[:at], me, [publisher], maps=maps)[0]
        if source.host != me.host:
            gets.append(me.host)
            sends.append(source.host)
    assert sorted(gets) == sorted({one.host for one in places} - {"A"})
    assert len(sends) == len(set(sends))


@given(PLACES)
def test_who_takes_slices_is_no_source_of_a_whole_version(places):
    sliced = [replace(one, wants="x") for one in places[::2]]
    line = [*sliced, *places[1::2]]
    me, publisher = LinePlace("me", "B"), LinePlace("publisher", "A")
    assert not any(one.wants for one in sources(line, me, [publisher]))
    slicing = sources(line, replace(me, wants="y"), [publisher])
    assert {*slicing} == {*line, publisher}
    # Publishers of one host, or of none, are equally far, so that all of them have to send.
    others = [publisher, LinePlace("other", "C"), LinePlace("near", "B")]
    found = sources(line, replace(me, wants="y"), others, maps=False)
    far = distances(found, me, others)
    assert far == sorted(far)
    by_id = {one.id: distance for one, distance in zip(found, far, strict=True)}
    assert by_id["publisher"] == by_id["other"] > by_id["near"]
    assert len({by_id[one.id] for one in line}) == len(line)


def test_slices_come_from_one_of_the_host_who_wants_the_same():
    """Before others of the host, that came first; its memory is mapped."""
    line = [
        LinePlace("a", "H", "y"),
        LinePlace("b", "H"),
        LinePlace("c", "H", "x"),
        LinePlace("d", "I", "x"),
    ]
    publisher, me = LinePlace("p", "P"), LinePlace("me", "H", "x")
    found = [one.id for one in sources(line, me, [publisher], maps=False)]
    assert found == ["c", "a", "b", "d", "p"]


def test_who_can_map_no_memory_is_near_to_nobody():
    places = [LinePlace("a", ""), LinePlace("b", "")]
    publisher = LinePlace("p", "")
    found = sources(places, LinePlace("c", ""), [publisher])
    assert found == [*reversed(places), publisher]


@given(PLACES)
def test_each_stands_in_a_line_once(places):
    line: list[LinePlace] = []
    for one in [*places, *places]:
        line = in_line(line, one) or line
    assert line == places
    for one in places:
        assert at_end(places, one) == [*(other for other in places if other != one), one]
    assert at_end(places, LinePlace("new", "")) == [*places, LinePlace("new", "")]


def test_who_is_behind_may_have_what_is_wanted():
    sliced, whole, last = LinePlace("s", "", "half"), LinePlace("w", ""), LinePlace("l", "")
    line = [whole, sliced, last]
    assert behind(line, whole) == [last]
    assert behind(line, sliced) == [last]
    assert behind([sliced, whole, LinePlace("t", "", "half")], sliced)[0].wants == "half"
    assert behind(line, last) == []
    assert behind(line, LinePlace("new", "")) == []


def shares(version, count, *missing):
    return [release(version, share=at, shares=count) for at in range(count) if at not in missing]


def test_a_version_is_there_when_all_its_shares_are():
    known = [*shares(1, 2), *shares(2, 2, 0), *shares(3, 3), *shares(4, 3, 1, 2)]
    assert versions(known) == [tuple(shares(1, 2)), tuple(shares(3, 3))]
    assert newest(known) == 3
    assert newest(shares(1, 2, 1)) is None


def test_each_share_grows_for_itself():
    known = [*shares(1, 2), *shares(2, 2, 0)]
    check_higher(known, 2, 0)
    for share, version in ((0, 1), (1, 2)):
        with pytest.raises(ValueError, match=f"the newest is {version}"):
            check_higher(known, version, share)
    assert with_release(known, release(2, share=0, shares=2), 1) == shares(2, 2)
    # Another number of publishers goes on from the last version that was there.
    assert with_release(known, release(2, share=0, shares=3), 5) == [
        *shares(1, 2),
        release(2, share=0, shares=3),
    ]


def test_those_that_were_begun_and_never_came_are_forgotten():
    known = shares(1, 2)
    for version in range(2, 9):
        known = with_release(known, release(version, share=0, shares=2), 2)
    assert known == [*shares(1, 2), *shares(7, 2, 1), *shares(8, 2, 1)]
    known = with_release(known, release(8, share=1, shares=2), 1)
    assert known == shares(8, 2)
    assert restored([], shares(7, 2)) == shares(7, 2)
    assert restored(known, shares(7, 2)) is None
    again = release(9, share=1, shares=2, check=9)  # by another publisher, of other bytes
    assert restored([again], shares(9, 2, 0)) is None


def test_what_a_publisher_began_goes_with_it():
    first, of_three = Seat("a", "", 0, 2), Seat("b", "", 2, 3)
    known = [*shares(1, 2), *shares(2, 2), *shares(3, 2, 1)]
    assert without_begun(known, [], first) == known[:-1]
    assert without_begun(known, [], of_three) == known[:-1]
    assert without_begun(known, [], Seat("c", "", 1, 2)) is None
    assert without_begun(known, [], first, known[-1:]) is None
    # The store of a coordinator that was restarted may lack shares of a complete version so far.
    assert without_begun(shares(3, 2, 1), shares(3, 2), first) is None
    assert without_begun([], [], first) is None


def test_one_publishes_each_share():
    first, second = Seat("a", "", 0, 2), Seat("b", "", 1, 2)
    alone, again = Seat("c", "", 0, 1), Seat("d", "", 0, 2)
    assert seated([], second, []) == [second]
    assert seated([second], first, []) == [first, second]
    assert seated([first, second], first, []) == [first, second]
    assert rivals([first, second], again) == [first]
    assert rivals([first, second], alone) == [first, second]
    assert seated([first, second], again, []) is None
    assert seated([first, second], again, [first]) == [again, second]
    assert seated([first, second], alone, [first, second]) == [alone]
