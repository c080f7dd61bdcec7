"""A member's connection to its averager."""

from __future__ import annotations

import asyncio

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
