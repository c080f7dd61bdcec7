"""Dumps of what ranks did last: after errors, on a signal, by hand."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

import aiodist
from aiodist import flight_recorder


@pytest.fixture(autouse=True)
def off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Ranks that were killed in simulations of earlier tests may not have been collected yet.
    monkeypatch.setattr(flight_recorder, "_actors", WeakSet())
    flight_recorder.disable()
    before = signal.getsignal(signal.SIGUSR1)
    yield
    flight_recorder.disable()
    assert signal.getsignal(signal.SIGUSR1) is before


async def _miss_a_deadline(groups: list[aiodist.Group], tag: str = "step") -> None:
    with pytest.raises(aiodist.CollectiveTimeoutError):
        await groups[0].all_reduce(np.ones(3, np.float32), tag=tag, timeout=0.05)
    for group in groups[1:]:
        with pytest.raises(aiodist.CollectiveTimeoutError):
            await group.all_reduce(np.ones(3, np.float32), tag=tag)


def test_by_hand(run) -> None:
    async def main() -> str:
        async with aiodist.local(2) as groups:
            arrays = [np.ones(3, np.float32) for _ in groups]
            for _ in range(3):
                pairs = zip(groups, arrays, strict=True)
                await asyncio.gather(*[group.all_reduce(x) for group, x in pairs])
            await asyncio.gather(groups[0].send("text", 1, tag=5), groups[1].recv(src=0))
            waiting = groups[1].recv(src=0, tag="never")
            out = io.StringIO()
            flight_recorder.dump(out)
            waiting.cancel()
            return out.getvalue()

    text = run(main())
    own, other = text.split("aiodist flight recorder: ")[1:]
    assert own.startswith("group 'world' epoch 1 rank 0 of 2, pid")
    assert other.startswith("group 'world' epoch 1 rank 1 of 2, pid")
    for seq in range(3):
        assert f"  all_reduce #{seq}  all_reduce(SUM, float32[3])  12 bytes\n" in own
    assert "done       send tag 5 to rank 1" in own
    assert "done       recv tag 5 from rank 0" in other
    assert "waits      recv tag 'never' from rank 0" in other
    assert "test_flight_recorder.py:" in own


def test_nothing_is_written_unasked(run, capfd) -> None:
    async def main() -> None:
        async with aiodist.local(2) as groups:
            await _miss_a_deadline(groups)

    run(main())
    assert capfd.readouterr().err == ""


def test_after_an_error_each_rank_writes_a_file(run, tmp_path: Path) -> None:
    async def main() -> None:
        flight_recorder.enable(tmp_path / "dumps", on_signal=False)
        async with aiodist.local(2, group="a/b") as groups:
            await _miss_a_deadline(groups)

    run(main())
    pid = os.getpid()
    found = sorted(path.name for path in (tmp_path / "dumps").iterdir())
    assert found == [f"a%2Fb-rank{rank}-pid{pid}.txt" for rank in (0, 1)]
    text = (tmp_path / "dumps" / found[0]).read_text()
    assert "CollectiveTimeoutError: not entered within 0.05 s by rank 1" in text
    assert "failed     all_reduce tag 'step' #0  all_reduce(SUM, float32[3])" in text


class NoText(Exception):
    def __str__(self) -> str:
        raise KeyError("planted")


@pytest.mark.parametrize(
    ("error", "words"),
    [(ValueError("not a number"), "ValueError: not a number"), (NoText(), "NoText")],
)
def test_a_rank_that_leaves_by_an_exception_writes_why(
    run, tmp_path: Path, error: Exception, words: str
) -> None:
    async def main() -> None:
        flight_recorder.enable(tmp_path, on_signal=False)
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            with pytest.raises(type(error)):
                async with aiodist.connect(coordinator.address, rank=0, size=1) as group:
                    await group.all_reduce(np.ones(3))
                    raise error
            assert group.closed

    run(main())
    (text,) = [path.read_text() for path in tmp_path.iterdir()]
    assert f": {words}\n" in text
    assert "done       all_reduce #0" in text


def test_errors_that_come_in_crowds_are_dumped_once(run, capfd) -> None:
    async def main() -> None:
        flight_recorder.enable(on_signal=False)
        async with aiodist.local(2) as groups:
            for number in range(30):
                work = groups[0].barrier(tag=number, timeout=1e-9)
                await asyncio.wait([work])
                assert isinstance(work.exception(), aiodist.CollectiveTimeoutError)

    run(main())
    assert capfd.readouterr().err.count("flight recorder: group 'world' epoch 1 rank 0") == 1


def test_a_signal_shows_everything_also_where_the_loop_is_blocked(run, capfd) -> None:
    seen: list[int] = []

    async def main() -> None:
        before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
        flight_recorder.enable()
        async with aiodist.local(2) as groups:
            works = [groups[0].barrier(tag=number) for number in range(30)]
            signal.raise_signal(signal.SIGUSR1)  # no turn of the loop in between
            await asyncio.gather(*[groups[1].barrier(tag=number) for number in range(30)], *works)
        flight_recorder.disable()
        signal.signal(signal.SIGUSR1, before)

    run(main())
    err = capfd.readouterr().err
    for number in range(30):
        assert f"  barrier tag {number} #0  barrier()  not heard of: rank 1\n" in err
    assert "its event loop is at scenarios/test_flight_recorder.py:" in err
    assert seen == [signal.SIGUSR1]  # the handler that was there before


@pytest.fixture(params=["inproc", "shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


def _calls(group: aiodist.Group) -> list[tuple[str, str]]:
    """What the recorder of this rank has, without the times."""
    recorder = group._actor.endpoint.recorder
    return [(entry.name, entry.call) for entry in recorder.entries(group._actor.loop.time())]


def test_a_window_that_others_close_first_is_no_failure(run, transport: str) -> None:
    async def main() -> None:
        async with aiodist.local(2, transports=transport) as ranks:
            one, two = await asyncio.gather(*[group.expose(np.zeros(4)) for group in ranks])
            await asyncio.gather(one.fence(), two.close())
            await asyncio.wait(one._serving[1:])  # it has heard that the window is closed
            for group in ranks:
                assert not group._actor.endpoint.recorder.failures
            await one._end()

    run(main())


def test_the_calls_of_a_window_are_recorded_and_its_messages_are_not(run, transport: str) -> None:
    async def main() -> None:
        async with aiodist.local(2, transports=transport) as ranks:
            one, two = await asyncio.gather(*[group.expose(np.zeros(4)) for group in ranks])
            for _ in range(3):  # later ones may be done within the call
                await one.put(1, slice(3), 1.0)
                await one.accumulate(1, 0, 1.0)
                assert (await one.get(1)).tolist() == [2, 1, 1, 0]
            await asyncio.gather(one.fence(), two.fence())
            [(expose, _), *calls, fence] = _calls(ranks[0])
            asked = ("put to rank 1", "float64[3]"), ("accumulate to rank 1", "float64[]")
            assert expose == "expose #0"
            assert calls == [*asked, ("get from rank 1", "float64[4]")] * 3
            assert fence == ("fence tag 1 #0", "fence()")
            assert [name for name, _ in _calls(ranks[1])] == ["expose #0", "fence tag 1 #0"]
            for task in two._serving:
                task.cancel()
            get = one.get(1)
            out = io.StringIO()
            flight_recorder.dump(out)
            assert "waits      get from rank 1" in out.getvalue()
            get.cancel()
            await asyncio.gather(one.close(), two.close())

    run(main())


def test_a_subscriber_that_leaves_is_no_failure(run, tmp_path: Path) -> None:
    async def main() -> None:
        flight_recorder.enable(tmp_path, on_signal=False)
        where: dict[str, Any] = {"address": "inproc://flight", "transports": "inproc"}
        async with (
            aiodist.Coordinator(where["address"]),
            aiodist.publisher("weights", **where) as out,
            aiodist.subscriber("weights", **where) as weights,
        ):
            await out.publish({"w": np.ones(1000)}, version=1)
            await weights.latest()

    run(main())
    assert not [path.read_text() for path in tmp_path.iterdir()]


@pytest.mark.parametrize("tag", [None, "refused"])
def test_a_call_that_one_rank_refuses_has_its_number_on_all(run, transport: str, tag) -> None:
    async def main() -> None:
        async with aiodist.local(2, transports=transport) as ranks:
            for number in range(3):
                works = []
                for group in ranks:
                    try:
                        works.append(group.all_reduce("x" if group.rank else 3, tag=tag))
                    except TypeError:
                        assert group.rank == 1
                with pytest.raises(aiodist.CollectiveAbortedError):
                    await works[0]
                names = [name for name, _ in _calls(ranks[0])]
                assert names == [name for name, _ in _calls(ranks[1])]
                assert names[-1].endswith(f" #{number}")

    run(main())


def test_by_the_environment(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(flight_recorder.VARIABLE, str(tmp_path))
    monkeypatch.setattr(flight_recorder._settings, "decided", False)

    async def main() -> None:
        async with aiodist.local(1):
            assert signal.getsignal(signal.SIGUSR1) is flight_recorder._on_signal
            signal.raise_signal(signal.SIGUSR1)

    run(main())
    [path] = tmp_path.iterdir()
    assert path.read_text().startswith("aiodist flight recorder: group 'world' epoch 1 rank 0 of 1")


def test_a_directory_that_cannot_be_made_is_no_reason_to_fail(
    run, tmp_path: Path, monkeypatch, caplog
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(flight_recorder.VARIABLE, str(tmp_path / "file" / "below"))
    monkeypatch.setattr(flight_recorder._settings, "decided", False)

    async def main() -> None:
        async with aiodist.local(1) as [group]:
            await group.barrier()

    run(main())
    assert "dumps go to stderr" in caplog.text
