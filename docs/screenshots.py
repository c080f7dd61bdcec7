"""Pictures of the coordinator's page, for docs/monitoring.md: `make screenshots`.

What they show is simulated: five minutes of a training job in virtual time, with what can go wrong
in it. The coordinator, the ranks and the page are the real ones. Needs Chromium
(``apt-get install chromium``).
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from aiohttp import web

import aiodist
from aiodist.testing import Network, Simulation, VirtualLoop
from aiodist_server.averagers import averagers
from aiodist_server.channels import Channels
from aiodist_server.history import History
from aiodist_server.latencies import Latencies
from aiodist_server.picture import picture

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "shared"))

import chromium  # noqa: E402

IMAGES = ROOT / "docs" / "images"
ADDRESS = "tcp://10.0.0.1:29500"
END, EVERY = 300.0, 2.0
RANKS = 6
SERVERS = 3
MEMBERS = 5
ROUNDS = 30
NEW = 14
"""Turns from one version of the weights to the next."""
SLOW, DEATH, STUCK = 110.0, 190.0, 288.0
"""When rank 4 is late, rank 5 is killed, and rank 2 waits for data that do not come."""

NOON = "Date.now = () => 1767268800000"
"""The clock of the browser stands still: the same pictures each time."""


def last_minutes() -> dict[str, Any]:
    """What the page is told after five minutes of the simulated job."""
    loop = VirtualLoop(1)
    network = Network(loop, 1)
    nodes = [network.node(f"10.0.1.{rank + 1}") for rank in range(RANKS + 1)]
    watching = network.node("10.0.0.1").spawn(watch(), "coordinator")
    ranks = [node.spawn(train(rank), f"rank {rank}") for rank, node in enumerate(nodes[:-1])]
    ranks.append(nodes[-1].spawn(evaluate(), "evaluation"))
    loop.call_later(DEATH, nodes[RANKS - 1].kill)
    shown = loop.run_until_complete(watching)
    if ended := [rank for rank in ranks if rank.done()]:
        raise AssertionError(f"a rank ended: {ended}")
    del ranks[RANKS - 1]  # the task of a node that was killed never ends
    for rank in ranks:
        rank.cancel()
    loop.run_until_complete(asyncio.gather(*ranks, return_exceptions=True))
    return shown


async def watch() -> dict[str, Any]:
    history, latencies, time = History(), Latencies(), asyncio.get_running_loop().time
    coordinator = aiodist.Coordinator(ADDRESS)
    coordinator.observers.append(lambda note: history.note(note.event, note.fields, time()))
    await coordinator.start()
    while True:
        found = await coordinator.survey(counts=True)
        for group in found["groups"]:
            for member in group["members"]:
                _leave_own_places(member)
        totals = coordinator.totals.latencies
        history.take(found, time())
        latencies.take(totals, time())
        if time() >= END:
            shown = picture(found, history, time())
            return shown | {"latencies": latencies.plain(totals, time())}
        await asyncio.sleep(EVERY)


def weights() -> list[dict[str, Any]]:
    """What the page is told after five minutes of a simulated channel of weights."""
    simulation = Simulation(1 + SERVERS)
    mains = {0: publish(simulation)}
    mains |= {number: serve_requests(simulation, number) for number in range(1, 1 + SERVERS)}
    shown = simulation.play(mains)[0]
    if isinstance(shown, BaseException):
        raise shown
    return list(shown)


async def publish(simulation: Simulation) -> Any:
    """A version of the weights each half a minute."""
    channels, time = Channels(), asyncio.get_running_loop().time
    async with aiodist.publisher("policy", **options(simulation, "trainer")) as out:
        for turn in range(int(END / EVERY)):
            if turn % NEW == 0:
                await out.publish({"w": np.ones(500_000, np.float32)}, version=100 * turn // NEW)
            await asyncio.sleep(EVERY)
            assert simulation._served is not None
            found = simulation._served.status()
            channels.take(found, time())
        return channels.plain(found, time())


def rounds() -> list[dict[str, Any]]:
    """What the page is told after some rounds of a simulated averager."""
    simulation = Simulation(MEMBERS)
    mains = {0: average(simulation, 0, watches=True)}
    mains |= {number: average(simulation, number) for number in range(1, MEMBERS)}
    shown = simulation.play(mains)[0]
    if isinstance(shown, BaseException):
        raise shown
    return list(shown)


async def average(simulation: Simulation, number: int, *, watches: bool = False) -> Any:
    """The last member is slow, and the one before comes later."""
    random, gradients = Random(number), np.ones(100_000, np.float32)
    await asyncio.sleep(60.0 if number == MEMBERS - 2 else 0.0)
    name, codec = f"site:{number}", aiodist.codecs.int8()
    entering = aiodist.averager(
        "outer", quorum=2, grace=2.0, codec=codec, max_stale=100, **options(simulation, name)
    )
    async with entering as avg:
        while avg.rounds.get("", 0) < ROUNDS:
            slow = 3.0 if number == MEMBERS - 1 and random.random() < 0.4 else 1.0
            await asyncio.sleep(8.0 * slow + random.uniform(0.0, 1.5))
            await avg.average(gradients, weight=1000.0)
        if watches:
            assert simulation._served is not None
            return averagers(await simulation._served.survey())
        return await asyncio.sleep(END)


async def serve_requests(simulation: Simulation, number: int) -> None:
    """The last one takes no more versions at some time."""
    await asyncio.sleep(31.0 * number)
    last = 700 if number == SERVERS else 100 * int(END / EVERY / NEW)
    async with aiodist.subscriber("policy", **options(simulation, f"server:{number}")) as taken:
        async for version, _ in taken:
            await asyncio.sleep(3.0 * number)
            if version >= last:
                break
        await asyncio.sleep(END)


def options(simulation: Simulation, name: str) -> dict[str, Any]:
    return {"address": simulation.address, "name": name, "transports": ("tcp",)}


def _leave_own_places(member: dict[str, Any]) -> None:
    """The simulated ranks share one event loop: each tells of the tasks of all of them."""
    is_stuck = not member["doing"]["waits"]
    member["doing"]["places"] = [
        place
        for place in member["doing"]["places"]
        if place.endswith(" in open_shard" if is_stuck else " in train")
    ]


async def train(rank: int) -> None:
    random, gradients = Random(rank), np.ones(20_000)
    group = await connect("train", rank, RANKS, f"gpu{rank // 2}:{rank % 2}")
    while True:
        try:
            await load_batch(rank, random)
            await group.all_reduce(gradients, aiodist.ReduceOp.MAX)
        except aiodist.GroupBrokenError:
            group = await group.shrink()


async def load_batch(rank: int, random: Random) -> None:
    now = asyncio.get_running_loop().time()
    if rank == 2 and now > STUCK:
        await open_shard()
    late = 9.0 if rank == 4 and SLOW < now < SLOW + 1.5 else 0.0
    await asyncio.sleep(late + random.uniform(0.5, 0.7 + 0.3 * np.sin(now / 40) ** 2))


async def open_shard() -> None:
    await asyncio.Event().wait()


async def evaluate() -> None:
    await asyncio.sleep(END - 60)
    await connect("evaluate", 0, 2, "eval:0")


def connect(group: str, rank: int, size: int, name: str) -> aiodist.session.Connecting:
    return aiodist.connect(
        ADDRESS, group=group, rank=rank, size=size, name=name, timeout=600, transports="tcp"
    )


async def serve(shown: dict[str, Any]) -> tuple[web.AppRunner, str]:
    """The page, and this for news."""

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(shown | {'problem': ''})}\n\n".encode())
        await asyncio.Event().wait()  # until the browser has gone
        return response

    app = web.Application()
    app.router.add_get("/events", events)
    app.router.add_static("/", str(resources.files("aiodist_server") / "page"))
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/index.html"


async def take(program: str, shown: dict[str, Any]) -> None:
    runner, url = await serve(shown)
    async with chromium.browsing(program) as page:
        await page.call("Page.enable")
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=NOON)
        for name, width, scheme in [
            ("page", 1000, "light"), ("page-dark", 1000, "dark"), ("page-phone", 400, "light"),
        ]:  # fmt: skip
            await page.resize(width, 600)
            await page.colours(scheme)
            await page.go(url)
            await page.until("document.body.dataset.shown")
            (IMAGES / f"{name}.png").write_bytes(await page.picture())
    await runner.cleanup()


def main() -> int:
    program = chromium.command()
    if program is None:
        print("no Chromium here: apt-get install chromium", file=sys.stderr)
        return 1
    shown = last_minutes() | {"channels": weights(), "averagers": rounds()}
    asyncio.run(take(program, shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
