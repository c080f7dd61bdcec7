"""Listening sockets of the coordinator: whose address it is, and which files may be replaced."""

from __future__ import annotations

import errno
import socket
import stat
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from aiodist.coordinator.listening import bind_tcp, bind_unix, own_address
from aiodist.wire.address import Address


async def test_an_address_of_this_host() -> None:
    assert await own_address(Address("tcp", "127.0.0.1", 7)) == Address("tcp", "127.0.0.1", 7)


async def test_an_address_of_another_host() -> None:
    """One of a network that is there for examples, and nowhere else (RFC 5737)."""
    assert await own_address(Address("tcp", "192.0.2.1", 7)) is None


async def test_a_port_that_is_taken_is_named() -> None:
    with await bind_tcp(Address("tcp", "127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on tcp://127.0.0.1:{port}: ") as caught:
            await bind_tcp(Address("tcp", "127.0.0.1", port))
    assert caught.value.errno == errno.EADDRINUSE


def test_a_socket_file_is_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with bind_unix(str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_a_killed_coordinator_left_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "c.sock")
    bind_unix(path).close()
    with bind_unix(path), socket.socket(socket.AF_UNIX) as caller:
        caller.connect(path)


def test_who_listens_keeps_its_file(tmp_path: Path) -> None:
    path = str(tmp_path / "c.sock")
    with bind_unix(path), socket.socket(socket.AF_UNIX) as caller:
        with pytest.raises(OSError, match="cannot listen on unix://") as caught:
            bind_unix(path)
        assert caught.value.errno == errno.EADDRINUSE
        caller.connect(path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue refuses connections")
def test_a_listener_that_hangs_keeps_its_file(tmp_path: Path) -> None:
    path = str(tmp_path / "c.sock")
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        with pytest.raises(BlockingIOError):
            while True:
                caller = stack.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(path)
        with pytest.raises(OSError, match="cannot listen on unix://"):
            bind_unix(path)


def test_a_file_that_is_no_socket_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(OSError, match="cannot listen on unix://"):
        bind_unix(str(path))
    assert path.read_text() == "mine"
