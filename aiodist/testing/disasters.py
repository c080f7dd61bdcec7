"""What can happen to simulated ranks while they work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from aiodist.errors import AiodistError
from aiodist.testing.faults import Action, Point
from aiodist.testing.simulation import Simulation
from aiodist.testing.wires import Node


@dataclass(frozen=True)
class Disaster:
    """One disaster: `kind`, a key of `DISASTERS`, happens at `when` (seconds) to the rank `victim`.

    Some kinds also involve the rank `other`. It lasts `seconds`. `choice` is a random number for
    its use.
    """

    kind: str
    when: float
    victim: int
    other: int
    seconds: float
    choice: int

    def __str__(self) -> str:
        return (
            f"{self.kind} at {self.when:.3f} s: rank {self.victim} (other {self.other}, for "
            f"{self.seconds:.3f} s, choice {self.choice})"
        )


def arrange(simulation: Simulation, disaster: Disaster) -> None:
    """Schedule `disaster`."""
    happen = DISASTERS[disaster.kind]
    simulation.network.at(disaster.when, happen, simulation, disaster)


def random_disaster(chooser: Random, size: int, until: float) -> Disaster:
    """Choose a disaster that happens before `until` (seconds)."""
    victim, other = chooser.sample(range(size), 2)
    return Disaster(
        chooser.choice(sorted(DISASTERS)),
        # Early ones hit the beginning, in which groups and links are made.
        until * chooser.random() ** 2,
        victim,
        other,
        chooser.choice([0.01, 0.3, 3.0, 8.0, 25.0]) * chooser.uniform(0.5, 1.5),
        chooser.randrange(1 << 20),
    )


def _nodes(simulation: Simulation, disaster: Disaster) -> tuple[Node, Node]:
    return simulation.nodes[disaster.victim], simulation.nodes[disaster.other]


def _kill(simulation: Simulation, disaster: Disaster) -> None:
    how = ("reset", "close", "silent")[disaster.choice % 3]
    _nodes(simulation, disaster)[0].kill(how)


def _kill_while_sending(simulation: Simulation, disaster: Disaster) -> None:
    how = ("reset", "close", "silent")[disaster.choice % 3]
    _nodes(simulation, disaster)[0].kill_after(1 + disaster.choice % 100_000, how)


def _kill_in_operation(simulation: Simulation, disaster: Disaster) -> None:
    ops = ("all_reduce", "all_gather", "broadcast", "all_to_all", "send", "recv")
    op = ops[disaster.choice % len(ops)]
    points: tuple[Point, ...] = ("start", "before_complete")
    if op not in ("send", "recv"):
        points += ("entered", "phase")
    point = points[disaster.choice // 8 % len(points)]
    action: Action = "kill" if disaster.choice & 1 else "unplug"
    simulation.faults.fail_at(disaster.victim, op, point, action, required=False)


def _raise_in_operation(simulation: Simulation, disaster: Disaster) -> None:
    op = ("all_reduce", "all_gather", "broadcast", "barrier")[disaster.choice % 4]
    error = AiodistError("injected")
    nth = disaster.choice // 4 % 6
    simulation.faults.fail_at(disaster.victim, op, "phase", error, nth=nth, required=False)


def _stop(simulation: Simulation, disaster: Disaster) -> None:
    victim, _ = _nodes(simulation, disaster)
    simulation.network.later_by(disaster.seconds, victim.stop())


def _break_links(simulation: Simulation, disaster: Disaster) -> None:
    simulation.network.break_links(*_nodes(simulation, disaster))


def _lose_coordinator_link(simulation: Simulation, disaster: Disaster) -> None:
    victim, _ = _nodes(simulation, disaster)
    simulation.network.break_links(victim, simulation.coordinator)


def _partition_one(simulation: Simulation, disaster: Disaster) -> None:
    """Cut one rank off from all others and the coordinator."""
    victim, _ = _nodes(simulation, disaster)
    heal = simulation.network.partition([victim], simulation.network.nodes.values())
    simulation.network.later_by(disaster.seconds, heal)


def _partition_two(simulation: Simulation, disaster: Disaster) -> None:
    """Cut two ranks off from each other. All others reach both."""
    victim, other = _nodes(simulation, disaster)
    heal = simulation.network.partition([victim], [other])
    simulation.network.later_by(disaster.seconds, heal)


def _partition_coordinator(simulation: Simulation, disaster: Disaster) -> None:
    """Cut some ranks off from the coordinator."""
    some = [node for at, node in enumerate(simulation.nodes) if disaster.choice >> at & 1]
    heal = simulation.network.partition(some, [simulation.coordinator])
    simulation.network.later_by(disaster.seconds, heal)


def _restart_coordinator(simulation: Simulation, disaster: Disaster) -> None:
    how = ("reset", "close", "silent")[disaster.choice % 3]
    simulation.restart_coordinator(disaster.seconds / 10, how)


# Each disaster draws one `choice`, however much of it is used. So a kind that begins to use more of
# it does not change what a seed draws after that.
DISASTERS: dict[str, Callable[[Simulation, Disaster], None]] = {
    "kill": _kill,
    "kill while sending": _kill_while_sending,
    "kill in an operation": _kill_in_operation,
    "raise in an operation": _raise_in_operation,
    "stop": _stop,
    "break links": _break_links,
    "lose the coordinator's link": _lose_coordinator_link,
    "cut off one rank": _partition_one,
    "cut off two ranks from each other": _partition_two,
    "cut off the coordinator": _partition_coordinator,
    "restart the coordinator": _restart_coordinator,
}
"""By name. More can be added, and are drawn like the others."""
