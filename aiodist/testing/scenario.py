"""The scenario of a seed: a random program of some ranks, and what goes wrong meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from aiodist.testing.disasters import Disaster, random_disaster
from aiodist.testing.mail import Mail, random_mail
from aiodist.testing.steps import KINDS, Step
from aiodist.testing.wires import Conditions

SIZES = (0, 1, 3, 50, 1000, 9000, 40_000)
"""Elements of 8 bytes."""
NARROW_SIZES = (0, 1, 3, 50, 300, 1000, 6000)
"""For programs whose connections take little at once."""
WIDE = ((1 << 14, 1 << 18), (1 << 18, 1 << 22))
"""What other connections take at once, in bytes."""


@dataclass(frozen=True)
class Child:
    """A group that is made of the first one while that works.

    It is made by "dup", by "split" with `colors` by rank, or as the "subgroup" of the ranks whose
    color is not None. It runs `steps`, by color.
    """

    kind: str
    colors: tuple[int | None, ...]
    steps: dict[int, tuple[Step, ...]]


@dataclass(frozen=True)
class Scenario:
    """All that a seed decides.

    `durable`: the coordinator has a state file. `moves`: how ranks get from each epoch to the next:
    they "leave" and meet in another group, or go on by "shrink" or "rendezvous". `cancels` maps
    steps to the rank that gives it up, and `hurries` to its deadline in seconds. `pauses` maps
    (rank, step) to seconds before the call. `wrongs` maps steps to the rank that calls it with
    another shape.
    """

    seed: int | str
    size: int
    conditions: Conditions
    lease: float
    op_timeout: float
    durable: bool
    epochs: int
    moves: tuple[str, ...]
    steps: tuple[Step, ...]
    cancels: dict[int, int]
    hurries: dict[int, float]
    pauses: dict[tuple[int, int], float]
    wrongs: dict[int, int]
    children: tuple[Child, ...]
    mail: Mail
    disasters: tuple[Disaster, ...]

    def __str__(self) -> str:
        moves = ", ".join(self.moves[: self.epochs - 1])
        lines = [
            f"seed {self.seed}: {self.size} ranks, {len(self.steps)} collectives and "
            f"{len(self.mail.messages)} messages in each of {self.epochs} epochs"
            + (f" ({moves} in between)" if moves else "")
            + (", a state file" if self.durable else ""),
            f"  {self.conditions}, lease {self.lease:g} s, op_timeout {self.op_timeout:g} s",
            f"  {len(self.cancels)} cancels, {len(self.hurries)} deadlines, {len(self.pauses)} "
            "pauses",
        ]
        return "\n".join([*lines, *(f"  {disaster}" for disaster in self.disasters)])


def scenario(seed: int | str) -> Scenario:
    """Make the scenario of `seed`."""
    # Everything is drawn here, in one order, before anything runs. Otherwise what a rank draws
    # would depend on the progress of the others, and a failing seed could not be made smaller. This
    # way a scenario without one of its disasters keeps its program.
    chooser = Random(f"scenario {seed}")
    size = chooser.choice([2, 2, 3, 3, 4, 5, 7])
    calls = chooser.choice([5, 20, 60])
    calm = chooser.random() < 0.25
    narrow = chooser.random() < 0.3  # everything takes many small writes
    steps = _random_steps(chooser, range(calls), NARROW_SIZES if narrow else SIZES)

    def some(share: float) -> list[int]:
        return [] if calm else [step.number for step in steps if chooser.random() < share]

    slow = chooser.choice([1e-3, 1e-3, 0.05])
    return Scenario(
        seed=seed,
        size=size,
        conditions=Conditions(
            delay=(20e-6, slow),
            loss=chooser.choice([0.0, 0.0, 0.001, 0.01]),
            room=(300, 5000) if narrow else chooser.choice(WIDE),
            largest=chooser.choice([1 << 16, 1500, 40]) if calls < 60 else 1 << 16,
        ),
        lease=chooser.choice([2.0, 6.0, 15.0]),
        op_timeout=30.0,
        durable=chooser.random() < 0.5,
        epochs=chooser.choice([1, 1, 2, 3]),
        moves=tuple(chooser.choice(["leave", "shrink", "rendezvous"]) for _ in range(3)),
        steps=steps,
        cancels={number: chooser.randrange(size) for number in some(0.1)},
        hurries={number: chooser.choice([0.001, 0.05, 0.5]) for number in some(0.05)},
        pauses={
            (chooser.randrange(size), number): chooser.choice([0.0005, 0.02, 0.6])
            for number in some(0.2)
        },
        wrongs={
            number: chooser.randrange(size)
            for number in some(0.05)
            if steps[number].kind in ("all_reduce", "scan")
        },
        children=tuple(
            _random_child(chooser, size, 100 + 200 * at)
            for at in range(chooser.choice([0, 0, 1, 2]))
        ),
        mail=random_mail(chooser, size, calm=calm, narrow=narrow),
        disasters=tuple(
            random_disaster(chooser, size, chooser.choice([0.02, 0.5, 5.0]))
            for _ in range(0 if calm else chooser.choice([0, 1, 1, 2, 3]))
        ),
    )


def _random_steps(
    chooser: Random, numbers: Iterable[int], sizes: Sequence[int]
) -> tuple[Step, ...]:
    tags: list[str | int | None] = [None, None, None, "a", 1, "1"]
    return tuple(
        Step(
            number,
            chooser.choice(["all_reduce", "all_reduce", *KINDS]),
            chooser.choice([*tags, f"request {number}"]),
            chooser.choice(sizes[:4] if chooser.random() < 0.7 else sizes),
            chooser.randrange(8),
            chooser.random() < 0.3,
        )
        for number in numbers
    )


def _random_child(chooser: Random, size: int, number: int) -> Child:
    kind = chooser.choice(["dup", "split", "subgroup"])
    colors: tuple[int | None, ...] = (0,) * size
    if kind == "split":
        colors = tuple(chooser.choice([0, 1, None]) for _ in range(size))
    elif kind == "subgroup":
        colors = tuple(chooser.choice([0, 0, None]) for _ in range(size))
    first, second = range(number, number + 6), range(number + 100, number + 106)
    steps = {
        0: _random_steps(chooser, first, SIZES[:4]),
        1: _random_steps(chooser, second, SIZES[:4]),
    }
    return Child(kind, colors, steps)
