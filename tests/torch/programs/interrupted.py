"""Ctrl-C while an operation waits: it is cancelled here, and the other rank hears of that."""

from __future__ import annotations

import os
import signal
import threading

import torch
import torch.distributed as dist

import aiodist

dist.init_process_group("aiodist")
x = torch.ones(1)
if dist.get_rank() == 0:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        dist.all_reduce(x)
        raise AssertionError("not interrupted")
    except KeyboardInterrupt:
        pass
    dist.send(x, 1)
else:
    dist.recv(x, 0)
    try:
        dist.all_reduce(x)
        raise AssertionError("not cancelled")
    except aiodist.CollectiveAbortedError as error:
        assert error.rank == 0, error
dist.barrier()
dist.destroy_process_group()
print("interrupted")
