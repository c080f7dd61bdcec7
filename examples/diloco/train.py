"""A member that trains a small character model on Python's manual, which is a part of Python.

    python examples/diloco/train.py tcp://127.0.0.1:29500 --name a

It goes on until it is stopped, and prints its loss and the steps of all members that are in it. On
several machines, give each the address of the same coordinator. `demo.py` runs several here.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn

import aiodist
import aiodist_torch

TEXT = "".join(topics.values())
WINDOW, BATCH, HIDDEN = 16, 64, 512
EVERY = 60
"""Inner steps of an outer step."""
SHOW = 5
"""Steps of DDP after which it prints its loss and saves what it has."""


class Learner:
    """Learns from `WINDOW` characters which one comes next. A step takes `pace` seconds at least,
    like those of a larger model."""

    def __init__(self, pace: float, seed: int) -> None:
        torch.manual_seed(0)  # all members begin with the same parameters
        found = sorted(set(TEXT))
        codes = {character: code for code, character in enumerate(found)}
        self.text = torch.tensor([codes[character] for character in TEXT])
        self.model = nn.Sequential(
            *[nn.Embedding(len(found), 32), nn.Flatten(), nn.Linear(32 * WINDOW, HIDDEN)],
            *[nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, len(found))],
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.pace, self.random = pace, torch.Generator().manual_seed(seed)

    def loss(self, net: nn.Module, starts: Tensor) -> Tensor:
        windows = self.text[starts[:, None] + torch.arange(WINDOW + 1)]
        return nn.functional.cross_entropy(net(windows[:, :-1]), windows[:, -1])

    def loss_on_the_rest(self) -> float:
        """The loss on a tenth of the text, which no member learns from."""
        last = len(self.text) - WINDOW - 1
        with torch.no_grad():
            return self.loss(self.model, torch.linspace(last * 0.9, last, 2000).long()).item()

    def show(self, steps: float, own: float) -> None:
        """Print steps that the model has learned from, and its loss. `own`: those of this one."""
        loss = round(self.loss_on_the_rest(), 4)
        print(json.dumps({"at": time.monotonic(), "steps": steps, "loss": loss}), flush=True)

    def backward(self, net: nn.Module) -> None:
        learned = int(len(self.text) * 0.9) - WINDOW - 1
        self.optimizer.zero_grad()
        loss = self.loss(net, torch.randint(learned, (BATCH,), generator=self.random))
        torch.autograd.backward(loss)

    async def step(self, net: nn.Module) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self.pace
        self.backward(net)
        self.optimizer.step()
        await asyncio.sleep(max(0.0, end - loop.time()))  # averaging goes on meanwhile


async def diloco(learner: Learner, given: argparse.Namespace) -> None:
    parts = [str(part) for part in range(given.fragments)]
    codec = aiodist.codecs.int8(error_feedback=True) if given.int8 else None
    async with aiodist.averager(
        "model", address=given.address, name=given.name, quorum=given.quorum, grace=given.grace,
        parts=parts, codec=codec, carry=True, max_stale=5,
    ) as averager:  # fmt: skip
        outer = torch.optim.SGD(learner.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        member = aiodist_torch.DiLoCo(
            learner.model, outer, averager, every=EVERY, fragments=given.fragments
        )
        if given.join:
            await member.join()
        while True:
            await learner.step(learner.model)
            try:
                found = await member.step()
            except aiodist.StaleError:  # it was away for too long
                await member.join()
                continue
            if found is not None:
                weights = dict(zip(found.contributors, found.weights, strict=True))
                steps = (sum(found.weights), weights.get(averager.name, 0.0))
                learner.show(*(weight / given.fragments for weight in steps))


async def ddp(learner: Learner, given: argparse.Namespace) -> None:
    """The same model, by DistributedDataParallel. If a rank dies, all begin again from `save`."""
    dist.init_process_group("aiodist", given.address, rank=given.rank, world_size=given.size)
    if given.join:
        learner.model.load_state_dict(torch.load(given.save))
    net = nn.parallel.DistributedDataParallel(learner.model)
    for step in itertools.count(1):
        await learner.step(net)
        if step % SHOW == 0 and given.rank == 0:
            torch.save(learner.model.state_dict(), given.save)
            learner.show(SHOW * given.size, SHOW)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="of the coordinator; with --ddp, of rank 0")
    parser.add_argument("--name", default="a")
    parser.add_argument("--join", action="store_true", help="begin where the others are")
    parser.add_argument("--pace", type=float, default=0.0, help="least seconds of a step")
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--grace", type=float, default=1.0)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--ddp", dest="save", help="train by DDP, and save to this file")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    learner = Learner(given.pace, seed=sum(given.name.encode()) + given.rank)
    print("ready: Enter starts it", flush=True)
    sys.stdin.readline()  # all begin at once
    asyncio.run(ddp(learner, given) if given.save else diloco(learner, given))


if __name__ == "__main__":
    main(sys.argv[1:])
