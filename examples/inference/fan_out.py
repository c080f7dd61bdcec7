"""Streaming inference: one web server in front, as many workers behind it as there are ranks.

``POST /generate`` answers with words as a worker makes them, one a line. Each request goes to the
worker that has the fewest under way; any number are under way at once, since every one has a tag of
its own. Where a worker dies, its requests end with a line that says so, all others go on, and the
next ones go to the workers that are left. ::

    aiodist run -n 2:3 examples/inference/fan_out.py --port 8080
    curl -d '{"prompt": "the", "words": 20}' http://127.0.0.1:8080/generate

The model is small: which word follows which, in the text of a licence. What matters here is what is
around it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

import aiodist

TEXT = Path(__file__).parents[2] / "LICENSE"


class Model:
    """Words that may follow a word."""

    def __init__(self) -> None:
        words = TEXT.read_text().lower().split()
        self._next: dict[str, list[str]] = defaultdict(list)
        for word, following in itertools.pairwise(words):
            self._next[word].append(following)

    def after(self, word: str, chooser: random.Random) -> str:
        """The next word; any, after one that it does not know."""
        return chooser.choice(self._next.get(word) or list(self._next))


async def work(group: aiodist.Group) -> None:
    """A worker: answers what rank 0 asks, all at once, until it says that there is no more."""
    model = Model()

    async def answer(number: int, prompt: str, words: int) -> None:
        chooser = random.Random(f"{prompt} {words}")
        word = (prompt.lower().split() or ["the"])[-1]
        for _ in range(words):
            word = model.after(word, chooser)
            await group.send(word, 0, tag=f"words of {number}")
        await group.send(None, 0, tag=f"words of {number}")

    async with asyncio.TaskGroup() as answers:
        while (asked := await group.recv(src=0, tag="requests")) is not None:
            answers.create_task(answer(*asked))


async def asked_of(
    group: aiodist.Group, worker: int, number: int, prompt: str, words: int
) -> AsyncIterator[str]:
    """The words that a worker makes, as they come. Each request has a tag of its own for them."""
    await group.send((number, prompt, words), worker, tag="requests")
    while (word := await group.recv(src=worker, tag=f"words of {number}")) is not None:
        yield word


class Front:
    """Rank 0: the web server, and which worker has how much to do."""

    def __init__(self, group: aiodist.Group) -> None:
        self._group = group
        self._busy = Counter(dict.fromkeys(range(1, group.size), 0))  # requests, by worker
        self._numbers = itertools.count()
        self.app = web.Application()
        self.app.router.add_post("/generate", self.generate)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = await request.json()
            prompt, words = str(asked["prompt"]), int(asked.get("words", 20))
        except (ValueError, TypeError, KeyError):
            raise web.HTTPBadRequest(text='{"prompt": "…", "words": 20} is needed\n') from None
        if not self._busy:
            raise web.HTTPServiceUnavailable(text="no worker is left\n")
        worker = min(self._busy, key=lambda rank: self._busy[rank])
        response = web.StreamResponse(headers={"X-Worker": str(worker)})
        await response.prepare(request)
        self._busy[worker] += 1
        try:
            there = True
            async for word in asked_of(self._group, worker, next(self._numbers), prompt, words):
                # Who asked may have gone. The worker goes on all the same: what it says is taken.
                with contextlib.suppress(ConnectionResetError):
                    if there:
                        there = False
                        await response.write(f"{word}\n".encode())
                        there = True
        except aiodist.PeerLostError:
            self._busy.pop(worker, None)
            await response.write(f"(worker {worker} died: ask again)\n".encode())
        else:
            if worker in self._busy:  # it may have died after its last word
                self._busy[worker] -= 1
        return response

    async def end(self) -> None:
        """No more requests will come."""
        for worker in list(self._busy):
            with contextlib.suppress(aiodist.PeerLostError):
                await self._group.send(None, worker, tag="requests")


def on_signal(function: Callable[[], None]) -> None:
    """Call it when this process is told to end."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, function)


async def serve(group: aiodist.Group, port: int) -> None:
    """Rank 0, until it is told to stop."""
    front, stop = Front(group), asyncio.Event()
    on_signal(stop.set)
    runner = web.AppRunner(front.app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    print(f"{group.size - 1} workers serve {site.name}/generate", flush=True)
    await stop.wait()
    await runner.cleanup()
    await front.end()


async def job() -> None:
    """What `aiodist run` starts."""
    parser = argparse.ArgumentParser(description="Words, one after the other, over HTTP.")
    parser.add_argument("--port", type=int, default=8080, help="0: any that is free")
    port = parser.parse_args().port
    async with aiodist.connect() as group:
        if group.rank == 0:
            await serve(group, port)
        else:
            on_signal(lambda: None)  # Ctrl-C reaches all ranks: workers end when rank 0 says so
            await work(group)


if __name__ == "__main__":
    asyncio.run(job())
