"""DiLoCo beside DDP: one of four members is ten times slower, one is killed, and one joins.

    python examples/diloco/demo.py --seconds 60 --plot diloco.svg

As root on Linux, members are on hosts of their own, with lines of 50 MB/s and 50 ms. Otherwise all
share this host. `--all` adds DiLoCo in one piece that nothing disturbs, and DiLoCo with int8.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import NamedTuple

from matplotlib.figure import Figure

from aiodist.launching.spawn import free_port
from aiodist.testing.long_links import LongLine, far_hosts

TRAIN = Path(__file__).with_name("train.py")
PACE, SLOWER = 0.1, 10
"""Seconds of an inner step, and how many times as many member 3 takes."""

ADDED = {"AIODIST_TOKEN": secrets.token_hex(), "RES_OPTIONS": "timeout:1 attempts:1"}
"""To the environment. Hosts have no name server, and torch asks for the names of its peers."""


class Host(NamedTuple):
    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


@dataclass
class Run:
    """`said`: seconds, inner steps of all members, and loss, each time that member 0 shows it."""

    label: str
    options: tuple[str, ...] = ()
    calm: bool = False
    said: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def phases(self) -> tuple[list[int], ...]:
        """The members that begin in each third. DDP restarts all members then, as torchrun does."""
        joins = ([0, 2, 3], [0, 2, 3, 4]) if self.label == "DDP" else ([], [4])
        return ([0, 1, 2, 3], *(([], []) if self.calm else joins))

    def race(self, hosts: list[Host], seconds: float, save: str) -> None:
        """Train for so many seconds, after which all processes are gone."""
        serve = ("-m", "aiodist_cli", "coordinator", "--listen", f"tcp://{hosts[0].address}:0")
        processes = [coordinator := self.spawn(hosts[0], *serve)]
        alive: dict[int, Popen[str]] = {}
        try:
            address = heard(coordinator).split()[-1]
            # Before it begins, because many of them start slowly on one machine.
            phases = [self.ready(hosts, numbers, address, save) for numbers in self.phases]
            processes += [one for phase in phases for one in phase.values()]
            for one in processes[1:]:
                heard(one)
            begun = time.monotonic()
            for third, phase in enumerate(phases):
                if third and not self.calm:
                    self.stop(alive, 1, *phase)
                alive |= phase
                for one in phase.values():
                    print(file=one.stdin, flush=True)
                time.sleep(max(0.0, begun + (third + 1) * seconds / 3 - time.monotonic()))
            self.stop(alive, *alive)
        finally:
            for one in processes:
                one.kill()
                one.communicate()
        self.said = [(at - begun, steps, loss) for at, steps, loss in self.said]

    def ready(
        self, hosts: list[Host], numbers: list[int], address: str, save: str
    ) -> dict[int, Popen[str]]:
        """Members that begin when they are told."""
        found = {}
        port = free_port()
        for rank, number in enumerate(numbers):
            pace = PACE * (SLOWER if number == 3 and not self.calm else 1)
            words = [address, "--name", f"member {number}", "--pace", str(pace), *self.options]
            if self.label == "DDP":
                words[0] = f"tcp://{hosts[0].address}:{port}"
                words += ["--ddp", save, "--rank", str(rank), "--size", str(len(numbers))]
            if 1 not in numbers:
                words.append("--join")
            found[number] = self.spawn(hosts[number], str(TRAIN), *words)
        return found

    def stop(self, alive: dict[int, Popen[str]], *numbers: int) -> None:
        for number in alive.keys() & {*numbers}:
            process = alive.pop(number)
            process.kill()
            text = process.communicate()[0]
            if number == 0:
                self.said += [tuple(json.loads(line).values()) for line in text.splitlines()]

    def spawn(self, host: Host, *words: str) -> Popen[str]:
        command = [*host.prefix, sys.executable, *words]
        return Popen(command, stdin=PIPE, stdout=PIPE, text=True, env={**os.environ, **ADDED})

    @property
    def steps(self) -> float:
        return sum(steps for _, steps, _ in self.said)

    def loss_after(self, steps: float) -> float:
        done = 0.0
        for _, more, loss in self.said:
            done += more
            if done >= steps:
                return loss
        return float("nan")

    def row(self, seconds: float, steps: float) -> str:
        """Its inner steps, as a share of those of members that wait for nothing, and its loss."""
        rates = (4, 4, 4) if self.calm else [alive + 1 / SLOWER for alive in (3, 2, 3)]
        share = self.steps / (sum(rates) / 3 * seconds / PACE)
        last = self.loss_after(self.steps)
        return (
            f"{self.label:14}{self.steps:6.0f}{share:7.0%}{last:8.3f}{self.loss_after(steps):8.3f}"
        )


def heard(process: Popen[str]) -> str:
    """The next line that a process says."""
    assert process.stdout is not None
    return process.stdout.readline()


RUNS = (
    Run("DiLoCo"),
    Run("DDP"),
    Run("DiLoCo, int8", ("--int8",)),
    Run("DiLoCo, calm", ("--fragments", "1"), calm=True),
)


def plot(runs: list[Run], seconds: float, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        axes.plot([at for at, _, _ in run.said], [loss for _, _, loss in run.said], label=run.label)
    for third, text in (1, "one is killed"), (2, "one joins"):
        axes.axvline(third * seconds / 3, color="grey", linestyle=":")
        axes.text(third * seconds / 3, axes.get_ylim()[1], text, va="top", fontsize=8)
    axes.set(xlabel="seconds", ylabel="loss on text that was held out")
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--plot", type=Path, default=Path("diloco.svg"))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--here", action="store_true", help="all on this host")
    given = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        hosts = [Host()] * 5
        try:
            if not given.here:
                made, _ = stack.enter_context(far_hosts(5, LongLine(50e6, 0.05)))
                hosts = [Host(one.address, one.prefix) for one in made]
        except OSError as error:
            print(f"all on this host, because lines cannot be made: {error}")
        save = str(Path(stack.enter_context(tempfile.TemporaryDirectory()), "model.pt"))
        runs = list(RUNS[: 4 if given.all else 2])
        for run in runs:
            run.race(hosts, given.seconds, save)
    plot(runs, given.seconds, given.plot)
    least = min(run.steps for run in runs if run.label != "DDP")
    print(f"{'':14}{'steps':>6}{'of all':>7}{'loss':>8}{f'loss after {least:.0f} steps':>24}")
    for run in runs:
        print(run.row(given.seconds, least))


if __name__ == "__main__":
    main(sys.argv[1:])
