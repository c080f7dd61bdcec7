"""A rank that leaves: what it has sent arrives, however busy its receiver is; or `close` says what
was not taken, and by whom."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.testing import Conditions, Simulation

COUNT, TAGS = 200, 50
BUSY = 60.0


def simulated(**options: Any) -> Simulation:
    conditions = Conditions(delay=(20e-6, 200e-6), loss=0.0)
    return Simulation(2, conditions=conditions, lease=5.0, **{"op_timeout": 600.0, **options})


class Pair:
    """Rank 0 sends to rank 1, which is busy for a minute, and leaves. `after`: when it has left."""

    def __init__(self, simulation: Simulation, *, linked: bool, stops: bool = False) -> None:
        self.simulation = simulation
        self.receiver = simulation.nodes[1]
        self.linked = linked
        self.begin = self.receiver.stop if stops else self.receiver.block
        self.after = 0.0
        self.error: BaseException | None = None

    async def sender(self, group: aiodist.Group) -> None:
        network = self.simulation.network
        if self.linked:
            await group.barrier()
        await group.store.wait("busy")
        network.later_by(0.0, self.begin)
        network.later_by(BUSY, self.receiver.resume)
        await asyncio.sleep(0.001)
        await asyncio.gather(*(group.send(np.full(250, k), 1, tag=k % TAGS) for k in range(COUNT)))
        try:
            await group.close()
        except aiodist.AiodistError as error:
            self.error = error
        self.after = network.loop.time()

    async def taker(self, group: aiodist.Group) -> list[int]:
        if self.linked:
            await group.barrier()
        await group.store.set("busy", b"")
        await asyncio.sleep(0.01)  # it is amid that when it becomes busy
        return [int((await group.recv(src=0, tag=k % TAGS))[0]) for k in range(COUNT)]

    async def __call__(self, group: aiodist.Group) -> Any:
        return await (self.taker(group) if group.rank else self.sender(group))


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "first contact"])
def test_what_it_sent_arrives(linked: bool) -> None:
    simulation = simulated()
    pair = Pair(simulation, linked=linked)
    assert simulation.run(pair)[1] == [*range(COUNT)]
    assert pair.error is None


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "first contact"])
def test_what_was_not_taken_by_the_deadline(linked: bool) -> None:
    simulation = simulated(op_timeout=20.0)
    pair = Pair(simulation, linked=linked)
    simulation.run(pair)
    assert isinstance(pair.error, aiodist.CollectiveTimeoutError)
    assert pair.error.missing == (1,)
    assert pair.error.op == "close"
    assert "had been taken within 20 s: not " in str(pair.error)
    assert "bytes by rank 1 (" in str(pair.error)
    assert 20.0 < pair.after < 24.0


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "first contact"])
def test_a_receiver_that_dies_does_not_hold_it_up(linked: bool) -> None:
    simulation = simulated()
    simulation.network.later_by(10.0, simulation.nodes[1].kill)
    pair = Pair(simulation, linked=linked)
    simulation.run(pair)
    assert pair.error is None
    assert 10.0 < pair.after < 11.0


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "first contact"])
def test_a_receiver_that_is_evicted_does_not_hold_it_up(linked: bool) -> None:
    simulation = simulated()
    pair = Pair(simulation, linked=linked, stops=True)
    simulation.run(pair)
    assert pair.error is None
    assert 3.0 < pair.after < 8.0


def test_abort_is_immediate_also_amid_close() -> None:
    simulation = simulated()
    pair = Pair(simulation, linked=True)

    async def main(group: aiodist.Group) -> Any:
        if not group.rank:
            asyncio.get_running_loop().call_later(10.0, group.abort)
        try:
            return await pair(group)
        except aiodist.PeerLostError:
            return "lost"

    simulation.run(main)
    assert isinstance(pair.error, aiodist.CollectiveTimeoutError)
    assert 10.0 < pair.after < 12.0


def test_ranks_that_leave_at_about_the_same_time_do_not_wait_for_each_other() -> None:
    async def main(group: aiodist.Group) -> float:
        await group.barrier()
        work = group.all_reduce(np.ones(40_000))
        if group.rank == 1:
            work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await group.close()
        return loop.time() - began

    for seed in range(10):
        conditions = Conditions(delay=(20e-6, 2e-3), loss=0.0)
        simulation = Simulation(4, seed=seed, conditions=conditions, lease=5.0, op_timeout=600.0)
        assert max(simulation.run(main)) < 1.0


@pytest.mark.parametrize("how", ["raises", "aborts", "raises in a task group"])
def test_who_aborts_is_no_alarm(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its coordinator tells that from a crash, and so does whoever reads what that has logged."""
    caplog.set_level(logging.INFO, "aiodist.coordinator")

    async def fail() -> None:
        raise ValueError("no")

    async def body(group: aiodist.Group) -> None:
        await group.barrier()
        if group.rank == 1 and how == "aborts":
            group.abort("ValueError: no")
        elif group.rank == 1 and how == "raises in a task group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
        elif group.rank == 1:
            raise ValueError("no")
        else:
            await group.barrier()

    simulation = Simulation(3, conditions=Conditions(delay=(20e-6, 200e-6), loss=0.0))
    first, _, third = simulation.run(body)
    for error in (first, third):
        assert isinstance(error, aiodist.PeerLostError)
        assert error.ranks == (1,)
        assert "ValueError: no" in str(error)
    said = {
        record.__dict__["rank"]: (record.levelname, record.__dict__["reason"])
        for record in caplog.records
        if record.__dict__["event"] in ("lost", "aborted")
    }
    assert said[1] == ("INFO", "it aborted: ValueError: no")
    assert {level for level, _ in said.values()} == {"INFO"}
    assert sorted(said) == [0, 1, 2]  # theirs is a PeerLostError that nobody has caught


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_mismatch_that_no_rank_catches(size: int, calls_before: int) -> None:
    """The rank that finds it leaves at once, perhaps before it has links to all others."""

    async def body(group: aiodist.Group) -> None:
        for _ in range(calls_before):
            await group.barrier()
        await group.all_reduce(np.ones(4 if group.rank else 5))

    for seed in range(5):
        simulation = Simulation(size, seed=seed, conditions=Conditions(loss=0.0))
        for outcome in simulation.run(body):
            assert isinstance(outcome, aiodist.MismatchError)


