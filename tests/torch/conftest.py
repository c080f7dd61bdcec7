"""Process groups to test: as threads of this process, and as programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from nursery import Born, Nursery
from threaded import in_threads
from torch._C._distributed_c10d import _DistributedBackendOptions

from aiodist.launching.spawn import free_port
from aiodist.threads.engine import engine
from aiodist_torch.process_group import ProcessGroup, create

ROOT = Path(__file__).parents[2]

Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="session", autouse=True)
def the_engine() -> None:
    """Its thread stays as long as the process."""
    engine()


def join(store: dist.Store, rank: int, size: int, timeout: float) -> ProcessGroup:
    """A process group, made as torch asks for one."""
    options = _DistributedBackendOptions()
    options.store = store
    options.group_rank, options.group_size = rank, size
    options.timeout = timedelta(seconds=timeout)
    options.group_id = "test"
    options.global_ranks_in_group = []
    return create(options)


@pytest.fixture
def ranks(no_leaks: None) -> Iterator[Ranks]:
    """``ranks(3, body)``: the results of ``body(process_group)`` of three ranks, which are threads;
    raises what the first of them raises. `store()`: each one's own store, if not all share one."""

    def run(
        size: int,
        body: Callable[[ProcessGroup], Any],
        *,
        timeout: float = 60,
        store: Callable[[], dist.Store] | None = None,
    ) -> list[Any]:
        shared = dist.HashStore()

        def main(rank: int) -> Any:
            group = join(store() if store else shared, rank, size, timeout)
            try:
                return body(group)
            finally:
                group.shutdown()

        return in_threads(size, main)

    yield run
    engine().end()  # rank 0's coordinator stays until the others have left


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which aiodist is installed, entry points and all."""
    folder = tmp_path_factory.mktemp("installed")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "aiodist_entry_points-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: aiodist-entry-points\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in points.items()
        )
    )
    taken = ("AIODIST_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCH", "PYTHONUNBUF")
    env = {name: value for name, value in os.environ.items() if not name.startswith(taken)}
    path = [str(folder), str(ROOT), str(ROOT / "server"), str(ROOT / "clients")]
    return env | {
        "PYTHONPATH": os.pathsep.join([*path, env.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
    }


Process = subprocess.Popen[str] | Born

OPTIONS = ("-W", "ignore::FutureWarning")


@pytest.fixture(scope="session")
def nursery(installed: dict[str, str]) -> Iterator[Nursery]:
    """Forks ranks that have imported torch and what its data parallelism needs."""
    made = Nursery(("torch.distributed", "torch._dynamo"), installed, *OPTIONS)
    yield made
    made.close()


class Job:
    """Processes of one program, by rank."""

    def __init__(self, processes: list[Process]) -> None:
        self.processes = processes

    def finish(self, *, quiet: bool = True) -> list[str]:
        """Wait for the end, which must be a good one, without a word on stderr if `quiet`; what
        each rank has printed."""
        ends = [
            (*process.communicate(timeout=280), process.returncode) for process in self.processes
        ]
        assert [code for *_, code in ends] == [0] * len(ends), ends
        assert not quiet or [err for _, err, _ in ends] == [""] * len(ends)
        return [out for out, _, _ in ends]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=60)
            if isinstance(process, Born):
                process.close()


def begun_anew(program: Path, args: Sequence[str], env: Mapping[str, str]) -> Process:
    """A process that begins with nothing imported."""
    return subprocess.Popen(
        [sys.executable, *OPTIONS, str(program), *args],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def job(
    installed: dict[str, str], nursery: Nursery, no_leaks: None
) -> Iterator[Callable[..., Job]]:
    """``job("name.py", 2, *args)`` starts two ranks of a program of ``tests/torch/programs`` (or a
    path). ``anew=True`` where torch is to be told something when it is imported."""
    jobs: list[Job] = []

    def start(program: str | Path, size: int, *args: str, anew: bool = False, **env: str) -> Job:
        path = Path(__file__).with_name("programs") / program
        places = installed | env | {"WORLD_SIZE": str(size), "MASTER_PORT": str(free_port())}
        begin = begun_anew if anew else nursery.start
        ranks = [begin(path, args, places | {"RANK": str(rank)}) for rank in range(size)]
        jobs.append(Job(ranks))
        return jobs[-1]

    yield start
    for each in jobs:
        each.end()
