"""Names that coordinators of this process listen on."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from aiodist.transports import inproc_names

NAME = f"test of names {os.getpid()}"


@pytest.fixture
def taken() -> Iterator[list[socket.socket]]:
    """The listener's ends of connections to NAME."""
    ends: list[socket.socket] = []
    inproc_names.register(NAME, ends.append)
    yield ends
    inproc_names.unregister(NAME)
    for end in ends:
        end.close()


def test_a_connection_has_two_ends(taken: list[socket.socket]) -> None:
    with inproc_names.connect(NAME) as ours:
        ours.sendall(b"hello")
        assert taken[0].recv(5) == b"hello"


def test_a_name_is_taken_once(taken: list[socket.socket]) -> None:
    with pytest.raises(OSError, match="is in use in this process") as caught:
        inproc_names.register(NAME, lambda end: None)
    assert caught.value.errno == errno.EADDRINUSE


def test_nobody_listens() -> None:
    with pytest.raises(ConnectionRefusedError, match="no coordinator listens on inproc://nowhere"):
        inproc_names.connect("nowhere")
    inproc_names.unregister("nowhere")


def test_a_name_is_free_again() -> None:
    for _ in range(2):
        inproc_names.register(NAME, lambda end: None)
        inproc_names.unregister(NAME)


def test_a_child_of_fork_listens_on_nothing(taken: list[socket.socket]) -> None:
    child = os.fork()
    if not child:
        os._exit(len(inproc_names._names))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert NAME in inproc_names._names
