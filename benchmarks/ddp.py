"""A step of DistributedDataParallel: how much of it is communication, with each backend.

That is what it takes longer than the same step with a hook in place of the communication, which
leaves the buckets of gradients as they are. What DistributedDataParallel itself does with buckets,
which is the same with any backend, is told apart by steps without any (`no_sync`).

The steps of each kind take turns, and what counts is the median of the differences between
neighbours: what else the machine does hits both. In time, that is what a rank waits for the other
one as well, and what a backend does while the other one computes is not in it. In processor time,
of all threads of a rank, there is neither, but what it costs the computation that its caches are
used for something else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from aiodist_cli.bench_cases import format_seconds, turn
from aiodist_cli.bench_report import Fact, Report
from aiodist_cli.bench_run import Progress
from aiodist_cli.bench_team import Team
from aiodist_cli.bench_worker import Library

SIZE = 2
WIDTH, LAYERS = 2500, 4
"""Of the perceptron: 25 million parameters."""
BATCH = 8
"""Few examples, so that a step is not all computation."""
WARM_UP, STEPS = 3, 10
SHARE = 0.25
"""Of Gloo's time for communication."""


async def measure(report: Report, teams: Sequence[Team], progress: Progress) -> None:
    """Add the time for communication in a step to `report`: of the first team, that of aiodist,
    beside the second, that of Gloo. Raises OrderError, TeamError."""
    answers: dict[str, list[dict[str, Any]]] = {team.contender.name: [] for team in teams}
    for number in range(report.effort.rounds):
        for team in turn(teams, number):
            name = team.contender.name
            progress(f"{name}, round {number + 1} of {report.effort.rounds}")
            answers[name] += await team.order("benchmarks.ddp:steps")

    def compared(what: str, less: str, clock: str) -> tuple[str, float]:
        own, gloo = (cost(of_one, what, less, clock) for of_one in answers.values())
        text = f"{format_seconds(own)}, Gloo {format_seconds(gloo)}: {own / gloo:.0%}"
        return text, own / gloo

    step = f"DDP step of {LAYERS * WIDTH * WIDTH / 1e6:.0f} million parameters, n={SIZE}"
    shown, share = compared("together", "silent", "time")
    last = [of_one[-SIZE:] for of_one in answers.values()]
    apart = max(
        abs(a - b)
        for one, other in zip(*last, strict=True)
        for a, b in zip(one["losses"], other["losses"], strict=True)
    )
    report.facts += [
        Fact(f"{step}: communication", shown, f"at most {SHARE:.0%} of Gloo's", share <= SHARE),
        Fact(
            f"{step}: communication, processor time of a rank",
            compared("together", "silent", "processor")[0],
        ),
        Fact(f"{step}: with what DDP does with buckets", compared("together", "alone", "time")[0]),
        Fact("losses of the same steps: farthest apart", f"{apart:.1e}", "1e-4", apart <= 1e-4),
    ]


def cost(answers: Sequence[dict[str, Any]], what: str, less: str, clock: str) -> float:
    """What steps of the kind `what` take more than those of the kind `less`, by that clock: the
    median over all pairs of neighbours."""
    return statistics.median(
        after - before
        for answer in answers
        for after, before in zip(
            answer["steps"][what][clock], answer["steps"][less][clock], strict=True
        )
    )


def steps(library: Library) -> dict[str, Any]:
    """One rank: steps with and without communication in turns, and what each of them took."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)

    def perceptron() -> DistributedDataParallel:
        torch.manual_seed(0)
        layers = ((nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(LAYERS))
        return DistributedDataParallel(nn.Sequential(*(part for layer in layers for part in layer)))

    def as_it_is(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model, silent = perceptron(), perceptron()
    silent.register_comm_hook(None, lambda _, bucket: as_it_is(bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH)

    found: dict[str, dict[str, list[float]]] = {
        kind: {"time": [], "processor": []} for kind in ("alone", "silent", "together")
    }
    losses: list[float] = []

    def take(kind: str, model: nn.Module) -> None:
        model.zero_grad()
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        found[kind]["time"].append(time.perf_counter() - start)
        found[kind]["processor"].append(time.process_time() - used)
        losses.append(float(loss.detach()))

    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            for taken in (taken for clocks in found.values() for taken in clocks.values()):
                taken.clear()
        with model.no_sync():
            take("alone", model)
        take("silent", silent)
        take("together", model)
        optimizer.step()
    return {"steps": found, "losses": losses}
