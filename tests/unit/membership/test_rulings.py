"""Who is lost, where members that are alive cannot reach each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from aiodist.membership.rulings import losers


def plainly(broken: Iterable[tuple[int, int]], rank: Callable[[int], int]) -> list[int]:
    """The rule, word by word: it counts all links anew for each one that goes."""
    links = {frozenset(pair) for pair in broken}
    gone: list[int] = []
    while links:
        counts: dict[int, int] = {}
        for link in links:
            for one in link:
                counts[one] = counts.get(one, 0) + 1
        worst = max(counts, key=lambda one: (counts[one], rank(one)))
        gone.append(worst)
        links = {link for link in links if worst not in link}
    return gone


def pairs_of(n: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Some of all pairs, also said twice and from both sides."""
    return st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=3 * n)


@given(st.integers(1, 40).flatmap(pairs_of))
def test_those_go_who_go_by_the_plain_rule(broken: list[tuple[int, int]]) -> None:
    assert losers(broken, lambda one: one) == plainly(broken, lambda one: one)
    # Ranks that are in no order of the ids.
    assert losers(broken, lambda one: one * 31 % 41) == plainly(broken, lambda one: one * 31 % 41)


@given(
    st.integers(2, 6).flatmap(lambda n: st.sets(st.sampled_from(list(combinations(range(n), 2)))))
)
def test_whoever_stays_can_reach_each_other(broken: set[tuple[int, int]]) -> None:
    gone = losers(broken, lambda rank: rank)
    assert not [pair for pair in broken if not {*gone} & {*pair}]
    assert len(gone) == len({*gone}) <= len(broken)


def test_a_group_in_two_halves_and_one_host_without_network_by_the_plain_rule() -> None:
    halves = list(product(range(12), range(12, 24)))
    assert losers(halves, lambda one: one) == plainly(halves, lambda one: one)
    hosts = [(one, other) for one in range(8, 12) for other in range(24) if not 8 <= other < 12]
    assert losers(hosts, lambda one: one) == plainly(hosts, lambda one: one) == [11, 10, 9, 8]


class Counted:
    """A member that counts how often it is looked up."""

    lookups = 0

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __hash__(self) -> int:
        Counted.lookups += 1
        return self.rank


def test_the_time_grows_with_the_reports() -> None:
    each = []
    for n in (16, 64):
        members = [Counted(rank) for rank in range(n)]
        halves = list(product(members[: n // 2], members[n // 2 :]))
        Counted.lookups = 0
        assert len(losers(halves, lambda one: one.rank)) == n // 2
        each.append(Counted.lookups / len(halves))
    assert each[1] < 1.5 * each[0]
