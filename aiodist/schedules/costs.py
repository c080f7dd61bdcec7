"""What plans are expected to cost: the alpha-beta-gamma model, with frames, grants and connections.

A round costs `alpha` seconds, a byte on the wire `beta`, a byte reduced `gamma` (Hockney, "The
communication challenge for MPP", 1994; with gamma as in Thakur et al., 2005). That alone would have
every large array exchanged directly by all with all. What a frame, a grant and a connection cost is
what makes other plans better where there are many ranks.

The choice must be the same on all ranks. So it is made of numbers that all agree on, and of
constants that are the same everywhere. A rank may be given others, measured where it runs: a
profile. It says so to all when it joins, and they all go by the profile of the same rank
(`agreed`). No rank goes by what it alone has measured.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

PROFILE: Final = "costs:"
"""What a member says of its profile begins so, among its addresses."""

TRIP: Final = "trip:"
"""So begins what it says of its way to the coordinator and back."""

FASTEST: Final = 1.25e9
"""Bytes per second of the fastest network between ranks that are far: 10 Gbit/s."""

LEAST: Final = 1e-15
"""Fewest seconds of the constants of a profile whose ratio is taken; others may be 0."""

MOST: Final = 1e3
"""Most seconds."""


class Costs(NamedTuple):
    """The constants, in seconds."""

    alpha: float
    """A round: a frame is made, sent, and wakes the receiver."""
    frame: float
    """A further frame in the same round: its header, a system call or two, a step of the plan."""
    grant: float
    """Telling a peer that more frames may come: a small message, which does not wait for others."""
    connection: float
    """A connection that is used for the first time costs about a millisecond: it is made, and both
    ends prove who they are. This is the share of one call, of some fifty that a program makes."""
    beta: float
    """A byte on the wire."""
    gamma: float
    """A byte reduced."""
    trip: float = 0.0
    """There and back between the two ranks that are farthest from each other. A profile need not
    have it: 0 where they are near, or nobody knows."""

    @property
    def way(self) -> int:
        """Bytes that have left and are not answered for yet, at most, where the wire is busy."""
        return round(self.trip * FASTEST)


ONE_HOST_TCP = Costs(
    alpha=75e-6, frame=40e-6, grant=40e-6, connection=20e-6, beta=1 / 2.5e9, gamma=1 / 5e9
)
"""TCP between processes of one host. On a network alpha and beta are both larger; decisions depend
on their ratio, and change little, but where a round takes many times as long."""


def parse(text: str) -> Costs:
    """The profile that is TOML: the constants by name. Raises ValueError, which says what is wrong
    and what was expected."""
    return _checked(tomllib.loads(text))


def written(costs: Costs, comment: str = "") -> str:
    """A profile as TOML."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    names = _MEASURED if not costs.trip else Costs._fields
    lines += [f"{name} = {getattr(costs, name)!r}" for name in names]
    return "".join(f"{line}\n" for line in lines)


def said(costs: Costs) -> str:
    """A profile as a member says it to the others."""
    return PROFILE + ",".join(map(repr, costs if costs.trip else costs[:-1]))


def said_trip(seconds: float) -> str:
    """The way to the coordinator and back, as a member says it."""
    return f"{TRIP}{seconds:.4f}"


def agreed(members: Iterable[Sequence[str]]) -> Costs:
    """What all ranks go by, from what each says, by rank: the profile of the lowest rank that has
    one, and how far they are from each other. All ranks have heard the same, so all come to the
    same."""
    members = tuple(members)
    costs = next(
        (costs for one in members for text in one if (costs := _heard(text))), ONE_HOST_TCP
    )
    return costs if costs.trip else costs._replace(trip=_farthest(members))


def _heard(text: str) -> Costs | None:
    """The profile that `said` made this of; None: of none."""
    if not text.startswith(PROFILE):
        return None
    try:
        seconds = [float(part) for part in text.removeprefix(PROFILE).split(",")]
        return _checked(dict(zip(Costs._fields[: len(seconds)], seconds, strict=True)))
    except ValueError:
        return None  # of a stranger version, or of nobody's `said`: to all ranks alike, no profile


def _farthest(members: Iterable[Sequence[str]]) -> float:
    """How far two members are from each other, at most: by way of the coordinator."""
    found = [0.0, 0.0]
    for text in [text for one in members for text in one if text.startswith(TRIP)]:
        try:
            seconds = float(text.removeprefix(TRIP))
        except ValueError:
            continue  # of a stranger version, or of nobody's `said`
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
    """That it sends, or receives if these are more."""
    grants: int
    """That it sends."""
    connections: int
    """Peers that it exchanges anything with."""
    nbytes: float
    """On the wire, one after the other: what a rank cannot send while it receives counts twice."""
    reduced: float = 0
    """Bytes of operands, but for the own ones."""
    scratch: int = 0
    """Bytes."""

    def seconds(self, costs: Costs) -> float:
        """What the plan is expected to take."""
        return (
            self.rounds * costs.alpha
            + max(0, self.frames - self.rounds) * costs.frame
            + self.grants * costs.grant
            + self.connections * costs.connection
            + self.nbytes * costs.beta
            + self.reduced * costs.gamma
        )
