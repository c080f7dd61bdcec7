"""The coordinator daemon, as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aiodist.control.client import ControlClient
from aiodist.control.events import CoordinatorGone
from aiodist.errors import AuthenticationError
from aiodist.wire.messages import Draining, JoinRequest, StoreSet
from aiodist_server import Config

PROGRAM = "import sys, aiodist_server as s; sys.exit(s.serve(s.Config()))"


class Daemon:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        first = process.stdout.readline()
        assert first.startswith("listening on "), first
        self.address = first.removeprefix("listening on ").strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit code and log."""
        _, log = self.process.communicate(timeout=200)
        return self.process.returncode, log


@contextmanager
def started(program: str = PROGRAM, **settings: str) -> Iterator[subprocess.Popen[str]]:
    environ = {f"AIODIST_COORDINATOR_{name.upper()}": value for name, value in settings.items()}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "AIODIST_COORDINATOR_LISTEN": "tcp://127.0.0.1:0", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def page(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=200) as answer:
        return bytes(answer.read())


def with_files(soft: int, hard: int) -> str:
    """A daemon that may open so many files."""
    return (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); {PROGRAM}"
    )


def test_it_takes_the_files_that_it_may_have() -> None:
    with started(with_files(200, 300)) as process:
        Daemon(process)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (300, 300)


def test_half_open_requests_do_not_keep_members_out(tmp_path: Path) -> None:
    """Somebody of the same host, without the token, opens far more than the daemon has files."""

    async def scenario(daemon: Daemon) -> None:
        assert daemon.process.stdout is not None
        where = daemon.process.stdout.readline().removeprefix("http on http://").strip().strip("/")
        host, port = where.split(":")
        writers = []
        for _ in range(400):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /status HTTP/1.1\r\n")
            writers.append(writer)
        client = await ControlClient.open(daemon.address, token="t")
        await client.join(JoinRequest(group="g", id="me", size=1), 30)
        for number in range(20):
            await client.request(StoreSet("k", bytes(400_000) + bytes([number])), 30)
        assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < 60
        assert await asyncio.to_thread(page, f"http://{where}/healthz") == b"ok\n"
        client.close()
        for writer in writers:
            writer.close()

    settings = {"http": "127.0.0.1:0", "state": str(tmp_path / "state"), "token": "t"}
    with started(with_files(128, 128), **settings) as process:
        daemon = Daemon(process)
        asyncio.run(scenario(daemon))
        daemon.signal(signal.SIGTERM)
        code, log = daemon.end()
        assert code == 0
        assert "Traceback" not in log


