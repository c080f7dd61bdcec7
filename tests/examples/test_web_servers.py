"""The service under real servers, by Starlette and FastAPI: four workers, under load, while some
are killed, and while all are reloaded; and workers that are ended while they start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

import aiodist

SERVICE = Path(__file__).parents[2] / "examples" / "service"
WORKERS = 4

pytestmark = pytest.mark.timeout(180)

SERVERS = {
    "uvicorn": ["--host", "127.0.0.1", "--workers", str(WORKERS), "--timeout-keep-alive", "180"],
    "gunicorn": [
        *("-k", "asgi", "--asgi-loop", "asyncio", "-w", str(WORKERS)),
        *("--no-control-socket", "--keep-alive", "180", "--graceful-timeout", "170"),
    ],
}
"""Clients are idle for longer than the servers would keep their connections on a busy machine, and
would be at another worker then. A worker of gunicorn that does not end makes a test hang."""


@asynccontextmanager
async def served(
    server: str, app: str, port: int, env: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The service at `port`, for as long as this lasts. Its workers say what they do."""
    where = ["--port", str(port)] if server == "uvicorn" else ["-b", f"127.0.0.1:{port}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", server, *SERVERS[server], *where, "--log-level", "warning"),
        f"{app}:app",
        cwd=SERVICE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )
    try:
        yield process
        process.terminate()
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
    finally:
        with contextlib.suppress(ProcessLookupError):  # nobody of it is left
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


async def together(server: asyncio.subprocess.Process, *but: int) -> set[int]:
    """Until all workers are in one epoch: their processes. `but` are none of them."""
    epochs: dict[str, set[int]] = {}
    assert server.stdout is not None
    while line := (await server.stdout.readline()).decode():
        if match := re.match(rf"epoch (\d+): worker (\d+) is one of {WORKERS}", line):
            here = epochs.setdefault(match[1], set())
            here.add(int(match[2]))
            if len(here) == WORKERS and here.isdisjoint(but):
                return here
        else:
            print(line, end="")
    raise AssertionError("the server has ended")


async def listening(port: int) -> None:
    """Until the server takes connections. Workers of uvicorn have joined the group before that."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            continue
        writer.close()
        return


class Client:
    """Asks over one connection, and so always the same worker: again and again, while `going`."""

    def __init__(self, url: str, going: asyncio.Event) -> None:
        self.url = url
        self.going = going
        self.worker = 0
        self.asked = 0
        self.failed: Exception | None = None
        self.new = asyncio.Event()
        self.task = asyncio.ensure_future(self.run())

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            try:
                while True:
                    async with session.get(self.url) as response:
                        assert response.status == 200, await response.text()
                        answer = await response.json()
                    assert self.worker in (0, answer["worker"])
                    self.worker = answer["worker"]
                    self.asked += 1
                    self.new.set()
                    await self.going.wait()
            except (aiohttp.ClientError, AssertionError) as error:
                self.failed = error
                self.new.set()

    async def answered(self, more: int = 1) -> None:
        """So many times more; or it has failed."""
        enough = self.asked + more
        while self.failed is None and self.asked < enough:
            self.new.clear()
            await self.new.wait()


class Load:
    """Clients of all workers, at least one of each."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.going = asyncio.Event()
        self.clients: list[Client] = []

    async def reach(self, workers: set[int]) -> None:
        """Until there are clients of all of these. Who gets a connection is the kernel's choice."""
        while {client.worker for client in self.clients} != workers:
            self.clients += [client := Client(self.url, self.going)]
            await client.answered()
            assert client.failed is None

    async def go_on(self) -> None:
        """Until each has got some more answers, if its worker lives."""
        self.going.set()
        for client in self.clients:
            await client.answered(3)

    async def end_of(self, worker: int) -> None:
        """Until all clients of this worker have failed, and nobody else has."""
        its = [client for client in self.clients if client.worker == worker]
        assert its
        await asyncio.wait([client.task for client in its])
        assert [client for client in self.clients if client.failed] == its
        self.clients = [client for client in self.clients if client not in its]

    async def end(self) -> None:
        for client in self.clients:
            client.task.cancel()
        await asyncio.wait([client.task for client in self.clients])


