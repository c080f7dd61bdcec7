"""A group that joined over `tls://` does not reach other hosts by plain TCP, unless told to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.multihost

RANK = """
import asyncio, os, socket, ssl, sys, aiodist

async def main():
    client = ssl.create_default_context(cafile=os.environ["AIODIST_TLS_CA"])
    given = (client, None) if sys.argv[1] == "told" else None
    async with aiodist.connect(ssl=given) as group:
        said = [
            address
            for member in group._actor.view.members
            for address in member.addresses
            if address.startswith(("tcp:", "tls:"))
        ]
        print(*said, flush=True)
        listens = [one.address for one in group._actor._listeners if "tcp:" in one.address]
        print(*listens, flush=True)
        try:
            print(await group.all_reduce(1), flush=True)
        except aiodist.PeerLostError as error:
            print(error, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def certificate(hosts: list[Any], tmp_path: Path) -> Path:
    """The folder of `tls.pem`, of the first host, and of its `tls.key`."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make a certificate with")
    subprocess.run(
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=test -addext subjectAltName=IP:{hosts[0].address} -keyout tls.key -out tls.pem",
        shell=True, check=True, cwd=tmp_path, capture_output=True,
    )  # fmt: skip
    return tmp_path


@pytest.fixture
def ranks(hosts: list[Any], certificate: Path) -> Iterator[Any]:
    """``ranks(way)``: one on each host, with a coordinator on the first: what they print."""
    address = f"tls://{hosts[0].address}:29500"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
    env = clean | {
        "AIODIST_ADDRESS": address,
        "AIODIST_SIZE": "2",
        "AIODIST_TOKEN": "secret",
        "AIODIST_TLS_CA": str(certificate / "tls.pem"),
    }
    with ExitStack() as stack:

        def on(host: Any, *arguments: str, **more: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, sys.executable, *arguments],
                env=env | more,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        def joined(way: str) -> list[list[str]]:
            files = [f"--tls-{what}={certificate / f'tls.{end}'}"
                     for what, end in (("cert", "pem"), ("key", "key"))]  # fmt: skip
            on(hosts[0], "-m", "aiodist_cli", "coordinator", "--listen", address, *files)
            started = [
                on(host, "-c", RANK, way, AIODIST_RANK=str(rank)) for rank, host in enumerate(hosts)
            ]
            said = []
            for process in started:
                out, err = process.communicate()
                assert process.returncode == 0, err
                said.append(out.splitlines())
            return said

        yield joined


def test_without_certificates_ranks_of_two_hosts_do_not_reach_each_other(ranks: Any) -> None:
    outcomes = []
    for said, listens, outcome in ranks("environment"):
        for address in (*said.split(), *listens.split()):
            assert address.startswith("tcp://127.0.0.1:")  # nobody else gets there
        assert "is lost: " in outcome
        outcomes.append(outcome)
    # Who finds out first says why, and then has left.
    assert any("no certificate" in one and "AIODIST_TLS_CERT" in one for one in outcomes)


def test_who_is_told_to_goes_in_the_clear(ranks: Any, hosts: list[Any]) -> None:
    for said, _, outcome in ranks("told"):
        assert [address.rpartition(":")[0] for address in said.split()] == [
            f"tcp://{host.address}" for host in hosts
        ]
        assert outcome == "2"