@pytest.mark.parametrize(
    ("size", "delay", "seeds"),
    [
        (6, 2e-3, [0, 1, 2]),  # it has heard of several when it leaves
        (3, 2e-3, [8, 48]),  # others make a link to it once it has left
        (3, 20e-3, [4, 44]),  # they have no link to it: the coordinator says that it has left
    ],
)
def test_mismatches_that_ranks_catch_before_they_leave(
    size: int, delay: float, seeds: list[int]
) -> None:
    """A rank that hears late sees the mismatches, not that the others have left."""

    async def body(group: aiodist.Group) -> None:
        for _ in range(3 if size == 6 else 1):
            with pytest.raises(aiodist.MismatchError):
                await group.scan(np.ones(10 if group.rank else 11), tag="t")

    for seed in seeds:
        conditions = Conditions(delay=(20e-6, delay), loss=0.0)
        assert Simulation(size, seed=seed, conditions=conditions).run(body) == [None] * size


def test_who_waits_for_a_rank_that_aborts_goes_on_with_shrink() -> None:
    """Amid an operation it hears of that by the verdict on it, and else by the farewell."""

    async def body(group: aiodist.Group) -> Any:
        await group.barrier()
        if group.rank == 1:
            work = group.all_reduce(1)
            group.abort("no more")
            assert work.exception() is not None or work.result() == 3
            return None
        try:
            while True:
                await group.all_reduce(1)
        except aiodist.GroupBrokenError:
            return await (await group.shrink()).all_reduce(1)

    for seed in range(5):
        simulation = Simulation(3, seed=seed, conditions=Conditions(loss=0.0))
        assert simulation.run(body) == [2, None, 2]


def test_what_is_cancelled_after_a_loss_ends_by_the_loss() -> None:
    """Programs cancel what is pending because another operation has failed by the loss."""

    async def body(group: aiodist.Group) -> Any:
        await group.barrier()
        if group.rank == 2:
            await asyncio.sleep(1.0)
        work = group.all_reduce(1, tag="x")
        if group.rank == 1:
            await asyncio.sleep(0.1)
            simulation.nodes[1].kill()
        if group.rank == 0:
            await asyncio.sleep(0.5)
            assert 1 in group.lost
            assert work.cancel()  # rank 1 had entered it, so it waits for rank 2 alone
            await asyncio.sleep(1.0)
        try:
            await work
        except (aiodist.PeerLostError, asyncio.CancelledError):
            return await (await group.shrink()).all_reduce(1)

    simulation = Simulation(3, conditions=Conditions(loss=0.0))
    first, _, third = simulation.run(body)
    assert (first, third) == (2, 2)


