"""Chaos in a channel of weights: `make chaos-weights N=1000`. A publisher publishes without pause,
and subscribers, some by shared memory and some by TCP, take what they can: each a process of its
own. One after the other is killed with SIGKILL, stopped with SIGSTOP, added or ends in order; the
publisher is killed, stopped and started again; the coordinator is killed and started again. After
every fault all subscribers that live must get a version that was published after it, within
`DEADLINE`. No version may be mixed, wrong or older than one before it; in the end nothing may be
left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from restarts import Daemon

MEMBER = """
import asyncio, gc, json, logging, os, random, sys, threading
import numpy as np
import aiodist
from aiodist.channels import manifest

address, role, transports, seed = sys.argv[1:5]
chooser = random.Random(seed)
options = {"address": address, "token": "secret", "patience": 2.0, "timeout": 60.0}
options["transports"] = [transports] if transports else None
manifest.CHUNK = 1 << 16
STAMP = 1000  # publishers: what each writes can be told from what the others do
stop = asyncio.Event()

def say(**fields):
    print(json.dumps(fields), flush=True)

def files():
    found = {}
    for one in os.listdir("/proc/self/fd"):
        try:
            found[one] = os.readlink(f"/proc/self/fd/{one}")
        except OSError:  # that of the listing itself
            pass
    return found

def mapped():
    with open("/proc/self/maps") as lines:
        return {line.split()[4] for line in lines if "memfd:aiodist-weights" in line}

def tree(value):
    # Some chunks, and arrays that share one; another shape than before, now and then.
    size = 150_000 if value // STAMP % 7 else 1_000
    return {"w": np.full(size, value), "v": [np.full(100, value), np.full(99, value)]}

def check(version, got):
    value = int(got["w"][0])
    assert value // STAMP == version, f"version {version} is {value}"
    for array in (got["w"], *got["v"]):
        assert (array == value).all(), f"version {version} is mixed: {np.unique(array)}"

async def publish(stamp, version):
    loop = asyncio.get_running_loop()
    async with aiodist.publisher("chaos", **options) as out:
        version = max(version, -1 if out.newest is None else out.newest)
        while not stop.is_set():
            version += 1
            x = tree(version * STAMP + stamp)
            start = loop.time()
            try:
                await out.publish(x, version=version)
                say(published=version, maps=len(mapped()))
            except aiodist.CollectiveTimeoutError:
                pass  # the coordinator is away, and it is not known whether it has this one
            for array in (x["w"], *x["v"]):
                array.fill(-1)
            # By how fast the machine is: versions that go before they can come come nowhere.
            await asyncio.sleep(0.05 + chooser.choice([2, 5]) * (loop.time() - start))

async def subscribe():
    given = -1
    async with aiodist.subscriber("chaos", **options) as weights:
        say(version=-1)
        while True:
            way = chooser.choice(["latest", "latest", "into", "stream"])
            try:
                if way == "stream" and weights.newest is not None and weights.newest > given:
                    version, names = weights.newest, {}
                    async for name, array in weights.stream(version):
                        names[name] = array
                    got = {"w": names["w"], "v": [names["v.0"], names["v.1"]]}
                elif way == "into" and given >= 0:
                    got = tree(-STAMP)
                    version = await weights.latest(newer_than=given, into=got)
                else:
                    version, got = await weights.latest(newer_than=given)
            except ValueError as error:
                # Another size than `into` has, or a version that is gone by now.
                expected = way == "stream" or (way == "into" and "into['w']" in str(error))
                if not expected:
                    raise
                continue
            assert version > given, f"{version} after {given}"
            check(version, got)
            given, got, names = version, None, None
            say(version=version, maps=len(mapped()))

async def main():
    loop = asyncio.get_running_loop()
    def wait():
        sys.stdin.read()
        loop.call_soon_threadsafe(stop.set)
    threading.Thread(target=wait, daemon=True).start()
    before = files()
    if role == "publish":
        await publish(int(sys.argv[5]), int(sys.argv[6]))
    else:
        taking = asyncio.create_task(subscribe())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([taking, stopping], return_when=asyncio.FIRST_COMPLETED)
        if taking.done():
            await taking
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        del taking  # with what it had, which the loop has, too, until the next turn
        await asyncio.sleep(0)
    gc.collect()  # what only a cycle kept open is no leak
    left = {n: f for n, f in files().items() if n not in before and "memfd" in f}
    tasks = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    say(over=True, left=[*left.values(), *tasks, *mapped()])

