"""Chaos in channels of weights: `make chaos-weights N=1000`. In each of some channels a publisher
publishes without pause, and subscribers, some by shared memory and some by TCP, take what they can:
each a process of its own (`channel_member`). Versions travel as differences to those that take them
by TCP, and some of these are damaged or meet another base. Subscribers are killed with SIGKILL,
stopped with SIGSTOP, added and ended in order, several at once; publishers are killed, stopped and
started again, and so is the coordinator, which all channels have in common. After every round of
faults all subscribers that live must get a version that was published after it. No version may be
mixed, wrong or older than one before it; in the end nothing may be left.

How long that may take is counted in time in which none of the processes of a channel waits for a
processor: a busy machine breaks no bound.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from restarts import Daemon

MEMBER = Path(__file__).with_name("channel_member.py")

CHANNELS = 4

FEWEST, MOST = 2, 4
"""Subscribers of a channel at once."""

AT_ONCE = 4
"""Faults of a channel at once, at most."""

DEADLINE = 60.0
"""Seconds in which every live subscriber gets a new version after a fault; to be much longer than
leases. As many again, and it hangs."""

MOST_MAPPED = 4
"""Memories of versions that a process may have at once, beside one for each of those who are just
sent an older one: two that are kept, or were given, one that comes, and one more for a moment."""

PROBLEMS = ("mixed", "wrong", "older", "late", "hung", "ended", "memory", "left", "counted")


class Patience:
    """Seconds in which nobody has waited for a processor."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._starved: Counter[int] = Counter()
        self._before: dict[int, float] = {}

    def passed(self, pids: Iterable[int]) -> float:
        for pid in pids:
            try:
                waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
            except (OSError, IndexError):  # it has ended, or the system does not tell
                continue
            self._starved[pid] += waited - self._before.setdefault(pid, waited)
            self._before[pid] = waited
        return time.monotonic() - self._start - self._starved.total()


class Member:
    """A process; `news` is set whenever it says something."""

    def __init__(self, process: asyncio.subprocess.Process, role: str, news: asyncio.Event) -> None:
        self.process = process
        self.role = role
        self.version = -1
        self.whole = -1  # the newest version of which it has all
        self.published = -1
        self.over: dict[str, list[str]] | None = None
        self.most_mapped = 0
        self.differences = Counter[str]()
        self.problems: list[tuple[str, str]] = []
        self.results: list[dict[str, Any]] = []
        self._news = news
        self.reading = asyncio.create_task(self._read())

    def __str__(self) -> str:
        return f"{self.role} {self.process.pid}"

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            heard = json.loads(line)
            self.version = heard.get("version", self.version)
            self.whole = self.version if heard.get("hands_on") else self.whole
            self.published = heard.get("published", self.published)
            maps = heard.get("maps", 0)
            self.most_mapped = max(self.most_mapped, maps)
            if maps > MOST_MAPPED + heard.get("pairs", 0):
                self.problems.append(("memory", f"{self} maps {maps} memories: {heard}"))
            if "saved" in heard:
                self.differences["versions"] += heard["chain"] > 0
                self.differences["of several"] += heard["chain"] > 1
                self.differences["bytes saved"] = heard["saved"]
                self.differences["chunks that failed"] = heard["fallbacks"]
            if "call" in heard:
                self.results.append(heard)
            if "problem" in heard:
                self.problems.append((heard["problem"], f"{self}: {heard['text']}"))
            self.over = heard if "over" in heard else self.over
            self._news.set()
        await self.process.wait()
        self._news.set()

    def signal(self, number: int) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.reading


