"""A step of DistributedDataParallel: how much of it is communication, with each backend.

That is what it takes longer than the same step with a hook in place of the communication, which
leaves the buckets of gradients as they are. What DistributedDataParallel itself does with buckets,
which is the same with any backend, is told apart by steps without any (`no_sync`).
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
    times: dict[str, list[dict[str, float]]] = {team.contender.name: [] for team in teams}
    curves: dict[str, list[float]] = {}
    for number in range(report.effort.rounds):
        for team in turn(teams, number):
            name = team.contender.name
            progress(f"{name}, round {number + 1} of {report.effort.rounds}")
            answer = (await team.order("benchmarks.ddp:steps"))[0]
            times[name].append(answer["costs"])
            curves[name] = answer["losses"]

    def compared(what: str) -> tuple[str, float]:
        own, gloo = (statistics.median(costs[what] for costs in times[one]) for one in times)
        text = f"{format_seconds(own)}, Gloo {format_seconds(gloo)}: {own / gloo:.0%}"
        return text, own / gloo

    step = f"DDP step of {LAYERS * WIDTH * WIDTH / 1e6:.0f} million parameters, n={SIZE}"
    shown, share = compared("communication")
    apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    report.facts += [
        Fact(f"{step}: communication", shown, f"at most {SHARE:.0%} of Gloo's", share <= SHARE),
        Fact(f"{step}: with what DDP does with buckets", compared("buckets")[0]),
        Fact("losses of the same steps: farthest apart", f"{apart:.1e}", "1e-4", apart <= 1e-4),
    ]


def steps(library: Library) -> dict[str, Any]:
    """One rank: alternate steps with and without communication, and tell what it costs."""
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

    def timed(model: nn.Module) -> float:
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        took = time.perf_counter() - start
        losses.append(float(loss.detach()))
        return took

    losses: list[float] = []
    found: dict[str, list[float]] = {"alone": [], "silent": [], "together": []}
    for _ in range(WARM_UP + STEPS):
        with model.no_sync():
            found["alone"].append(timed(model))
        found["silent"].append(timed(silent))
        found["together"].append(timed(model))
        optimizer.step()
    median = {kind: statistics.median(times[WARM_UP:]) for kind, times in found.items()}
    costs = {
        "communication": median["together"] - median["silent"],
        "buckets": median["together"] - median["alone"],
    }
    return {"costs": costs, "losses": losses}
