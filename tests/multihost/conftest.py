"""Two "hosts": network namespaces with a wire between them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from aiodist.testing.owned_namespaces import remove, remove_left_over, this_process


class Host(NamedTuple):
    namespace: str
    address: str
    device: str
    """The interface that leads to the other one."""

    def set_link(self, state: str) -> None:
        """Pull the cable ("down"), or put it back ("up")."""
        ip("-n", self.namespace, "link", "set", self.device, state)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@pytest.fixture
def go() -> Callable[[list[subprocess.Popen[str]]], None]:
    """``go(ranks)``: each waits for a line on its standard input before it goes on."""

    def say(ranks: list[subprocess.Popen[str]]) -> None:
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    return say


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts. Skips where making them is not permitted."""
    remove_left_over()
    names = this_process().names("test", "ab")
    try:
        ip("netns", "add", names[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("netns", "add", names[1])
        veth = [f"ad{os.getpid() % 100000}{side}" for side in "ab"]
        ip("link", "add", veth[0], "netns", names[0], "type", "veth", "peer", veth[1],
           "netns", names[1])  # fmt: skip
        for number, (name, device) in enumerate(zip(names, veth, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.231.7.{number}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        for name, master in zip(names, ["127.0.1.1", "10.231.7.1"], strict=True):
            # What `ip netns exec` shows as /etc/hosts.
            Path(f"/etc/netns/{name}").mkdir(parents=True)
            Path(f"/etc/netns/{name}/hosts").write_text(f"{master} aiodist-master\n")
        yield [
            Host(names[0], "10.231.7.1", veth[0]),
            Host(names[1], "10.231.7.2", veth[1]),
        ]
    finally:
        remove(names)
