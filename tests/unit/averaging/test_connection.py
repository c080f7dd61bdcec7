"""A member's connection to its averager."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

import aiodist
from aiodist.averaging.connection import MemberConnection


async def test_a_member_that_is_ruled_lost_again_and_again_is_told_in_time() -> None:
    connection = MemberConnection("outer", "tcp://127.0.0.1:1", {"timeout": 0.01})
    connection._loop = asyncio.get_running_loop()
    connection._joining = asyncio.create_task(asyncio.Event().wait())
    with pytest.raises(aiodist.JoinTimeoutError, match=r"did not let it in again within 0\.01 s"):
        await connection._joined_again()
    connection._joining.cancel()


async def test_a_member_that_joined_again_is_in() -> None:
    connection = MemberConnection("outer", "tcp://127.0.0.1:1", {})
    connection._loop = asyncio.get_running_loop()
    connection._joining = asyncio.create_task(asyncio.sleep(0))
    await connection._joined_again()
    assert connection._joining.done()


@pytest.mark.parametrize("returns", [False, True])
async def test_a_member_that_was_ruled_lost_looks_only_for_a_coordinator_that_returns(
    monkeypatch: pytest.MonkeyPatch, *, returns: bool
) -> None:
    connection = MemberConnection("outer", "tcp://127.0.0.1:1", {})
    actor = SimpleNamespace(control=SimpleNamespace(returns=returns), gone=AsyncMock())
    connection._group = cast("Any", SimpleNamespace(_actor=actor, bytes_moved=(3, 4)))
    failed: list[aiodist.AiodistError] = []
    connection.expelled, connection.failed = lambda: None, failed.append
    join = AsyncMock(side_effect=[aiodist.JoinTimeoutError("none answered"), None])
    enter = AsyncMock()
    monkeypatch.setattr(connection, "_join", join)
    monkeypatch.setattr(connection, "_enter", enter)
    await connection._join_again()
    assert connection.bytes_moved == (3, 4)  # until it is in again
    if returns:
        assert not failed
        enter.assert_awaited_once()
    else:
        assert [type(one) for one in failed] == [aiodist.CoordinatorLostError]
        assert join.await_count == 1
        enter.assert_not_awaited()