class Channel:
    """Those who take part in one channel, and what happens to them."""

    program = MEMBER
    fewest, most = FEWEST, MOST

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"chaos {number}"
        self.chooser = random.Random(f"{world.seed} {number}")
        self.news = asyncio.Event()
        self.publisher: Member | None = None
        self.subscribers: list[Member] = []
        self.newest = -1  # that is known to have been published
        self.publishers = 0
        self._members = 0
        self._replacing = asyncio.Lock()

    async def _start(self, role: str, *more: object) -> Member:
        transports = self.chooser.choice(["", "", "tcp"])
        self._members += 1
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(self.program), self.name, self.world.daemon.address, role),
            *(transports, f"{self.world.seed} {self.name} {self._members}", *map(str, more)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(self.world.folder / "temporary")},
        )
        self.world.pids.append(process.pid)
        return Member(process, role, self.news)

    def members(self) -> list[Member]:
        return [*self.subscribers, *([self.publisher] if self.publisher else [])]

    def _look(self) -> None:
        for one in self.members():
            self._hear(one)
            if one.reading.done():
                self.world.fail("ended", f"{self.name}: {one} ended: {one.process.returncode}")
        if self.publisher is not None:
            self.newest = max(self.newest, self.publisher.published)

    def _hear(self, member: Member) -> None:
        for kind, text in member.problems:
            self.world.note(kind, f"{self.name}: {text}")
        member.problems.clear()
        self.world.differences[member.process.pid] = member.differences
        self.world.most_mapped = max(self.world.most_mapped, member.most_mapped)

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
        member = self._one_less()
        await member.kill()
        self._hear(member)

    async def leave(self) -> None:
        await self._end(self._one_less())

    async def stop(self) -> None:
        await self._stop(self.chooser.choice(self.subscribers))

    async def stop_publisher(self) -> None:
        if self.publisher is not None:
            await self._stop(self.publisher)

    async def _stop(self, member: Member) -> None:
        """SIGSTOP, for less or more than until it counts as gone."""
        member.signal(signal.SIGSTOP)
        await asyncio.sleep(self.chooser.choice([0.05, 0.5, 0.5, 5.0]))
        member.signal(signal.SIGCONT)

    async def kill_publisher(self) -> None:
        async with self._replacing:
            assert self.publisher is not None
            publisher, self.publisher = self.publisher, None
            await publisher.kill()
            self._hear(publisher)
            self.newest = max(self.newest, publisher.published)
            await asyncio.sleep(self.chooser.choice([0.0, 0.5]))
            await self.start_publisher()

    async def restart(self) -> None:
        await self.world.restart(self.chooser.choice([0.0, 0.0, 0.3]))

    # -- what has to hold -------------------------------------------------------------------------

    async def everyone_has(self, aim: int, what: str) -> None:
        """Wait until all have a version from that one on."""
        start, clock, is_late = time.monotonic(), Patience(), False
        while any(one.version < aim for one in self.subscribers):
            self.news.clear()
            try:
                async with asyncio.timeout(0.5):
                    await self.news.wait()
            except TimeoutError:
                pids = [one.process.pid for one in self.members()]
                passed = clock.passed([*pids, os.getpid(), *self.world.daemon_pids()])
                if passed > DEADLINE and not is_late:
                    is_late = True
                    self.world.note("late", self._waiting(aim, what))
                    for one in self.members():
                        one.signal(signal.SIGUSR1)
                if passed > 2 * DEADLINE:
                    self.world.fail("hung", self._waiting(aim, what))
            self._look()
        self.world.slowest = max(self.world.slowest, (time.monotonic() - start, what))

    def _waiting(self, aim: int, what: str) -> str:
        have = {str(one): (one.version, one.whole) for one in self.subscribers}
        return (
            f"{self.name}: after {what}: version {aim} was waited for, {self.newest} is published"
            f" by {self.publisher}, and the subscribers have {have}"
        )

    async def begin(self) -> None:
        await self.start_publisher()
        for _ in range(FEWEST + 1):
            await self.add()
        await self.everyone_has(0, "the start")

    async def round(self, faults: int) -> None:
        """So many at once, and then all have to get on."""
        kinds: list[str] = []
        there = len(self.subscribers)
        for _ in range(faults):
            kinds.append(self._kind(there))
            there += {"add": 1, "kill": -1, "leave": -1}.get(kinds[-1], 0)
        self.world.happened.update(kinds)
        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                group.create_task(getattr(self, kind)())
                await asyncio.sleep(self.chooser.choice([0.0, 0.02, 0.2]))
        self._look()
        aim = max([self.newest, *(one.version for one in self.subscribers)]) + 1
        await self.everyone_has(aim, " and ".join(kinds))

    def _kind(self, there: int) -> str:
        kinds = self.common_kinds()
        kinds += ["kill", "kill", "leave"] if there > self.fewest else []
        kinds += ["add", "add"] if there < self.most else []
        return self.chooser.choice(kinds)

    def common_kinds(self) -> list[str]:
        """Faults that can happen at any time."""
        return ["stop", "stop_publisher", "kill_publisher", "restart"]

    async def _end(self, member: Member) -> None:
        """In order, with nothing left."""
        assert member.process.stdin is not None
        member.process.stdin.close()
        clock = Patience()
        while not member.reading.done():
            await asyncio.wait([member.reading], timeout=0.5)
            if clock.passed([member.process.pid, *self.world.daemon_pids()]) > DEADLINE:
                member.signal(signal.SIGUSR1)
                self.world.fail("hung", f"{self.name}: {member} does not end")
        self._hear(member)
        if member.process.returncode or member.over is None:
            self.world.fail("ended", f"{self.name}: {member} ended: {member.process.returncode}")
        if member.over["left"]:
            self.world.note("left", f"{self.name}: {member} leaves {member.over['left']}")

    async def end(self) -> None:
        """All end in order, the publisher first: what it has published can still be had."""
        assert self.publisher is not None
        publisher, self.publisher = self.publisher, None
        await self._end(publisher)
        self.newest = max(self.newest, publisher.published)
        if any(one.whole >= self.newest for one in self.subscribers):
            await self.add()
            await self.everyone_has(self.newest, "the end of the publisher")
        while self.subscribers:
            await self._end(self._one_less())

    async def clean(self) -> None:
        for one in self.members():
            await one.kill()


