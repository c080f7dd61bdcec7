"""Memory of versions that are over: used again, and never while somebody has it."""

from __future__ import annotations

import numpy as np
import pytest

import aiodist

SHAPE = (300, 100)


def address(participant, version):
    """Where a version lies in this process."""
    return np.frombuffer(participant.holdings[version].view, np.uint8).ctypes.data


@pytest.mark.parametrize("transports", [None, ("tcp",)])
@pytest.mark.parametrize("keeps_tree", [False, True])
def test_it_is_used_again_unless_a_user_has_arrays_in_it(run, transports, keeps_tree):
    """That of the publisher, which a subscriber of its host maps, and what a subscriber has of its
    own where nothing is mapped."""

    async def main():
        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            aiodist.publisher(
                "policy", address=coordinator.address, keep=1, transports=transports
            ) as out,
            aiodist.subscriber(
                "policy", address=coordinator.address, transports=transports
            ) as weights,
        ):
            both = [one._participant for one in (out, weights)]
            places, trees = [], []
            for version in range(4):
                over = [one.holdings.get(version - 1) for one in both]
                await out.publish({"w": np.full(SHAPE, version)}, version=version)
                trees.append((await weights.latest(newer_than=version - 1))[1])
                places.append([address(one, version) for one in both])
                for holding in filter(None, over):
                    await holding.gone.wait()
                if not keeps_tree:
                    trees.clear()
            ours, theirs = (list(one) for one in zip(*places, strict=True))
            if transports is None:  # one memory, which the subscriber maps
                assert len(set(ours)) == (4 if keeps_tree else 2)
            else:
                assert len(set(ours)) == 2
                assert len(set(theirs)) == (4 if keeps_tree else 2)
            for version, tree in enumerate(trees):
                assert (tree["w"] == version).all()

    run(main())
