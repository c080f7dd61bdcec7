"""`aiodist coordinator` and `aiodist status` together."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import aiodist as library

Start = Callable[..., "subprocess.Popen[str]"]


def listen(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words[:2] == ["listening", "on"]
    return words[2]


async def test_status_shows_groups(
    aiodist: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret\n")
    serving = aiodist(
        "coordinator", "--listen", "tcp://127.0.0.1:0", "--token-file", tmp_path / "token"
    )
    address = listen(serving)

    refused = aiodist("status", address)
    _, err = refused.communicate(timeout=200)
    assert refused.returncode == 1
    assert "AIODIST_TOKEN" in err

    env = {"AIODIST_TOKEN": "secret"}
    async with library.connect(
        address, group="solo", rank=0, size=1, token="secret", name="[b]me[/b]"
    ):
        asking = aiodist("status", address, "--json", more_env=env)
        found = json.loads(asking.communicate(timeout=200)[0])
        showing = aiodist("status", address, more_env=env)
        text, _ = showing.communicate(timeout=200)
    assert (asking.returncode, showing.returncode) == (0, 0)
    assert (found["address"], found["draining"]) == (address, False)
    (group,) = found["groups"]
    assert (group["name"], group["size"]) == ("solo", 1)
    assert group["members"][0]["name"] == "[b]me[/b]"
    assert f"coordinator {address}: 1 group\n" in text
    assert "group solo: epoch 1, 1 of 1 ranks" in text
    assert "[b]me[/b]" in text

    serving.send_signal(signal.SIGTERM)
    serving.communicate(timeout=200)
    assert serving.returncode == 0


def test_systemd_hears_when_it_is_ready_and_when_it_stops(aiodist: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(200)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        serving = aiodist("coordinator", "--listen", "tcp://127.0.0.1:0", more_env=env)
        assert manager.recv(100) == b"READY=1"
        listen(serving)
        serving.send_signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        serving.communicate(timeout=200)
    assert serving.returncode == 0


def test_status_of_nobody(aiodist: Start) -> None:
    process = aiodist("status", "tcp://127.0.0.1:9", "--timeout", "1")
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("aiodist status: no coordinator answered at tcp://127.0.0.1:9")


async def test_top(aiodist: Start) -> None:
    serving = aiodist("coordinator", "--listen", "tcp://127.0.0.1:0")
    address = listen(serving)
    async with library.connect(address, group="solo", rank=0, size=1, name="me") as group:
        for _ in range(7):
            await group.barrier()
        process = aiodist("top", address, "--interval", "0.1", "--count", "3")
        out, err = await asyncio.to_thread(process.communicate, timeout=200)
    assert (process.returncode, err) == (0, "")
    assert out.count("group solo: epoch 1, 1 of 1 ranks") == 3
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    first, second, third = [row for row in rows if row]
    assert first[:5] == ["0", "me", "", "", ""]
    assert second[:5] == third[:5] == ["0", "me", "0.0", "0 bytes", "0 bytes"]


async def test_top_when_the_coordinator_goes_away(aiodist: Start) -> None:
    serving = aiodist("coordinator", "--listen", "tcp://127.0.0.1:0")
    process = aiodist("top", listen(serving), "--interval", "0.1", "--timeout", "5")
    assert process.stdout is not None
    assert "0 groups" in process.stdout.readline()
    serving.kill()
    serving.communicate()
    while not process.stdout.readline().startswith("asking again: "):
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, "")


def test_top_of_nobody(aiodist: Start) -> None:
    process = aiodist("top", "tcp://127.0.0.1:9", "--timeout", "1")
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("aiodist top: no coordinator answered at tcp://127.0.0.1:9")


def test_doctor(aiodist: Start) -> None:
    process = aiodist("doctor", "--json")
    out, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, "")
    found = {check["name"]: check for check in json.loads(out)}
    assert found["aiodist"]["found"] == library.__version__
    assert found["TCP over 127.0.0.1"]["level"] == "ok"
