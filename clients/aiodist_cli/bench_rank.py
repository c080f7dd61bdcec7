"""One process of aiodist that benchmarks measure: ``python -m aiodist_cli.bench_rank CONTROL``.

Its arrays are tensors if torch is installed, else numpy arrays. Another argument, "torch" or
"numpy", chooses.

It obeys the orders of `aiodist_cli.bench_worker` from inside a running event loop. So functions
that are called by "MODULE:FUNCTION" are coroutine functions here, and get the `Rank`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiodist
from aiodist.errors import in_words
from aiodist.launching import spawn
from aiodist_cli import bench_worker
from aiodist_cli.bench_worker import Block, Prepared, checked, differences, encode, fill

OP_TIMEOUT = 60.0


class Aiodist:
    """aiodist as a `bench_worker.Library`, with methods that have to be awaited.

    `arrays`: the library that makes its arrays. `shared`: the group makes them.
    """

    computes = True

    def __init__(self, group: aiodist.Group, arrays: str, *, shared: bool = False) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size  # of the group
        module = importlib.import_module(arrays)
        # The name in reports.
        self.name = f"aiodist {aiodist.__version__}, {module.__name__} {module.__version__}"
        self._maker: Any = group if shared else module  # its `empty` makes the arrays
        self._float: Any = module.float32  # the dtype of all arrays

    def empty(self, elements: int) -> Any:
        return self._maker.empty((elements,), dtype=self._float)

    def view(self, array: Any) -> Any:
        return array.numpy() if hasattr(array, "numpy") else array

    def operation(self, op: str, x: Any, out: Any) -> Callable[[], Awaitable[Any]]:
        group = self.group
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

    def barrier(self) -> Awaitable[None]:
        return self.group.barrier()

    def close(self) -> None:
        """Nothing: `main` leaves the group."""


class Rank:
    def __init__(self, group: aiodist.Group, arrays: str | None = None) -> None:
        arrays = arrays or ("numpy" if importlib.util.find_spec("torch") is None else "torch")
        self.group = group
        self.library = Aiodist(group, arrays)
        self._libraries = {"plain": self.library, "shared": Aiodist(group, arrays, shared=True)}
        self._case: tuple[str, int] | None = None
        self._prepared: dict[str, Prepared] = {}  # by memory

    @property
    def hello(self) -> dict[str, Any]:
        """The first message of this rank."""
        return bench_worker.hello(self.group.rank, self.library.name, ["empty"])

    async def obey(self, do: str, **details: Any) -> dict[str, Any]:
        """Carry out an order, and return the answer."""
        try:
            if do == "run":
                return await self._run(**details)
            answer: dict[str, Any] = await bench_worker.named(do)(self, **details)
            return answer
        except Exception as error:  # the driver is told, and goes on with the others
            return {"error": in_words(error)}

    async def _run(
        self, op: str, nbytes: int, iterations: int, memory: str, fill: bool, check: bool
    ) -> dict[str, Any]:
        prepared = await self.prepare(op, nbytes, memory)
        block = await self.repeat(prepared, iterations, fill)
        if check:
            checked(op, prepared)
        return block.answer(self.group.rank)

    async def prepare(self, op: str, nbytes: int, memory: str = "plain") -> Prepared:
        """Prepare the operation and fill its memory; returns when all ranks have done that."""
        if self._case != (op, nbytes):
            self._prepared.clear()
            self._case = (op, nbytes)
        if memory not in self._prepared:
            library = self._libraries[memory]
            self._prepared[memory] = bench_worker.prepare(library, op, nbytes)
        fill(self._prepared[memory], self.group.rank)
        await self.group.barrier()
        return self._prepared[memory]

    async def repeat(self, prepared: Prepared, iterations: int, refill: bool = False) -> Block:
        """Measure iterations, as `bench_worker.run` does."""
        call, clock = prepared.call, time.perf_counter_ns
        cpu = time.process_time()
        if refill:
            times = []
            for _ in range(iterations):
                prepared.x.fill(self.group.rank + 1)
                start = clock()
                await call()
                times.append(clock() - start)
            return Block(times, time.process_time() - cpu)
        stamps = [clock()]
        for _ in range(iterations):
            await call()
            stamps.append(clock())
        return Block(differences(stamps), time.process_time() - cpu)


async def main(control: str, arrays: str | None = None) -> None:
    """Join the group that the environment names, and obey."""
    reader, writer = await asyncio.open_unix_connection(control)
    try:
        async with aiodist.connect(op_timeout=OP_TIMEOUT) as group:
            rank = Rank(group, arrays)
            writer.write(encode(rank.hello))
            async for line in reader:
                order = json.loads(line)
                if order["do"] == "quit":
                    break
                writer.write(encode(await rank.obey(**order)))
                await writer.drain()
    finally:
        writer.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=spawn.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
