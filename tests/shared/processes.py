"""Ranks in processes of their own, which write a line of JSON for whatever they have to say."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiodist

Process = asyncio.subprocess.Process


@asynccontextmanager
async def processes(
    program: str,
    size: int,
    *arguments: object,
    env: Mapping[int, Mapping[str, str]] | None = None,
) -> AsyncIterator[list[Process]]:
    """`size` processes of `program`, whose arguments are the address of a coordinator, the rank,
    and `arguments`. `env`: what is added to the environment, by rank. What still runs at the end is
    killed, with all that it has forked: that would hold the pipes, for whose end is waited."""
    clean = {name: it for name, it in os.environ.items() if not name.startswith("AIODIST_")}
    started: list[Process] = []
    try:
        async with aiodist.Coordinator() as coordinator:
            for rank in range(size):
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", program, coordinator.address, str(rank)),
                    *map(str, arguments),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={**clean, **(env or {}).get(rank, {})},
                    start_new_session=True,
                )
                started.append(process)
            yield started
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in started:
            # To the end of the pipes, so that nothing of them is left.
            await process.communicate()


async def heard(process: Process) -> Any:
    """The next that it says."""
    assert process.stdout is not None and process.stderr is not None
    said = await process.stdout.readline()
    assert said, (await process.stderr.read()).decode()
    return json.loads(said)
