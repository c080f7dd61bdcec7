"""What an algorithm is expected to cost: the alpha-beta-gamma model.

A round costs `alpha` seconds, a byte on the wire `beta`, a byte reduced `gamma` (Hockney, "The
communication challenge for MPP", 1994; with gamma as in Thakur et al., 2005). The result decides
between algorithms and must be the same on all ranks, so it is made of numbers that all agree on,
not of measurements of one rank.
"""

from __future__ import annotations

from typing import NamedTuple


class Network(NamedTuple):
    """The constants, in seconds."""

    alpha: float
    """A round: a frame is made, sent, and wakes the receiver."""
    beta: float
    """A byte on the wire."""
    gamma: float
    """A byte reduced."""
    frame: float
    """A further frame in the same round."""


ONE_HOST_TCP = Network(alpha=25e-6, beta=1 / 2.5e9, gamma=1 / 5e9, frame=40e-6)
"""TCP between processes of one host. On a network alpha and beta are both larger; decisions depend
on their ratio, and change little."""


def doubling_rounds(size: int) -> int:
    """Rounds of `recursive_doubling.all_reduce`."""
    folded = size & (size - 1) != 0
    return size.bit_length() - 1 + 2 * folded


def recursive_doubling(nbytes: int, size: int, network: Network) -> float:
    """Seconds of `recursive_doubling.all_reduce` for a value of `nbytes`."""
    return doubling_rounds(size) * (network.alpha + nbytes * (network.beta + network.gamma))


def reduce_scatter_all_gather(nbytes: int, size: int, network: Network) -> float:
    """Seconds of `reduce_scatter_all_gather.all_reduce` for an array of `nbytes`.

    Two rounds, each with a frame to every peer, and a grant to every peer. The root of a
    `reduce.scatter_gather` takes in as much, so it costs the same.
    """
    others = size - 1
    frames = 2 * max(0, others - 1) + others
    share = nbytes * others / size
    return 2 * network.alpha + frames * network.frame + share * (2 * network.beta + network.gamma)
