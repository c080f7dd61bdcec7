"""A trainer gets better at digits while four web servers answer with what it has learned so far::

    python examples/digits/serving.py

Clients ask the servers (digits_server.py, each a process of its own) again and again. Meanwhile
there are new weights after each epoch, and servers are killed, and others added. No request to a
server that lives may fail, and all answers of one version have to be the same, whoever gives them.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import torch
import workload
from digits_server import CHANNEL

import aiodist

SERVERS = 4
CLIENTS = 4
ASKED = 50
"""Images of one request."""

THINKING = 0.2
"""Seconds between two requests of a client."""

PAUSE = 0.1
"""Seconds after an epoch: what others compute that is larger than these digits."""

KILLS = (5, 10)
"""The versions at which a server is killed, and another one added."""


class Servers:
    """Those that run: the process of each address."""

    def __init__(self, coordinator: str) -> None:
        self.command = [
            sys.executable,
            str(Path(__file__).with_name("digits_server.py")),
            coordinator,
        ]
        self.running: dict[str, asyncio.subprocess.Process] = {}
        self.started: list[asyncio.subprocess.Process] = []

    async def add(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *self.command, stdout=asyncio.subprocess.PIPE
        )
        self.started.append(process)
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise RuntimeError("a server did not start")
        self.running[address] = process

    async def kill(self, address: str) -> None:
        self.running.pop(address).kill()

    async def end(self) -> None:
        for process in self.started:
            if process.returncode is None:
                process.terminate()
            await process.wait()


class Clients:
    """Ask one server or the other, again and again."""

    def __init__(self, servers: Servers, images: torch.Tensor) -> None:
        self.servers = servers
        self.question = json.dumps(images.tolist())
        self.answers: dict[int, list[int]] = {}  # of each version
        self.newest: dict[str, int] = {}  # version with which each server has answered
        self.asked = 0
        self.news = asyncio.Condition()

    async def ask(self, session: aiohttp.ClientSession, address: str) -> None:
        before = self.newest.get(address, -1)
        async with session.post(f"{address}/digits", data=self.question) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
        version = answer["version"]
        if self.answers.setdefault(version, answer["digits"]) != answer["digits"]:
            raise RuntimeError(f"{address} does not answer with version {version} as others do")
        if version < before:
            raise RuntimeError(f"{address} went back from version {before} to {version}")
        async with self.news:
            self.asked += 1
            self.newest[address] = max(version, self.newest.get(address, -1))
            self.news.notify_all()

    async def go_on_asking(self, session: aiohttp.ClientSession) -> None:
        while True:
            address = random.choice([*self.servers.running])
            try:
                await self.ask(session, address)
            except aiohttp.ClientError:
                if address in self.servers.running:
                    raise
                continue  # it was killed: another one has the answer
            await asyncio.sleep(THINKING)

    async def have(self, version: int) -> None:
        """Wait for an answer of that version, or of a newer one."""
        async with self.news:
            await self.news.wait_for(lambda: max(self.answers, default=-1) >= version)

    async def have_all(self, version: int) -> None:
        """Wait until each server has answered with that version."""
        async with self.news:
            await self.news.wait_for(
                lambda: all(self.newest.get(one) == version for one in self.servers.running)
            )


async def train(
    coordinator: str, digits: workload.Digits, clients: Clients, last: asyncio.Future[int]
) -> None:
    """Publish the weights before the first epoch, and after each one; and stay."""
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    batches = list(workload.batches(len(digits.train_images)))

    def epoch(number: int) -> None:
        for batch in batches[number :: workload.EPOCHS]:
            workload.backward(model, digits.train_images[batch], digits.train_digits[batch])
            optimizer.step()

    # Arrays that share the memory of the model: `publish` copies them.
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    async with aiodist.publisher(CHANNEL, address=coordinator) as out:
        await out.publish(weights, version=0)
        await clients.have(0)
        for version in range(1, 1 + workload.EPOCHS):
            await asyncio.to_thread(epoch, version - 1)  # the loop hands weights on meanwhile
            await out.publish(weights, version=version)
            await asyncio.sleep(PAUSE)
        last.set_result(version)
        await asyncio.Event().wait()


async def disturb(servers: Servers, clients: Clients) -> None:
    for version in KILLS:
        await clients.have(version)
        await servers.kill(random.choice([*servers.running]))
        await servers.add()


async def main() -> None:
    torch.set_num_threads(1)
    digits = workload.load()
    last: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(aiodist.Coordinator("tcp://127.0.0.1:0"))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        servers = Servers(coordinator.address)
        stack.push_async_callback(servers.end)
        clients = Clients(servers, digits.test_images[:ASKED])
        async with asyncio.TaskGroup() as tasks:  # the first one that fails ends them all
            going = [tasks.create_task(train(coordinator.address, digits, clients, last))]
            await asyncio.gather(*(servers.add() for _ in range(SERVERS)))
            going += [tasks.create_task(clients.go_on_asking(session)) for _ in range(CLIENTS)]
            await disturb(servers, clients)
            newest = await last
            await clients.have_all(newest)
            for task in going:
                task.cancel()
    for version in (0, newest):
        right = torch.tensor(clients.answers[version]) == digits.test_digits[:ASKED]
        print(f"version {version}: {right.float().mean():.1%} right")
    print(
        f"{clients.asked} answers of {len(clients.answers)} versions by {len(servers.started)}"
        f" servers, of which {len(KILLS)} were killed; no request failed"
    )


if __name__ == "__main__":
    asyncio.run(main())