logging.getLogger("aiodist").setLevel(logging.CRITICAL)
asyncio.run(main())
"""

FEWEST, MOST = 2, 5
"""Subscribers at once."""

DEADLINE = 120.0
"""Seconds in which every live subscriber gets a new version after a fault; to be much longer than
leases and the pauses of a busy machine."""

MOST_MAPPED = 4 + MOST
"""Memories of versions that a process may have at once: two that are kept, or were given, one that
comes, one more for a moment, and one for each of those who are sent an older one."""


class Member:
    """A process; `news` is set whenever it says something."""

    def __init__(self, process: asyncio.subprocess.Process, news: asyncio.Event) -> None:
        self.process = process
        self.version = -1
        self.published = -1
        self.over: dict[str, object] | None = None
        self.most_mapped = 0
        self._news = news
        self.reading = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        return self.reading.done()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            heard = json.loads(line)
            self.version = heard.get("version", self.version)
            self.published = heard.get("published", self.published)
            self.most_mapped = max(self.most_mapped, heard.get("maps", 0))
            if "over" in heard:
                self.over = heard
            self._news.set()
        await self.process.wait()
        self._news.set()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.reading

    async def end(self) -> None:
        """In order. Raises AssertionError where something is left."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        async with asyncio.timeout(DEADLINE):
            await self.reading
        assert self.process.returncode == 0, self.process.returncode
        assert self.over is not None
        assert not self.over["left"], f"left behind: {self.over}"


