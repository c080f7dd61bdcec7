"""What happens in one run of a program: how many ranks it has, its seed, and its faults.

A plan is drawn from a seed, can be written as one line and read back, and says which smaller plans
there are. So a failing run can be made smaller without the program that fails. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

KINDS: Mapping[str, str] = {
    "kill": "its process is killed, and the others are told at once",
    "unplug": "its host loses power, and no word reaches the others",
    "cut": "it is cut off from all others and the coordinator",
    "delay": "its event loop stands still, as during a long computation",
    "break": "its connections break once",
    "restart": "the coordinator is killed, and another comes to its address",
}
"""The kinds of faults, and what happens to the rank."""
LASTING: Mapping[str, tuple[float, ...]] = {
    "cut": (0.5, 5.0, 40.0),
    "delay": (0.002, 0.05, 1.0, 20.0),
    "restart": (0.1, 3.0),
}
"""How long faults last, in seconds."""
NAMES = ("kill", "cut", "delay", "break", "restart")
"""What `faults` of `explore` may name: "kill" stands for "unplug" as well."""

_SECONDS = r"(\d+(?:\.\d+)?(?:e[-+]\d+)?)"
_FAULT = re.compile(rf"(\w+) (\d+) at (\d+)(?: after {_SECONDS})?(?: for {_SECONDS})?")


@dataclass(frozen=True)
class Planned:
    """One fault: `kind` happens to `rank`, `after` seconds after it has begun its `at`-th wait.

    Waits are counted from 1. It lasts `seconds`, if it is of a kind that lasts.
    """

    kind: str
    rank: int
    at: int
    after: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        after = f" after {self.after:g}" if self.after else ""
        lasts = f" for {self.seconds:g}" if self.kind in LASTING else ""
        return f"{self.kind} {self.rank} at {self.at}{after}{lasts}"


@dataclass(frozen=True)
class RunPlan:
    """One run. `even`: all packets take equally long, and what is ready is served in order.

    Else the seed decides these, too.
    """

    ranks: int
    seed: int
    even: bool = False
    faults: tuple[Planned, ...] = ()

    def __str__(self) -> str:
        network = ["even network"] if self.even else []
        return ", ".join(
            [f"ranks {self.ranks}, seed {self.seed}", *network, *map(str, self.faults)]
        )


def parse(text: str) -> RunPlan:
    """Read what ``str(plan)`` has written. Raises ValueError if it is something else."""
    first, second, *others = [part.strip() for part in text.split(",")] + [""]
    ranks, seed = re.fullmatch(r"ranks ([1-9]\d*)", first), re.fullmatch(r"seed (\d+)", second)
    others = [part for part in others if part]
    even = others[:1] == ["even network"]
    found = [_FAULT.fullmatch(part) for part in others[even:]]
    if ranks is None or seed is None or not all(found):
        example = RunPlan(3, 17, True, (Planned("kill", 1, 4),))
        raise ValueError(f"a plan reads like {str(example)!r}, not {text!r}")
    faults = [
        Planned(one[1], int(one[2]), int(one[3]), float(one[4] or 0), float(one[5] or 0))
        for one in found
        if one is not None
    ]
    for fault in faults:
        if fault.kind not in KINDS or fault.rank >= int(ranks[1]):
            raise ValueError(
                f"{fault} is no fault of {ranks[1]} ranks: kinds are {', '.join(KINDS)}"
            )
    return RunPlan(int(ranks[1]), int(seed[1]), even, tuple(faults))


def draw(seed: int, ranks: int, kinds: Sequence[str], waits: Sequence[int]) -> RunPlan:
    """Draw the plan of a seed.

    `kinds` are some of `NAMES`. `waits` says how often each rank waits if nothing fails.
    """
    chooser = Random(f"plan {seed}")
    faults: list[Planned] = []
    doomed: set[int] = set()
    for _ in range(chooser.choice((0, 1, 1, 2, 3)) if kinds else 0):
        kind = chooser.choice(kinds)
        kind = chooser.choice(("kill", "kill", "unplug")) if kind == "kill" else kind
        rank = chooser.randrange(ranks)
        at = chooser.randint(1, max(1, waits[rank]))
        after = chooser.choice((0.0, chooser.uniform(0, 0.002), chooser.uniform(0, 0.05)))
        seconds = chooser.choice(LASTING.get(kind, (0.0,)))
        if kind in ("kill", "unplug"):
            doomed.add(rank)
            if len(doomed) == ranks:  # then no rank is left that could do anything wrong
                continue
        faults.append(Planned(kind, rank, at, round(after, 6), seconds))
    return RunPlan(ranks, seed, False, tuple(faults))


def smaller(plan: RunPlan) -> Iterator[RunPlan]:
    """Yield plans in which less happens, the smallest first."""
    faults = plan.faults
    # Parts of the faults are left out, large parts first (delta debugging, ddmin of Zeller and
    # Hildebrandt).
    size = len(faults)
    while size:
        for start in range(0, len(faults), size):
            yield replace(plan, faults=faults[:start] + faults[start + size :])
        size //= 2
    for ranks in range(1, plan.ranks):
        yield _with_ranks(plan, ranks)
    if not plan.even:
        yield replace(plan, even=True)
    if plan.seed:
        yield replace(plan, seed=0)
    for at, fault in enumerate(faults):
        for less in _milder(fault):
            yield replace(plan, faults=(*faults[:at], less, *faults[at + 1 :]))


def _with_ranks(plan: RunPlan, ranks: int) -> RunPlan:
    """Leave out the highest ranks. What happens to them happens to the last that is left."""
    faults = [replace(fault, rank=min(fault.rank, ranks - 1)) for fault in plan.faults]
    return replace(plan, ranks=ranks, faults=tuple(faults))


def _milder(fault: Planned) -> Iterator[Planned]:
    """Yield faults that happen earlier, at a simpler moment, for a shorter time, or to a lower
    rank."""
    for at in sorted({*range(1, min(fault.at, 9)), fault.at // 2, fault.at - 1}):
        if 0 < at < fault.at:
            yield replace(fault, at=at)
    if fault.after:
        yield replace(fault, after=0.0)
    for seconds in LASTING.get(fault.kind, ()):
        if seconds < fault.seconds:
            yield replace(fault, seconds=seconds)
    if fault.kind == "unplug":
        yield replace(fault, kind="kill")
    for rank in range(fault.rank):
        yield replace(fault, rank=rank)


def shrink(plan: RunPlan, fails: Callable[[RunPlan], bool], most: int) -> tuple[RunPlan, int]:
    """Return the smallest plan found that fails as `plan` does, and how many were tried.

    `fails` plays a plan. At most `most` are played. If that is enough, no plan of `smaller(result)`
    fails.
    """
    tried: set[RunPlan] = {plan}
    while True:
        for candidate in smaller(plan):
            if candidate in tried:
                continue
            if len(tried) > most:
                return plan, len(tried) - 1
            tried.add(candidate)
            if fails(candidate):
                plan = candidate
                break
        else:
            return plan, len(tried) - 1
