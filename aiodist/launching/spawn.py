"""What launchers share: the environment of a rank, how its end is told, how a group is ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    GroupRevokedError,
    PeerLostError,
    leaves,
)

# Each by its own name, because `aiodist run` looks for these names in tracebacks.
CONSEQUENCES: tuple[type[AiodistError], ...] = (
    PeerLostError,
    CollectiveAbortedError,
    GroupRevokedError,
)
"""What ranks raise because another one failed: not the cause that a user looks for."""


def is_consequence(error: BaseException) -> bool:
    """Whether a rank raised `error` because another one failed; a group, if all in it are that."""
    return all(isinstance(leaf, CONSEQUENCES) for leaf in leaves(error))


SETTLE = 3.0
"""Seconds that a failure which looks like a consequence waits for its cause to show."""

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for ranks that have to stop."""


_RANK_AND_SIZES = ("AIODIST_RANK", "AIODIST_SIZE", "AIODIST_MIN_SIZE", "AIODIST_MAX_SIZE", "RANK",
                   "WORLD_SIZE", "AIODIST_RESTART_COUNT")  # fmt: skip
"""Variables of which a rank has some: it must not find the others of what started its launcher."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of a run have in common.

    `address`: of the coordinator. `master_addr`, `master_port`: for torch's own use, where a
    program calls torch.distributed beside aiodist. `least`: of an elastic group, how many ranks it
    takes; there the coordinator says which rank a process is.
    """

    address: str
    run_id: str
    local_size: int
    master_addr: str
    master_port: int
    nodes: int = 1
    node: int = 0
    group: str | None = None
    token: str | None = None
    least: int | None = None

    @property
    def size(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.local_size

    def rank(self, local_rank: int) -> int:
        """The rank of the process `local_rank` of this node."""
        return self.node * self.local_size + local_rank


def rank_environment(job: Job, local_rank: int, cores: int, restarts: int = 0) -> dict[str, str]:
    """The variables of one rank: aiodist's own and those of torchrun.

    `cores` are shared out as OMP_NUM_THREADS: every numpy and torch takes all of them otherwise.
    `restarts`: how often it was started before.
    """
    env = {
        "AIODIST_ADDRESS": job.address,
        "AIODIST_RUN_ID": job.run_id,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.local_size),
        "GROUP_RANK": str(job.node),
        "GROUP_WORLD_SIZE": str(job.nodes),
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": str(job.master_port),
        "OMP_NUM_THREADS": str(max(1, cores // job.local_size)),
    }
    if job.least is None:
        rank, size = str(job.rank(local_rank)), str(job.size)
        env |= {"AIODIST_RANK": rank, "AIODIST_SIZE": size, "RANK": rank, "WORLD_SIZE": size}
    else:
        env["AIODIST_MIN_SIZE"], env["AIODIST_MAX_SIZE"] = str(job.least), str(job.size)
        env["AIODIST_RESTART_COUNT"] = str(restarts)
    if job.group is not None:
        env["AIODIST_GROUP"] = job.group
    if job.token is not None:
        env["AIODIST_TOKEN"] = job.token
    return env


def with_rank_environment(
    base: Mapping[str, str], job: Job, local_rank: int, cores: int, restarts: int = 0
) -> dict[str, str]:
    """`base` with the variables of one rank: an OMP_NUM_THREADS that is set there stays, what an
    enclosing launcher left goes."""
    # A rank that is started within a job of torchrun would take itself for one of that job's
    # workers: it would look for the agent's store, and not make one of its own.
    env = {
        name: value
        for name, value in base.items()
        if not name.startswith("TORCHELASTIC_") and name not in _RANK_AND_SIZES
    }
    env |= rank_environment(job, local_rank, cores, restarts)
    if "OMP_NUM_THREADS" in base:
        env["OMP_NUM_THREADS"] = base["OMP_NUM_THREADS"]
    return env


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that nobody listened on just now. If possible, none of those that the
    system gives to connections: one of these may be taken a moment later."""
    # At random, for several runs may start on this host at once and all look for a port. Between
    # here and the moment at which somebody listens there is a gap in any case, so this can only
    # make it unlikely that the port is taken: it is below those that Linux gives to connections
    # (from 32768 on), of which a busy host may use hundreds a second.
    for port in (*random.sample(range(20_000, 32_000), 32), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError(f"{host} has no free TCP port")


def describe_exit(code: int) -> str:
    """How a process ended, from its return code (negative: the signal that ended it)."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def shell_status(code: int) -> int:
    """The return code of a process as a shell reports it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def signal_group(pid: int, number: signal.Signals) -> bool:
    """Signal the process group of the tethered process `pid`. False: there is none, because the
    process has just started and has no group of its own yet, or because all of it has ended."""
    # The number of the group is that of its first process, so no other group can have it while this
    # one has a member left: nobody else is hit, though the first process may be gone by now.
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True


def require_posix(what: str) -> None:
    """Raise OSError where there are no process groups, as on Windows."""
    if os.name != "posix":
        raise OSError(
            f"{what} needs process groups, which {os.name!r} systems lack: start the ranks by "
            "hand, each with AIODIST_ADDRESS, AIODIST_RANK and AIODIST_SIZE in its environment"
        )


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop event loop; asyncio's own where uvloop cannot be had."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks for a message: "rank 2", "ranks 0, 1 and 3"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
