"""The checks of `aiodist doctor`. Each finds out one fact and judges it."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aiodist import compiled
from aiodist.buffers.segment import unsupported_reason
from aiodist.environment import ALWAYS, NAMES, settings_from, timeout_in, token_in, transports_in
from aiodist.transports import certificates, polling
from aiodist.wire.address import is_loopback

Level = Literal["ok", "note", "warn", "fail"]

_NEEDED = ("msgpack", "numpy")
_OPTIONAL = {
    "uvloop": "pip install uvloop: small messages take about half the time",
    "torch": "for torch tensors: pip install 'aiodist[torch]'",
    "structlog": "for `aiodist coordinator`: pip install 'aiodist[server]'",
    "aiohttp": "for the option `--http`: pip install 'aiodist[server]'",
    "safetensors": "to move safetensors files: pip install 'aiodist[weights]'",
    "matplotlib": "for `aiodist bench --plot`: pip install 'aiodist[bench]'",
    "cloudpickle": "for `aiodist.run` in a notebook: pip install 'aiodist[notebook]'",
}
_FEW_FILES = 1024


@dataclass(frozen=True, slots=True)
class Check:
    """One fact.

    `level`: "ok", "note" (worth knowing), "warn" (aiodist may not work on several hosts) or "fail"
    (aiodist cannot work).
    """

    name: str
    level: Level
    found: str
    advice: str = ""


def all_checks(environ: Mapping[str, str]) -> list[Check]:
    """Every check, in the order in which they are shown."""
    return [
        python(sys.version_info[:3], platform.system()),
        *(package(name) for name in ("aiodist", *_NEEDED, *_OPTIONAL)),
        cores(polling.cores()),
        identity("boot id", _read_boot_id()),
        identity("network namespace", _read_network_namespace()),
        shared_memory(unsupported_reason()),
        compiled_part(compiled.reason),
        loopback(socket.AF_INET, "127.0.0.1"),
        hostname(socket.gethostname()),
        open_files(_read_open_files()),
        environment(environ),
    ]


def python(version: tuple[int, int, int], system: str) -> Check:
    """The interpreter and the operating system."""
    found = f"{'.'.join(map(str, version))} on {system}"
    if version < (3, 11):
        return Check("Python", "fail", found, "aiodist needs Python 3.11 or newer")
    if system != "Linux":
        return Check(
            "Python", "note", found, "only on Linux do ranks die with a launcher that is killed"
        )
    return Check("Python", "ok", found)


def package(name: str) -> Check:
    """Whether a distribution is installed, and which version."""
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        if name in _OPTIONAL:
            return Check(name, "note", "not installed", _OPTIONAL[name])
        return Check(name, "fail", "not installed", f"pip install {name}")


def cores(count: int) -> Check:
    """The cores that this process may use."""
    advice = "" if count > 1 else "ranks take turns on a single core: expect slow collectives"
    return Check("cores", "note" if advice else "ok", str(count), advice)


def identity(name: str, value: str | None) -> Check:
    """One half of what identifies a host: its boot id, or its network namespace."""
    if value is None:
        return Check(name, "note", "unknown", "ranks here are not recognised as one host")
    return Check(name, "ok", value)


def shared_memory(missing: str | None) -> Check:
    """Whether ranks of this host can share memory. `missing`: why they cannot."""
    if missing is None:
        return Check("shared memory", "ok", "works")
    return Check(
        "shared memory", "note", missing, "ranks of this host use sockets, which are slower"
    )


def compiled_part(missing: str) -> Check:
    """Whether the compiled part of aiodist is in use. `missing`: why not; "" if it is."""
    if not missing:
        return Check("compiled part", "ok", "in use")
    return Check(
        "compiled part",
        "note",
        missing,
        "small collectives between ranks of one host take several times as long; so do averages, "
        "and reductions of float16 and bfloat16",
    )


def loopback(family: socket.AddressFamily, host: str) -> Check:
    """A few bytes through a TCP connection to this machine."""
    name = f"TCP over {host}"
    try:
        with socket.socket(family) as listener:
            listener.settimeout(5.0)
            listener.bind((host, 0))
            listener.listen(1)
            with socket.create_connection(listener.getsockname()[:2], timeout=5.0) as ours:
                theirs, _ = listener.accept()
                with theirs:
                    ours.sendall(b"hello")
                    theirs.settimeout(5.0)
                    heard = theirs.recv(5, socket.MSG_WAITALL)
    except OSError as error:
        return Check(name, "fail", str(error), f"let processes connect to {host} (firewall?)")
    return Check(name, "ok" if heard == b"hello" else "fail", "works")


def hostname(name: str) -> Check:
    """The address of this host's name."""
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Check(
            "host name",
            "note",
            f"{name} has no address",
            "no matter: ranks advertise the address that the coordinator sees them come from",
        )
    if is_loopback(address):
        return Check(
            "host name",
            "warn",
            f"{name} is {address}",
            f"{name!r} resolves to {address}, so other hosts cannot reach rank 0 by it: use an IP "
            "address of this host in MASTER_ADDR or AIODIST_ADDRESS, or remove "
            f"{name!r} from the 127.* line of /etc/hosts",
        )
    return Check("host name", "ok", f"{name} is {address}")


def open_files(limit: int | None) -> Check:
    """The soft limit of open files. Each connected pair of ranks takes up to three on either
    side."""
    if limit is None:
        return Check("open files", "ok", "no limit")
    if limit < _FEW_FILES:
        return Check("open files", "note", str(limit), "for many ranks: ulimit -n 4096")
    return Check("open files", "ok", str(limit))


def environment(environ: Mapping[str, str]) -> Check:
    """The variables that `aiodist.connect()` would read, and whether it could."""
    names = [name for name in NAMES if environ.get(name, "").strip()]
    more = (*ALWAYS, certificates.CA, certificates.CERT, certificates.KEY)
    found = [
        f"{name} (set)" if name == "AIODIST_TOKEN" else f"{name}={environ[name]}"
        for name in (*names, *(name for name in more if name in environ))
    ]
    if not found:
        return Check("environment", "ok", "nothing set that aiodist.connect() reads")
    readers: list[Callable[[Mapping[str, str]], object]] = [token_in, timeout_in, transports_in]
    if names:
        readers.append(settings_from)
    for read in readers:
        try:
            read(environ)
        except ValueError as error:
            advice = f"aiodist.connect() raises ValueError: {error}"
            return Check("environment", "warn", " ".join(found), advice)
    return Check("environment", "note", " ".join(found), "aiodist.connect() takes these up")


def _read_open_files() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _read_boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _read_network_namespace() -> str | None:
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return None
