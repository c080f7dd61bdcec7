"""Memory of versions that are over: used again, and never while somebody has it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import ChannelStage, line

import aiodist
from aiodist.channels import transfers
from aiodist.channels.meetings import Meetings

SHAPE = (300, 100)


def block(participant, version):
    """What a version lies in, if that is this process's own."""
    return participant.stock.holdings[version].memory._block


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
            blocks, trees = [], []
            for version in range(4):
                over = [one.stock.holdings.get(version - 1) for one in both]
                await out.publish({"w": np.full(SHAPE, version)}, version=version)
                trees.append((await weights.latest(newer_than=version - 1))[1])
                blocks.append([block(one, version) for one in both])
                for holding in filter(None, over):
                    await holding.gone.wait()
                if not keeps_tree:
                    trees.clear()
            ours, theirs = (set(one) for one in zip(*blocks, strict=True))
            if transports is None:  # one memory, which the subscriber maps
                assert theirs == {None}
                assert len(ours) == (4 if keeps_tree else 2)
            else:
                assert len(ours) == 2
                assert len(theirs) == (4 if keeps_tree else 2)
            for version, tree in enumerate(trees):
                assert (tree["w"] == version).all()

    run(main())


@pytest.mark.parametrize("sliced", [False, True])
def test_nothing_is_kept_of_a_version_that_was_replaced_before_all_of_it_was_here(sliced):
    """A server gives up each version after a second, and its line needs three seconds for it."""
    shape, versions = (8, 1 << 17), range(1, 6)
    stage = ChannelStage(2, seed=1, conditions=line(shape[0] * shape[1] / 3, 0.01))
    given_up = asyncio.Event()
    found = []

    async def publish():
        async with stage.publisher(keep=1) as out:
            for version in versions:
                await out.publish(np.full(shape, version, np.uint8), version=version)
                await given_up.wait()
                given_up.clear()

    async def serve():
        half = np.zeros((shape[0] // 2, shape[1]), np.uint8)
        part = aiodist.Shard(half, (slice(0, shape[0] // 2), slice(None)), shape)
        async with stage.subscriber() as weights:
            stock = weights._participant.stock
            for version in versions:
                await weights.wait(newer_than=version - 1)
                with pytest.raises(aiodist.CollectiveTimeoutError):
                    await weights.latest(into=part if sliced else None, timeout=1)
                found.append(
                    [one.version for one in (*stock.holdings.values(), *stock.lots.values())]
                )
                given_up.set()

    stage.play({0: publish(), 1: serve()})
    # The call that has been given up may still take the rest of a chunk.
    assert all(len(kept) <= 2 and kept[-1] == version for version, kept in enumerate(found, 1))


@pytest.mark.parametrize("is_offered", [True, False])
def test_who_is_on_the_publishers_host_needs_to_meet_nobody(run, monkeypatch, is_offered):
    """Its memory is fetched with the words of the release; where that fails, as from anybody."""
    met = []
    called = Meetings.called

    async def noted(participant, who):
        met.append(who)
        return await called(participant, who)

    async def refuses(words, nbytes, **options):
        raise ConnectionError("it is not there any more")

    monkeypatch.setattr(Meetings, "called", noted)

    async def main():
        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            aiodist.publisher("policy", address=coordinator.address) as out,
            aiodist.subscriber("policy", address=coordinator.address) as weights,
        ):
            await out.publish({"w": np.full(SHAPE, 1.5)}, version=1)
            with monkeypatch.context() as during:
                if not is_offered:
                    takes = transfers.take_offered

                    async def fails(holding, patience):
                        during.undo()
                        during.setattr(transfers, "take_segment", refuses)
                        try:
                            await takes(holding, patience)
                        finally:
                            during.undo()

                    during.setattr(transfers, "take_offered", fails)
                _, tree = await weights.latest()
            assert (tree["w"] == 1.5).all()
            holding = weights._participant.stock.holdings[1]
            assert not holding.memory.is_own
            assert len(met) == (0 if is_offered else 1)
            await weights._fetching.stay()  # by which others know who has it
            assert weights._participant.store.place in await out._participant.store.line(1)

    run(main())
