"""DiLoCo by torchft beside DiLoCo by aiodist, in the conditions of `examples/diloco/demo.py`.

    make bench-torchft

Four members train the small model of the example, over lines of 50 MB/s and 50 ms. One takes ten
times as long for a step, one is killed after a third of the time, and one joins after two thirds.
torchft gets its own collectives, Gloo, and waits as long for the slow member as aiodist does: 1 s.
Needs root on Linux.

`torchft, 2` has two fragments, as aiodist has. `torchft, ahead` takes five inner steps while a
fragment is averaged.

It prints the inner steps that are in the model, as a share of those of members that never wait, and
the loss. The steps of torchft are those of all who took part in a quorum. That is more than it
has, because a member that had to take the model from another one is among them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from aiodist.testing.long_links import LongLine, far_hosts

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "diloco"))
import demo
import train

GRACE = 1.0
"""Seconds that a quorum waits for a member that lives and has not come."""
LONG = timedelta(seconds=120)


def lighthouse(address: str) -> None:
    """Serve torchft's lighthouse until this process is killed."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"{address}:0", min_replicas=2, join_timeout_ms=round(GRACE * 1000)
    )
    port = server.address().rpartition(":")[2]
    print(f"http://{address}:{port}", flush=True)
    threading.Event().wait()


def member(given: argparse.Namespace) -> None:
    """Train with torchft's DiLoCo until this process is killed."""
    import socket

    # Before torchft is imported: it tells others this name, and these hosts have no name server.
    socket.gethostname = lambda: given.address
    from torchft import Manager
    from torchft.local_sgd import DiLoCo
    from torchft.process_group import ProcessGroupGloo

    torch.set_num_threads(1)
    learner = train.Learner(given.pace, seed=sum(given.name.encode()))
    model, inner = learner.model, learner.optimizer
    assert isinstance(model, nn.Sequential)
    # Two fragments have about as many bytes each.
    halves: list[nn.Module] = [model] if given.fragments == 1 else [model[:3], model[3:]]
    outer: list[torch.optim.Optimizer] = [
        torch.optim.SGD(half.parameters(), lr=0.7, momentum=0.9, nesterov=True) for half in halves
    ]
    print("ready: Enter starts it", flush=True)
    sys.stdin.readline()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    store = dist.TCPStore(given.address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LONG), min_replica_size=2, use_async_quorum=False,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        replica_id=given.name, hostname=given.address, rank=0, world_size=1,
        store_addr=given.address, store_port=store.port, lighthouse_addr=given.lighthouse,
        timeout=LONG, quorum_timeout=LONG, init_sync=False,
    )  # fmt: skip
    with DiLoCo(manager, halves, inner, outer, train.EVERY, fragment_sync_delay=given.delay):
        done = 0
        while True:
            end = time.monotonic() + given.pace
            learner.backward(model)
            time.sleep(max(0.0, end - time.monotonic()))
            inner.step()  # and, after some of them, torchft's own step
            if (now := manager.current_step()) != done:
                steps = train.EVERY / given.fragments
                learner.show(manager.num_participants() * steps, steps)
                done = now


class Torchft(demo.Run):
    """A run of torchft's members."""

    def race(self, hosts: list[demo.Host], seconds: float, save: str) -> None:
        self.lighthouse = self.spawn(hosts[0], __file__, "lighthouse", hosts[0].address)
        try:
            self.address = demo.heard(self.lighthouse).strip()
            super().race(hosts, seconds, save)
        finally:
            self.lighthouse.kill()
            self.lighthouse.communicate()

    def spawn(self, host: demo.Host, *words: str) -> Popen[str]:
        if words[0] == str(demo.TRAIN):
            name, pace = words[words.index("--name") + 1], words[words.index("--pace") + 1]
            words = (
                *(__file__, "member", self.address, "--name", name.replace(" ", "-")),
                *("--pace", pace, "--address", host.address, *self.options),
            )
        command = [*host.prefix, sys.executable, *words]
        # It logs each step to its standard error.
        return Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True,
            env={**os.environ, **demo.ADDED},
        )  # fmt: skip


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    ways = parser.add_subparsers(dest="way")
    ways.add_parser("lighthouse").add_argument("address")
    one = ways.add_parser("member")
    one.add_argument("lighthouse")
    one.add_argument("--address", required=True)
    one.add_argument("--name", required=True)
    one.add_argument("--pace", type=float, required=True)
    one.add_argument("--fragments", type=int, default=1)
    one.add_argument("--delay", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.way == "lighthouse":
        lighthouse(given.address)
    elif given.way == "member":
        member(given)
    else:
        compare(given.seconds)


def compare(seconds: float) -> None:
    """Run both, one after the other, and print what came of each."""
    runs = [
        demo.Run("DiLoCo"),
        Torchft("torchft"),
        Torchft("torchft, 2", ("--fragments", "2")),
        Torchft("torchft, ahead", ("--fragments", "2", "--delay", "5")),
    ]
    with far_hosts(5, LongLine(50e6, 0.05)) as (made, _), tempfile.TemporaryDirectory() as folder:
        hosts = [
            demo.Host(each.address, (*each.prefix, "env", f"GLOO_SOCKET_IFNAME={each.device}"))
            for each in made
        ]
        for run in runs:
            run.race(hosts, seconds, str(Path(folder, "unused")))
    least = min(run.steps for run in runs)
    print(f"{'':14}{'steps':>6}{'of all':>7}{'loss':>8}{f'loss after {least:.0f} steps':>24}")
    for run in runs:
        print(run.row(seconds, least))


if __name__ == "__main__":
    main(sys.argv[1:])
