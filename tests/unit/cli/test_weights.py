"""`aiodist weights`: a channel begins anew, or says why not."""

from __future__ import annotations

import asyncio

from typer.testing import CliRunner

import aiodist
from aiodist_cli.main import app


async def test_forget() -> None:
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:

        async def forget() -> tuple[int, str]:
            words = ["weights", "forget", "policy", coordinator.address]
            result = await asyncio.to_thread(CliRunner().invoke, app, words)
            return result.exit_code, result.output

        async with aiodist.publisher("policy", address=coordinator.address) as out:
            await out.publish([1.5], version=7)
        assert await forget() == (0, "channel policy: the next version may have any number\n")
        async with (
            aiodist.publisher("policy", address=coordinator.address) as out,
            aiodist.subscriber("policy", address=coordinator.address),
        ):
            assert out.newest is None
            await out.publish([1.5], version=0)
            code, text = await forget()
            assert code == 1
            assert "has another publisher" in " ".join(text.replace("│", " ").split())
