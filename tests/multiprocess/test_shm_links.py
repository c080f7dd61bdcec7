"""A link through shared memory between two processes: nothing is lost, nobody sleeps on work."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from aiodist.buffers.segment import unsupported_reason

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))

# Both sides send, poll and sleep as a seed says, and check what comes.
PROGRAM = """
import asyncio, random, sys
from aiodist.transports.shm import ShmTransport

FRAMES = 3000

def sent(seed):
    rng = random.Random(seed)
    noise = rng.randbytes(1 << 20)
    for _ in range(FRAMES):
        size = rng.choice((0, 1, 30, 500, 5000, 70_000, 262_144))
        at = rng.randrange(len(noise) - size)
        yield noise[at : at + size]

class Checker:
    def __init__(self, seed):
        self.expected = sent(seed)
        self.ended = asyncio.get_running_loop().create_future()
        self.all_here = asyncio.Event()
        self.came = 0

    def frame(self, link, header, nbytes):
        self.memory = memoryview(bytearray(nbytes))
        return self

    def landed(self):
        assert self.memory == next(self.expected), f"frame {self.came} came otherwise"
        self.came += 1
        if self.came == FRAMES:
            self.all_here.set()

    def closed(self, link, error):
        self.all_here.set()
        self.ended.set_result(error)

async def traffic(link, checker, seed):
    rng = random.Random(seed)
    for payload in sent(seed):
        link.send(b"h", [memoryview(payload)])
        what = rng.randrange(8)
        if what == 0:
            await asyncio.sleep(0)
        elif what == 1:
            link.poll()
        elif what == 2:
            for _ in range(200):
                link.poll()
        elif what == 3 and rng.random() < 0.1:
            while link.backlog and not link.is_closed:  # only bells go on with it
                await asyncio.sleep(0.001)
    await checker.all_here.wait()
    await link.finish(20.0)
    assert await checker.ended is None, checker.ended
    assert checker.came == FRAMES

async def main(seed, address):
    async with asyncio.timeout(200):
        checker = Checker(not seed)
        if address:
            link = await ShmTransport().dial(address, checker)
            link.max_payload = 1 << 20
        else:
            accepted = asyncio.get_running_loop().create_future()

            def accept(link):
                link.receiver = checker
                link.max_payload = 1 << 20
                accepted.set_result(link)

            listener = await ShmTransport().listen(accept)
            print(listener.address, flush=True)
            link = await accepted
            listener.close()
        await traffic(link, checker, seed)
        print("fine")

loop = sys.argv[1]
main = main(bool(sys.argv[2:]), sys.argv[2] if sys.argv[2:] else "")
if loop == "uvloop":
    import uvloop
    uvloop.run(main)
else:
    asyncio.run(main)
"""


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *arguments, stdout=asyncio.subprocess.PIPE
    )


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_traffic_between_two_processes(loop: str) -> None:
    processes: list[Any] = []
    try:
        processes.append(await start(loop))
        address = (await processes[0].stdout.readline()).decode().strip()
        processes.append(await start("asyncio", address))
        for process in processes:
            said, _ = await process.communicate()
            assert said == b"fine\n"
            assert process.returncode == 0
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.communicate()
