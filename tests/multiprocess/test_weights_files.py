"""Files that move between processes: `aiodist weights push` and `pull`, as a user starts them."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from aiodist.launching.spawn import free_port

Process = subprocess.Popen[str]

STOPPING = signal.SIGHUP, signal.SIGTERM, signal.SIGINT


def checkpoint(path: Path, fill: int) -> dict[str, bytes]:
    """A checkpoint of two shards in a new folder, and what is in it."""
    path.mkdir()
    for shard in (1, 2):
        tensors = {
            f"w{shard}": {"dtype": "BF16", "shape": [512, 512], "data_offsets": [0, 1 << 19]}
        }
        header = json.dumps(tensors).encode()
        front = len(header).to_bytes(8, "little") + header
        (path / f"model-{shard}.safetensors").write_bytes(front + bytes([fill]) * (1 << 19))
    index = {"weight_map": {"w1": "model-1.safetensors", "w2": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return content(path)


def content(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir() if one.name[0] != "."}


def heard(process: Process, text: str) -> str:
    """The next line on its stdout that has `text`."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    assert process.stderr is not None
    raise AssertionError(f"no {text!r}: {process.stderr.read()}")


@pytest.fixture
def address(aiodist) -> str:
    coordinator = aiodist("coordinator", "--listen", "tcp://127.0.0.1:0")
    return heard(coordinator, "listening on ").split()[-1]


def test_push_to_two_folders_which_are_exchanged(aiodist, address: str, tmp_path: Path) -> None:
    there = {"AIODIST_ADDRESS": address}
    command = 'echo "exec $AIODIST_VERSION $(ls "$AIODIST_DIR" | wc -l)"'

    def pull(name: str) -> Process:
        return aiodist(
            *("weights", "pull", "policy", "--to", name, "--follow", "--exec", command),
            more_env=there,
        )

    pulls = [pull("one"), pull("two")]
    first = checkpoint(tmp_path / "ck1", 1)
    push = aiodist("weights", "push", "policy", "ck1", "--until", 1, more_env=there)
    for process in pulls:
        heard(process, "version 0: 3 files")
        heard(process, "exec 0 3")
    # One host has it now, so the push has come to its end, and the pulls go on.
    assert push.wait(60) == 0
    heard(push, "version 0: on 1 of 1 hosts")
    assert content(tmp_path / "one") == content(tmp_path / "two") == first

    # A pull that is killed finds its files again, and the command runs for them.
    pulls[0].kill()
    pulls[0].wait()
    pulls[0] = pull("one")
    heard(pulls[0], "has these files already")
    heard(pulls[0], "exec 0 3")

    second = checkpoint(tmp_path / "ck2", 2)
    push = aiodist("weights", "push", "policy", "ck2", more_env=there)
    for process in pulls:
        heard(process, "exec 1 3")
    assert content(tmp_path / "one") == content(tmp_path / "two") == second

    for process, number in zip((push, *pulls), STOPPING, strict=True):
        process.send_signal(number)
        assert process.wait(60) == 0, process.stderr.read()
    assert {path.name for path in tmp_path.iterdir()} == {"ck1", "ck2", "one", "two"}


def test_no_coordinator_and_files_that_are_not_whole(aiodist, tmp_path: Path) -> None:
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    whole = checkpoint(tmp_path / "ck", 1)
    (tmp_path / "old").mkdir()
    for arguments in [
        ("push", "policy", "ck", nowhere),
        ("pull", "policy", nowhere, "--to", "old"),
    ]:
        process = aiodist("weights", *arguments, "--timeout", 0.2)
        assert process.wait(60) == 1
        assert f"aiodist weights {arguments[0]}: " in (said := process.stderr.read())
        assert nowhere in said
        assert "Traceback" not in said
    assert content(tmp_path / "old") == {}
    assert content(tmp_path / "ck") == whole


def test_a_push_of_a_shard_that_is_cut_off_publishes_nothing(
    aiodist, address: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "ck", 1)
    with open(tmp_path / "ck" / "model-2.safetensors", "r+b") as file:
        file.truncate(1000)
    push = aiodist("weights", "push", "policy", "ck", address)
    pulls = [aiodist("weights", "pull", "policy", address, "--to", f"{n}") for n in STOPPING]
    assert push.wait(60) == 1
    assert "model-2.safetensors is no whole safetensors file" in push.stderr.read()
    # There is no version, so they wait for a signal. Their folders are there when they wait.
    for pull, number in zip(pulls, STOPPING, strict=True):
        while not (tmp_path / f"{number}").exists():
            assert pull.poll() is None
        pull.send_signal(number)
        assert pull.wait(60) == 128 + number
        assert pull.stderr.read() == ""
        assert not (tmp_path / f"{number}").exists()
