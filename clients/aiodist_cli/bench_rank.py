"""One process of aiodist that `aiodist bench` measures: `python -m aiodist_cli.bench_rank CONTROL`.

It obeys the orders that `aiodist_cli.bench_worker` describes, from inside the event loop, which
goes on turning between them. Three more orders ask for what only aiodist is asked for:

    {"do": "ticker", "period": 0.002, "seconds": 3.0, "op": …, "nbytes": …, "iterations": 0}
        how late a timer is, in ns, while the loop is idle or, with iterations, busy
    {"do": "idle", "seconds": 3.0}
        the share of a core that a pending `recv` takes
    {"do": "memory", "nbytes": 1073741824}
        bytes by which the resident set grows beyond the array during an all_reduce
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiodist
from aiodist.launching import spawn
from aiodist_cli import bench_worker
from aiodist_cli.bench_worker import FLOAT, Prepared, checked, differences, encode, fill, layout

OP_TIMEOUT = 60.0


class Arrays:
    """Memory for operations: of torch where it is installed, of numpy elsewhere."""

    def __init__(self, group: aiodist.Group) -> None:
        self._group: Any = group
        try:
            import torch
        except ImportError:
            import numpy

            self.name = f"numpy {numpy.__version__}"
            self._module: Any = numpy
        else:
            self.name = f"torch {torch.__version__}"
            self._module = torch

    @property
    def features(self) -> list[str]:
        """ "empty" where the group gives memory that its ranks share."""
        return ["empty"] if hasattr(self._group, "empty") else []

    def empty(self, elements: int, memory: str) -> Any:
        """An array of float32. `memory`: "plain", or "shared": from the group."""
        maker = self._group if memory == "shared" else self._module
        return maker.empty((elements,), dtype=self._module.float32)


class Rank:
    """A rank that obeys orders."""

    def __init__(self, group: aiodist.Group) -> None:
        self._group = group
        self._arrays = Arrays(group)
        self._case: tuple[str, int] | None = None
        self._prepared: dict[str, Prepared] = {}  # by memory

    @property
    def hello(self) -> dict[str, Any]:
        """What this rank says first."""
        library = f"aiodist {aiodist.__version__}, {self._arrays.name}"
        return bench_worker.hello(self._group.rank, library, self._arrays.features)

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """The answer to an order."""
        handlers: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "run": self._run,
            "ticker": self._ticker,
            "idle": self._idle,
            "memory": self._memory,
        }
        do = order.pop("do")
        try:
            return await handlers[do](**order)
        except Exception as error:  # told to the driver, which goes on with the others
            return {"error": f"{type(error).__name__}: {error}"}

    async def _run(
        self, op: str, nbytes: int, iterations: int, memory: str, check: bool
    ) -> dict[str, Any]:
        prepared = self._prepare(op, nbytes, memory)
        fill(prepared, self._group.rank)
        await self._group.barrier()
        times = await self._repeat(prepared, iterations)
        if check:
            checked(op, prepared)
        return {"ns": times} if self._group.rank == 0 else {}

    def _prepare(self, op: str, nbytes: int, memory: str) -> Prepared:
        if self._case != (op, nbytes):
            self._prepared.clear()
            self._case = (op, nbytes)
        if memory not in self._prepared:
            group = self._group
            elements, out_elements, expected = layout(op, nbytes, group.rank, group.size)
            x = self._arrays.empty(elements, memory)
            out = self._arrays.empty(out_elements, memory) if out_elements else None
            self._prepared[memory] = Prepared(
                operation(group, op, x, out),
                _view(x),
                None if out is None else _view(out),
                expected,
            )
        return self._prepared[memory]

    async def _repeat(self, prepared: Prepared, iterations: int) -> list[int]:
        call, clock = prepared.call, time.perf_counter_ns
        stamps = [clock()]
        for _ in range(iterations):
            await call()
            stamps.append(clock())
        return differences(stamps)

    async def _ticker(
        self, period: float, seconds: float, op: str, nbytes: int, iterations: int
    ) -> dict[str, Any]:
        prepared = self._prepare(op, nbytes, "plain")
        fill(prepared, self._group.rank)  # before the ticker: it blocks the loop
        await self._group.barrier()
        stop = asyncio.Event()
        ticks = asyncio.create_task(ticker(period, stop))
        if iterations:
            await self._repeat(prepared, iterations)
        else:
            await asyncio.sleep(seconds)
        stop.set()
        return {"late": await ticks}

    async def _idle(self, seconds: float) -> dict[str, Any]:
        group = self._group
        await group.barrier()
        message = group.recv(src=(group.rank - 1) % group.size)
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        await group.send(0, (group.rank + 1) % group.size)
        await message
        return {"share": share}

    async def _memory(self, nbytes: int) -> dict[str, Any]:
        group = self._group
        x = self._arrays.empty(nbytes // FLOAT, "plain")
        _view(x).fill(group.rank + 1)
        await group.barrier()
        _reset_peak()
        before = _status("VmRSS")
        await group.all_reduce(x)
        growth = _status("VmHWM") - before
        bench_worker.check("all_reduce", _view(x), layout("all_reduce", 4, 0, group.size).result)
        return {"growth": growth}


def operation(group: aiodist.Group, op: str, x: Any, out: Any) -> Callable[[], Awaitable[Any]]:
    """What does `op` once."""
    if op == "all_reduce":
        return lambda: group.all_reduce(x)
    if op == "broadcast":
        return lambda: group.broadcast(x, 0)
    if op == "reduce_scatter":
        return lambda: group.reduce_scatter(x, out=out)
    if op == "all_gather":
        rows = out.reshape(group.size, -1)
        return lambda: group.all_gather(x, out=rows)
    if op == "all_to_all":
        slots, outs = list(x.reshape(group.size, -1)), list(out.reshape(group.size, -1))
        return lambda: group.all_to_all(slots, out=outs)

    async def ping() -> None:
        await group.send(x, 1)
        await group.recv(src=1, out=out)

    async def pong() -> None:
        await group.recv(src=0, out=out)
        await group.send(out, 0)

    async def nothing() -> None:
        pass

    return {0: ping, 1: pong}.get(group.rank, nothing)


async def ticker(period: float, stop: asyncio.Event) -> list[int]:
    """How late, in ns, each tick of a fixed schedule was, until `stop` and one tick more.

    Ticks that a busy loop missed are late as well, each by its own due time, so that one long
    stall counts as often as a timer would have hit it.
    """
    late: list[int] = []
    clock, step = time.perf_counter_ns, int(period * 1e9)
    due = clock() + step
    while True:
        last = stop.is_set()
        await asyncio.sleep(max(0, due - clock()) / 1e9)
        late.append(clock() - due)
        due += step
        if last:
            return late


def _view(array: Any) -> Any:
    """The memory of `array` as a numpy array."""
    return array.numpy() if hasattr(array, "numpy") else array


def _reset_peak() -> None:
    """Let VmHWM start anew, see proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only")


async def main(control: str) -> None:
    """Join the group that the environment names, and obey."""
    reader, writer = await asyncio.open_unix_connection(control)
    try:
        async with aiodist.connect(op_timeout=OP_TIMEOUT) as group:
            rank = Rank(group)
            writer.write(encode(rank.hello))
            async for line in reader:
                order = json.loads(line)
                if order["do"] == "quit":
                    break
                writer.write(encode(await rank.obey(order)))
                await writer.drain()
    finally:
        writer.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=spawn.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
