"""A forked child has no part in its parent's groups, and meets others anew."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

import aiodist
from aiodist_torch.work import _guard


def total() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)


def in_child(pending: dist.Work, folder: str) -> None:
    for call in (dist.new_group, pending.wait):
        try:
            call()
            raise AssertionError("a call for the parent's groups returned")
        except aiodist.GroupClosedError as error:
            assert isinstance(error, dist.DistBackendError)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.group.WORLD.abort()
    dist.destroy_process_group()
    method = f"file://{folder}/meeting"
    dist.init_process_group("aiodist", init_method=method, rank=rank, world_size=size)
    assert total() == size
    dist.destroy_process_group()


dist.init_process_group("aiodist")
x = torch.zeros(1)
pending = dist.irecv(x)
held, forked = threading.Event(), threading.Event()


def complete() -> None:
    """Hold what a thread holds that completes a work, until this process has forked."""
    with _guard.lock:
        held.set()
        forked.wait(120)


thread = threading.Thread(target=complete)
thread.start()
assert held.wait(120)
child = os.fork()
if child == 0:
    signal.alarm(120)  # the test ends even if the child does not
    try:
        in_child(pending, sys.argv[1])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
forked.set()
thread.join()
assert os.waitpid(child, 0)[1] == 0
assert total() == dist.get_world_size()
dist.send(torch.ones(1), 1 - dist.get_rank())
pending.wait()
assert float(x) == 1
dist.destroy_process_group()
print("forked")
