"""The membership of one rank: what its operations hear of the coordinator's words."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from over_links import until

import aiodist
from aiodist.control.events import CoordinatorGone
from aiodist.engine.failures import LOST, Verdict
from aiodist.errors import GroupClosedError
from aiodist.links.endpoint import FAREWELL_TIMEOUT
from aiodist.work import Work


async def test_what_waits_for_a_ruling_hears_that_its_own_rank_was_removed() -> None:
    """The connection to the coordinator ends with that word, so no other ruling is expected."""
    async with aiodist.local(2) as groups:
        actor, context = groups[1]._actor, groups[1]._context
        work: Work[Any] = Work.begin(asyncio.get_running_loop(), "all_reduce")
        verdict = Verdict(LOST, "rank 1 is lost: no sign of life", 0, {1: ""})
        context.calls.ends.hearsay.fail(work, verdict, verdict.error(1, "", {}), {})
        assert not work.done()
        actor.control.abort("its connection has ended")
        actor._on_event(CoordinatorGone("no sign of life", evicted=True))
        with pytest.raises(GroupClosedError, match="no longer a member"):
            work.result()
        await groups[1]._actor.gone()


@pytest.mark.parametrize(("op_timeout", "longest"), [(60.0, FAREWELL_TIMEOUT), (0.25, 0.25)])
async def test_peers_have_a_second_at_most_to_answer_a_goodbye(
    op_timeout: float, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was sent is with their systems by then, so a busy peer must not keep this rank."""
    async with aiodist.local(2, op_timeout=op_timeout) as groups:
        await asyncio.gather(*(group.barrier(timeout=60.0) for group in groups))
        endpoint = groups[0]._actor.endpoint
        finish, given = endpoint.finish, list[float]()

        async def noted(timeout: float) -> None:
            given.append(timeout)
            await finish(timeout)

        monkeypatch.setattr(endpoint, "finish", noted)
        await groups[0].close()
        assert [0.0 <= seconds <= longest for seconds in given] == [True]


async def test_many_that_ask_at_once_get_one_answer() -> None:
    """Unless it would come too late for one of them."""
    async with aiodist.local(3) as ranks:
        actor: Any = ranks[0]._actor
        begun: list[Any] = []
        begin = actor.control.begin
        actor.control.begin = lambda request: begun.append(request) or begin(request)
        told: list[dict[int, str]] = []
        for seconds in (3.0, 3.0, 3.0, 2.0, 3.0):
            actor.ask([1, 2], told.append, seconds)
        actor.ask([2], told.append, 3.0)
        await until(lambda: len(told) == 6)
        assert [(request.ranks, request.seconds) for request in begun] == [
            ((1, 2), 3.0),
            ((1, 2), 2.0),
            ((2,), 3.0),
        ]
        assert [sorted(texts) for texts in told].count([1, 2]) == 5
        assert not actor._asking


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_the_coordinator_hears_the_goodbye_even_if_a_listener_cannot_be_closed(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="of a test"):
        async with aiodist.local(2) as ranks:
            actor, other = ranks[0]._actor, ranks[1]._actor
            listener = actor._listeners[0]
            closed: list[object] = []

            def fails() -> None:
                closed.append(listener)
                listener.close()
                raise ValueError("of a test")

            closes = fails, lambda: closed.append(actor)
            there: list[Any] = [SimpleNamespace(close=close) for close in closes]
            monkeypatch.setattr(actor, "_listeners", there)
            if how == "abort":
                ranks[0].abort("enough")
            await asyncio.wait([asyncio.ensure_future(ranks[0].close())])
            assert closed == [listener, actor]
            assert not actor.control.is_open
            await until(lambda: 0 in (other.lost if how == "abort" else other.left))


async def test_a_question_of_an_earlier_epoch_answers_none_of_this_one() -> None:
    """It asked for ranks, and these may be other members now."""
    async with aiodist.local(2) as ranks:
        actor: Any = ranks[0]._actor
        begun: list[Any] = []
        begin = actor.control.begin
        actor.control.begin = lambda request: begun.append(request) or begin(request)
        told: list[dict[int, str]] = []
        actor.ask([1], told.append, 3.0)
        actor.adopt(actor.view)
        actor.ask([1], told.append, 4.0)
        await until(lambda: len(told) == 2)
        assert [request.ranks for request in begun] == [(1,), (1,)]
        assert not actor._asking
