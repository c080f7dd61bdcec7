"""Replicas of torchft: one is killed and comes back, and their parameters are equal at the end.

``replicas.py FOLDER`` starts them and writes their logs there; ``replicas.py NAME LIGHTHOUSE`` is
one of them. The replica "dies" is killed at its third step. "stays" ends the run when it has seen
another one come, be lost, and come again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

from aiodist_torch.torchft import ProcessGroupAiodist

MINUTE = timedelta(seconds=60)
TOGETHER = 3
"""Steps that the replicas take together, each time."""


def replica(name: str, lighthouse: str) -> None:
    torch.manual_seed(len(name))  # they begin with other parameters: torchft makes them equal
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        sgd.load_state_dict(state["sgd"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupAiodist(timeout=MINUTE)
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
        replica_id=name,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=MINUTE,
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, sgd)
    together, losses, over = 0, 0, False
    parent = os.getppid()
    while not over:
        assert os.getppid() == parent, "whoever started the replicas is gone"
        optimizer.zero_grad()
        model(torch.rand(4, 8)).sum().backward()
        last = torch.tensor([float(name == "stays" and losses > 0 and together >= TOGETHER)])
        manager.allreduce(last).wait()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() == before:
            continue  # the step was given up, on all replicas
        over = bool(last)
        if manager.num_participants() == 2:
            together += 1
        elif together:
            together, losses = 0, losses + 1
        if name == "dies" and together == TOGETHER:
            os.kill(os.getpid(), signal.SIGKILL)
    weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
    print(manager.num_participants(), hashlib.sha256(weights).hexdigest(), flush=True)
    group.shutdown()  # torchft's manager does not do it
    manager.shutdown(wait=False)


def run(folder: Path) -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    with contextlib.ExitStack() as stack:

        def start(name: str) -> subprocess.Popen[str]:
            # torchft logs each step, more than a pipe holds.
            log = stack.enter_context((folder / name).open("w"))
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, name, lighthouse.address()],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            stack.callback(process.kill)
            return process

        stays, dies = start("stays"), start("dies")
        assert dies.wait() == -signal.SIGKILL
        again = start("again")
        found = [process.communicate()[0] for process in (stays, again)]
    lighthouse.shutdown()
    assert found[0].startswith("2 "), found
    assert found[0] == found[1], found
    print("equal", flush=True)
    os._exit(0)  # torchft's own threads sometimes keep a process that had a lighthouse from ending


if len(sys.argv) == 2:
    run(Path(sys.argv[1]))
else:
    replica(*sys.argv[1:])
