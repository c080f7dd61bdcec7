"""Chains of differences: from one version to another, and no other."""

from __future__ import annotations

from itertools import pairwise

from aiodist.channels.changes import Difference, Differences
from aiodist.channels.directory import MOST_RELEASES


def known(*pairs: tuple[bytes, bytes]) -> Differences:
    """Whole differences of 10 bytes, by base and result."""
    found = Differences()
    for base, result in pairs:
        one = Difference(base, result, 1)
        one.add(b"0123456789")
        found.add(one, 1e9)
    return found


def test_a_chain_leads_from_the_base_to_the_result() -> None:
    differences = known((b"1", b"2"), (b"2", b"3"), (b"3", b"4"))
    chain = differences.between(b"2", b"4", 100)
    assert [(one.base, one.result) for one in chain] == [(b"2", b"3"), (b"3", b"4")]


def test_there_is_none_from_a_base_that_none_of_them_has() -> None:
    # A restarted publisher may use a number for other bytes: the ids tell these apart.
    differences = known((b"1", b"2"), (b"2", b"3"))
    assert differences.between(b"another 1", b"3", 100) == []
    assert differences.between(b"1", b"another 3", 100) == []
    assert known((b"1", b"2"), (b"3", b"4")).between(b"1", b"4", 100) == []


def test_there_is_none_if_it_has_as_many_bytes_as_the_whole() -> None:
    differences = known((b"1", b"2"), (b"2", b"3"))
    assert len(differences.between(b"1", b"3", 21)) == 2
    assert differences.between(b"1", b"3", 20) == []


def test_there_is_none_that_is_longer_than_receivers_take() -> None:
    ids = [bytes([at]) for at in range(MOST_RELEASES + 2)]
    differences = known(*pairwise(ids))
    assert len(differences.between(ids[1], ids[-1], 1_000)) == MOST_RELEASES
    assert differences.between(ids[0], ids[-1], 1_000) == []


def test_differences_in_a_circle_are_no_chain() -> None:
    assert known((b"1", b"2"), (b"2", b"1")).between(b"3", b"1", 100) == []


def test_no_more_differences_are_kept_than_a_chain_has() -> None:
    """Those of versions in which nothing has changed take nearly no bytes."""
    ids = [bytes([at]) for at in range(MOST_RELEASES + 11)]
    differences = known(*pairwise(ids))
    assert differences.nbytes == MOST_RELEASES * 10
    assert len(differences.between(ids[10], ids[-1], 1_000)) == MOST_RELEASES
    assert differences.between(ids[9], ids[10], 1_000) == []


def test_the_oldest_differences_are_forgotten_above_a_number_of_bytes() -> None:
    differences = known((b"1", b"2"), (b"2", b"3"), (b"3", b"4"))
    differences.trim(29)
    assert differences.nbytes == 20
    assert differences.between(b"1", b"2", 100) == []
    assert len(differences.between(b"2", b"4", 100)) == 2
