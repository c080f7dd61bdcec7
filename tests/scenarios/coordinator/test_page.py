"""The page of a coordinator, in a real browser."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import browsing, command

import aiodist
from aiodist.wire.address import parse_address
from aiodist_server import feed
from aiodist_server.http import serving

pytestmark = [
    pytest.mark.skipif(command() is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.one_loop,
]

LOCAL = parse_address("tcp://127.0.0.1:0")
HOSTILE = "<script>document.title = 'harm'</script><img src=x onerror='document.title=1'>"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "PERIOD", 0.2)


PROGRAM = """
import asyncio, sys
import numpy as np
import aiodist

async def read_a_shard():
    await asyncio.Event().wait()

async def main(address, group, name):
    async with aiodist.connect(address, rank=2, size=3, group=group, name=name) as ranks:
        told = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        while not told.done():
            await ranks.all_reduce(np.ones(1000))
        await read_a_shard()

asyncio.run(main(*sys.argv[1:]))
"""
"""Rank 2: works with the others until it is told something."""


@asynccontextmanager
async def rank_2(coordinator: aiodist.Coordinator) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, coordinator.address, HOSTILE, f"{HOSTILE} 2"),
        stdin=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def work(coordinator: aiodist.Coordinator, rank: int) -> None:
    """What the other ranks do, until one of them is lost; then they wait for the end."""
    connecting = aiodist.connect(
        coordinator.address, rank=rank, size=3, group=HOSTILE, name=f"{HOSTILE} {rank}"
    )
    async with connecting as group:
        with suppress(aiodist.PeerLostError):
            while True:
                await group.all_reduce(np.ones(1000))
                await asyncio.sleep(0.005)
        await asyncio.Event().wait()


async def test_it_shows_what_the_groups_do() -> None:
    """One way through it: groups come, a rank holds up others, one dies, all without a reload."""
    program = command()
    assert program is not None
    async with (
        aiodist.Coordinator() as coordinator,
        AsyncExitStack() as stack,
        browsing(program) as page,
        serving(coordinator, LOCAL) as url,
    ):
        await page.resize(1000, 800)
        await page.go(url)
        await page.until("document.querySelector('#live').dataset.state === 'live'")
        assert "No group yet" in await page.text()
        third = await stack.enter_async_context(rank_2(coordinator))
        tasks = [asyncio.create_task(work(coordinator, rank)) for rank in range(2)]

        # What ranks do, and how fast.
        await page.until("document.querySelectorAll('.member').length === 3")
        await page.until("document.querySelector('.member .number').textContent > '0'")
        assert await page.text("h2") == HOSTILE  # as text, for that is what it is
        assert await page.text(".member .name") == f"{HOSTILE} 0"
        assert await page.evaluate("document.querySelectorAll('main script, main img').length") == 0
        assert await page.text(".events") != ""

        await page.until("!document.querySelector('#latencies').hidden")
        assert "all_reduce" in await page.text("#latencies tbody")

        # Who holds up others, with the line of its program.
        assert third.stdin is not None
        third.stdin.write(b"now\n")
        await page.until("document.querySelector('.finding')")
        finding = await page.text(".finding")
        assert "rank 2 holds up others" in finding
        assert "ranks 0-1 in all_reduce" in finding
        assert "in read_a_shard" in finding
        red = "rgb(198, 47, 43)"
        for selector in (".finding strong", ".finding .stack", "[data-kind=culprit] .rank"):
            colour = f"getComputedStyle(document.querySelector({selector!r})).color"
            assert await page.evaluate(colour) == red
        fill = "getComputedStyle(document.querySelector('rect[data-kind=culprit]')).fill"
        assert await page.evaluate(fill) == red
        assert "rank 2 holds up others" in await page.evaluate("document.title")

        # It stays as it was where somebody reads in it, and fits on a phone, in the dark as well.
        await page.evaluate("document.querySelector('.member').open = true")
        shown = await page.evaluate("document.body.dataset.shown")
        await page.until(f"document.body.dataset.shown > {shown} + 1")
        assert await page.evaluate("document.querySelector('.member').open")
        assert "pid " in await page.text(".member .where")
        light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.resize(400, 800)
        assert await page.evaluate("document.documentElement.scrollWidth") == 400
        await page.colours("dark")
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (light, dark) == ("rgb(245, 246, 248)", "rgb(17, 21, 26)")

        # One dies; the others go on without it.
        third.kill()
        await page.until("document.querySelector('.member.gone')")
        assert "lost: " in await page.text(".member.gone .doing")
        await page.until("!document.querySelector('.finding')")
        assert "rank 2 is lost" in await page.text(".notices")

        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await page.until("document.querySelector('.group.ended')")
        assert page.problems == []


async def test_it_finds_its_coordinator_again() -> None:
    program = command()
    assert program is not None
    async with aiodist.Coordinator() as coordinator, browsing(program) as page:
        async with serving(coordinator, LOCAL) as url:
            await page.go(url)
            await page.until("document.querySelector('#live').dataset.state === 'live'")
        await page.until("document.querySelector('#live').dataset.state === 'lost'")
        assert await page.text("#live") == "no connection, trying again"
        there = parse_address(url.rstrip("/").replace("http", "tcp"))
        async with serving(coordinator, there):
            await page.until("document.querySelector('#live').dataset.state === 'live'")


async def test_it_shows_channels_of_weights() -> None:
    """Who publishes, and which version each subscriber has, without a reload."""
    program = command()
    assert program is not None
    async with (
        aiodist.Coordinator() as coordinator,
        browsing(program) as page,
        serving(coordinator, LOCAL) as url,
    ):
        address = coordinator.address
        await page.resize(400, 800)
        await page.go(url)
        async with (
            aiodist.publisher(HOSTILE, address=address, name=HOSTILE) as out,
            aiodist.subscriber(HOSTILE, address=address) as weights,
        ):
            await page.until("document.querySelectorAll('.channel tbody tr').length === 2")
            assert await page.text(".channel h2") == HOSTILE
            assert await page.text(".channel tbody .name") == HOSTILE
            assert "no version yet" in await page.text(".channel .state")
            # One that has had no turn for some seconds is shown without a sign of life until it has
            # one, so all of this is waited for.
            await out.publish({"w": np.ones(1000)}, version=7)
            await weights.latest()
            await page.until(
                "document.querySelectorAll('.channel tr')[2].cells[1].innerText === '7'"
            )
            shows = "document.querySelector('.channel').innerText.includes"
            await page.until(f"{shows}('version 7, 8.')")
            await out.publish({"w": np.ones(1000)}, version=12)
            await page.until(f"{shows}('by 5, ')")
            await page.until("document.querySelector('.channel progress')")
            await page.until(f"{shows}('version 12 is published')")
            # Participants are no groups, and it fits on a phone.
            assert await page.evaluate("document.querySelectorAll('.member').length") == 0
            assert await page.evaluate("document.documentElement.scrollWidth") == 400
        await page.until("!document.querySelector('.channel')")
        assert page.problems == []


async def test_it_shows_the_rounds_of_averagers() -> None:
    """Which members were in which rounds, which were late, and what the codec has saved."""
    program = command()
    assert program is not None
    async with (
        aiodist.Coordinator() as coordinator,
        browsing(program) as page,
        serving(coordinator, LOCAL) as url,
    ):
        await page.resize(400, 800)
        await page.go(url)
        options: Any = {
            "address": coordinator.address, "quorum": 2, "grace": 0.0, "max_stale": 2,
            "codec": aiodist.codecs.int8(), "transports": ("tcp",),
        }  # fmt: skip
        values = np.ones(10_000, np.float32)
        async with (
            aiodist.averager(HOSTILE, name=HOSTILE, **options) as first,
            aiodist.averager(HOSTILE, name="second", **options) as second,
            aiodist.averager(HOSTILE, name="slow", **options) as slow,
        ):
            await page.until("document.querySelectorAll('.round .name').length === 3")
            assert await page.text(".averager h2") == HOSTILE
            assert await page.text(".round .name") == HOSTILE
            assert "no round yet" in await page.text(".averager")
            # The slow one is in the first round, late for the second, and misses the last.
            for other in (slow, second, second):
                await asyncio.gather(first.average(values), other.average(values))
            assert (await slow.average(values)).late
            shows = "document.querySelector('.averager').innerText.includes"
            await page.until(f"{shows}('round 3 took')")
            await page.until(f"{shows}('kB saved')")
            cells = "[...document.querySelectorAll('.round .strip rect')].map(r => r.dataset.kind)"
            await page.until(f"{cells}.join() === 'in,in,in,out,in,in,in,late,out'")
            assert "3 of 3" in await page.text(".round:nth-child(1)")
            assert " s" in await page.text(".round:nth-child(3)")
            # Members are no groups, and it fits on a phone.
            assert await page.evaluate("document.querySelectorAll('.member').length") == 0
            assert await page.evaluate("document.documentElement.scrollWidth") == 400
        await page.until("!document.querySelector('.averager')")
        assert await page.evaluate("document.querySelectorAll('main .group').length") == 0
        assert page.problems == []


IDLE = """
import asyncio, sys
import aiodist

