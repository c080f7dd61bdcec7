"""Every wait has a deadline, and its error says who is missing, and what they are doing."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from idle_time import idle_time

import aiodist
from aiodist.engine import deadlines


@idle_time
async def test_connect_names_the_ranks_that_have_not_come() -> None:
    async with aiodist.Coordinator() as coordinator:
        joining = [
            aiodist.connect(coordinator.address, rank=rank, size=5, timeout=0.2) for rank in (0, 3)
        ]
        errors = await asyncio.gather(*joining, return_exceptions=True)
    for error in errors:
        assert isinstance(error, aiodist.JoinTimeoutError)
        assert isinstance(error, TimeoutError)
        assert error.missing == (1, 2, 4)
        assert "missing: ranks 1-2, 4" in str(error)


@idle_time
async def test_connect_without_a_coordinator_knows_of_nobody() -> None:
    with pytest.raises(aiodist.JoinTimeoutError) as caught:
        await aiodist.connect("tcp://127.0.0.1:9", rank=0, size=2, timeout=0.1)
    assert caught.value.missing == ()


async def _elsewhere(group: aiodist.Group) -> None:
    await group.barrier(tag="elsewhere")


@pytest.mark.parametrize("large", [False, True])
@idle_time
async def test_messages_say_what_the_other_rank_is_doing(large: bool) -> None:
    async with aiodist.local(2) as groups:
        other = asyncio.create_task(_elsewhere(groups[1]))
        await asyncio.sleep(0)
        if large:  # larger than what is sent before somebody receives
            work = groups[0].send(np.zeros(1 << 20), 1, tag="t", timeout=0.3)
        else:
            work = groups[0].recv(src=1, tag="t", timeout=0.3)
        with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
            await work
        error = caught.value
        assert error.missing == (1,)
        assert error.op == ("send" if large else "recv")
        assert "in barrier tag 'elsewhere' #0 for" in error.last_seen[1]
        assert "test_deadlines.py:" in error.last_seen[1]
        assert f"not matched by rank 1 ({error.last_seen[1]}) within 0.3 s" in str(error)
        await groups[0].barrier(tag="elsewhere")
        await other


@idle_time
async def test_a_receive_from_anyone_names_nobody() -> None:
    async with aiodist.local(2) as groups:
        with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
            await groups[0].recv(timeout=0.05)
        assert caught.value.missing == ()
        with pytest.raises(aiodist.CollectiveTimeoutError):
            await groups[0].probe(timeout=0.05)


@pytest.mark.parametrize("call", ["agree", "shrink", "rendezvous"])
@idle_time
async def test_votes_say_what_the_missing_are_doing(call: str) -> None:
    async with aiodist.local(3) as groups:
        other = asyncio.create_task(_elsewhere(groups[2]))
        await asyncio.sleep(0)
        calls = [
            getattr(groups[0], call)(timeout=0.1),
            getattr(groups[1], call)(timeout=math.inf),
        ]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        for error in errors:
            assert isinstance(error, aiodist.CollectiveTimeoutError)
            assert error.missing == (2,)
            # A shrink or rendezvous has revoked the group: the barrier has ended by then.
            assert ("elsewhere" if call == "agree" else "in no operation") in error.last_seen[2]
            assert "not called by rank 2 (in " in str(error)
        other.cancel()
        await asyncio.wait([other])
        for group in groups:
            group.abort()


@idle_time
async def test_a_question_that_fails_does_not_cost_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def inquire(*args: object) -> None:
        raise LookupError("of the question")

    told: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    monkeypatch.setattr(deadlines, "inquire", inquire)
    async with aiodist.local(2) as groups:
        with pytest.raises(aiodist.CollectiveTimeoutError, match=r"rank 1 \(no answer\)"):
            await groups[0].barrier(timeout=0.05)
    assert [type(error) for error in told] == [LookupError]


@idle_time
async def test_the_store_has_deadlines() -> None:
    async with aiodist.local(1, op_timeout=0.05) as [group]:
        with pytest.raises(aiodist.CollectiveTimeoutError, match="not all of the keys exist"):
            await group.store.wait("never")
        with pytest.raises(aiodist.CollectiveTimeoutError):
            await group.store.wait("never", timeout=0.01)
        async with group.store.watch("never", timeout=0.01) as changes:
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await anext(changes)


async def test_a_rank_needs_time_to_answer_before_it_is_taken_for_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with aiodist.local(2) as groups:
        work = groups[0].all_reduce(1)
        calls = groups[0]._context.calls
        operation = calls.find((None, work.seq))
        assert operation is not None
        asked: list[float] = []
        owner = groups[0]._context.endpoint.owner
        monkeypatch.setattr(owner, "ask", lambda roots, tell, seconds: asked.append(seconds))
        for seconds in (0.3, 0.6):  # as long as rank 1 is missing, any answer helps
            deadlines.inquire(calls, operation, seconds)
        assert asked == [0.3 * deadlines.PART, 0.6 * deadlines.PART]
        operation.heard.add(1)
        for seconds in (0.3, 0.6):
            deadlines.inquire(calls, operation, seconds)
        assert asked[2:] == [0.6 * deadlines.PART]
        assert asked[2] >= deadlines.LEAST_SILENCE
        assert await asyncio.gather(work, groups[1].all_reduce(2)) == [3, 3]
