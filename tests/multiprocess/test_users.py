"""Ranks of different users on one host: they have no memory in common, and meet over TCP."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

import aiodist
from aiodist.transports import processes

ROOT, OTHER = 0, 65534


def as_user(user: int) -> list[str]:
    """What runs a program as `user`, who may read it wherever it lies: in root's home, say."""
    if user == ROOT:
        return []
    reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *reading]


def refused(*command: str) -> bool:
    """Whether `command` cannot be run here."""
    try:
        return bool(subprocess.run([*command, "true"], check=False, capture_output=True).returncode)
    except OSError:
        return True


pytestmark = [
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0 or refused(*as_user(OTHER)),
        reason="processes of other users cannot be started here",
    ),
]


RANK = """
import asyncio, sys
import numpy as np
import aiodist

async def main(address, rank, size):
    async with aiodist.connect(address, rank=rank, size=size, token="secret", timeout=200) as group:
        # Alone and all at once: over links, and over shared memory where there is some.
        for peer in range(size):
            if peer != rank:
                assert await group.sendrecv(rank, peer, src=peer, tag=7) == peer
        for _ in range(3):
            x = np.full(1000, rank + 1.0)
            await group.all_reduce(x)
            assert (x == sum(range(size + 1))).all()
        assert await group.all_gather(rank) == list(range(size))
        links = [group._actor.endpoint.peer(peer).link for peer in range(size)]
        print(group.local_size, *(getattr(link, "kind", "-") for link in links), flush=True)
        await group.barrier()

address, rank, size = sys.argv[1:]
asyncio.run(main(address, int(rank), int(size)))
"""


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(user, *arguments)``: a rank of `user`; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}

    def run(user: int, *arguments: object, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*prefix, *as_user(user), sys.executable, "-c", RANK, *map(str, arguments)],
            env=clean,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


async def kinds_of(
    start: Start, users: Sequence[int], prefixes: Sequence[Sequence[str]] = ()
) -> list[list[str]]:
    """What each rank said: how many share its host, and the kinds of its links."""
    prefixes = prefixes or [()] * len(users)
    async with aiodist.Coordinator("tcp://127.0.0.1:0", token="secret") as coordinator:
        ranks = [
            start(user, coordinator.address, rank, len(users), prefix=prefix)
            for rank, (user, prefix) in enumerate(zip(users, prefixes, strict=True))
        ]
        ended = await asyncio.gather(*(asyncio.to_thread(rank.communicate) for rank in ranks))
    for rank, (_, err) in zip(ranks, ended, strict=True):
        assert (rank.returncode, err) == (0, "")
    return [out.split() for out, _ in ended]


@pytest.mark.parametrize(
    "users",
    [
        pytest.param([ROOT, OTHER], marks=pytest.mark.long),
        pytest.param([OTHER, ROOT], marks=pytest.mark.long),
        [ROOT, OTHER, ROOT],
        [OTHER, ROOT, OTHER],
    ],
    ids=lambda users: "-".join("root" if user == ROOT else "other" for user in users),
)
async def test_users_meet(start: Start, users: list[int]) -> None:
    said = await kinds_of(start, users)
    for rank, user in enumerate(users):
        kinds = ["shm" if other == user else "tcp" for other in users]
        kinds[rank] = "-"
        assert said[rank] == [str(len(users)), *kinds]


UNSHARE = ("unshare", "--user", "--map-root-user")


@pytest.mark.skipif(refused(*UNSHARE), reason="user namespaces cannot be made here")
async def test_root_of_another_user_namespace_is_another_user(start: Start) -> None:
    said = await kinds_of(start, [ROOT, ROOT], [(), UNSHARE])
    assert said == [["2", "-", "tcp"], ["2", "tcp", "-"]]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_a_number_that_stands_for_many_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert processes.user_id() == processes.user_id()  # here every user has a number
    monkeypatch.setattr(processes, "_ALL_USERS", "0 100000 65536")  # of a container
    assert processes.user_id() != processes.user_id()