def test_who_is_killed_is_one(caplog: pytest.LogCaptureFixture) -> None:
    async def body(group: aiodist.Group) -> None:
        await group.barrier()
        if group.rank == 1:
            simulation.nodes[1].kill("reset")
        await group.barrier()

    simulation = Simulation(2, conditions=Conditions(delay=(20e-6, 200e-6), loss=0.0))
    simulation.run(body)
    [lost] = [one for one in caplog.records if one.name == "aiodist.coordinator"]
    assert (lost.levelname, lost.__dict__["rank"]) == ("WARNING", 1)
    assert lost.message.startswith("lost: ")


def meeting(size: int) -> Simulation:
    return Simulation(size, conditions=Conditions(delay=(20e-6, 200e-6), loss=0.0), lease=5.0)


def served(size: int, *, large: bool = False, part: bool = False) -> list[Any]:
    """What rank 0 receives from whoever is next, while the others leave one after the other.

    `part`: in a subgroup of all, which each leaves while it stays in the whole one.
    """

    async def main(whole: aiodist.Group) -> list[Any]:
        group = await whole.subgroup(range(size)) if part else whole
        found: list[Any] = []
        if group.rank:
            # The last one is slow: nothing of it is there when the first have left.
            await asyncio.sleep(float(group.rank))
            for k in range(3):
                await group.send(np.full(100_000 if large else 2, k), 0, tag="work")
            await group.close()
            await whole.close()
            return found
        with pytest.raises(aiodist.PeerLostError, match="no rank is left that could") as end:
            async for _, source, _ in group.messages(tag="work"):
                found.append(source)
        assert end.value.ranks == tuple(range(1, size))
        return found

    return meeting(size).run(main)[0]


