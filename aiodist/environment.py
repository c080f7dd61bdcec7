"""Settings from the environment variables of launchers. Pure: a mapping in, settings out.

The first source that is set wins. Rank and size always come from the same source:

=========  ======================================================================================
address    AIODIST_ADDRESS; MASTER_ADDR and MASTER_PORT; the pod of index 0 in the headless service
           AIODIST_SERVICE; a port made from the job id, of 127.0.0.1 if Slurm, Open MPI or MPICH
           say that all ranks are on one host, else of the first host that Slurm lists
rank/size  AIODIST_RANK/_SIZE; RANK/WORLD_SIZE; OMPI_COMM_WORLD_RANK/_SIZE; PMI_RANK/_SIZE of
           mpiexec; JOB_COMPLETION_INDEX/AIODIST_SIZE; AIODIST_SIZE alone; SLURM_PROCID/_NTASKS;
           other PMI_…; WORLD_SIZE alone
run id     AIODIST_RUN_ID; TORCHELASTIC_RUN_ID, with TORCHELASTIC_RESTART_COUNT if torchrun has one
           agent (GROUP_WORLD_SIZE); the job id, with an address that was made from it
others     AIODIST_GROUP; of an elastic group AIODIST_MIN_SIZE, AIODIST_MAX_SIZE. Also if the
           address is given: AIODIST_TOKEN, AIODIST_TIMEOUT, AIODIST_TRANSPORTS
=========  ======================================================================================

An empty variable counts as not set. Only an empty AIODIST_TOKEN is an error, because a program that
sets it wants a token.
"""

from __future__ import annotations

import ipaddress
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from aiodist import hostlist
from aiodist.wire.address import Address, parse_reachable
from aiodist.wire.limits import MAX_MEMBERS

DEFAULT_PORT = 29500
"""The port of a job without a job id (torch's default for MASTER_PORT)."""

FLIGHT_RECORDER = "AIODIST_FLIGHT_RECORDER"
"""The variable that has ranks dump what they do when they get a signal."""

TRACE = "AIODIST_TRACE"
"""The variable that names the directory into which ranks write their traces."""

_FIRST_PORT, _PORTS = 20000, 10000
"""Ports for jobs with an id: below those that systems give to clients."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says; None or empty if it does not say.

    `listen` is the address at which rank 0 may serve `address` itself ("": it may not).
    `listen_guarded` is the same if strangers cannot reach it. MASTER_ADDR is rank 0's host under
    the name that others know, so rank 0 may then listen on all interfaces. `agent_store`: torchrun
    keeps a TCPStore at MASTER_ADDR:MASTER_PORT, so that address is taken. `one_host`: all ranks are
    on one host, by LOCAL_WORLD_SIZE of torchrun and `aiodist run`. `rank_by` and `size_by` are the
    variables of the rank and of the (greatest) size, for errors.
    """

    address: str = ""
    rank: int | None = None
    size: int | None = None
    min_size: int | None = None
    max_size: int | None = None
    group: str | None = None
    run_id: str = ""
    listen: str = ""
    listen_guarded: str = ""
    agent_store: bool = False
    one_host: bool = False
    rank_by: str = "AIODIST_RANK"
    size_by: str = "AIODIST_SIZE"


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
# script has a SLURM_PROCID but is in no step: its ranks are those that it starts by srun. A size
# without a rank may be meant for an outer launcher (the manifest of a pod sets AIODIST_SIZE, in
# which torchrun may start ranks), or be left over. So it comes late.
_LAUNCHERS = (
    _Launcher("aiodist", "AIODIST_RANK", "AIODIST_SIZE", given=("AIODIST_RANK",)),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", given=("RANK",)),
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
        "Kubernetes",
        "JOB_COMPLETION_INDEX",
        "AIODIST_SIZE",
        given=("JOB_COMPLETION_INDEX", "AIODIST_SIZE"),
    ),
    _Launcher("aiodist", "AIODIST_RANK", "AIODIST_SIZE"),
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
    _Launcher("torchrun", "RANK", "WORLD_SIZE"),
)

ALWAYS = ("AIODIST_TOKEN", "AIODIST_TIMEOUT", "AIODIST_TRANSPORTS", FLIGHT_RECORDER, TRACE)
"""The variables that are also read if the address is given."""

