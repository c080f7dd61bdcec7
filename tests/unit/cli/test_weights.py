"""`aiodist weights`: a channel begins anew, or says why not; channels are listed."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import aiodist
from aiodist.launching.spawn import free_port
from aiodist_cli import weights
from aiodist_cli.main import app


async def test_forget() -> None:
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:

        async def forget() -> tuple[int, str]:
            words = ["weights", "forget", "policy", coordinator.address]
            result = await asyncio.to_thread(CliRunner().invoke, app(), words)
            return result.exit_code, result.output

        async with aiodist.publisher("policy", address=coordinator.address) as out:
            await out.publish([1.5], version=7)
        assert await forget() == (0, "channel policy: the next version may have any number\n")
        code, text = await forget()
        assert code == 1
        assert "there is no channel 'policy' with a version, so there is nothing to" in text
        async with (
            aiodist.publisher("policy", address=coordinator.address) as out,
            aiodist.subscriber("policy", address=coordinator.address),
        ):
            assert out.newest is None
            await out.publish([1.5], version=0)
            code, text = await forget()
            assert code == 1
            assert "the channel 'policy' has a publisher already" in " ".join(
                text.replace("│", " ").split()
            )


def test_forget_does_not_wait_for_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the other commands that ask it."""
    monkeypatch.setattr(weights, "publisher", None)
    address = f"tcp://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app(), ["weights", "forget", "policy", address])
    assert result.exit_code == 1
    assert "no coordinator answered" in " ".join(result.output.replace("│", " ").split())


async def test_list_asks_the_coordinator() -> None:
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        words = ["weights", "list", coordinator.address]
        result = await asyncio.to_thread(CliRunner().invoke, app(), words)
        assert (result.exit_code, result.output) == (0, "no channels\n")
        async with aiodist.publisher("policy", address=coordinator.address):
            result = await asyncio.to_thread(CliRunner().invoke, app(), words)
            assert result.exit_code == 0
            assert "policy" in result.output


def test_list_counts_who_is_up_to_date() -> None:
    def participant(version: int | None, *, publishes: bool = False) -> dict[str, Any]:
        return {"publishes": publishes, "said": {"version": version}}

    taking = [participant(7), participant(6), participant(None)]
    silent = {"publishes": False, "said": None}
    channels = [
        {
            "name": "policy\x1b[31m",
            "newest": 7,
            "nbytes": 1_500_000,
            "participants": [participant(7, publishes=True), *taking, silent],
        },
        {"name": "empty", "newest": None, "nbytes": 0, "participants": [participant(None)]},
    ]
    console = Console(width=100, file=io.StringIO())
    console.print(weights.table({"channels": channels}))
    rows = [line.replace("│", " ").split() for line in console.file.getvalue().splitlines()[3:-1]]
    assert rows == [
        ["policy?[31m", "7", "1.5", "MB", "1", "4", "1"],
        ["empty", "0", "1"],
    ]
