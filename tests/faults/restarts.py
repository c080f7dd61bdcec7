"""Restarts of the coordinator under load: `make restarts N=100`.

A daemon is killed with SIGKILL at random moments and started again, while ranks, each a process of
its own, reduce arrays and write to the store without pause. In the end every sum was right, no
operation has failed, every acknowledged write is there, and no `add` was carried out twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANK = """
import asyncio, json, logging, sys, threading
import numpy as np
import aiodist

async def reduce(group, stop):
    turns = 0
    while True:
        more = await group.all_reduce(0 if stop.is_set() else 1, aiodist.ReduceOp.MIN, tag="more")
        if not more:
            return turns
        turns += 1
        x = np.full(1000, float(group.rank + turns))
        await group.all_reduce(x)
        assert (x == sum(rank + turns for rank in range(group.size))).all(), x
        await asyncio.sleep(0.001)

async def count(group, stop):
    adds = 0
    while not stop.is_set():
        await asyncio.gather(*(group.store.add("all") for _ in range(8)))
        adds += 8
        key = f"rank {group.rank}"
        await group.store.set(key, b"%d" % adds)
        assert await group.store.get(key) == b"%d" % adds
        await asyncio.sleep(0.001)
    return adds

async def main():
    address, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    def wait():
        sys.stdin.read()
        loop.call_soon_threadsafe(stop.set)
    threading.Thread(target=wait, daemon=True).start()
    async with aiodist.connect(address, rank=rank, size=size, token="secret") as group:
        await group.barrier()
        print("ready", flush=True)
        turns, adds = await asyncio.gather(reduce(group, stop), count(group, stop))
        adds = await group.all_gather(adds)
        found = int(await group.store.get("all"))
        for other, theirs in enumerate(adds):
            assert await group.store.get(f"rank {other}") == b"%d" % theirs
        await group.barrier()
        print(json.dumps({"turns": turns, "adds": sum(adds), "found": found, "epoch": group.epoch}))

logging.getLogger("aiodist").setLevel(logging.ERROR)
asyncio.run(main())
"""


class Daemon:
    """The coordinator; `state`: its state file."""

    def __init__(self, state: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        self._state = state
        self._token = state.with_name("token")
        self._token.write_text("secret")
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """None while it is away."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiodist_cli", "coordinator", "--listen", self.address),
            *("--state", str(self._state), "--token-file", str(self._token)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        first = await self._process.stdout.readline()
        assert first.startswith(b"listening on"), first

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.communicate()
            self._process = None


def cut(pids: set[int], port: int, chooser: random.Random) -> bool:
    """Cut a connection between two members, not one to the coordinator, which listens on `port`.

    False if this needs rights or a kernel that we do not have.
    """
    found = subprocess.run(["ss", "-Htnp"], capture_output=True, text=True, check=False).stdout
    links = [
        line.split()[3]
        for line in found.splitlines()
        if f":{port} " not in line and any(f"pid={pid}," in line for pid in pids)
    ]
    if not links:
        return False
    chosen = chooser.choice(links).rpartition(":")[2]
    command = ["ss", "-HKtn", "sport", "=", chosen]
    return bool(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


async def run(restarts: int, ranks: int, seed: int, folder: Path) -> dict[str, float]:
    """What was counted. Raises AssertionError where something was lost."""
    chooser = random.Random(seed)
    daemon = Daemon(folder / "state")
    processes: list[asyncio.subprocess.Process] = []
    start = time.monotonic()
    try:
        await daemon.start()
        for rank in range(ranks):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", RANK, daemon.address, str(rank), str(ranks)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            processes += [process]
        for process in processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        for _ in range(restarts):
            await asyncio.sleep(chooser.uniform(0.0, 0.5))
            await daemon.kill()
            await asyncio.sleep(chooser.choice([0.0, 0.0, 0.2]))
            await daemon.start()
        outcomes = await asyncio.gather(*(process.communicate(b"") for process in processes))
        assert [process.returncode for process in processes] == [0] * ranks
        found = [json.loads(out) for out, _ in outcomes]
        assert all(one["epoch"] == 1 for one in found), found
        assert all(one["found"] == one["adds"] for one in found), found
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.communicate()
        await daemon.kill()
    return {
        "restarts": restarts,
        "seconds": round(time.monotonic() - start, 1),
        "all_reduces": found[0]["turns"],
        "store writes": found[0]["adds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100, help="how many restarts")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(asyncio.run(run(given.n, given.ranks, given.seed, Path(folder))))


if __name__ == "__main__":
    main()