class Chaos:
    """Who takes part, and what happens to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chooser = random.Random(seed)
        self.seed = seed
        self.daemon = Daemon(folder / "state")
        self.news = asyncio.Event()
        self.publisher: Member | None = None
        self.subscribers: list[Member] = []
        self.pids: list[int] = []
        self.happened: Counter[str] = Counter()
        self.slowest = (0.0, "")
        self.newest = -1  # that is known to have been published
        self.most_mapped = 0
        self.publishers = 0
        self.versions = 0

    async def _start(self, role: str, *more: object) -> Member:
        transports = self.chooser.choice(["", "", "tcp"])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MEMBER, self.daemon.address, role, transports),
            *(f"{self.seed} {len(self.pids)}", *map(str, more)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(self.folder / "temporary")},
        )
        self.pids.append(process.pid)
        return Member(process, self.news)

    def _look(self) -> None:
        members = [*self.subscribers, *([self.publisher] if self.publisher else [])]
        for one in members:
            assert not one.ended, f"{one.process.pid} ended: {one.process.returncode}"
            assert one.most_mapped <= MOST_MAPPED, f"{one.most_mapped} memories are mapped"
            self.most_mapped = max(self.most_mapped, one.most_mapped)
        if self.publisher is not None:
            self.newest = max(self.newest, self.publisher.published)

    async def start_publisher(self) -> None:
        self.publishers += 1
        # It knows from its checkpoint what was published, even where nobody else does any more.
        floor = max(self.newest, *(one.version for one in self.subscribers), -1)
        self.publisher = await self._start("publish", self.publishers, floor)

    # -- faults -----------------------------------------------------------------------------------

    async def add(self) -> None:
        self.subscribers.append(await self._start("subscribe"))

    def _one_less(self) -> Member:
        return self.subscribers.pop(self.chooser.randrange(len(self.subscribers)))

    async def kill(self) -> None:
        await self._one_less().kill()

    async def leave(self) -> None:
        await self._one_less().end()

    async def stop(self) -> None:
        await self._stop(self.chooser.choice(self.subscribers))

    async def stop_publisher(self) -> None:
        assert self.publisher is not None
        await self._stop(self.publisher)

    async def _stop(self, member: Member) -> None:
        """SIGSTOP, for less or more than until it counts as gone."""
        member.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self.chooser.choice([0.05, 0.5, 0.5, 5.0]))
        member.process.send_signal(signal.SIGCONT)

    async def kill_publisher(self) -> None:
        assert self.publisher is not None
        publisher, self.publisher = self.publisher, None
        await publisher.kill()
        self.newest = max(self.newest, publisher.published)
        await asyncio.sleep(self.chooser.choice([0.0, 0.5]))
        await self.start_publisher()

    async def restart(self) -> None:
        await self.daemon.kill()
        await asyncio.sleep(self.chooser.choice([0.0, 0.0, 0.3]))
        await self.daemon.start()

    # -- what has to hold -------------------------------------------------------------------------

    async def everyone_has_news(self, what: str) -> None:
        """Wait until all have a version that was published after now."""
        start = time.monotonic()
        self._look()
        aim = max([self.newest, *(one.version for one in self.subscribers)]) + 1
        try:
            async with asyncio.timeout(DEADLINE):
                while any(one.version < aim for one in self.subscribers):
                    self.news.clear()
                    await self.news.wait()
                    self._look()
        except TimeoutError:
            have = {one.process.pid: one.version for one in self.subscribers}
            raise AssertionError(
                f"after {what}: version {aim} was waited for, {self.newest} is published,"
                f" and the subscribers have {have}"
            ) from None
        self.slowest = max(self.slowest, (time.monotonic() - start, what))

    async def run(self, faults: int) -> None:
        """Raises AssertionError for whatever must not happen."""
        (self.folder / "temporary").mkdir()
        await self.daemon.start()
        await self.start_publisher()
        for _ in range(FEWEST + 1):
            await self.add()
        await self.everyone_has_news("the start")
        while self.happened.total() < faults:
            # Now and then two at once.
            chosen = [self._kind() for _ in range(self.chooser.choice([1, 1, 2]))]
            done = []
            for kind in chosen:
                # The first one may have made the second one senseless.
                if kind in ("kill", "leave") and len(self.subscribers) <= FEWEST:
                    kind = "add"
                elif kind == "add" and len(self.subscribers) == MOST:
                    kind = "kill"
                done.append(kind)
                self.happened[kind] += 1
                await getattr(self, kind)()
                await asyncio.sleep(self.chooser.choice([0.0, 0.02, 0.2]))
            await self.everyone_has_news(" and ".join(done))
            if self.happened.total() // 50 > (self.happened.total() - len(done)) // 50:
                print(f"{self.happened.total()} faults, version {self.newest}", flush=True)

    def _kind(self) -> str:
        kinds = ["stop", "stop_publisher", "kill_publisher", "restart"]
        kinds += ["kill", "kill", "leave"] if len(self.subscribers) > FEWEST else []
        kinds += ["add", "add"] if len(self.subscribers) < MOST else []
        return self.chooser.choice(kinds)

    async def end(self) -> None:
        """All end in order, the publisher first: what it has published can still be had."""
        assert self.publisher is not None
        publisher, self.publisher = self.publisher, None
        await publisher.end()
        self.newest = max(self.newest, publisher.published)
        await self.add()
        try:
            async with asyncio.timeout(DEADLINE):
                while any(one.version < self.newest for one in self.subscribers):
                    self.news.clear()
                    await self.news.wait()
                    self._look()
        except TimeoutError:
            have = [one.version for one in self.subscribers]
            raise AssertionError(f"{self.newest} is the last one; they have {have}") from None
        while self.subscribers:
            await self._one_less().end()

    async def clean(self) -> None:
        for one in (*self.subscribers, *([self.publisher] if self.publisher else [])):
            await one.kill()
        await self.daemon.kill()


async def chaos(faults: int, seed: int) -> dict[str, object]:
    """What happened."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        it = Chaos(Path(folder), seed)
        try:
            await it.run(faults)
            await it.end()
        finally:
            await it.clean()
        files = os.listdir(it.folder / "temporary")
        assert not files, f"files were left: {files}"
    left = sorted({*os.listdir("/proc")} & {str(pid) for pid in it.pids})
    assert not left, f"processes were left: {left}"
    seconds, what = it.slowest
    return {
        "faults": dict(it.happened),
        "seconds": round(time.monotonic() - start, 1),
        "slowest": f"{seconds:.1f} s after {what}",
        "versions": it.newest + 1,
        "processes": len(it.pids),
        "memories mapped at most": it.most_mapped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100, help="how many faults")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    print(asyncio.run(chaos(given.n, given.seed)), flush=True)


if __name__ == "__main__":
    main()
