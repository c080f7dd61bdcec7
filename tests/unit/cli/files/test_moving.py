"""Files from a publisher to folders, in one process: what is taken, refused, tried again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist_cli.files import folder as folders
from aiodist_cli.files import pull, push, reading, tree
from aiodist_cli.files.checkpoints import IncompleteError, Watch
from aiodist_cli.files.folder import META, Folder, FolderError
from aiodist_cli.files.names import RefusedError
from aiodist_cli.files.pull import FailedError, Pulling, pause_after
from aiodist_cli.files.push import Pushing
from aiodist_cli.files.tree import Source

NOW = Watch(0.0), lambda: 0.0
"""What there is has settled."""


def content(path: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(path)): one.read_bytes()
        for one in path.rglob("*")
        if one.is_file() and one.name != META
    }


def published(**files: bytes) -> dict[str, Any]:
    sources = [
        Source(name.replace("__", "/"), np.frombuffer(data, np.uint8), {})
        for name, data in files.items()
    ]
    return tree.tree_of(tree.version_of(sources, reading.checked(sources, lambda _: None)))


@pytest.fixture
async def channel() -> AsyncIterator[str]:
    """The address of a coordinator."""
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        yield coordinator.address


@asynccontextmanager
async def pulling(
    address: str,
    path: Path,
    *,
    command: str | None = None,
    all_files: bool = False,
    max_bytes: int | None = None,
) -> AsyncIterator[Pulling]:
    with Folder(path, "policy") as folder:
        async with aiodist.subscriber("policy", address=address, max_bytes=max_bytes) as weights:
            puller = Pulling(weights, folder, all_files=all_files, command=command)
            await puller.begin()
            yield puller


@asynccontextmanager
async def beside(work: Any) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def writable(path: Path) -> None:
    """Fails if a file that was read is still kept from programs that write to it."""
    for _ in range(500):  # the thread that has read it may not have let go of it yet
        with suppress(BlockingIOError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{path} is still mapped")


class Lines:
    """What was said, and what was warned of; `async with` nothing: await `until`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[str] = []
        self._news = asyncio.Event()
        for module in (pull, push):
            monkeypatch.setattr(module, "say", self._add)
            monkeypatch.setattr(module, "warn", self._add)

    def _add(self, text: str) -> None:
        self.all.append(text)
        self._news.set()

    async def until(self, text: str) -> str:
        while True:
            for line in self.all:
                if text in line:
                    return line
            self._news.clear()
            await self._news.wait()


async def there(path: Path) -> None:
    """Returns once there is such a file, which another process makes."""
    while not path.exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.01)


@pytest.fixture
async def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    return Lines(monkeypatch)


async def test_a_checkpoint_arrives_byte_for_byte(
    channel: str, tmp_path: Path, lines: Lines
) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}})
    model = len(header).to_bytes(8, "little") + header.encode() + bytes(range(8))
    checkpoint = tmp_path / "ck"
    (checkpoint / "sub").mkdir(parents=True)
    for name, data in {"m.safetensors": model, "sub/x.json": b"{}", "optimizer.pt": b"P"}.items():
        (checkpoint / name).write_bytes(data)
    async with aiodist.publisher("policy", address=channel) as out:
        number, content_id = await Pushing(out, checkpoint, all_files=False, first=7).once(*NOW)
        assert number == 7
        await writable(checkpoint / "m.safetensors")
        for name in ("one", "two"):
            async with pulling(channel, tmp_path / name) as puller:
                await puller.once()
                assert content(tmp_path / name) == {"m.safetensors": model, "sub/x.json": b"{}"}
        # One host has it, however many folders there are.
        await push.serve(out, number, content_id, 1)
        await lines.until("version 7: on 1 of 1 hosts")
        await lines.until("left out, because they can run code: optimizer.pt")
        assert await Pushing(out, checkpoint, all_files=True).once(*NOW) != (7, content_id)
        async with pulling(channel, tmp_path / "one", all_files=True) as puller:
            await puller.once()
        assert content(tmp_path / "one").keys() == {"m.safetensors", "sub/x.json", "optimizer.pt"}


