"""Settings from the environment variables of launchers. Pure: a mapping in, settings out.

The first source that is set wins. Rank and size always come from the same source:

=========  ======================================================================================
address    AIODIST_ADDRESS; MASTER_ADDR and MASTER_PORT; the pod of index 0 in the headless service
           AIODIST_SERVICE; a port made from the job id, of 127.0.0.1 if Slurm, Open MPI or MPICH
           say that all ranks are on one host, else of the first host that Slurm lists
rank/size  JOB_COMPLETION_INDEX/AIODIST_SIZE; AIODIST_RANK/_SIZE; RANK/WORLD_SIZE;
           OMPI_COMM_WORLD_RANK/_SIZE; PMI_RANK/_SIZE of mpiexec; SLURM_PROCID/_NTASKS; other PMI_…
run id     AIODIST_RUN_ID; TORCHELASTIC_RUN_ID; the job id, with an address that was made from it
others     AIODIST_GROUP, AIODIST_TRANSPORTS; of an elastic group AIODIST_MIN_SIZE,
           AIODIST_MAX_SIZE. Also if the address is given: AIODIST_TOKEN, AIODIST_TIMEOUT
=========  ======================================================================================

An empty variable counts as not set. Only an empty AIODIST_TOKEN is an error, because a program that
sets it wants a token.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from aiodist import hostlist
from aiodist.wire.address import Address, parse_address

DEFAULT_PORT = 29500
"""The port of a job without a job id (torch's default for MASTER_PORT)."""

_FIRST_PORT, _PORTS = 20000, 10000
"""Ports for jobs with an id: below those that systems give to clients."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says; None or empty if it does not say.

    `listen` is the address at which rank 0 may serve `address` itself ("": it may not).
    `listen_guarded` is the same if strangers cannot reach it. MASTER_ADDR is rank 0's host under
    the name that others know, so rank 0 may then listen on all interfaces. `agent_store`: torchrun
    keeps a TCPStore at MASTER_ADDR:MASTER_PORT, so that address is taken. `one_host`: all ranks are
    on one host, by LOCAL_WORLD_SIZE of torchrun and `aiodist run`.
    """

    address: str = ""
    rank: int | None = None
    size: int | None = None
    min_size: int | None = None
    max_size: int | None = None
    group: str | None = None
    transports: tuple[str, ...] | None = None
    run_id: str = ""
    listen: str = ""
    listen_guarded: str = ""
    agent_store: bool = False
    one_host: bool = False


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of one launcher. They count if all of `given` are set.

    A job is on one host if `hosts` is 1, or if `local_size` equals `size`. `nodes` lists its hosts,
    and the first of them has rank 0. `job` are variables that together name the job on all ranks.
    """

    name: str
    rank: str
    size: str
    hosts: str = ""
    local_size: str = ""
    nodes: str = ""
    job: tuple[str, ...] = ()
    given: tuple[str, ...] = ()


# From the innermost to the outermost launcher. mpirun in a job of Slurm starts ranks itself, or
# through one task of Slurm on each host, so the ranks inherit the variables of that task. A batch
# script has a SLURM_PROCID but is in no step: its ranks are those that it starts by srun.
_LAUNCHERS = (
    _Launcher("aiodist", "AIODIST_RANK", "AIODIST_SIZE"),
    _Launcher("torchrun", "RANK", "WORLD_SIZE"),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        nodes="SLURM_JOB_NODELIST",
        job=("PMIX_NAMESPACE",),
    ),
    _Launcher(
        "MPICH",
        "PMI_RANK",
        "PMI_SIZE",
        local_size="MPI_LOCALNRANKS",
        nodes="SLURM_JOB_NODELIST",
        job=("SLURM_JOB_ID", "I_MPI_HYDRA_UUID"),
        given=("MPI_LOCALNRANKS",),
    ),
    _Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        hosts="SLURM_NNODES",
        nodes="SLURM_STEP_NODELIST",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        given=("SLURM_STEP_ID",),
    ),
    _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", local_size="MPI_LOCALNRANKS"),
)

# One source, although the manifest gives the size and Kubernetes the rank. Ranks that `aiodist run`
# starts within the pod have an AIODIST_RANK of their own, which wins.
_POD = _Launcher(
    "Kubernetes",
    "JOB_COMPLETION_INDEX",
    "AIODIST_SIZE",
    given=("JOB_COMPLETION_INDEX", "AIODIST_SIZE"),
)

ALWAYS = ("AIODIST_TOKEN", "AIODIST_TIMEOUT")
"""The variables that are also read if the address is given."""

NAMES = tuple(
    dict.fromkeys(
        [
            *("AIODIST_ADDRESS", "AIODIST_RANK", "AIODIST_SIZE", "AIODIST_MIN_SIZE"),
            *("AIODIST_MAX_SIZE", "AIODIST_GROUP", "AIODIST_TRANSPORTS", "AIODIST_RUN_ID"),
            *("AIODIST_SERVICE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"),
            *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
            *(
                name
                for one in (*_LAUNCHERS, _POD)
                for name in (one.rank, one.size, one.hosts, one.local_size, one.nodes, *one.job)
                if name
            ),
            "SLURM_DISTRIBUTION",
        ]
    )
)
"""All other variables that are read here. HOSTNAME is not among them, because it is always set."""


def settings_from(environ: Mapping[str, str]) -> Settings:
    """Read the settings. Raises ValueError that names the variable, its value, and what was
    expected."""
    environ = {name: value.strip() for name, value in environ.items() if value.strip()}
    # Launchers may be nested: `aiodist run` within a job of Slurm, torchrun within MPI. The
    # innermost knows the process best, so it comes first in the list. Rank and size come from the
    # same launcher. In an elastic group the coordinator assigns the ranks, in each epoch anew.
    elastic = "AIODIST_MIN_SIZE" in environ or "AIODIST_MAX_SIZE" in environ
    launcher, rank, size = (None, None, None) if elastic else _rank_and_size(environ)
    # Without TORCHELASTIC_RESTART_COUNT, because each of torchrun's agents counts its own restarts.
    run_id = environ.get("AIODIST_RUN_ID") or environ.get("TORCHELASTIC_RUN_ID", "")
    agent_store = False
    if "AIODIST_ADDRESS" in environ:
        address = _given_address(environ)
    elif "MASTER_ADDR" in environ or "MASTER_PORT" in environ:
        address = _master_address(environ)
        agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    else:
        address, job = _launcher_address(environ, launcher, size)
        run_id = run_id or job
    transports = None
    if "AIODIST_TRANSPORTS" in environ:
        named = (name.strip() for name in environ["AIODIST_TRANSPORTS"].split(","))
        transports = tuple(name for name in named if name)
    return Settings(
        address=str(address),
        rank=rank,
        size=size,
        min_size=_integer(environ, "AIODIST_MIN_SIZE", 1),
        max_size=_integer(environ, "AIODIST_MAX_SIZE", 1),
        group=environ.get("AIODIST_GROUP"),
        transports=transports,
        run_id=run_id,
        # An address of TLS belongs to a coordinator of its own.
        listen="" if address.scheme == "tls" else str(address),
        listen_guarded=_listening_at(address, master="AIODIST_ADDRESS" not in environ),
        agent_store=agent_store,
        one_host=size is not None and environ.get("LOCAL_WORLD_SIZE") == str(size),
    )


def token_in(environ: Mapping[str, str]) -> str | None:
    """Return AIODIST_TOKEN; None if it is not set. Raises ValueError if it is empty.

    An empty token is more often the output of a failed command than the wish to let every process
    in.
    """
    token = environ.get("AIODIST_TOKEN")
    if token is not None and not token.strip():
        raise ValueError(
            "AIODIST_TOKEN is set, but empty: expected the token. Unset it for no authentication"
        )
    return None if token is None else token.strip()


def timeout_in(environ: Mapping[str, str]) -> float | None:
    """Return AIODIST_TIMEOUT in seconds; None if it is not set. Raises ValueError."""
    value = environ.get("AIODIST_TIMEOUT", "").strip()
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"AIODIST_TIMEOUT={value!r}: expected seconds, more than 0")
    return seconds


def _listening_at(address: Address, *, master: bool) -> str:
    if address.scheme == "tls":
        return ""
    if master and not address.is_loopback:
        address = Address("tcp", "::" if ":" in address.host else "0.0.0.0", address.port)
    return str(address)


def _rank_and_size(
    environ: Mapping[str, str],
) -> tuple[_Launcher | None, int | None, int | None]:
    launchers = _LAUNCHERS if "AIODIST_RANK" in environ else (_POD, *_LAUNCHERS)
    for launcher in launchers:
        if not all(name in environ for name in launcher.given):
            continue
        rank = _integer(environ, launcher.rank, 0)
        size = _integer(environ, launcher.size, 1)
        if rank is None and size is None:
            continue
        if rank is not None and size is not None and rank >= size:
            raise ValueError(
                f"{launcher.rank}={rank} with {launcher.size}={size}: expected a rank from 0 to "
                f"{size - 1}"
            )
        return launcher, rank, size
    return None, None, None


def _integer(environ: Mapping[str, str], name: str, least: int) -> int | None:
    value = environ.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or int(value) < least:
        raise ValueError(f"{name}={value!r}: expected an integer of at least {least}")
    return int(value)


def _given_address(environ: Mapping[str, str]) -> Address:
    try:
        return parse_address(environ["AIODIST_ADDRESS"])
    except ValueError as error:
        raise ValueError(f"AIODIST_ADDRESS: {error}") from None


def _master_address(environ: Mapping[str, str]) -> Address:
    for name, other, example in (
        ("MASTER_ADDR", "MASTER_PORT", "the host of rank 0"),
        ("MASTER_PORT", "MASTER_ADDR", "a free port on it"),
    ):
        if name not in environ:
            raise ValueError(
                f"{other}={environ[other]!r} is set but {name} is not: expected {name} to be "
                f"{example}"
            )
    port = _integer(environ, "MASTER_PORT", 1)
    if port is None or port > 65535:
        raise ValueError(f"MASTER_PORT={port}: expected a port from 1 to 65535")
    return Address("tcp", environ["MASTER_ADDR"].strip("[]"), port)


def _launcher_address(
    environ: Mapping[str, str], launcher: _Launcher | None, size: int | None
) -> tuple[Address, str]:
    """Return the address that follows from what the launcher says, and the job's id."""
    if "AIODIST_SERVICE" in environ:
        return Address("tcp", _first_pod(environ), DEFAULT_PORT), ""
    needed = (
        "set AIODIST_ADDRESS (tcp://host:port), or MASTER_ADDR and MASTER_PORT, or call "
        "connect() with an address"
    )
    if launcher is None or not (launcher.hosts or launcher.local_size):
        command = "srun python" if "SLURM_JOB_ID" in environ else "aiodist run -n 4"
        raise ValueError(
            "the environment names no coordinator: start the program by a launcher, as with "
            f"`{command} PROGRAM.py`, or {needed}"
        )
    hosts = _integer(environ, launcher.hosts, 1) if launcher.hosts else None
    local = _integer(environ, launcher.local_size, 1) if launcher.local_size else None
    host = "127.0.0.1"
    if hosts != 1 and (local is None or local != size):
        host = _first_host(environ, launcher)
    if not host:
        clue = launcher.hosts or launcher.local_size
        raise ValueError(
            f"{launcher.name} gives rank and size but no address, and does not say that all ranks "
            f"are on one host ({clue}={environ.get(clue, 'not set')}): {needed}"
        )
    named = ".".join(environ[name] for name in launcher.job if name in environ)
    job = environ.get("AIODIST_RUN_ID", named)
    port = _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS if job else DEFAULT_PORT
    return Address("tcp", host, port), job


def _first_host(environ: Mapping[str, str], launcher: _Launcher) -> str:
    """Return the host of rank 0, if Slurm says which that is."""
    if launcher.nodes not in environ:
        return ""
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise ValueError(
            f"SLURM_DISTRIBUTION={environ['SLURM_DISTRIBUTION']}: rank 0 may be on any host of "
            f"{launcher.nodes}={environ[launcher.nodes]}. Set MASTER_ADDR to the one that "
            "the file of hosts has first, and MASTER_PORT to a free port of it"
        )
    try:
        return next(hostlist.hosts(environ[launcher.nodes]))
    except ValueError as error:
        raise ValueError(f"{launcher.nodes}: {error}") from None


def _first_pod(environ: Mapping[str, str]) -> str:
    """Return the name of the pod of index 0 in the headless service.

    It follows from the name of this pod, because an indexed Job names each host after itself and
    the index.
    """
    index, pod = environ.get("JOB_COMPLETION_INDEX", ""), environ.get("HOSTNAME", "")
    job = pod.removesuffix(f"-{index}")
    if not index or job == pod:
        raise ValueError(
            f"AIODIST_SERVICE={environ['AIODIST_SERVICE']} is for the pods of an indexed Job: "
            f"expected HOSTNAME to end in -JOB_COMPLETION_INDEX, not HOSTNAME={pod or 'not set'} "
            f"with JOB_COMPLETION_INDEX={index or 'not set'}. Or set AIODIST_ADDRESS"
        )
    return f"{job}-0.{environ['AIODIST_SERVICE']}"
