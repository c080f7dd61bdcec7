"""Addresses."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from aiodist.wire.address import MAX_UNIX_PATH, Address, parse_address, parse_endpoint


@pytest.mark.parametrize(
    ("text", "address", "loopback"),
    [
        ("tcp://10.0.0.1:29500", Address("tcp", "10.0.0.1", 29500), False),
        ("tcp://localhost:0", Address("tcp", "localhost", 0), True),
        ("tcp://127.0.0.2:1", Address("tcp", "127.0.0.2", 1), True),
        ("tcp://127.example.org:1", Address("tcp", "127.example.org", 1), False),
        ("tls://node-3.example:443", Address("tls", "node-3.example", 443), False),
        ("tcp://[::1]:80", Address("tcp", "::1", 80), True),
        ("tcp://[2001:db8::1]:80", Address("tcp", "2001:db8::1", 80), False),
        ("unix:///run/a.sock", Address("unix", path="/run/a.sock"), True),
        ("inproc://name", Address("inproc", "name"), True),
    ],
)
def test_every_form_is_read_and_written(text: str, address: Address, loopback: bool) -> None:
    assert parse_address(text) == address
    assert str(address) == text
    assert address.is_loopback is loopback


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("10.0.0.1:29500", "has no scheme"),
        ("http://10.0.0.1:80", "unknown scheme 'http'"),
        ("tcp://10.0.0.1", "needs host and port"),
        ("tcp://:80", "needs host and port"),
        ("tcp://::1:80", "around an IPv6 host"),
        ("tcp://host:http", "port 'http': expected 0 to 65535"),
        ("tcp://host:65536", "port '65536'"),
        ("tcp://host:²", "port"),
        ("unix://relative", "absolute path"),
        ("inproc://", "needs a name"),
    ],
)
def test_what_is_wrong_is_said(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_address(text)


@pytest.mark.skipif(sys.platform == "win32", reason="Python has no Unix sockets there")
@pytest.mark.parametrize("letter", ["x", "ä"])
def test_the_longest_path_of_a_socket(letter: str) -> None:
    """The system counts bytes."""
    free = MAX_UNIX_PATH - len("/a")
    size = len(letter.encode())
    path = "/a" + letter * (free // size) + "b" * (free % size)
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(FileNotFoundError):
        sock.connect(parse_address(f"unix://{path}").path)
    with pytest.raises(ValueError, match=rf"{MAX_UNIX_PATH + 1} bytes: expected at most"):
        parse_address(f"unix://{path}b")


def test_what_is_no_text_is_no_address() -> None:
    no_text: Any = None
    with pytest.raises(TypeError, match="an address is a str, not None: expected tcp://"):
        parse_address(no_text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ("", 0)),
        ("node-3", ("node-3", 0)),
        ("node-3:29501", ("node-3", 29501)),
        (":29501", ("", 29501)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("::", ("::", 0)),
        ("::1", ("::1", 0)),
        ("2001:db8::1", ("2001:db8::1", 0)),
        ("[::1]", ("::1", 0)),
        ("[2001:db8::1]:65535", ("2001:db8::1", 65535)),
    ],
)
def test_hosts_with_and_without_ports(text: str, found: tuple[str, int]) -> None:
    assert parse_endpoint(text) == found


@pytest.mark.parametrize("text", ["host:", "host:http", "host:0", "host:65536", "[::1]:x", ":²"])
def test_what_is_no_port_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"has port .*: expected 1 to 65535, or no port"):
        parse_endpoint(text)
