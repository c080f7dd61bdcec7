"""Data-parallel training of a digit classifier: what one rank does.

Start it with ``aiodist run -n 4 examples/digits/train.py``. Each step, every rank computes the
gradients of its share of the batch; one coalesced ``all_reduce`` averages them. Shares are equal,
so that the average of the gradients is the gradient of the whole batch, and the result must be
that of a single process, but for rounding: rank 0 trains once more alone, compares, and fails the
run if it is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import workload
from torch import nn
from workload import Digits

import aiodist
from aiodist import ReduceOp

TOLERANCE = 1e-4
"""Most that a weight may differ from that of the single process. Sums of float32 in another order
differ by some 1e-7, which the steps of training carry on and add up."""


@dataclass
class Report:
    """The result, as rank 0 saw it. Times in seconds."""

    ranks: int
    steps: int
    parameters: int
    accuracy: float
    difference: float
    seconds: float
    communicating: float
    sent: int
    received: int


async def train(group: aiodist.Group, model: nn.Module, digits: Digits) -> float:
    """Train `model` together with the other ranks; the seconds spent in communication."""
    images = len(digits.train_images)
    steps = workload.steps(images)
    optimizer = workload.make_optimizer(model)
    communicating = 0.0
    for step, batch in enumerate(workload.batches(images), 1):
        share = batch.tensor_split(group.size)[group.rank]
        loss = workload.backward(model, digits.train_images[share], digits.train_digits[share])
        start = time.perf_counter()
        await group.all_reduce([p.grad for p in model.parameters()], op=ReduceOp.AVG)
        communicating += time.perf_counter() - start
        optimizer.step()
        if group.rank == 0 and (step % 10 == 0 or step == steps):
            print(f"step {step}/{steps} loss {loss:.4f}")
    return communicating


def train_alone(digits: Digits) -> nn.Module:
    """Train a model in one process, on whole batches, as a group of ranks trains it together."""
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    for batch in workload.batches(len(digits.train_images)):
        workload.backward(model, digits.train_images[batch], digits.train_digits[batch])
        optimizer.step()
    return model


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


async def work() -> Report | None:
    async with aiodist.connect() as group:
        if workload.BATCH % group.size:
            sys.exit(f"{group.size} ranks cannot share batches of {workload.BATCH} evenly")
        # Only rank 0 loads the data; the others need not even have scikit-learn.
        data = astuple(workload.load()) if group.rank == 0 else None
        digits = Digits(*await group.broadcast(data, src=0))
        model = workload.make_model()
        before = group.bytes_moved
        start = time.perf_counter()
        communicating = await train(group, model, digits)
        seconds = time.perf_counter() - start
        sent, received = (now - then for now, then in zip(group.bytes_moved, before, strict=True))
        if group.rank != 0:
            return None
        return Report(
            ranks=group.size,
            steps=workload.steps(len(digits.train_images)),
            parameters=sum(p.numel() for p in model.parameters()),
            accuracy=workload.accuracy(model, digits),
            difference=largest_difference(model, train_alone(digits)),
            seconds=seconds,
            communicating=communicating,
            sent=sent,
            received=received,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--report", type=Path, help="write the result to this file, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = asyncio.run(work())
    if report is None:
        return
    print(f"test accuracy {report.accuracy:.1%}, {report.steps / report.seconds:.0f} steps/s")
    if options.report:
        options.report.write_text(json.dumps(vars(report)))
    if not report.difference <= TOLERANCE:
        sys.exit(
            f"the weights differ by {report.difference:.1e} from those of a single process, "
            f"more than the {TOLERANCE:.0e} that rounding explains"
        )


if __name__ == "__main__":
    main()