class World:
    """A coordinator, and its channels."""

    def __init__(self, folder: Path, seed: int, channels: int, kind: type[Channel]) -> None:
        self.folder = folder
        self.seed = seed
        self.daemon = Daemon(folder / "state")
        self.channels = [kind(self, number) for number in range(channels)]
        self.pids: list[int] = []
        self.happened: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.slowest = (0.0, "")
        self.most_mapped = 0
        self.differences: dict[int, Counter[str]] = {}
        self._restarting = asyncio.Lock()
        self._told = 0

    def note(self, kind: str, text: str) -> None:
        """Something that must not happen."""
        self.problems[kind] += 1
        print(f"{kind}: {text}", flush=True)

    def fail(self, kind: str, text: str) -> None:
        """The same, and there is no going on."""
        self.note(kind, text)
        raise AssertionError(text)

    def daemon_pids(self) -> Iterator[int]:
        if (pid := self.daemon.pid) is not None:
            yield pid

    async def restart(self, pause: float) -> None:
        async with self._restarting:
            await self.daemon.kill()
            await asyncio.sleep(pause)
            await self.daemon.start()

    async def run(self, faults: int) -> None:
        """Raises AssertionError where there is no going on."""
        (self.folder / "temporary").mkdir()
        await self.daemon.start()
        left = faults

        async def disturb(channel: Channel) -> None:
            nonlocal left
            await channel.begin()
            while left:
                some = min(left, channel.chooser.randint(1, AT_ONCE))
                left -= some
                await channel.round(some)
                self._tell(faults)

        async with asyncio.TaskGroup() as group:
            for channel in self.channels:
                group.create_task(disturb(channel))
        for channel in self.channels:
            await channel.end()

    def _tell(self, faults: int) -> None:
        if (done := self.happened.total()) >= self._told + 25:
            self._told = done
            versions = [channel.newest for channel in self.channels]
            seconds, what = self.slowest
            print(
                f"{time.strftime('%H:%M:%S')} {done} of {faults} faults, versions {versions},"
                f" slowest {seconds:.1f} s after {what}, problems {dict(self.problems)}",
                flush=True,
            )

    async def clean(self) -> None:
        for channel in self.channels:
            await channel.clean()
        await self.daemon.kill()

    @contextmanager
    def leaving_nothing(self) -> Iterator[None]:
        yield
        if files := os.listdir(self.folder / "temporary"):
            self.note("left", f"files: {files}")
        if left := {*os.listdir("/proc")} & {str(pid) for pid in self.pids}:
            self.note("left", f"processes: {sorted(left)}")


async def chaos(
    faults: int, seed: int, channels: int, kind: type[Channel] = Channel
) -> dict[str, object]:
    """What happened."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), seed, channels, kind)
        with world.leaving_nothing():
            try:
                await world.run(faults)
            except* AssertionError:
                pass  # it is noted
            finally:
                await world.clean()
    seconds, what = world.slowest
    return {
        "seed": seed,
        "faults": dict(world.happened),
        "faults in all": world.happened.total(),
        "seconds": round(time.monotonic() - start, 1),
        "versions": sum(channel.newest + 1 for channel in world.channels),
        "publishers": sum(channel.publishers for channel in world.channels),
        "processes": len(world.pids),
        "memories mapped at most": world.most_mapped,
        "differences": dict(sum(world.differences.values(), Counter[str]())),
        "longest until all had a new version": f"{seconds:.1f} s after {what}",
        "problems": {problem: world.problems[problem] for problem in PROBLEMS},
    }


def main(kind: type[Channel] = Channel, description: str | None = __doc__) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-n", type=int, default=100, help="how many faults")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--channels", type=int, default=CHANNELS, help="at once")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    found = asyncio.run(chaos(given.n, given.seed, given.channels, kind))
    print(json.dumps(found, indent=2), flush=True)
    problems = found["problems"]
    assert isinstance(problems, dict)
    sys.exit(1 if any(problems.values()) else 0)


if __name__ == "__main__":
    main()
