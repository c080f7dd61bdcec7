"""How calls of torchrun's store end: with the process, and if the store does not answer."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.coordinator.agent_store import AgentStore, Notice
from aiodist.errors import JoinTimeoutError
from aiodist.wire.address import Address

PROGRAM = """
import asyncio, atexit, threading
from aiodist.coordinator.agent_store import AgentStore
from aiodist.wire.address import Address

entered, over = threading.Event(), threading.Event()

def slow():
    entered.set()
    over.wait()
    print("the call has returned", flush=True)

async def main():
    store = AgentStore(Address("tcp", "127.0.0.1", 29500), "key")
    calling = asyncio.create_task(store._call(slow))
    await asyncio.to_thread(entered.wait)
    calling.cancel()

asyncio.run(main())
atexit.register(over.set)  # runs before what was registered earlier
"""


def test_the_end_of_the_process_waits_for_a_call_that_was_cancelled() -> None:
    """torch's client would abort a process that ends while a call returns."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the call has returned\n", "")


async def test_who_publishes_hears_that_the_store_does_not_answer() -> None:
    over = threading.Event()

    class Silent(AgentStore):
        async def _open(self, timeout: float) -> None:
            await self._call(over.wait)

    store = Silent(Address("tcp", "127.0.0.1", 29500), "key")
    try:
        with pytest.raises(JoinTimeoutError, match=r"29500 did not answer within 0.01 s"):
            await store.publish(Notice("tcp://127.0.0.1:1", "run"), 0.01)
    finally:
        over.set()


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
async def test_a_rank_may_wait_for_ever(timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []

    def store(host: str, port: int, **options: Any) -> Any:
        made.append(options["timeout"].total_seconds())
        return SimpleNamespace(check=lambda keys: True, get=lambda key: b"tcp://127.0.0.1:1 run")

    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(TCPStore=store))
    found = await AgentStore(Address("tcp", "127.0.0.1", 29500), "key").read(timeout)
    assert (found, made) == (Notice("tcp://127.0.0.1:1", "run"), [1e6])
