"""The web service: averages over all workers, many at once, a killed worker, and a clean end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

import aiodist
from aiodist.launching import spawn

SERVICE = Path(__file__).parents[2] / "examples" / "service" / "average_service.py"

pytestmark = pytest.mark.timeout(120)

Environment = Callable[..., dict[str, str]]


@asynccontextmanager
async def service(
    size: int, env: dict[str, str], *options: str, port: int = 0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """The service with `size` workers: its process, and the addresses of the workers by rank."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aiodist_cli", "run", "-n", str(size), *options),
        *(str(SERVICE), "--port", str(port)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
    )
    assert process.stdout is not None
    try:
        urls = {}
        for _ in range(size):
            line = (await process.stdout.readline()).decode()
            match = re.search(r"worker (\d+) of \d+ serves (\S+)", line)
            assert match, line
            urls[int(match[1])] = match[2]
        yield process, [urls[rank] for rank in range(size)]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_averages_over_workers_while_requests_are_served(environment: Environment) -> None:
    async with service(3, environment()) as (process, urls), aiohttp.ClientSession() as session:

        async def get(url: str) -> tuple[int, object]:
            async with session.get(url) as response:
                is_json = response.content_type == "application/json"
                return response.status, await (response.json() if is_json else response.text())

        async def post(url: str, body: str) -> int:
            async with session.post(f"{url}/vector", data=body) as response:
                return response.status

        assert await get(f"{urls[1]}/average") == (409, "no worker has a vector yet")
        for body in ("[1, 2]", "nonsense", '{"a": 1}', "[null, 1, 2]", f"[1, 2, {10**400}]"):
            assert await post(urls[0], body) == 400, body

        assert await post(urls[0], "[1, 2, 3]") == 200
        assert await post(urls[2], "[3, 4, 5]") == 200
        assert await post(urls[2], "[5, 6, 7]") == 200
        expected = (200, {"average": [3.0, 4.0, 5.0], "count": 3})
        for url in urls:
            assert await get(f"{url}/average") == expected

        # Averages asked of all workers at once: each is made of all workers, in its own order.
        answers = await asyncio.gather(
            *(
                get(f"{url}/{path}")
                for _ in range(10)
                for url in urls
                for path in ("average", "health")
            )
        )
        assert answers[::2] == [expected] * 30
        assert answers[1::2] == [
            (200, {"rank": rank, "size": 3}) for _ in range(10) for rank in range(3)
        ]

        process.send_signal(signal.SIGTERM)
        out, err = await process.communicate()
        assert process.returncode == 128 + signal.SIGTERM
        stops = [f"[{rank}] worker {rank} stops" for rank in range(3)]
        assert sorted(out.decode().splitlines()) == stops
        assert err.decode() == "aiodist run: SIGTERM; ranks 0, 1 and 2 stopped\n"


def free_ports(count: int) -> int:
    """The first of so many ports in a row that no process uses now."""
    while True:
        first = spawn.free_port()
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


async def test_the_successor_of_a_killed_worker_serves_at_its_port(
    environment: Environment,
) -> None:
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        options = ("--max-restarts", "1", "--coordinator", coordinator.address)
        port = free_ports(3)
        async with service(3, environment(), *options, port=port) as (process, urls):
            assert sorted(urls) == [f"http://127.0.0.1:{port + place}" for place in range(3)]
            (group,) = coordinator.status()["groups"]
            os.kill(group["members"][0]["pid"], signal.SIGKILL)
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            assert line.endswith(f"worker 2 of 3 serves {urls[0]}\n")
            async with aiohttp.ClientSession() as session:
                for url in urls:
                    async with session.post(f"{url}/vector", data="[1, 2, 3]") as response:
                        assert response.status == 200
                async with session.get(f"{urls[0]}/average") as response:
                    assert await response.json() == {"average": [1.0, 2.0, 3.0], "count": 3}
            process.send_signal(signal.SIGTERM)
            await process.communicate()
            assert process.returncode == 128 + signal.SIGTERM