@pytest.mark.parametrize("part", [False, True], ids=["the group", "a subgroup"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_server_outlives_those_who_leave_in_order(size: int, large: bool, part: bool) -> None:
    assert served(size, large=large, part=part) == [r for r in range(1, size) for _ in range(3)]


def test_what_has_come_of_one_that_left_is_received_first() -> None:
    async def main(group: aiodist.Group) -> list[Any]:
        if group.rank == 1:
            await asyncio.gather(*(group.send(k, 0) for k in range(5)))
        elif group.rank == 2:
            await asyncio.sleep(2.0)
            await group.send("last", 0)
        else:
            await asyncio.sleep(1.0)  # rank 1 has left
            assert group.lost == {1: "it left the group"}
            return [await group.recv() for _ in range(6)]
        return []

    assert meeting(3).run(main)[0] == [0, 1, 2, 3, 4, "last"]


@pytest.mark.parametrize("how", ["killed", "aborts", "evicted"])
def test_one_that_is_lost_fails_a_receive_from_anybody(how: str) -> None:
    async def main(group: aiodist.Group) -> Any:
        await group.barrier()
        if group.rank == 1:
            return None  # it leaves in order
        if group.rank == 2:
            await asyncio.sleep(1.0)
            node = simulation.nodes[2]
            if how == "aborts":
                group.abort("no more")
            elif how == "killed":
                node.kill("reset")
            else:  # it is stopped for longer than its lease, and hears so when it goes on
                simulation.network.later_by(30.0, node.resume)
                node.stop()
            await asyncio.sleep(60.0)
        with pytest.raises(aiodist.PeerLostError) as caught:
            await group.recv()
        return caught.value.ranks

    simulation = meeting(4)
    outcomes = simulation.run(main)
    assert outcomes[0] == outcomes[3] == (2,)


LARGE = 100_000
"""The numbers in an array that stays with its sender until a receive takes it."""


def pair(op_timeout: float = 20.0) -> Simulation:
    conditions = Conditions(delay=(20e-6, 200e-6), loss=0.0)
    return Simulation(2, conditions=conditions, op_timeout=op_timeout)


@pytest.mark.parametrize("how", ["send", "isend", "ssend"])
def test_close_tells_of_a_send_that_ends_by_its_deadline(how: str) -> None:
    async def main(group: aiodist.Group) -> Any:
        if group.rank:
            await asyncio.sleep(60.0)
            return None
        getattr(group, how)(np.zeros(LARGE), 1, tag="precious")
        with pytest.raises(aiodist.CollectiveTimeoutError):
            await group.close()
        assert group.closed
        return None

    error, _ = pair().run(main)
    assert isinstance(error, aiodist.CollectiveTimeoutError)  # `async with` raises it, too
    assert (error.missing, error.op) == ((1,), "close")
    assert "800,000 bytes of " in str(error)
    assert "send tag 'precious' (not matched by rank 1 (" in str(error)


def test_close_tells_of_a_send_whose_receiver_closes_first() -> None:
    async def main(group: aiodist.Group) -> Any:
        if group.rank:
            await asyncio.sleep(1.0)
            return None
        group.send(np.zeros(LARGE), 1)
        await group.close()

    error, _ = pair().run(main)
    assert isinstance(error, aiodist.PeerLostError)
    assert error.ranks == (1,)
    assert "800,000 bytes of send tag 0 (rank 1 is lost: " in str(error)


@pytest.mark.parametrize("more", [0, 2])
def test_close_tells_of_four_sends_and_counts_the_others(more: int) -> None:
    async def main(group: aiodist.Group) -> Any:
        if group.rank:
            await asyncio.sleep(1.0)
            return None
        for tag in range(4 + more):
            group.send(np.zeros(LARGE), 1, tag=tag)
        await group.close()

    text = str(pair().run(main)[0])
    assert [f"bytes of send tag {tag} (" in text for tag in range(6)] == 4 * [True] + 2 * [False]
    assert (f", {more} more sends" in text) is ("more" in text) is (more > 0)


def test_close_names_ranks_of_its_own_group() -> None:
    """The send is one of a subgroup, and the subgroup ends with the group that it was made of."""

    async def main(group: aiodist.Group) -> Any:
        other = await group.subgroup([1, 0])
        if group.rank:
            await asyncio.sleep(60.0)
            return None
        other.send(np.zeros(LARGE), 0)
        with pytest.raises(aiodist.CollectiveTimeoutError, match="in group 'world/subgroup'"):
            await group.close()
        return None

    error, _ = pair().run(main)
    assert error.missing == (1,)


@pytest.mark.parametrize("seconds", [1.0, 60.0], ids=["lost", "late"])
@pytest.mark.parametrize("how", ["wait", "gather"])
def test_close_does_not_tell_what_a_task_hears_of_its_send(how: str, seconds: float) -> None:
    async def main(group: aiodist.Group) -> Any:
        if group.rank:
            return await asyncio.sleep(seconds)
        work, ended = group.send(np.zeros(LARGE), 1), asyncio.Event()
        if how == "gather":  # it looks at the send only once all have ended
            hearing: Any = asyncio.gather(work, ended.wait(), return_exceptions=True)
        else:
            hearing = asyncio.gather(work.wait(), return_exceptions=True)
        await asyncio.sleep(0)
        await group.close()
        ended.set()
        return type((await hearing)[0])

    kind = aiodist.PeerLostError if seconds < 20.0 else aiodist.CollectiveTimeoutError
    assert pair().run(main)[0] is kind


def test_a_group_that_is_revoked_while_it_closes_is_closed() -> None:
    async def main(group: aiodist.Group) -> Any:
        made = await group.dup()
        if group.rank:
            await asyncio.sleep(1.0)
            made.revoke()
            return None
        made.send(np.zeros(LARGE), 1)
        await made.close()
        assert made.closed and made.revoked
        with pytest.raises(aiodist.GroupClosedError):
            await made.barrier()
        return "closed"

    assert pair().run(main)[0] == "closed"


def test_close_of_a_revoked_group_waits_for_those_that_were_made_of_it() -> None:
    async def main(group: aiodist.Group) -> Any:
        made = await group.dup()
        if group.rank:
            await asyncio.sleep(1.0)
            return (await made.recv(src=0)).size
        made.send(np.zeros(LARGE), 1)
        group.revoke()
        await group.close()
        return made.closed

    assert pair().run(main) == [True, LARGE]


def test_who_cancels_close_hears_of_its_send_by_the_next_one() -> None:
    async def main(group: aiodist.Group) -> Any:
        if group.rank:
            await asyncio.sleep(60.0)
            return None
        group.send(np.zeros(LARGE), 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(group.close(), 1.0)
        with pytest.raises(aiodist.CollectiveTimeoutError):
            await group.close()
        return None

    error, _ = pair().run(main)
    assert error.missing == (1,)


def test_a_receive_that_was_given_up_is_not_waited_for() -> None:
    """It has asked the other rank to say when it leaves, and that is too busy to answer."""
    conditions = Conditions(delay=(20e-6, 200e-6), loss=0.0)
    simulation = Simulation(3, conditions=conditions, lease=5.0, op_timeout=600.0)
    busy, network, after = simulation.nodes[2], simulation.network, []

    async def program(group: aiodist.Group) -> None:
        part = await group.dup()
        await part.barrier()
        if group.rank == 1:
            assert part._context.link(2) is None
            network.later_by(0.0, busy.block)
            network.later_by(BUSY, busy.resume)
            await asyncio.sleep(0.001)
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await part.recv(src=2, timeout=0.1)
            assert part._context.peers[2].dialing is not None
            await group.close()
            after.append(network.loop.time())
        else:
            await asyncio.sleep(0.1)

    simulation.run(program)
    assert after[0] < BUSY
