"""Chaos: `make chaos N=1000`. Ranks that are real processes work without pause, over shared memory
or TCP, while one after the other is killed with SIGKILL, stopped with SIGSTOP, added, while
operations are cancelled and the coordinator is killed and started again. After every fault all that
live must get on; every sum must be right; in the end nothing may be left.
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

RANK = """
import asyncio, gc, json, logging, os, random, sys, threading
import numpy as np
import aiodist

address, transports, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
chooser = random.Random(sys.argv[4])
counts = {"sums": 0, "cancels": 0, "epochs": 0, "evicted": 0}
stop = False

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

def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def turns(group, waiting):
    # Until the ranks agree to take others in (True), or to end (False).
    turn = 0
    say(epoch=group.epoch, size=group.size)
    while True:
        turn += 1
        wish = 2 if stop else 1 if waiting() and group.size < most else 0
        wish = await group.all_reduce(wish, aiodist.ReduceOp.MAX, tag="wish")
        if wish:
            return wish == 1
        size = chooser.choice([1, 1000, 50_000])
        size = await group.broadcast(size, tag="size")
        x = np.full(size, float(group.rank + turn + group.epoch * 1000))
        work = group.all_reduce(x)
        if chooser.random() < 0.02:
            await asyncio.sleep(chooser.choice([0, 0.001]))
            work.cancel()
            counts["cancels"] += 1
        try:
            await work
            expected = sum(rank + turn + group.epoch * 1000 for rank in range(group.size))
            assert (x == expected).all(), f"a wrong sum: {x}, not {expected}"
            counts["sums"] += 1
        except (asyncio.CancelledError, aiodist.CollectiveAbortedError):
            if asyncio.current_task().cancelling():
                raise
        if turn % 20 == 0:
            say(turn=turn, epoch=group.epoch)
        await asyncio.sleep(0.002)

async def watch(group, seen):
    async for view in group.views():
        seen[0] = view.waiting

async def member():
    seen = [0]
    async with aiodist.connect(
        address, group="chaos", min_size=1, max_size=most, join_window=0.2, lease=1.5,
        op_timeout=15, timeout=120, transports=transports, token="secret",
    ) as group:
        watching = asyncio.create_task(watch(group, seen))
        try:
            while True:
                counts["epochs"] += 1
                try:
                    if not await turns(group, lambda: seen[0]):
                        return
                except (aiodist.GroupBrokenError, aiodist.CollectiveTimeoutError):
                    group.revoke()
                group = await group.rendezvous(min_size=1, timeout=60)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

async def main():
    global stop
    loop = asyncio.get_running_loop()
    def wait():
        global stop
        sys.stdin.read()
        stop = True
    threading.Thread(target=wait, daemon=True).start()
    open_files, began = files(), None
    while not stop:
        try:
            await member()
        except aiodist.GroupClosedError as error:
            counts["evicted"] += 1
        except aiodist.JoinError:
            if not stop:
                raise
        began = began or memory()
    await asyncio.sleep(0.1)
    gc.collect()  # what only a cycle kept open is no leak
    left = {n: f for n, f in files().items() if n not in open_files}
    say(over=counts, files=left, memory=memory())

logging.getLogger("aiodist").setLevel(logging.CRITICAL)
asyncio.run(main())
"""

MOST = 5
"""Ranks at once."""
PATIENCE = 60.0
"""Seconds in which every live rank has to get on after a fault; to be much longer than leases and
the pauses of a busy machine."""
MOST_MEMORY = 400 << 20
"""Bytes that a rank may take in the end."""


class Rank:
    """A process; `news` is set whenever it says something."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = 0
        self.news = asyncio.Event()
        self.over: dict[str, object] | None = None
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            heard = json.loads(line)
            if "over" in heard:
                self.over = heard
            self.said += 1
            self.news.set()
        self.news.set()

    async def gets_on(self) -> None:
        """Wait until it has completed more operations."""
        before = self.said
        while self.said < before + 2:
            self.news.clear()
            if self.reading.done():
                await self.process.wait()
                raise AssertionError(f"rank {self.process.pid} ended: {self.process.returncode}")
            await self.news.wait()


