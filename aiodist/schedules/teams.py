"""Teams: the ranks of each host, which share memory, and the ranks that meet between hosts.

The ranks of one host are a *team*. Data cross between hosts along columns: each rank has a place in
its team, and meets the ranks with the same place in other teams. In a smaller team a rank stands in
several columns. So every rank of a team carries other data, and no data cross twice.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

Teams = tuple[tuple[int, ...], ...]
"""The ranks of each host, ascending; hosts in the order of their lowest ranks. A host with very
many ranks counts as several, see `parted`."""


def teams_of(hosts: Collection[object]) -> Teams:
    """The teams of ranks 0, 1, …, which are on `hosts`."""
    found: dict[object, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return tuple(map(tuple, found.values()))


def parted(teams: Teams, most: int) -> Teams:
    """The same ranks in teams of at most `most`. A larger team is cut into parts of about equal
    size, which exchange data as the teams of several hosts do."""
    parts = []
    for team in teams:
        count = -(-len(team) // most)
        bounds = [len(team) * part // count for part in range(count + 1)]
        parts += [team[start:stop] for start, stop in pairwise(bounds)]
    return tuple(sorted(parts))


def spans_hosts(teams: Teams) -> bool:
    """Whether there are several hosts, or one with more ranks than can be in a team."""
    return len(teams) > 1


def in_order(teams: Teams) -> bool:
    """Whether reducing team by team keeps the order of the ranks."""
    ranks = [rank for team in teams for rank in team]
    return ranks == sorted(ranks)


class TeamView(NamedTuple):
    """The place of a rank among `teams`."""

    teams: Teams
    rank: int
    host: int
    """The index of its team."""
    team: tuple[int, ...]
    mates: tuple[int, ...]
    """The others of its team, from the next one on, so that not all ranks begin with the same
    one."""
    seats: tuple[int, ...]
    """The place of each rank in its team."""

    @property
    def size(self) -> int:
        return sum(map(len, self.teams))

    def agent(self, host: int, rank: int) -> int:
        """The agent of `rank` on `host`: the rank in the same column. On its own host `rank` is its
        own agent."""
        team = self.teams[host]
        return team[self.seats[rank] % len(team)]

    def duties(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` is the agent of on its host, itself included, ascending."""
        return _duties(self.teams)[rank]

    def abroad(self) -> tuple[int, ...]:
        """The other hosts, from the next one on."""
        hosts = len(self.teams)
        return tuple((self.host + distance) % hosts for distance in range(1, hosts))


@lru_cache(maxsize=64)
def team_view(teams: Teams, rank: int) -> TeamView:
    """The view of `rank`. Raises ValueError if it is in no team."""
    for host, team in enumerate(teams):
        if rank in team:
            at = team.index(rank)
            return TeamView(teams, rank, host, team, team[at + 1 :] + team[:at], _seats(teams))
    raise ValueError(f"rank {rank} is in none of the teams {teams}")


@lru_cache(maxsize=64)
def _seats(teams: Teams) -> tuple[int, ...]:
    """The place of each rank in its team."""
    seats = {rank: at for team in teams for at, rank in enumerate(team)}
    return tuple(seats[rank] for rank in range(len(seats)))


@lru_cache(maxsize=64)
def _duties(teams: Teams) -> tuple[tuple[int, ...], ...]:
    """The duties of each rank, see `TeamView.duties`."""
    seats = _seats(teams)
    duties: list[list[int]] = [[] for _ in seats]
    for rank, at in enumerate(seats):
        for team in teams:
            duties[team[at % len(team)]].append(rank)
    return tuple(map(tuple, duties))


def most_duties(teams: Teams) -> int:
    """How many duties the rank with most of them has."""
    return max(map(len, _duties(teams)))