NAMES = tuple(
    dict.fromkeys(
        [
            *("AIODIST_ADDRESS", "AIODIST_RANK", "AIODIST_SIZE", "AIODIST_MIN_SIZE"),
            *("AIODIST_MAX_SIZE", "AIODIST_GROUP", "AIODIST_RUN_ID"),
            *("AIODIST_SERVICE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"),
            *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"),
            "TORCHELASTIC_USE_AGENT_STORE",
            *(
                name
                for one in _LAUNCHERS
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
    run_id = environ.get("AIODIST_RUN_ID", "")
    if not run_id and "TORCHELASTIC_RUN_ID" in environ:
        run_id = environ["TORCHELASTIC_RUN_ID"]
        if environ.get("GROUP_WORLD_SIZE", "1") == "1":  # several agents count each for itself
            run_id += f"#{_integer(environ, 'TORCHELASTIC_RESTART_COUNT', 0) or 0}"
    agent_store = False
    if "AIODIST_ADDRESS" in environ:
        address = _given_address(environ)
    elif "MASTER_ADDR" in environ or "MASTER_PORT" in environ:
        address = _master_address(environ)
        agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    else:
        address, job = _launcher_address(environ, launcher, size)
        run_id = run_id or job
    least, most = (
        _integer(environ, name, 1, MAX_MEMBERS) for name in ("AIODIST_MIN_SIZE", "AIODIST_MAX_SIZE")
    )
    if least is not None and most is not None and least > most:
        raise ValueError(
            f"AIODIST_MIN_SIZE={least} with AIODIST_MAX_SIZE={most}: expected at most {most}"
        )
    source = launcher or _LAUNCHERS[0]
    return Settings(
        address=str(address),
        rank=rank,
        size=size,
        min_size=least,
        max_size=most,
        group=environ.get("AIODIST_GROUP"),
        run_id=run_id,
        # An address of TLS belongs to a coordinator of its own.
        listen="" if address.scheme == "tls" else str(address),
        listen_guarded=_listening_at(address, master="AIODIST_ADDRESS" not in environ),
        agent_store=agent_store,
        one_host=size is not None and environ.get("LOCAL_WORLD_SIZE") == str(size),
        rank_by=source.rank,
        size_by="AIODIST_MAX_SIZE" if elastic else source.size,
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


def transports_in(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names in AIODIST_TRANSPORTS; None if it is not set. Raises ValueError."""
    value = environ.get("AIODIST_TRANSPORTS", "").strip()
    names = tuple(name for part in value.split(",") if (name := part.strip()))
    if value and not names:
        raise ValueError(f"AIODIST_TRANSPORTS={value!r}: expected names, as shm,tcp")
    return names or None


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
    for launcher in _LAUNCHERS:
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


def _integer(environ: Mapping[str, str], name: str, least: int, most: int = 10**9) -> int | None:
    value = environ.get(name)
    if value is None:
        return None
    # Python refuses to read thousands of digits, with a text of its own.
    is_number = value.isascii() and value.isdigit() and len(value) < 20
    if not is_number or not least <= int(value) <= most:
        raise ValueError(f"{name}={value!r:.50}: expected an integer from {least} to {most}")
    return int(value)


def _given_address(environ: Mapping[str, str]) -> Address:
    try:
        return parse_reachable(environ["AIODIST_ADDRESS"])
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
    port = _integer(environ, "MASTER_PORT", 1, 65535)
    assert port is not None
    host = environ["MASTER_ADDR"].strip("[]")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(
                f"MASTER_ADDR={host!r}: expected a host alone; the port goes to MASTER_PORT"
            ) from None
    return Address("tcp", host, port)


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
        names = (launcher.rank, launcher.size) if launcher is not None else ()
        found = " and ".join(f"{name}={environ[name]}" for name in names if name in environ)
        beside = f" has {found}, but" if found else ""
        raise ValueError(
            f"the environment{beside} names no coordinator: start the program by a launcher, as "
            f"with `{command} PROGRAM.py`, or {needed}"
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
    service = environ["AIODIST_SERVICE"]
    if ":" in service:
        raise ValueError(
            f"AIODIST_SERVICE={service!r}: expected a service's name alone; its port is always "
            f"{DEFAULT_PORT}"
        )
    job = pod.removesuffix(f"-{index}")
    if not index or job == pod:
        raise ValueError(
            f"AIODIST_SERVICE={service} is for the pods of an indexed Job: "
            f"expected HOSTNAME to end in -JOB_COMPLETION_INDEX, not HOSTNAME={pod or 'not set'} "
            f"with JOB_COMPLETION_INDEX={index or 'not set'}. Or set AIODIST_ADDRESS"
        )
    return f"{job}-0.{service}"
