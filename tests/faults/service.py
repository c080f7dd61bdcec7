"""A web service under load while its workers are killed: `make service`.

Four workers serve `examples/service/starlette_app.py` by uvicorn. Each answer is a sum over all
workers. Requests come at a fixed rate, whether or not earlier ones were answered, and go to the
workers in turn. Undisturbed rounds and rounds with kills alternate, so a busy hour of the machine
slows down both. In a round with kills, a worker is killed with SIGKILL every few seconds, and a
warm process forks a new one.

A request may fail only if its own worker was killed. Every answer has to be right: it counts all
requests that living workers had answered before, and none that was not sent yet.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import aiohttp
import numpy as np

import aiodist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2] / "examples" / "service"))

from service_worker import worker

WORKERS = 4
PATIENCE = 60.0
"""Seconds within which a request has to be answered; much longer than a busy machine needs."""


class Worker:
    """One process of the service, and what was asked of it."""

    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("forkserver")
        self._port, theirs = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(target=worker, args=(address, theirs))
        self.process.start()
        theirs.close()
        self.url = ""
        self.begun = 0
        self.answered = 0
        self.is_killed = False

    async def listens(self) -> None:
        """Wait until it takes connections."""
        self.url = f"http://127.0.0.1:{await asyncio.to_thread(self._port.recv)}/visits"
        self._port.close()

    async def end(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        await asyncio.to_thread(self.process.join, PATIENCE)
        assert self.process.exitcode == -number, self.process.exitcode


class Service:
    """The workers, those that ask them, and how long each answer took.

    `members` are the processes that live, and `ready` those of them that have answered once.
    """

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self.members: list[Worker] = []
        self.ready: list[Worker] = []
        self.kills = 0
        self.lost = 0
        """Requests that failed because their worker was killed."""
        self.failed: list[str] = []
        """Why other requests failed."""
        self._address = address
        self._session = session
        self._turns = itertools.count()

    async def add(self) -> None:
        new = Worker(self._address)
        self.members.append(new)
        await new.listens()
        await self.ask(new)
        if not new.is_killed:
            self.ready.append(new)

    async def kill(self, victim: Worker) -> None:
        victim.is_killed = True
        self.members.remove(victim)
        self.ready.remove(victim)
        self.kills += 1
        await victim.end(signal.SIGKILL)

    async def ask(self, worker: Worker) -> bool:
        """Send one request, and check its answer. False: there was none.

        Raises AssertionError if the answer is wrong.
        """
        members, answered = list(self.members), {one: one.answered for one in self.ready}
        answered[worker] = worker.answered + 1
        worker.begun += 1
        try:
            async with self._session.get(worker.url) as response:
                response.raise_for_status()
                found = (await response.json())["visits"]
        except (aiohttp.ClientError, TimeoutError) as error:
            if worker.is_killed:
                self.lost += 1
            else:
                self.failed.append(f"worker {worker.process.pid}: {error!r}")
            return False
        worker.answered += 1
        least = sum(count for one, count in answered.items() if not one.is_killed)
        most = sum(one.begun for one in {*members, *self.members})
        assert least <= found <= most, f"{found} visits, not {least} to {most}"
        return True

    async def load(self, seconds: float, rate: float) -> list[float]:
        """Send requests at this rate. Returns the seconds until each answer.

        They count from the moment at which the request was due, so that a client that is late
        itself hides nothing.
        """
        took: list[float] = []
        loop = asyncio.get_running_loop()

        async def one(due: float) -> None:
            if await self.ask(self.ready[next(self._turns) % len(self.ready)]):
                took.append(loop.time() - due)

        begin = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(seconds * rate)):
                due = begin + number / rate
                await asyncio.sleep(due - loop.time())
                tasks.create_task(one(due))
        return took

    async def disturb(self, seconds: float, every: float, chooser: random.Random) -> None:
        """Kill workers for so long, and replace them. Returns when all of them are there again."""
        loop = asyncio.get_running_loop()
        due, end = loop.time(), loop.time() + seconds
        async with asyncio.TaskGroup() as tasks:
            while (due := due + every * chooser.uniform(0.5, 1.5)) < end:
                await asyncio.sleep(due - loop.time())
                if len(self.ready) > 1:
                    await self.kill(chooser.choice(self.ready))
                    tasks.create_task(self.add())

    async def end(self) -> None:
        await asyncio.gather(*(one.end(signal.SIGTERM) for one in self.members))

    def clean(self) -> None:
        for one in self.members:
            one.process.kill()
            one.process.join()


async def run(given: argparse.Namespace) -> dict[str, object]:
    """What was measured. Raises AssertionError if anything is wrong."""
    chooser = random.Random(given.seed)
    calm: list[float] = []
    disturbed: list[float] = []
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with (
        aiodist.Coordinator() as coordinator,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
    ):
        service = Service(coordinator.address, session)
        try:
            await asyncio.gather(*(service.add() for _ in range(WORKERS)))
            await service.load(1.0, given.rate)  # so that all is warm
            for _ in range(given.rounds):
                calm += await service.load(given.seconds, given.rate)
                disturbing = service.disturb(given.seconds, given.every, chooser)
                both = await asyncio.gather(service.load(given.seconds, given.rate), disturbing)
                disturbed += both[0]
            await service.end()
            assert coordinator.status()["groups"] == [], "a worker has not left in order"
            assert not service.failed, service.failed
        finally:
            service.clean()
    rows = {"undisturbed": calm, "with kills": disturbed}
    return {
        "kills": service.kills,
        "failed requests of killed workers": service.lost,
        "failed requests of others": len(service.failed),
        **{name: row(took) for name, took in rows.items()},
    }


def row(took: list[float]) -> dict[str, float]:
    median, most, worst = np.quantile(took, [0.5, 0.99, 1.0]) * 1e3
    found = {"median, ms": median, "p99, ms": most, "longest, ms": worst}
    return {"answers": len(took)} | {name: round(float(one), 2) for name, one in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of both kinds, in turns")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each round")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--rate", type=float, default=50.0, help="requests in a second")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    # For the warm process, which is started by the first worker.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["service_worker"])
    print(json.dumps(asyncio.run(run(given)), indent=2))


if __name__ == "__main__":
    main()
