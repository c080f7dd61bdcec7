"""Elastic training in one command: ranks are killed and added while it runs.

Three ranks train; two of them are killed, one after the other, and replaced; then two more join.
At the end all five have the same result.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import aiodist

TRAIN = Path(__file__).with_name("train.py")


class Rank:
    """A process that trains, and what it says."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self.process = process
        self.last = ""

    @classmethod
    async def start(cls, number: int, *arguments: str) -> Rank:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(TRAIN), *arguments, stdout=asyncio.subprocess.PIPE
        )
        print(f"process {number} starts", flush=True)
        return cls(number, process)

    async def says(self, text: str) -> str:
        """Wait for a line with `text`."""
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            if "step" not in line or "Error" in line:
                print(f"  process {self.number}: {line}", end="", flush=True)
            self.last = line
            if text in line:
                return line
        raise RuntimeError(f"process {self.number} ended without saying {text!r}")

    async def end(self) -> dict[str, float]:
        """What it says last."""
        await self.says("{")
        assert self.process.stdout is not None
        await self.process.stdout.read()
        if await self.process.wait():
            raise RuntimeError(f"process {self.number} failed")
        found: dict[str, float] = json.loads(self.last)
        return found


async def all_say(ranks: list[Rank], text: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        for rank in ranks:
            tasks.create_task(rank.says(text))


async def perform(ranks: list[Rank], address: str, until: Path) -> list[dict[str, float]]:
    async def start() -> Rank:
        ranks.append(await Rank.start(len(ranks), address, "--until", str(until)))
        return ranks[-1]

    alive = [await start() for _ in range(3)]
    await all_say(alive, "of 3")
    for _ in range(2):
        # Whoever was there first: so the state is handed on from process to process.
        await alive[0].says("step")
        victim = alive.pop(0)
        print(f"kill -9 process {victim.number}", flush=True)
        victim.process.kill()
        alive.append(await start())
        await all_say(alive, "of 3")
    alive += [await start(), await start()]
    await all_say(alive, "of 5")
    await asyncio.to_thread(until.touch)
    return [await rank.end() for rank in alive]


async def main() -> int:
    ranks: list[Rank] = []
    try:
        async with aiodist.Coordinator() as coordinator:
            with tempfile.TemporaryDirectory() as folder:
                results = await perform(ranks, coordinator.address, Path(folder, "enough"))
    finally:
        for rank in ranks:
            if rank.process.returncode is None:
                rank.process.kill()
        for rank in ranks:
            await rank.process.wait()
    agreed = all(one == results[0] for one in results)
    print(json.dumps({"ranks": len(results), "agreed": agreed, **results[0]}))
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
