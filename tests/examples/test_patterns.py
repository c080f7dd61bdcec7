"""Examples that are patterns of programs: a parameter server, gossip, a pipeline, streaming.

Run as programs their ranks are processes. Here they share this one, which is fast, and does not
change what they do: `main` is what each rank does.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

import aiodist

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A program as a module; what lies beside it can be imported, as when it is run."""

    def loaded(name: str) -> ModuleType:
        path = EXAMPLES / name
        monkeypatch.syspath_prepend(str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield loaded
    sys.modules.pop("softmax", None)


async def test_a_parameter_server_learns_from_whoever_comes(load):
    program = load("learning/parameter_server.py")
    async with aiodist.local(4) as ranks:
        (known, oldest), *others = await asyncio.gather(*map(program.main, ranks))
    assert known > 0.9
    assert oldest > 0  # nobody waited for the others
    assert others == [None] * 3


async def test_gossiping_ranks_learn_what_all_have_seen(load):
    program = load("learning/gossip.py")
    async with aiodist.local(3) as ranks:
        found = await asyncio.gather(*map(program.main, ranks))
    assert all(known > 0.9 for known, _ in found)
    assert len({apart for _, apart in found}) == 1


async def test_gossip_alone(load):
    program = load("learning/gossip.py")
    async with aiodist.local(1) as ranks:
        known, apart = await program.main(ranks[0])
    assert known > 0.9
    assert apart == 0


async def test_weights_reach_those_who_answer_meanwhile(load):
    program = load("learning/weight_sync.py")
    async with aiodist.local(4) as ranks:
        *others, first, second = await asyncio.gather(*map(program.main, ranks))
    assert others == [None] * 2
    for outcome in (first, second):
        assert list(outcome) == list(range(0, program.STEPS + 1, program.EVERY))
        answers, known = zip(*outcome.values(), strict=True)
        assert all(answers)  # nobody stopped for a sync
        assert known[0] < 0.5
        assert known[-1] > 0.9


async def test_images_flow_through_the_stages(load):
    program = load("pipeline/stages.py")
    async with aiodist.local(4) as ranks:
        *others, (right, all_of_them) = await asyncio.gather(*map(program.main, ranks))
    assert all_of_them == 1797 - program.KNOWN
    assert right / all_of_them > 0.9
    assert others == [None] * 3
    async with aiodist.local(1) as (alone,):
        with pytest.raises(SystemExit, match="has 4 stages, not 1"):
            await program.main(alone)


async def test_words_are_streamed_and_a_dead_worker_is_left_out(load):
    program = load("inference/fan_out.py")
    async with aiodist.Coordinator() as coordinator:
        joining = [aiodist.connect(coordinator.address, rank=r, size=3) for r in range(3)]
        front, *workers = await asyncio.gather(*(_group(one) for one in joining))
        tasks = [asyncio.create_task(program.work(group)) for group in workers]
        server = program.Front(front)
        runner = web.AppRunner(server.app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:

            async def generate(**asked: object) -> tuple[int, list[str], str | None]:
                async with client.post("/generate", json=asked) as response:
                    lines = (await response.text()).splitlines()
                    return response.status, lines, response.headers.get("X-Worker")

            answers = await asyncio.gather(
                *(generate(prompt="the licensor", words=30) for _ in range(6))
            )
            assert {status for status, *_ in answers} == {200}
            assert {len(words) for _, words, _ in answers} == {30}
            assert len({tuple(words) for _, words, _ in answers}) == 1  # of the same prompt
            assert {worker for *_, worker in answers} == {"1", "2"}
            assert (await generate(words=3))[0] == 400

            # It dies while it has much to say: who has asked it is told so.
            stream = await client.post("/generate", json={"prompt": "the", "words": 10**6})
            assert await stream.content.readline()
            dead = int(stream.headers["X-Worker"])
            workers[dead - 1].abort("killed")
            assert (await stream.text()).endswith(f"(worker {dead} died: ask again)\n")
            for _ in range(3):
                _, words, worker = await generate(prompt="the", words=5)
                assert len(words) == 5
                assert worker == str(3 - dead)

            # Who asks goes away in the middle: the worker is free again all the same.
            gone = await client.post("/generate", json={"prompt": "the", "words": 2000})
            gone.close()
            assert (await generate(prompt="the", words=5))[0] == 200
        await server.end()
        await tasks[2 - dead]
        with pytest.raises((ExceptionGroup, aiodist.GroupClosedError)):
            await tasks[dead - 1]
        await runner.cleanup()
        await asyncio.gather(front.close(), workers[2 - dead].close())


async def test_a_worker_that_dies_after_its_last_word_is_left_out(load, monkeypatch):
    program = load("inference/fan_out.py")
    front = program.Front(SimpleNamespace(size=2))

    async def answered(*asked):
        yield "words"
        front._busy.clear()  # by another request, which was told of the death

    monkeypatch.setattr(program, "asked_of", answered)
    async with TestClient(TestServer(front.app)) as client:
        for status in (200, 503):
            async with client.post("/generate", json={"prompt": "the"}) as response:
                assert response.status == status


async def _group(connecting: aiodist.session.Connecting) -> aiodist.Group:
    return await connecting
