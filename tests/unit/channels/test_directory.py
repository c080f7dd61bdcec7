"""What a channel says of itself, and of whom one takes a version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.channels.directory import (
    Place,
    Release,
    check_higher,
    in_line,
    is_gone,
    packed,
    restored,
    sources,
    unpacked,
    with_release,
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
        packed([Place("a", "")]),
        b"\x91\x95\x01\x00\x01\x01\x01",
        b"\x07",
    ):
        with pytest.raises(ProtocolError, match="no Release"):
            unpacked(Release, nonsense)


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
    assert restored([], []) is None


PLACES = st.lists(st.sampled_from("ABC"), max_size=12).map(
    lambda hosts: [Place(f"p{at}", host) for at, host in enumerate(hosts)]
)


@given(places=PLACES, me=st.integers(0, 12), host=st.sampled_from("ABC"))
def test_nobody_takes_from_one_who_came_later(places, me, host):
    mine = Place(f"p{me}", places[me].host if me < len(places) else host)
    publisher = Place("publisher", "A")
    found = sources(places, mine, publisher)
    before = places[: min(me, len(places))]
    assert sorted(one.id for one in found) == sorted(one.id for one in [publisher, *before])
    near = [one for one in found if one.host == mine.host]
    far = [one for one in found if one.host != mine.host]
    assert found == near + far
    # On one host all map the memory of one; between hosts each has one to hand on to.
    assert near == [one for one in [publisher, *before] if one.host == mine.host]
    assert far == [one for one in reversed([publisher, *before]) if one.host != mine.host]
    assert sources(places, mine, None) == [one for one in found if one is not publisher]


def test_who_can_map_no_memory_is_near_to_nobody():
    places = [Place("a", ""), Place("b", "")]
    assert sources(places, Place("c", ""), Place("p", "")) == [*reversed(places), Place("p", "")]


@given(PLACES)
def test_each_stands_in_a_line_once(places):
    line: list[Place] = []
    for one in [*places, *places]:
        line = in_line(line, one) or line
    assert line == places


def test_a_version_is_gone_when_there_are_newer_ones():
    assert is_gone([release(3), release(4)], release(2))
    assert is_gone([release(2, check=8)], release(2))  # of another publisher
    assert not is_gone([release(2), release(3)], release(2))
    assert not is_gone([], release(2))  # it was forgotten, and will be told again
    assert not is_gone([release(1)], release(2))
