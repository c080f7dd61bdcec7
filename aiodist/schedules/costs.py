"""What plans are expected to cost: the alpha-beta-gamma model, with frames, grants and connections.

A round costs `alpha` seconds, a byte on the wire `beta`, a byte reduced `gamma` (Hockney, "The
communication challenge for MPP", 1994; with gamma as in Thakur et al., 2005). That alone would have
every large array exchanged directly by all with all. What a frame, a grant and a connection cost is
what makes other plans better where there are many ranks.

The choice must be the same on all ranks. So it is made of numbers that all agree on, and of
constants that are the same everywhere, not of measurements of one rank. Another `Costs` may be
given where all ranks have agreed on it, as on any other argument.
"""

from __future__ import annotations

from typing import NamedTuple


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


ONE_HOST_TCP = Costs(
    alpha=75e-6, frame=40e-6, grant=40e-6, connection=20e-6, beta=1 / 2.5e9, gamma=1 / 5e9
)
"""TCP between processes of one host. On a network alpha and beta are both larger; decisions depend
on their ratio, and change little."""


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
