"""The membership of one rank: what its operations hear of the coordinator's words."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiodist
from aiodist.control.events import CoordinatorGone
from aiodist.engine.failures import LOST, Verdict
from aiodist.errors import GroupClosedError
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
