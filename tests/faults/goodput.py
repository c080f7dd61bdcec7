"""Goodput: how much training is left if members die all the time? `make goodput`.

Two groups train the same model at the same time. Nothing disturbs the first. In the second, a
member is killed with SIGKILL every few seconds, and a new one joins, which a warm process forks.
The second coordinator is killed and restarted, and connections between members are cut. Both groups
share this machine, so a busy hour of it slows down both.

Goodput is the work of the second group as a share of the work of the first. The work of a step is
the number of its members. Nothing is deducted for the time in which a member was dead.

In the end a single process takes the same steps again. Its weights must be those of the group, but
for rounding. So no step was lost, taken twice, or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from goodput_member import MEMBERS, PATIENCE, Model, member
from restarts import Daemon, cut
from steps_taken import STEP, lineage, whole

DRIFT = 1e-6
"""Most that a weight may differ from that of a single process, because float64 sums were rounded in
another order."""


class Training:
    """One group: its coordinator and its members. If `spare`, one more member waits to join."""

    def __init__(self, folder: Path, task: str, spare: bool) -> None:
        folder.mkdir()
        self.task = task
        self.folder = folder
        self.daemon = Daemon(folder / "state")
        self.members: dict[int, BaseProcess] = {}
        self.began = 0
        self._spare = spare

    async def begin(self) -> None:
        await self.daemon.start()
        for _ in range(MEMBERS + self._spare):
            self.add()
        async with asyncio.timeout(PATIENCE):
            while len(self.seasoned()) < MEMBERS:
                self.check()
                await asyncio.sleep(0.02)

    def add(self) -> None:
        """Fork a new member."""
        context = multiprocessing.get_context("forkserver")
        arguments = (self.daemon.address, self.folder, self.began, self.task)
        self.members[self.began] = process = context.Process(target=member, args=arguments)
        process.start()
        self.began += 1

    def seasoned(self) -> list[int]:
        """The members that have taken a step, and so have the model."""
        paths = {one: self.folder / f"{one}.steps" for one in self.members}
        return [one for one, path in paths.items() if path.exists() and path.stat().st_size]

    def check(self) -> None:
        for number, process in self.members.items():
            assert process.exitcode is None, f"member {number} ended: {process.exitcode}"

    def kill(self, number: int) -> None:
        process = self.members.pop(number)
        process.kill()
        process.join()

    async def end(self) -> list[np.ndarray]:
        """Let the members end: the weights of each."""
        self.check()
        trained = self.seasoned()
        (self.folder / "enough").touch()
        joins = (asyncio.to_thread(self.members[one].join, PATIENCE) for one in trained)
        await asyncio.gather(*joins)
        codes = [self.members[one].exitcode for one in trained]
        assert codes == [0] * len(codes), codes
        return [np.load(self.folder / f"{one}.npy") for one in trained]

    async def clean(self) -> None:
        for number in list(self.members):
            self.kill(number)
        await self.daemon.kill()

    def steps(self) -> np.ndarray:
        """The steps that led to the model, of dtype STEP."""
        rows = [np.frombuffer(whole(path), STEP) for path in self.folder.glob("*.steps")]
        return lineage(np.concatenate(rows))


def replayed(steps: np.ndarray, task: str) -> np.ndarray:
    """The weights of a single process that takes these steps."""
    model = Model.of(task)
    for size in steps["size"]:
        gradients = [model.gradient(rank)[0] for rank in range(size)]
        model.take(np.mean(gradients, axis=0))
    return model.weights


class Faults:
    """Disturbs a group for some seconds, and counts how. Times are seconds between two faults."""

    def __init__(self, training: Training, given: argparse.Namespace) -> None:
        self.counts: Counter[str] = Counter()
        self._training, self._given = training, given
        self._chooser = random.Random(given.seed)

    async def go_on(self, until: float) -> None:
        faults = {self._kill: self._given.every, self._restart: self._given.restart}
        faults[self._cut] = self._given.cut
        async with asyncio.TaskGroup() as tasks:
            for fault, every in faults.items():
                tasks.create_task(self._again(fault, every, until))

    async def _again(
        self, fault: Callable[[], Awaitable[bool]], every: float, until: float
    ) -> None:
        due = time.monotonic()
        # At any moment of a step, and also right after another fault.
        while every and (due := due + every * self._chooser.uniform(0.5, 1.5)) < until:
            await asyncio.sleep(due - time.monotonic())
            self.counts[fault.__name__.strip("_")] += await fault()
        await asyncio.sleep(until - time.monotonic())

    async def _kill(self) -> bool:
        """Kill a member, unless it is the last one that has the model."""
        training = self._training
        training.check()
        if len(seasoned := training.seasoned()) < 2:
            return False
        training.kill(self._chooser.choice(seasoned))
        training.add()
        return True

    async def _restart(self) -> bool:
        await self._training.daemon.kill()
        await self._training.daemon.start()
        return True

    async def _cut(self) -> bool:
        training = self._training
        pids = {process.pid for process in training.members.values() if process.pid}
        port = int(training.daemon.address.rpartition(":")[2])
        return await asyncio.to_thread(cut, pids, port, self._chooser)


async def run(given: argparse.Namespace, folder: Path) -> dict[str, object]:
    """What was measured. Raises AssertionError if anything is wrong."""
    calm = Training(folder / "calm", given.task, spare=False)
    disturbed = Training(folder / "disturbed", given.task, spare=True)
    faults = Faults(disturbed, given)
    both = (calm, disturbed)
    try:
        await asyncio.gather(*(one.begin() for one in both))
        begin = time.monotonic()
        await faults.go_on(begin + given.seconds)
        end = time.monotonic()
        weights, wanted = await asyncio.gather(disturbed.end(), calm.end())
    finally:
        await asyncio.gather(*(one.clean() for one in both))
    drift = 0.0
    for training, found in zip(both, (wanted, weights), strict=True):
        assert all((one == found[0]).all() for one in found), "members ended with other weights"
        drift = max(drift, float(np.abs(replayed(training.steps(), given.task) - found[0]).max()))
    assert drift <= DRIFT, f"weights differ by {drift} from those of a single process"
    steps = [one[(begin <= one["at"]) & (one["at"] < end)] for one in map(Training.steps, both)]
    if given.plot:
        plot(steps, begin, given.plot)
    work = [int(one["size"].sum()) for one in steps]
    pauses = [np.diff(one["at"], prepend=begin, append=end) for one in steps]
    return {
        "faults": dict(faults.counts),
        "goodput": round(work[1] / work[0], 4),
        "steps": [len(one) for one in steps],
        "longest pause": [round(float(one.max()), 3) for one in pauses],
        "pauses over 0.1 s": [int((one > 0.1).sum()) for one in pauses],
        "median step, ms": [round(float(np.median(one)) * 1e3, 2) for one in pauses],
        "loss of the last tenth": [
            round(float(one["loss"][-len(one) // 10 :].mean()), 4) for one in steps
        ],
        "largest difference to a single process": drift,
    }


def plot(runs: list[np.ndarray], begin: float, path: Path) -> None:
    """The loss of both, each point the mean of many steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for steps, label in zip(runs, ("undisturbed", "members are killed"), strict=True):
        parts = np.array_split(steps, 200)
        axes.plot(
            [part["at"].mean() - begin for part in parts],
            [part["loss"].mean() for part in parts],
            label=label,
            linewidth=1,
        )
    axes.set(xlabel="seconds", ylabel="loss", yscale="log")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=("digits", "transformer"), default="digits")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long both train")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("--restart", type=float, default=60.0, help="of the coordinator; 0: never")
    parser.add_argument("--cut", type=float, default=10.0, help="of a connection; 0: never")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--plot", type=Path, help="draw the loss of both, as SVG")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    # For the warm process, which is started by the first member.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["goodput", f"goodput_{given.task}"]
    )
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(run(given, Path(folder))), indent=2))


if __name__ == "__main__":
    main()
