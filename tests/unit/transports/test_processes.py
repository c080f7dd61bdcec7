"""The process at the other end of a Unix socket, its user, and whether it has ended."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aiodist.transports import processes
from aiodist.transports.processes import credentials, open_behind, peer_pid, user_id

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")

NOBODY = 65534


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_who_is_at_the_other_end(pair: tuple[socket.socket, socket.socket]) -> None:
    assert credentials(pair[0]) == (os.getpid(), os.geteuid())
    assert peer_pid(pair[0], os.geteuid()) == os.getpid()
    with pytest.raises(PermissionError, match=f"expected user {os.geteuid() + 1}"):
        peer_pid(pair[0], os.geteuid() + 1)


def test_nobody_is_not_one_user(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a namespace where most users have no number, its number stands for all of these."""
    monkeypatch.setattr(processes, "credentials", lambda sock: (7, NOBODY))
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    monkeypatch.setattr(processes.Path, "read_text", lambda path, **_: "0 1000 1\n")
    with pytest.raises(PermissionError):
        peer_pid(pair[0], NOBODY)
    assert user_id() != user_id()  # like no other
    monkeypatch.setattr(processes.Path, "read_text", lambda path, **_: "0 0 4294967295\n")
    assert peer_pid(pair[0], NOBODY) == 7
    assert user_id() == user_id()


def test_there_is_no_file_for_who_cannot_be_told(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    assert open_behind(pair[0]) is None  # this process itself
    with socket.socket() as other_kind:
        assert open_behind(other_kind) is None


def test_the_end_of_a_process_is_seen_whoever_keeps_its_socket() -> None:
    """Its socket may be open in another one: what is watched is the process."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # an abstract address of the kernel's choice
        listener.listen()
        name = listener.getsockname()
        code = (
            "import socket, sys\n"
            "with socket.socket(socket.AF_UNIX) as sock:\n"
            f"    sock.connect({name!r})\n"
            "    sys.stdin.read()\n"
        )
        with (
            subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child,
            listener.accept()[0] as sock,
        ):
            assert credentials(sock)[0] == child.pid
            watched = open_behind(sock)
            assert watched is not None
            with watched:
                assert select.select([watched], [], [], 0)[0] == []
                assert child.stdin is not None
                child.stdin.close()
                assert select.select([watched], [], [], 30)[0] == [watched]
            # Its number may be another process' by now.
            assert open_behind(sock) is None