BOOTING = """
import os, signal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("booting", flush=True)
signal.sigwait({signal.SIGTERM})
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
os.kill(os.getpid(), signal.SIGTERM)
from starlette_app import app
"""
"""An application that gets the SIGTERM of the server while its worker imports it."""


@pytest.mark.timeout(60)
async def test_workers_that_are_ended_while_they_start(
    environment: Callable[..., dict[str, str]], free_port: int, tmp_path: Path
) -> None:
    (tmp_path / "booting.py").write_text(BOOTING)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    async with aiodist.Coordinator() as coordinator:
        env = environment(AIODIST_ADDRESS=coordinator.address, PYTHONPATH=paths)
        async with served("gunicorn", "booting", free_port, env) as service:
            assert service.stdout is not None
            for _ in range(WORKERS):
                assert await service.stdout.readline() == b"booting\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("server", "app"),
    [
        ("uvicorn", "fastapi_app"),
        ("uvicorn", "starlette_app"),
        ("gunicorn", "starlette_app"),
    ],
)
async def test_workers_come_and_go_under_load(
    server: str, app: str, environment: Callable[..., dict[str, str]], free_port: int
) -> None:
    async with aiodist.Coordinator() as coordinator:
        env = environment(AIODIST_ADDRESS=coordinator.address)
        load = Load(f"http://127.0.0.1:{free_port}/visits")
        async with served(server, app, free_port, env) as service:
            workers = await together(service)
            await listening(free_port)
            await load.reach(workers)
            try:
                # SIGKILL: it is gone. SIGTERM: it ends in order. Another one takes its place.
                for number in (signal.SIGKILL, signal.SIGTERM):
                    victim = min(workers)
                    await load.go_on()
                    os.kill(victim, number)
                    await load.end_of(victim)
                    await load.go_on()
                    before, workers = workers, await together(service, victim)
                    assert workers > before - {victim}
                    await load.go_on()
                    load.going.clear()
                    await load.reach(workers)
            finally:
                await load.end()
        assert coordinator.status()["groups"] == []


@pytest.mark.long
async def test_all_workers_are_reloaded_under_load(
    environment: Callable[..., dict[str, str]], free_port: int
) -> None:
    """gunicorn starts new workers at a SIGHUP, and ends the old ones in order: no request fails."""
    asked: Counter[int] = Counter()
    more = asyncio.Event()

    async def ask() -> None:
        # Each time over a connection of its own: those of workers that end are closed.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                async with session.get(f"http://127.0.0.1:{free_port}/visits") as response:
                    assert response.status == 200, await response.text()
                    asked[(await response.json())["worker"]] += 1
                more.set()

    async def answered(workers: set[int]) -> None:
        """Until each of these has answered, once more."""
        before = asked.copy()
        while any(asked[worker] == before[worker] for worker in workers):
            more.clear()
            await more.wait()

    async def reload(service: asyncio.subprocess.Process, workers: set[int]) -> None:
        await answered(workers)
        service.send_signal(signal.SIGHUP)
        await answered(await together(service, *workers))

    async with aiodist.Coordinator() as coordinator:
        env = environment(AIODIST_ADDRESS=coordinator.address)
        async with served("gunicorn", "fastapi_app", free_port, env) as service:
            workers = await together(service)
            clients = [asyncio.ensure_future(ask()) for _ in range(2 * WORKERS)]
            reloading = asyncio.ensure_future(reload(service, workers))
            # A request that fails ends this before its time.
            await asyncio.wait({reloading, *clients}, return_when=asyncio.FIRST_COMPLETED)
            for task in clients:
                assert not task.done(), task.exception()
                task.cancel()
            await asyncio.wait(clients)
            await reloading
        assert coordinator.status()["groups"] == []