class Chaos:
    """The ranks, the coordinator, and what happens to them."""

    def __init__(self, folder: Path, transports: str, seed: int) -> None:
        self.chooser = random.Random(seed)
        self.seed = seed
        self.transports = transports
        self.daemon = Daemon(folder / "state")
        self.ranks: list[Rank] = []
        self.happened: Counter[str] = Counter()
        self.slowest = 0.0
        self.pids: list[int] = []

    async def add(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RANK, self.daemon.address, self.transports, str(MOST)),
            f"{self.seed} {len(self.pids)}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.pids.append(process.pid)
        self.ranks.append(Rank(process))

    async def kill(self) -> None:
        rank = self.ranks.pop(self.chooser.randrange(len(self.ranks)))
        rank.process.kill()
        await rank.process.wait()
        await rank.reading

    async def stop(self) -> None:
        """SIGSTOP, for less or more than the lease."""
        rank = self.chooser.choice(self.ranks)
        rank.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self.chooser.choice([0.05, 0.5, 2.5]))
        rank.process.send_signal(signal.SIGCONT)

    async def restart(self) -> None:
        await self.daemon.kill()
        await asyncio.sleep(self.chooser.choice([0.0, 0.0, 0.3]))
        await self.daemon.start()

    async def everyone_gets_on(self, what: str) -> None:
        start = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*(rank.gets_on() for rank in self.ranks))
        except TimeoutError:
            stuck = [rank.process.pid for rank in self.ranks]
            raise AssertionError(f"after {what}: not all of {stuck} get on") from None
        self.slowest = max(self.slowest, time.monotonic() - start)

    async def run(self, faults: int) -> None:
        """Raises AssertionError for whatever must not happen."""
        await self.daemon.start()
        for _ in range(3):
            await self.add()
        await self.everyone_gets_on("the start")
        while self.happened.total() < faults:
            kinds = ["stop", "restart"]
            kinds += ["kill"] * 2 if len(self.ranks) > 2 else []
            kinds += ["add"] * 2 if len(self.ranks) < MOST else []
            # Now and then two at once.
            chosen = self.chooser.choices(kinds, k=self.chooser.choice([1, 1, 2]))
            for kind in chosen:
                # The first may have made the second one senseless.
                if kind == "kill" and len(self.ranks) == 1:
                    kind = "add"
                elif kind == "add" and len(self.ranks) == MOST:
                    kind = "kill"
                self.happened[kind] += 1
                await getattr(self, kind)()
                await asyncio.sleep(self.chooser.choice([0.0, 0.02, 0.2]))
            await self.everyone_gets_on(" and ".join(chosen))

    async def end(self) -> dict[str, int]:
        """Let all ranks end: what they counted."""
        for rank in self.ranks:
            assert rank.process.stdin is not None
            rank.process.stdin.close()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(rank.reading for rank in self.ranks))
            codes = [await rank.process.wait() for rank in self.ranks]
        assert codes == [0] * len(codes), codes
        counts: Counter[str] = Counter()
        for rank in self.ranks:
            assert rank.over is not None
            assert not rank.over["files"], f"files were left open: {rank.over}"
            assert int(str(rank.over["memory"])) < MOST_MEMORY, rank.over
            over = rank.over["over"]
            assert isinstance(over, dict)
            counts.update(over)
        self.ranks.clear()
        return dict(counts)

    async def clean(self) -> None:
        for rank in self.ranks:
            if rank.process.returncode is None:
                rank.process.kill()
            await rank.process.wait()
            await rank.reading
        await self.daemon.kill()


def shared_memory() -> set[str]:
    """Files that would be left behind."""
    return {name for name in os.listdir("/dev/shm") if "aiodist" in name}


async def chaos(faults: int, transports: str, seed: int) -> dict[str, object]:
    """What happened, over these transports."""
    shared, start = shared_memory(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        it = Chaos(Path(folder), transports, seed)
        try:
            await it.run(faults)
            counts = await it.end()
        finally:
            await it.clean()
    left = sorted({*os.listdir("/proc")} & {str(pid) for pid in it.pids})
    assert not left, f"processes were left: {left}"
    assert shared_memory() == shared
    return {
        "transports": transports,
        "faults": dict(it.happened),
        "seconds": round(time.monotonic() - start, 1),
        "slowest to get on": round(it.slowest, 2),
        "ranks": len(it.pids),
        "of those that lived to the end": counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100, help="how many faults, over all transports")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    for transports in ("shm", "tcp"):
        print(asyncio.run(chaos(given.n // 2, transports, given.seed)), flush=True)


if __name__ == "__main__":
    main()
