"""How much training is left if a member dies each minute, and one is ten times slower?

    python examples/diloco/goodput.py --seconds 900

Four members train by `train.py`, each on a host of its own, over lines of 50 MB/s and 50 ms. Hosts,
lines and time are simulated, so the number of cores of this machine does not matter. An inner step
takes its time and computes nothing. All else runs as it is. The model has a twelfth of the
parameters and the lines have a twelfth of the rate, so transfers take as long as they would.

Each minute, the process of a member chosen at random is killed. 10 s later a new one begins in its
place. Goodput is the inner steps that are in the model, as a share of those that an undisturbed run
takes in the time in which processes of members were alive. `of all` compares them with the steps of
members that never wait.

Beside it stands data parallel training: all members average their gradients at each step. It does
better than DDP under torchrun, because no process starts anew. By `aiodist.epochs`, the members
that are left go on, and a new one gets the model from them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import torch
import train
from torch import nn

import aiodist
from aiodist.testing import Conditions, Simulation

MEMBERS = 4
HIDDEN, LESS = 64, 12
"""Neurons of a layer, in place of 512, and how many times fewer parameters this makes."""
LINE = Conditions(delay=(0.025, 0.025), loss=0.0, room=(1 << 22, 1 << 22), rate=50e6 / LESS)
"""A round trip takes 50 ms."""
PACE, SLOWER = 0.1, 10
"""Seconds of an inner step, and how many times as many the last member takes."""
EVERY, AGAIN = 60.0, 10.0
"""Seconds between two kills, and from a kill to the start of a new process."""


@dataclass(frozen=True)
class Life:
    """A process of member `number`: seconds at which it begins, and at which it is killed."""

    number: int
    begins: float
    ends: float


def lives(seconds: float, *, calm: bool) -> list[Life]:
    """The processes of all members, for so many seconds."""
    chooser = random.Random(1)
    begins = dict.fromkeys(range(MEMBERS), 0.0)
    found: list[Life] = []
    for kill in range(1, 1 if calm else int((seconds - AGAIN) // EVERY) + 1):
        number, at = chooser.randrange(MEMBERS), kill * EVERY
        found.append(Life(number, begins[number], at))
        begins[number] = at + AGAIN
    return found + [Life(number, at, seconds) for number, at in begins.items()]


class Paced(train.Learner):
    """`count(own)` is called when so many of this member's steps are in the model."""

    def __init__(self, pace: float, count: Callable[[float], None]) -> None:
        super().__init__(pace, seed=0)
        self.count = count

    async def step(self, net: nn.Module) -> None:
        await asyncio.sleep(self.pace)

    def show(self, steps: float, own: float) -> None:
        self.count(own)


@dataclass
class Run:
    """`way(run, address, life)` trains until it is killed. `steps`: those in the model."""

    label: str
    calm: bool
    way: Callable[[Run, str, Life], Awaitable[None]]
    fragments: int = 1
    steps: defaultdict[object, float] = field(default_factory=lambda: defaultdict(float))

    def go(self, seconds: float) -> float:
        """Return the steps as a share of those of members that never wait."""
        processes = lives(seconds, calm=self.calm)
        simulation = Simulation(len(processes), conditions=LINE)

        async def live(life: Life) -> None:
            await asyncio.sleep(life.begins)
            await self.way(self, simulation.address, life)

        for node, life in zip(simulation.nodes, processes, strict=True):
            simulation.loop.call_at(life.ends, node.kill)
        simulation.play({at: live(life) for at, life in enumerate(processes)}, 2 * seconds)
        possible = sum((life.ends - life.begins) / self.pace(life) for life in processes)
        return sum(self.steps.values()) / possible

    def pace(self, life: Life) -> float:
        return PACE * (SLOWER if life.number == MEMBERS - 1 and not self.calm else 1)


async def by_diloco(run: Run, address: str, life: Life) -> None:
    def count(own: float) -> None:
        run.steps[life] += own

    given = argparse.Namespace(
        address=address, name=f"{life.number} of {life.begins:g} s", join=life.begins > 0,
        quorum=2, grace=1.0, fragments=run.fragments, int8=False,
    )  # fmt: skip
    await train.diloco(Paced(run.pace(life), count), given)


async def by_gradients(run: Run, address: str, life: Life) -> None:
    """Data parallel training that goes on with the members that are left."""
    model = train.Learner(0.0, seed=0).model
    gradients = [torch.zeros_like(each) for each in model.parameters()]
    taken = 0
    async for group in aiodist.epochs(
        address, group="model", min_size=1, max_size=MEMBERS, join_window=0.0
    ):
        async with group:
            steps = await group.all_gather(taken)
            taken, source = max(steps), steps.index(max(steps))
            await group.broadcast(list(model.state_dict().values()), src=source)
            while True:
                await asyncio.sleep(run.pace(life))
                await group.all_reduce(gradients, aiodist.ReduceOp.AVG)
                taken += 1
                run.steps[taken] = group.size


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900.0, help="of virtual time")
    given = parser.parse_args(arguments)
    os.environ["AIODIST_TRANSPORTS"] = "tcp"  # all that is simulated
    train.HIDDEN = HIDDEN
    torch.set_num_threads(1)
    logging.getLogger("aiodist").setLevel(logging.CRITICAL)  # which members were killed
    print(f"{'':22}{'undisturbed, of all':>21}{'disturbed, of all':>19}{'goodput':>9}")
    for label, way, fragments in (
        ("DiLoCo, 2 fragments", by_diloco, 2),
        ("DiLoCo, in one piece", by_diloco, 1),
        ("data parallel", by_gradients, 1),
    ):
        calm, share = (Run(label, one, way, fragments).go(given.seconds) for one in (True, False))
        print(f"{label:22}{calm:21.1%}{share:19.1%}{share / calm:9.1%}", flush=True)


if __name__ == "__main__":
    main()
