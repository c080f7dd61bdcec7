"""What a traced rank writes."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.rank import tracing
from aiodist.recorder import KEPT, Record


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ranks that join from now on are traced, into this directory."""
    monkeypatch.setattr(tracing, "_write_when_terminated", lambda: None)
    monkeypatch.setenv(tracing.VARIABLE, str(tmp_path / "traces"))
    return tmp_path / "traces"


def parts(where: Path) -> list[dict[str, Any]]:
    found = [json.loads(file.read_text("utf-8")) for file in where.glob("*.json")]
    return sorted(found, key=lambda one: (one["rank"], one["events"]))


async def test_all_operations_are_written_with_their_times(traced: Path) -> None:
    async with aiodist.local(2) as groups:
        loop = asyncio.get_running_loop()
        before = loop.time()
        for _ in range(3):
            await asyncio.gather(*(one.all_reduce(np.ones(4)) for one in groups))
        await asyncio.gather(groups[0].send("x", 1, tag="t"), groups[1].recv(tag="t"))
        after = loop.time()
    one, other = parts(traced)
    assert [row[1:7] for row in one["operations"]] == [
        *(["all_reduce", None, seq, "all_reduce(SUM, float64[4])", None, 32] for seq in range(3)),
        ["send", "t", None, "", 1, one["operations"][3][6]],
    ]
    assert [row[1] for row in other["operations"]] == ["all_reduce"] * 3 + ["recv"]
    for row in [*one["operations"], *other["operations"]]:
        assert before <= row[7] <= row[8] <= after
        assert row[9] == "done"
    assert one["operations"][0][11] == ["recursive_doubling.all_reduce"]
    assert [text for _, text in one["events"]][:1] == ["epoch 1 of 'world': 2 ranks"]
    assert "leaves" in [text for _, text in one["events"]]
    assert one["complete"] and one["machine"] == other["machine"]


async def test_messages_say_what_they_carry_and_all_say_over_what(traced: Path) -> None:
    """Those that are done within the call, and the others."""
    async with aiodist.local(2, transports="unix") as groups:
        await asyncio.gather(*(one.all_reduce(np.ones(4)) for one in groups))
        copies = await asyncio.gather(*(one.dup() for one in groups))
        await asyncio.gather(*(one.all_reduce(np.ones(4)) for one in copies))
        for group in copies:
            await group.close()  # what it did is in the trace all the same
        x = np.ones((2, 3), np.int16)
        for _ in range(3):
            await groups[0].send(x, 1)
            await groups[1].recv(src=0, out=x)
        tree = {"a": np.ones(50_000), "b": [np.ones(3, bool)] * 9}
        await asyncio.gather(groups[0].send(tree, 1), groups[1].recv())
    for one, transports in zip(parts(traced), ([None, "unix"], ["unix", None]), strict=True):
        assert [scope[5] for scope in one["scopes"]] == [transports] * 2
        told = [row[4] for row in one["operations"] if row[1] in ("send", "recv")]
        assert told == [*["int16[2,3]"] * 3, "float64[50000], bool[3], bool[3], bool[3]"]


async def test_clocks_are_compared_with_the_coordinators(traced: Path) -> None:
    async with aiodist.local(1) as (group,):
        (tracer,) = [one for one in tracing._tracers if one._actor is group._actor]
        while not tracer._clock:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
        name, number = group._actor.control.start
    ((start, [[when, ahead, error]]),) = parts(traced)[0]["clock"].items()
    assert start == f"{name} {number}"
    # It is the clock of this process.
    assert abs(ahead) <= error
    assert when > 0 < error


async def test_what_is_pending_when_the_process_ends_is_written_as_waiting(traced: Path) -> None:
    async with aiodist.local(2) as groups:
        work = groups[0].all_reduce(np.ones(4))
        tracing._write_all()  # at exit
        await asyncio.gather(work, groups[1].all_reduce(np.ones(4)))
    one, other = parts(traced)
    assert [row[9] for row in one["operations"]] == ["waits"]
    assert other["operations"] == []


async def test_losses_are_written(traced: Path) -> None:
    async with aiodist.local(2) as groups:
        groups[1].abort("enough")
        with pytest.raises(aiodist.PeerLostError):
            await groups[0].all_reduce(np.ones(4))
    one, _ = parts(traced)
    assert any("rank 1 lost" in text for _, text in one["events"])
    (row,) = one["operations"]
    assert row[9] == "failed"
    assert row[10].startswith("PeerLostError: ")


async def test_off_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not so much as looked at: what notes an operation is the append of the ring itself."""
    monkeypatch.delenv(tracing.VARIABLE, raising=False)
    async with aiodist.local(1) as (group,):
        recorder = group._actor.endpoint.recorder
        assert group._context.records.add == recorder._ring.append
        assert (recorder._ring.maxlen, recorder.observers) == (KEPT, ())
        assert not any(one._actor is group._actor for one in tracing._tracers)


async def late_all_reduce(groups: list[aiodist.Group]) -> Counter[tuple[str, str]]:
    """What is called by an all_reduce that is done within its call, once it is prepared."""
    called: Counter[tuple[str, str]] = Counter()

    kicks = 0  # functions that are under way to wake the other rank, if that sleeps by now

    def note(frame: Any, event: str, function: Any) -> None:
        nonlocal kicks
        name = function.__name__ if event.startswith("c_") else frame.f_code.co_name
        if name == "kick":
            kicks += {"call": 1, "return": -1}[event]
        elif event in ("call", "c_call") and not kicks:
            called[event, "clock" if name in ("time", "monotonic") else name] += 1

    while groups[1]._context.express is None:  # until it is agreed on memory
        await asyncio.gather(*(one.barrier() for one in groups))
    progress: Any = groups[1]._actor.endpoint.progress
    progress.is_due = lambda: False  # which the time that has gone by decides,
    progress.is_unread = lambda: False  # and this too, if the machine is slow
    for _ in range(3):
        first = groups[0].all_reduce(np.ones(4))
        x, before = np.ones(4), sys.getprofile()
        called.clear()
        sys.setprofile(note)
        try:
            second = groups[1].all_reduce(x)
        finally:
            sys.setprofile(before)
        done = second.done()
        await asyncio.gather(first, second)
    assert done
    return called


@pytest.mark.parametrize("transport", ["shm", "unix"])
async def test_an_operation_does_nothing_for_a_trace(
    traced: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Counted, and not measured: the functions that are called are those of a rank without a trace,
    and what is kept of each call is nothing that the garbage collector has to look at."""
    async with aiodist.local(2, transports=transport) as groups:
        with_trace = await late_all_reduce(groups)
        recorder = groups[1]._actor.endpoint.recorder
        assert recorder._ring.maxlen == tracing.MOST
        gc.collect()
        gc.collect()  # the tuple within was found to be plain by the first one
        kept = [gc.is_tracked(one) for one in recorder._ring if not isinstance(one, Record)]
        assert kept
        assert not any(kept)
    monkeypatch.delenv(tracing.VARIABLE)
    async with aiodist.local(2, transports=transport) as groups:
        without = await late_all_reduce(groups)
    assert with_trace == without


async def test_a_directory_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(tracing.VARIABLE, str(tmp_path / "file" / "traces"))
    async with aiodist.local(1) as (group,):
        await group.barrier()
    assert "nothing is traced" in caplog.text