async def test_a_known_version_is_not_taken_again(
    channel: str, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy"
    async with aiodist.publisher("policy", address=channel) as out:
        await out.publish(published(a=b"1"), version=1)
        async with pulling(channel, path) as puller:
            await puller.once()
        taken = folders.Folder.take
        monkeypatch.delattr(folders.Folder, "take")
        for number in (1, 2):  # under another number, too: a publisher was restarted
            if number == 2:
                await out.publish(published(a=b"1"), version=2)
            async with pulling(channel, path) as puller:
                await puller.once()
            await lines.until(f"version {number}: {path} has these files already")
        monkeypatch.setattr(folders.Folder, "take", taken, raising=False)
    # The numbers begin anew: the same number has other files.
    async with aiodist.publisher("policy", address=channel, restart=True) as out:
        await out.publish(published(a=b"2"), version=2)
        async with pulling(channel, path) as puller:
            await puller.once()
        assert content(path) == {"a": b"2"}


ROOM = os.statvfs_result((1, 1, 0, 0, 0, 0, 0, 0, 0, 255))
EVIL: dict[str, Callable[[], Any]] = {
    "outside": lambda: published(**{"../evil": b"x"}),
    "absolute": lambda: published(**{"/tmp/evil": b"x"}),
    "hidden": lambda: published(**{META: b"{}"}),
    "case": lambda: published(A=b"1", a=b"2"),
    "code": lambda: published(**{"modeling.py": b"import os"}),
    "pickle": lambda: published(**{"model.bin": b"x"}),
    "no files": lambda: {"w": np.zeros(3)},
    "other format": lambda: published(a=b"2") | {"files_of": 2},
    "damaged": lambda: {
        **published(a=b"2"),
        "files": {"a": {"crc": 7, "bytes": np.zeros(1, np.uint8), "tensors": {}}},
    },
}


async def test_the_old_folder_stays_and_the_next_version_is_taken(
    channel: str, tmp_path: Path, lines: Lines
) -> None:
    path = tmp_path / "models" / "policy"
    path.parent.mkdir()
    async with (
        aiodist.publisher("policy", address=channel) as out,
        pulling(channel, path) as puller,
        beside(puller.follow()),
    ):
        await out.publish(published(a=b"1"), version=1)
        await lines.until("version 1: 1 file,")
        for number, evil in enumerate(EVIL, 2):
            await out.publish(EVIL[evil](), version=number)
            assert "waiting for a newer version" in await lines.until(f"version {number}:"), evil
            assert content(path) == {"a": b"1"}
            assert json.loads((path / META).read_text())["version"] == 1
        async with pulling(channel, path.with_name("other")) as other:
            with pytest.raises(RefusedError):
                await other.once()
        await out.publish(published(a=b"3"), version=99)
        await lines.until("version 99: 1 file,")
        assert content(path) == {"a": b"3"}
    assert content(path.parent) == {"policy/a": b"3"}


async def test_a_version_that_is_too_large_is_not_taken(
    channel: str, tmp_path: Path, lines: Lines
) -> None:
    path = tmp_path / "policy"
    async with (
        aiodist.publisher("policy", address=channel) as out,
        pulling(channel, path, max_bytes=4000) as puller,
        beside(puller.follow()),
    ):
        await out.publish(published(a=bytes(5000)), version=1)
        assert "and max_bytes is 4,000" in await lines.until("version 1 takes")
        assert content(path) == {}
        async with pulling(channel, tmp_path / "other", max_bytes=4000) as other:
            with pytest.raises(aiodist.MessageTooLargeError):
                await other.once()
        await out.publish(published(a=b"2"), version=2)
        await lines.until("version 2: 1 file,")
        assert content(path) == {"a": b"2"}


async def test_a_full_disk_is_tried_again(
    channel: str, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy"
    monkeypatch.setattr(pull, "pause_after", lambda _: 0.01)
    async with (
        aiodist.publisher("policy", address=channel) as out,
        pulling(channel, path) as puller,
        beside(puller.follow()),
    ):
        await out.publish(published(a=b"1"), version=1)
        await lines.until("version 1: 1 file,")
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda _: ROOM)
            await out.publish(published(a=b"2"), version=2)
            assert "is full: version 2 has 1 bytes" in await lines.until("version 2:")
            assert content(path) == {"a": b"1"}
            async with pulling(channel, tmp_path / "other") as other:
                with pytest.raises(FolderError, match="is full"):
                    await other.once()
        await lines.until("version 2: 1 file,")
        assert content(path) == {"a": b"2"}


async def test_the_command_runs_for_each_version_until_it_succeeds(
    channel: str, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = tmp_path / "policy", tmp_path / "log"
    monkeypatch.setattr(pull, "pause_after", lambda _: 0.01)
    # It fails the first time of each version.
    command = (
        f'echo "$AIODIST_VERSION $(cat "$AIODIST_DIR/a")" >> {log};'
        f' test "$(grep -c "^$AIODIST_VERSION " {log})" = 2 && echo done > {log}.$AIODIST_VERSION'
    )
    async with (
        aiodist.publisher("policy", address=channel) as out,
        pulling(channel, path, command=command) as puller,
        beside(puller.follow()),
    ):
        for number in (1, 2):
            await out.publish(published(a=str(number).encode()), version=number)
            assert "--exec ended with 1; trying" in await lines.until(f"version {number}: --exec")
            await there(tmp_path / f"log.{number}")
        assert log.read_text().split("\n") == ["1 1", "1 1", "2 2", "2 2", ""]


async def test_a_command_that_goes_on_failing(
    channel: str, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "pause_after", lambda _: 0.0)
    async with (
        aiodist.publisher("policy", address=channel) as out,
        pulling(channel, tmp_path / "policy", command="echo x >> log; exit 3") as puller,
    ):
        monkeypatch.chdir(tmp_path)
        await out.publish(published(a=b"1"), version=1)
        with pytest.raises(FailedError, match="--exec ended with 3"):
            await puller.once()
    assert (tmp_path / "log").read_text() == "x\n" * pull.TRIES
    # The folder has the version all the same.
    assert content(tmp_path / "policy") == {"a": b"1"}


@pytest.mark.parametrize("trap", ["true", "trap '' TERM"])
async def test_a_command_ends_with_its_pull(
    channel: str, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    monkeypatch.setattr(pull, "GRACE", 0.3)
    started, child = tmp_path / "started", tmp_path / "child"
    child.write_text(
        f"{trap}; echo $$ > {started}.new; mv {started}.new {started}; exec sleep 1000"
    )
    command = f"sh {child} & wait"
    async with (
        aiodist.publisher("policy", address=channel) as out,
        pulling(channel, tmp_path / "policy", command=command) as puller,
    ):
        await out.publish(published(a=b"1"), version=1)
        async with beside(puller.follow()):
            await there(started)
            fd = os.pidfd_open(int(started.read_text()))
    gone = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(fd, gone.set_result, None)
    await gone
    asyncio.get_running_loop().remove_reader(fd)
    os.close(fd)


async def test_a_command_has_ended_if_the_system_refuses_to_signal_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As macOS does if all of its processes have ended, but one is not reaped yet."""
    signalled: list[int] = []

    def killpg(pid: int, number: int) -> None:
        signalled.append(number)
        if len(signalled) > 1:
            raise PermissionError
        os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(os, "killpg", killpg)
    process = await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True)
    await pull._ended(process)
    assert signalled == [signal.SIGTERM, 0, signal.SIGKILL]
    assert process.returncode == -signal.SIGKILL


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [pause_after(failures) for failures in range(1, 12)]
    assert pauses[:3] == [1, 2, 4]
    assert pauses[-1] == pull.LONGEST_PAUSE == max(pauses)


async def test_each_checkpoint_of_a_trainer(channel: str, tmp_path: Path, lines: Lines) -> None:
    def write(name: str, data: bytes, at: int) -> None:
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (at, at))

    index = json.dumps({"weight_map": {"w": "m-1.safetensors"}}).encode()
    model = (2).to_bytes(8, "little") + b"{}"
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    async with aiodist.publisher("policy", address=channel) as out:
        async with beside(
            Pushing(out, tmp_path / "out", all_files=False).watch(Watch(2.0), clock, 0.001)
        ):
            await lines.until("No such file")
            write("step-1/model.safetensors.index.json", index, 1)
            await lines.until("step-1 is not complete: m-1.safetensors is missing")
            write("step-1/m-1.safetensors", model[:-1], 1)
            await lines.until("m-1.safetensors is no whole safetensors file")
            assert out.newest is None
            write("step-1/m-1.safetensors", model, 1)
            await lines.until("version 0: ")
            (tmp_path / "out" / "step-2").mkdir()
            (tmp_path / "out" / "step-2" / "m.safetensors").symlink_to(tmp_path)
            await lines.until("step-2 is not published: m.safetensors is a link")
            write("step-3/m.safetensors", model, 4_000_000_000)
            await lines.until("version 1: ")
            write("step-3/m.safetensors", model, 4_000_000_001)  # the same again
            write("step-4/m.safetensors", model + b"", 4_000_000_002)
            write("step-4/config.json", b"{}", 4_000_000_002)
            assert "step-4, 2 files" in await lines.until("version 2: ")
        assert out.newest == 2


async def test_a_checkpoint_that_is_still_written_is_waited_for(
    channel: str, tmp_path: Path, lines: Lines
) -> None:
    source = tmp_path / "out"
    source.mkdir()
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        if now < 5.0:  # after that listing
            with (source / "model.gguf").open("ab") as file:
                file.write(b"x")
        with (source / "optimizer.pt").open("ab") as file:
            file.write(b"x")
        return now

    async with aiodist.publisher("policy", address=channel) as out:
        with pytest.raises(RefusedError, match="no files"):
            await Pushing(out, source, all_files=False).once(*NOW)
        (source / "optimizer.pt").write_bytes(b"x")
        with pytest.raises(RefusedError, match=r"optimizer\.pt can run code"):
            await Pushing(out, source, all_files=False).once(*NOW)
        (source / "model.gguf").write_bytes(b"x")
        await Pushing(out, source, all_files=False).once(Watch(2.0), clock, 0.0)
        assert now == 7.0
        waits = (
            "aiodist weights push: waiting until no file has changed for 2 s: model.gguf changes"
        )
        assert [line for line in lines.all if "waiting" in line] == [waits]
        async with pulling(channel, tmp_path / "policy") as puller:
            await puller.once()
        assert content(tmp_path / "policy") == {"model.gguf": b"xxxxx"}


async def test_files_that_change_while_they_are_published(
    channel: str, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_lease", lambda fd: None)  # as on some file systems
    source = tmp_path / "model.gguf"
    source.write_bytes(b"1" * 100)
    async with aiodist.publisher("policy", address=channel) as out:
        checked = reading.checked

        def meanwhile(*given: Any) -> Any:
            found = checked(*given)
            source.write_bytes(b"2" * 101)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(reading, "checked", meanwhile)
            with pytest.raises(IncompleteError, match="changed while it was read"):
                await Pushing(out, source, all_files=False).once(*NOW)
        assert out.newest is None

        async def late(params: Any, *, version: int) -> None:
            # The bytes that were read are no longer those that are published.
            file = open(source, "r+b")  # noqa: ASYNC230, SIM115
            with file:
                file.write(b"3")
            await publish(params, version=version)

        publish = out.publish
        with monkeypatch.context() as patch:
            patch.setattr(out, "publish", late)
            with pytest.raises(IncompleteError, match="version 0 is damaged"):
                await Pushing(out, source, all_files=False).once(*NOW)
        async with pulling(channel, tmp_path / "policy") as puller:
            with pytest.raises(RefusedError, match="other bytes than its checksum says"):
                await puller.once()
        assert not (tmp_path / "policy").exists()


def test_sources_that_are_never_published(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="there is no"):
        push.check_source(tmp_path / "no", all_files=False, watch=False)
    with pytest.raises(RefusedError, match="--all-files"):
        push.check_source(tmp_path / "model.pt", all_files=False, watch=True)
    push.check_source(tmp_path / "no", all_files=False, watch=True)  # the trainer comes later
    (tmp_path / "model.pt").touch()
    push.check_source(tmp_path / "model.pt", all_files=True, watch=False)
    push.check_source(tmp_path, all_files=False, watch=False)
