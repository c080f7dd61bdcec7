"""The expected costs of plans: the alpha-beta-gamma model, with frames, grants and connections.

A round costs `alpha` seconds, a byte on the wire `beta`, a byte reduced `gamma` (Hockney, "The
communication challenge for MPP", 1994; with gamma as in Thakur et al., 2005). With these alone the
model would have all ranks exchange every large array directly. With many ranks other plans are
better, because each frame, grant and connection costs time, too.

All ranks must make the same choice. So it depends only on numbers that all agree on, and on
constants that are the same everywhere. A rank may be given other constants, measured on its host: a
profile. It tells all others when it joins, and all ranks use the profile of the same rank
(`agreed`). No rank uses what it alone has measured.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

PROFILE: Final = "costs:"
"""The prefix of a profile among the addresses that a member announces."""

TRIP: Final = "trip:"
"""The prefix of the time that a member measures to the coordinator and back."""

FASTEST: Final = 1.25e9
"""Bytes per second of the fastest network between ranks that are far from each other: 10 Gbit/s."""

LEAST: Final = 1e-15
"""Fewest seconds of those constants of a profile that are divided by each other; others may be
0."""

MOST: Final = 1e3
"""Most seconds."""


class Costs(NamedTuple):
    """The constants, in seconds."""

    alpha: float
    """A round: a frame is made, sent, and wakes the receiver."""
    frame: float
    """A further frame in the same round: its header, a system call or two, a step of the plan."""
    grant: float
    """A grant: a small message, which does not wait for others."""
    connection: float
    """The share of one call in the cost of a connection. To connect takes about a millisecond,
    because both ends prove who they are; a program makes about fifty calls over it."""
    beta: float
    """A byte on the wire."""
    gamma: float
    """A byte reduced."""
    trip: float = 0.0
    """The time from one rank to another and back, of the two that are farthest from each other. It
    is 0 if they are near, or if it was not measured; a profile may leave it out."""

    @property
    def way(self) -> int:
        """Most bytes that are sent and not yet answered while the wire is busy."""
        return round(self.trip * FASTEST)


ONE_HOST_TCP = Costs(
    alpha=75e-6, frame=40e-6, grant=40e-6, connection=20e-6, beta=1 / 2.5e9, gamma=1 / 5e9
)
"""TCP between processes of one host. On a network alpha and beta are both larger. Decisions depend
on their ratio, so they change little, unless a round takes many times as long."""


def parse(text: str) -> Costs:
    """Read a profile from TOML: the constants by name. Raises ValueError, which says what is wrong
    and what was expected."""
    return _checked(tomllib.loads(text))


def written(costs: Costs, comment: str = "") -> str:
    """A profile as TOML."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    names = _MEASURED if not costs.trip else Costs._fields
    lines += [f"{name} = {getattr(costs, name)!r}" for name in names]
    return "".join(f"{line}\n" for line in lines)


def said(costs: Costs) -> str:
    """A profile as a member announces it to the others."""
    return PROFILE + ",".join(map(repr, costs if costs.trip else costs[:-1]))


def said_trip(seconds: float) -> str:
    """The time to the coordinator and back, as a member announces it."""
    return f"{TRIP}{seconds:.4f}"


def agreed(members: Iterable[Sequence[str]]) -> Costs:
    """The costs that all ranks use, from what each member announces, by rank. They are the profile
    of the lowest rank that has one, and the largest distance. All ranks have the same
    announcements, so all get the same result."""
    members = tuple(members)
    costs = next(
        (costs for one in members for text in one if (costs := _heard(text))), ONE_HOST_TCP
    )
    return costs if costs.trip else costs._replace(trip=_farthest(members))


def _heard(text: str) -> Costs | None:
    """The profile that `said` made this text of, or None if it is none."""
    if not text.startswith(PROFILE):
        return None
    try:
        seconds = [float(part) for part in text.removeprefix(PROFILE).split(",")]
        return _checked(dict(zip(Costs._fields[: len(seconds)], seconds, strict=True)))
    except ValueError:
        # A text of another version, or of a foreign program: all ranks see it alike, so it counts
        # as no profile.
        return None


def _farthest(members: Iterable[Sequence[str]]) -> float:
    """The largest distance between two members, in seconds: the way through the coordinator."""
    found = [0.0, 0.0]
    for text in [text for one in members for text in one if text.startswith(TRIP)]:
        try:
            seconds = float(text.removeprefix(TRIP))
        except ValueError:
            continue  # A text of another version, or of a foreign program.
        found += [seconds] * (0 <= seconds <= MOST)
    return round(sum(sorted(found)[-2:]), 4)


def _checked(given: Mapping[str, Any]) -> Costs:
    names = _MEASURED
    if odd := set(names) ^ (set(given) - {"trip"}):
        raise ValueError(
            f"a profile of costs has {', '.join(names)} and may have trip, each in seconds; "
            f"{', '.join(sorted(odd))} is missing, or is none of these"
        )
    for name, seconds in given.items():
        least = LEAST if name in ("frame", "beta") else 0
        if type(seconds) not in (int, float) or not least <= seconds <= MOST:
            raise ValueError(
                f"{name} = {seconds!r} in a profile of costs: expected seconds, from {least:g} to "
                f"{MOST:g}"
            )
    return Costs(**{name: float(seconds) for name, seconds in given.items()})


_MEASURED: Final = Costs._fields[:-1]


class Tally(NamedTuple):
    """What the busiest rank of a plan does."""

    rounds: int
    """The longest chain of frames in which each is sent after the one before has come."""
    frames: int
    """The frames that it sends, or receives if these are more."""
    grants: int
    """The grants that it sends."""
    connections: int
    """Peers with which it exchanges frames."""
    nbytes: float
    """Bytes on the wire, one after the other: bytes that a rank cannot send while it receives count
    twice."""
    reduced: float = 0
    """Bytes of operands, except the rank's own."""
    scratch: int = 0
    """Bytes of scratch."""

    def seconds(self, costs: Costs) -> float:
        """The time that the plan is expected to take."""
        return (
            self.rounds * costs.alpha
            + max(0, self.frames - self.rounds) * costs.frame
            + self.grants * costs.grant
            + self.connections * costs.connection
            + self.nbytes * costs.beta
            + self.reduced * costs.gamma
        )
