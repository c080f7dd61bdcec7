"""Addresses: ``tcp://host:port``, ``tls://host:port``, ``unix:///path``, ``inproc://name``."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["tcp", "tls", "unix", "inproc"]
FORMS = "tcp://host:port, tls://host:port, unix:///path or inproc://name"

MAX_UNIX_PATH = 107 if sys.platform == "linux" else 103
"""The bytes that the system has for the path of a Unix socket, without the zero byte behind it."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address. tcp and tls have `host` and `port`, unix has `path`, inproc has a name as
    `host`."""

    scheme: Scheme
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        if self.scheme == "inproc":
            return f"inproc://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it. Judged by the name: nothing is resolved."""
        return self.scheme in ("unix", "inproc") or is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Tell whether `host` means this host on every host. Judged by the name: nothing is resolved.

    "127.example.org" is a name like any other.
    """
    digits = host.replace(".", "")
    is_number = digits.isascii() and digits.isdigit()
    return host in ("localhost", "::1") or (host.startswith("127.") and is_number)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Read a host with or without a port: "node-3", "node-3:29501", "::1", "[::1]:29501", ":29501".

    A missing host is "", and a missing port 0. Raises ValueError, or TypeError, that says what is
    wrong.
    """
    if not isinstance(text, str):
        raise TypeError(f"a host is a str, such as 'node-3' or 'node-3:29501', not {text!r}")
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]") or (":" in host and not host.endswith("]")):
        return text.removeprefix("[").removesuffix("]"), 0  # the colons belong to an IPv6 host
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        raise ValueError(f"{text!r} has port {port!r}: expected 1 to 65535, or no port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse_address(text: str) -> Address:
    """Read an address. Raises ValueError, or TypeError, that says what is wrong with it."""
    if not isinstance(text, str):
        raise TypeError(f"an address is a str, not {text!r}: expected {FORMS}")
    scheme, separator, rest = text.partition("://")
    if not separator:
        raise ValueError(f"the address {text!r} has no scheme: expected {FORMS}")
    if scheme == "unix":
        if not rest.startswith("/"):
            raise ValueError(f"the address {text!r} needs an absolute path: unix:///path")
        if (length := len(os.fsencode(rest))) > MAX_UNIX_PATH:
            raise ValueError(
                f"the address {text!r} has a path of {length} bytes: expected at most "
                f"{MAX_UNIX_PATH}, which is the limit of the system, so choose a shorter path"
            )
        return Address("unix", path=rest)
    if scheme == "inproc":
        if not rest:
            raise ValueError(f"the address {text!r} needs a name: inproc://name")
        return Address("inproc", host=rest)
    if scheme not in ("tcp", "tls"):
        raise ValueError(f"the address {text!r} has an unknown scheme {scheme!r}: expected {FORMS}")
    host, separator, port = rest.rstrip("/").rpartition(":")
    if not separator or not host:
        raise ValueError(f"the address {text!r} needs host and port: {scheme}://host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"the address {text!r} needs [] around an IPv6 host: {scheme}://[::1]:1")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"the address {text!r} has port {port!r}: expected 0 to 65535")
    return Address("tcp" if scheme == "tcp" else "tls", host=host, port=int(port))


def parse_reachable(text: str) -> Address:
    """Read an address to connect to, which needs a port. Raises what `parse_address` does."""
    address = parse_address(text)
    if address.scheme in ("tcp", "tls") and not address.port:
        raise ValueError(
            f"the address {text!r} has port 0, which no coordinator has: give the port of the "
            "coordinator, as its address shows it"
        )
    return address