HANGS_UP = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); {PROGRAM}"
"""The daemon, if the tests run with nohup, too."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_cleanly(number: int) -> None:
    with started(HANGS_UP) as process:
        daemon = Daemon(process)
        daemon.signal(number)
        code, log = daemon.end()
        assert code == 0
        assert "Traceback" not in log


def test_it_drains_and_logs_what_happens() -> None:
    async def scenario(daemon: Daemon) -> None:
        client = await ControlClient.open(daemon.address)
        events: asyncio.Queue[Any] = asyncio.Queue()
        client.on_event = events.put_nowait
        await client.join(JoinRequest(group="g", id="me", size=1, name="alpha"), 30)
        daemon.signal(signal.SIGTERM)
        assert await events.get() == Draining()
        assert (await client.status())["draining"] is True
        assert daemon.process.poll() is None
        await client.leave(30)
        gone = CoordinatorGone("it was shut down", orderly=True, final=True)
        assert await events.get() == gone
        client.close()

    with started(log_format="json", log_level="debug") as process:
        daemon = Daemon(process)
        asyncio.run(scenario(daemon))
        code, log = daemon.end()
    assert code == 0
    lines = [json.loads(line) for line in log.splitlines()]
    events = [line["event"] for line in lines]
    assert events == [
        "listening", "waiting", "formed", "draining", "left", "deleted", "stopped"
    ]  # fmt: skip
    assert lines[0]["address"] == daemon.address
    assert (lines[2]["group"], lines[2]["epoch"], lines[2]["size"]) == ("g", 1, 1)
    assert lines[3]["groups"] == 1


def test_it_serves_http() -> None:
    with started(http="127.0.0.1:0") as process:
        daemon = Daemon(process)
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:2] == ["http", "on"]
        with urllib.request.urlopen(f"{words[2]}healthz", timeout=200) as response:
            assert response.read() == b"ok\n"
        with started(http=words[2].rstrip("/")) as second:
            out, log = second.communicate(timeout=200)
            assert (second.returncode, out) == (1, "")
            assert "cannot start" in log and "already in use" in log
        daemon.signal(signal.SIGTERM)
        code, log = daemon.end()
        assert code == 0
        assert "Traceback" not in log


def test_a_second_signal_does_not_wait() -> None:
    async def scenario(daemon: Daemon) -> None:
        client = await ControlClient.open(daemon.address)
        events: asyncio.Queue[Any] = asyncio.Queue()
        client.on_event = events.put_nowait
        await client.join(JoinRequest(group="g", id="me", size=1), 30)
        daemon.signal(signal.SIGTERM)
        assert await events.get() == Draining()
        daemon.signal(signal.SIGINT)
        assert await events.get() == CoordinatorGone("it was shut down", orderly=True)
        client.close()
        await client.closed()

    with started() as process:
        daemon = Daemon(process)
        asyncio.run(scenario(daemon))
        assert daemon.end()[0] == 0


def test_a_token_file_is_honoured(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")

    async def scenario(daemon: Daemon) -> None:
        client = await ControlClient.open(daemon.address, token="secret")
        client.close()
        with pytest.raises(AuthenticationError):
            await ControlClient.open(daemon.address, token="wrong")

    with started(token_file=str(token)) as process:
        daemon = Daemon(process)
        asyncio.run(scenario(daemon))
        daemon.signal(signal.SIGTERM)
        code, log = daemon.end()
    assert code == 0
    assert "authentication failed" in log


def test_what_keeps_it_from_starting_is_said(tmp_path: Path) -> None:
    with started() as first:
        address = Daemon(first).address
        with started(listen=address) as second:
            out, log = second.communicate(timeout=200)
            assert (second.returncode, out) == (1, "")
            assert f"cannot listen on {address}: Address already in use" in log
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with started(token_file=str(empty)) as third:
        _, log = third.communicate(timeout=200)
        assert third.returncode == 1
        assert "is empty" in log


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"listen": "tcp://0.0.0.0:1"}, "reached from other hosts, and there is no token"),
        ({"listen": "nonsense"}, "has no scheme"),
        ({"http": "0.0.0.0:1", "token": "t"}, "the token does not guard it"),
        ({"http": "8080"}, "http=8080: expected host:port"),
        ({"listen": "inproc://x"}, "no other program runs in the process of a daemon"),
        ({"listen": "tls://127.0.0.1:1"}, "tls_cert belong together"),
        ({"tls_cert": "c"}, "tls_cert belong together"),
        ({"tls_key": "k"}, "tls_key needs tls_cert"),
        ({"token": "t", "token_file": "f"}, "token or token_file, not both"),
        ({"token": ""}, "token is empty"),
        ({"drain": -1.0}, "greater than or equal to 0"),
        ({"log_format": "xml"}, "'console' or 'json'"),
        ({"unknown": 1}, "not permitted"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Config(**settings)


def test_settings_that_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Config(listen="tcp://0.0.0.0:1", insecure=True).read_token() is None
    assert Config(listen="tcp://0.0.0.0:1", token="t").read_token() == "t"
    assert "secret" not in repr(Config(token="secret"))
    assert str(Config(http="http://[::1]:80").http_address) == "tcp://[::1]:80"
    assert str(Config(http="0.0.0.0:0", insecure=True).http_address) == "tcp://0.0.0.0:0"
    assert Config(listen="unix:///run/s").ssl_context() is None
    monkeypatch.setenv("AIODIST_TOKEN", "shared")
    assert Config(listen="tcp://0.0.0.0:1").read_token() == "shared"
    assert Config(token="t").read_token() == "t"
    (tmp_path / "token").write_text("of the file")
    assert Config(token_file=tmp_path / "token").read_token() == "of the file"
    monkeypatch.setenv("AIODIST_TOKEN", "")
    with pytest.raises(ValueError, match="AIODIST_TOKEN is set, but empty"):
        Config()
    monkeypatch.setenv("AIODIST_COORDINATOR_TOKEN", "t")
    assert Config().read_token() == "t"
    monkeypatch.delenv("AIODIST_COORDINATOR_TOKEN")
    monkeypatch.delenv("AIODIST_TOKEN")
    monkeypatch.setenv("AIODIST_COORDINATOR_LISTEN", "tcp://127.0.0.1:7")
    assert Config().listen == "tcp://127.0.0.1:7"
    missing = Config(listen="tls://127.0.0.1:1", tls_cert=tmp_path / "missing")
    with pytest.raises(OSError):
        missing.ssl_context()
