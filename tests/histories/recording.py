"""Histories of the store of a group: random clients on a simulated network, and what they saw.

A history says when each client has called what, and what came back when. It says nothing of how the
store works, so a checker that knows only what a register is can judge it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Literal

import aiodist
from aiodist.testing import Killed, Simulation

Kind = Literal["read", "write", "cas"]
KINDS: tuple[Kind, ...] = ("read", "write", "cas")
"""The kinds of calls, each with one argument more than the one before."""


@dataclass
class Op:
    """One call of one client. Times are in seconds of virtual time.

    `kind` and `arguments`: ``read``, ``write`` a value, or ``cas`` from one value to another.
    Values are 1 to 4; 0 stands for no value. `result` is what was read, or whether the cas was
    done. If the answer never came, `result` and `ended` are None. Then the call was carried out at
    any time after `begun`, or never.
    """

    client: int
    kind: Kind
    arguments: tuple[int, ...]
    begun: float
    ended: float | None = None
    result: int | None = None


def record(seed: int, *, clients: int = 4, calls: int = 6) -> list[Op]:
    """Run clients that read and write one key, and return what they saw.

    The coordinator is killed and restarted up to three times. In half of the seeds a client is
    killed, and in a third of them a line is cut for a moment. The coordinator has a state file.
    """
    chooser = Random(f"history {seed}")
    simulation = Simulation(clients, seed=seed, durable=True, lease=5.0, timeout=120.0)
    ops: list[Op] = []
    loop = simulation.loop

    async def program(group: aiodist.Group) -> None:
        own = Random(f"client {seed} {group.rank}")
        for _ in range(calls):
            await asyncio.sleep(own.choice([0.0, 0.001, 0.05, 0.5]))
            kind: Kind = own.choice(KINDS)
            arguments = tuple(
                own.randint(1, 4) for _ in range(("read", "write", "cas").index(kind))
            )
            op = Op(group.rank, kind, arguments, loop.time())
            ops.append(op)
            try:
                op.result = await _call(group, kind, arguments)
            except aiodist.AiodistError:
                return  # the answer never came: this client calls nothing more
            op.ended = loop.time()

    for _ in range(chooser.randint(0, 3)):
        how = chooser.choice(["reset", "close", "silent"])
        restart = simulation.restart_coordinator
        simulation.network.at(chooser.uniform(0.0, 2.0), restart, chooser.uniform(0.01, 0.5), how)
    if chooser.random() < 0.5:
        victim = simulation.nodes[chooser.randrange(clients)]
        simulation.network.at(
            chooser.uniform(0.01, 1.5), victim.kill, chooser.choice(["reset", "silent"])
        )
    if chooser.random() < 0.3:
        cut = simulation.nodes[chooser.randrange(clients)]
        at = chooser.uniform(0.01, 1.5)
        simulation.network.at(
            at, lambda: simulation.network.partition([cut], [simulation.coordinator])
        )
        simulation.network.at(at + chooser.uniform(0.1, 2.0), simulation.network.heal)
    for outcome in simulation.run(program, limit=600.0):
        if isinstance(outcome, BaseException) and not isinstance(
            outcome, (Killed, aiodist.AiodistError)
        ):
            raise outcome
    return ops


async def _call(group: aiodist.Group, kind: Kind, arguments: tuple[int, ...]) -> int:
    store = group.store
    if kind == "read":
        value = await store.get("x", timeout=60.0)
        return 0 if value is None else int(value)
    if kind == "write":
        await store.set("x", b"%d" % arguments[0], timeout=60.0)
        return 1
    return int(
        await store.compare_set("x", b"%d" % arguments[0], b"%d" % arguments[1], timeout=60.0)
    )
