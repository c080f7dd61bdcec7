"""What launchers share: the environment of a rank, its exit code, and how a process group is
ended."""

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
)

# Each by its own name, because `aiodist run` looks for these names in tracebacks.
CONSEQUENCES: tuple[type[AiodistError], ...] = (
    PeerLostError,
    CollectiveAbortedError,
    GroupRevokedError,
)
"""Errors that a rank raises because another rank failed. A user looks for the cause instead."""


_MARK = "_aiodist_consequence"


def mark(error: BaseException) -> None:
    """Note in `error` if it is a consequence, because pickling loses what led to it."""
    if is_consequence(error):
        error.__dict__[_MARK] = True


def is_consequence(error: BaseException) -> bool:
    """Tell whether a rank raised `error` because another rank failed.

    An exception group is a consequence if all of its exceptions are. So is an exception that was
    raised from a consequence, or while one was handled.
    """
    return _is_consequence(error, {})


def _is_consequence(error: BaseException, known: dict[int, bool]) -> bool:
    """`known`: what is known of exceptions, by their ids. Those that are looked at are in it, too,
    because exceptions may refer to each other."""
    chain: list[int] = []
    found: BaseException | None = error
    result = False
    while found is not None and not result:
        if id(found) in known:
            result = known[id(found)]
            break
        known[id(found)] = False
        chain.append(id(found))
        result = (
            isinstance(found, CONSEQUENCES)
            or _MARK in found.__dict__
            or (
                isinstance(found, BaseExceptionGroup)
                and all(_is_consequence(each, known) for each in found.exceptions)
            )
        )
        found = found.__cause__ if found.__suppress_context__ else found.__context__
    known |= dict.fromkeys(chain, result)
    return result


SETTLE = 3.0
"""How many seconds a failure that looks like a consequence waits for its cause."""

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for ranks that have to stop."""


_RANK_AND_SIZES = ("AIODIST_RANK", "AIODIST_SIZE", "AIODIST_MIN_SIZE", "AIODIST_MAX_SIZE", "RANK",
                   "WORLD_SIZE", "AIODIST_RESTART_COUNT")  # fmt: skip
"""Variables of a rank. A rank gets some of them, and must not inherit the others from its
launcher."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of a run have in common.

    `address` is that of the coordinator. `master_addr` and `master_port` are for programs that call
    torch.distributed beside aiodist. `least` is the smallest size of an elastic group. In an
    elastic group the coordinator assigns the ranks.
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
    """Return the variables of one rank: those of aiodist and those of torchrun.

    Each rank gets its share of `cores` as OMP_NUM_THREADS, because numpy and torch take all cores
    otherwise. `restarts` says how often it was started before.
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
    """Return `base` with the variables of one rank.

    OMP_NUM_THREADS of `base` stays. Variables of an enclosing launcher are removed.
    """
    # A rank within a job of torchrun would otherwise take itself for a worker of that job, and
    # would look for the agent's store instead of making one.
    env = {
        name: value
        for name, value in base.items()
        if not name.startswith("TORCHELASTIC_") and name not in _RANK_AND_SIZES
    }
    env |= rank_environment(job, local_rank, cores, restarts)
    if "OMP_NUM_THREADS" in base:
        env["OMP_NUM_THREADS"] = base["OMP_NUM_THREADS"]
    return env


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of `host` on which no process listens now.

    If possible, it is outside the range from which the system serves connections, because a port in
    that range may be taken a moment later.
    """
    # At random, because several runs may start on this host at once. A gap remains between this
    # check and the moment when the rank listens, so a collision can only be made unlikely. Linux
    # serves connections from ports 32768 and up, of which a busy host may use hundreds a second.
    # The program's own stream of random numbers may be seeded alike in all of them.
    for port in (*random.SystemRandom().sample(range(20_000, 32_000), 32), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError(f"{host} has no free TCP port")


def describe_exit(code: int) -> str:
    """Describe how a process ended, from its return code (negative: the signal that ended it)."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def shell_status(code: int) -> int:
    """Return the code that a shell reports for a process: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def signal_group(pid: int, number: int) -> bool:
    """Signal the process group that the process `pid` leads; 0 as the number only looks for it.

    Returns False if there is none: the process has just started and has no group yet, or all of the
    group has ended.
    """
    # A group has the number of its first process. That number is free for others as soon as the
    # process is reaped and the group has no member. So signal first, and reap after that. A caller
    # whose loop reaps cannot: it signals at once after that, or only while it knows no return code.
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # macOS: all of the group has ended
        return False
    return True


def require_posix(what: str) -> None:
    """Raise OSError if the system has no process groups, as Windows."""
    if os.name != "posix":
        raise OSError(
            f"{what} needs process groups, which {os.name!r} systems lack: start the ranks by "
            "hand, each with AIODIST_ADDRESS, AIODIST_RANK and AIODIST_SIZE in its environment"
        )


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: uvloop's if it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks for a message: "rank 2", "ranks 0, 1 and 3"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