async def main():
    async with aiodist.connect(sys.argv[1], group="train", rank=1, size=2, lease=600):
        print("here", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
"""Rank 1 of two that have nothing to say to each other, so that nobody misses it."""


async def test_it_shows_who_may_come_back_and_who_waits_to_join(tmp_path: Path) -> None:
    """A member dies while the coordinator is away: for the next one, which knows of it by the state
    file, it is absent."""
    program = command()
    assert program is not None
    state = tmp_path / "state"
    async with AsyncExitStack() as stack:
        async with aiodist.Coordinator(state=state) as first:
            address = first.address
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", IDLE, address), stdout=asyncio.subprocess.PIPE
            )
            try:
                connecting = aiodist.connect(address, group="train", rank=0, size=2, lease=600)
                group = await stack.enter_async_context(connecting)
                assert process.stdout is not None
                assert await process.stdout.readline() == b"here\n"
                await first.stop()
            finally:
                process.kill()
                await process.wait()
        second = await stack.enter_async_context(aiodist.Coordinator(address, state=state))
        page = await stack.enter_async_context(browsing(program))
        await page.go(await stack.enter_async_context(serving(second, LOCAL)))
        await page.until("document.querySelector('.notices li[data-kind=absent]')")
        await page.until("document.querySelectorAll('.member:not(.gone)').length === 1")
        notice = await page.text(".notices li[data-kind=absent]")
        assert notice == "rank 1 may still come back to the coordinator"
        options: Any = {"group": "evaluate", "size": 3, "name": "eval", "timeout": 600}
        joining = [asyncio.ensure_future(aiodist.connect(address, **options)) for _ in range(2)]
        waiting = "document.querySelectorAll('.notices li[data-kind=waiting]')"
        await page.until(f"{waiting}.length === 2")
        assert await page.text(".notices li[data-kind=waiting]") == "eval waits to join"
        shown = await page.evaluate("document.body.dataset.shown")
        await page.until(f"document.body.dataset.shown > {shown} + 1")
        assert await page.evaluate(f"{waiting}.length") == 2
        for left, join in enumerate(joining):
            join.cancel()
            await page.until(f"{waiting}.length === {1 - left}")
        await asyncio.gather(*joining, return_exceptions=True)
        assert page.problems == []
        group.abort("the other one is gone")
