"""Without a token, rank 0 listens on what MASTER_ADDR names on its host, and on nothing else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.multihost

SERVE = """
import asyncio, sys, aiodist
async def main():
    async with aiodist.connect(allow_pickle="pickle" in sys.argv):
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""

MEET = """
import asyncio, aiodist
async def main():
    async with aiodist.connect(timeout=3):
        pass
asyncio.run(main())
"""

PROBE = """
import socket, sys
for host in sys.argv[1:]:
    try:
        socket.create_connection((host, 29500), timeout=10).close()
        print("open")
    except ConnectionRefusedError:
        print("refused")
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
    with contextlib.ExitStack() as stack:

        def run(
            namespace: str, program: str, *arguments: str, **more: str
        ) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, sys.executable, "-c", program, *arguments],
                env=clean | {"MASTER_PORT": "29500"} | more,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield run


def test_strangers_find_nobody_at_other_addresses(hosts: Any, start: Start) -> None:
    home, away = hosts
    subprocess.run(
        ["ip", "-n", home.namespace, "addr", "add", "10.231.7.11/24", "dev", home.device],
        check=True,
    )
    alone = {"MASTER_ADDR": home.address, "RANK": "0", "WORLD_SIZE": "1"}
    server = start(home.namespace, SERVE, **alone)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    probe = start(away.namespace, PROBE, home.address, "10.231.7.11")
    assert probe.communicate()[0].split() == ["open", "refused"]
    probe = start(home.namespace, PROBE, "127.0.0.1")
    assert probe.communicate()[0].split() == ["refused"]
    _, err = server.communicate()
    assert server.returncode == 0, err
    assert err.count("without a token") == 1
    assert f"tcp://{home.address}:29500" in err

    refused = start(home.namespace, SERVE, "pickle", **alone)
    _, err = refused.communicate()
    assert "ValueError: allow_pickle=True lets every member run code" in err


def test_a_name_that_is_a_loopback_address_at_home_is_explained(hosts: Any, start: Start) -> None:
    """In /etc/hosts of Debian the name of the machine itself has a loopback address."""
    ranks = [
        start(host.namespace, MEET, MASTER_ADDR="aiodist-master", RANK=str(rank), WORLD_SIZE="2")
        for rank, host in enumerate(hosts)
    ]
    for process in ranks:
        _, err = process.communicate()
        assert process.returncode == 1
        assert "JoinTimeoutError" in err
        assert "give all ranks the same AIODIST_TOKEN" in err
