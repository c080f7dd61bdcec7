"""A device that fails fails the operation, and nothing else: no link, no later operation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import standin
from standin import StandinDevice

import aiodist
from aiodist import CollectiveAbortedError, Group, ProtocolError
from aiodist.channels import hosting
from aiodist.devices import sections

Devices = Callable[[int], list[StandinDevice]]
Blind = Callable[[StandinDevice], None]


def fails(*args: Any) -> None:
    raise RuntimeError("the device is broken")


async def turns(groups: list[Group], count: int = 10) -> None:
    for _ in range(count):
        await asyncio.gather(*(g.all_reduce(1, tag="turn") for g in groups))


async def check_next(groups: list[Group], ranks: list[StandinDevice]) -> None:
    """The next message arrives."""
    receiving = groups[1].recv(src=0)
    await groups[0].send(ranks[0].put(np.arange(100.0)), 1)
    np.testing.assert_array_equal(ranks[1].get(await receiving), np.arange(100.0))


async def test_a_cancelled_receiver_cannot_copy(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next receive says why the message is lost."""
    ranks = devices(2)

    def no_access(handle: Any) -> None:
        raise OSError("no access")

    monkeypatch.setattr(ranks[1], "open", no_access)
    async with aiodist.local(2) as groups:
        groups[1]._context.device_memory.use(ranks[1])
        gate = groups[1]._context.device_memory.stream(ranks[1]).hold()
        sending = groups[0].send(ranks[0].put(np.ones(100)), 1)
        receiving = groups[1].recv(src=0, out=ranks[1].put(np.zeros(100)))
        await turns(groups)
        with monkeypatch.context() as broken:
            broken.setattr(ranks[1], "copy", fails)
            broken.setattr(ranks[1], "empty", fails)
            receiving.cancel()
        gate.set()
        with pytest.raises(ProtocolError, match="dropped: the device is broken"):
            await groups[1].recv(src=0)
        await sending
        await check_next(groups, ranks)


@pytest.mark.parametrize("way", ["device", "host"])
@pytest.mark.parametrize("first", ["send", "recv"])
async def test_a_receiver_that_cannot_copy(
    devices: Devices, blind: Blind, monkeypatch: pytest.MonkeyPatch, way: str, first: str
) -> None:
    ranks = devices(2)
    if way == "host":
        blind(ranks[1])
    async with aiodist.local(2) as groups:
        groups[1]._context.device_memory.use(ranks[1])
        with monkeypatch.context() as broken:
            broken.setattr(ranks[1], "copy", fails)
            calls = [
                lambda: groups[0].send(ranks[0].put(np.ones(100)), 1),
                lambda: groups[1].recv(src=0),
            ]
            works = []
            for call in calls if first == "send" else reversed(calls):
                works.append(call())
                await turns(groups)
            sending, receiving = works if first == "send" else reversed(works)
            with pytest.raises(ProtocolError, match="dropped: the device is broken"):
                await receiving
            if way == "host":
                await sending  # all of it had left
            else:
                with pytest.raises(ProtocolError, match="see the error of its receive"):
                    await sending
        await check_next(groups, ranks)


@asynccontextmanager
async def under_way(devices: Devices) -> AsyncIterator[tuple[Any, ...]]:
    """The groups and devices of two ranks, a send and its receive, and what holds the sender's
    device."""
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        groups[1]._context.device_memory.use(ranks[1])
        gate = ranks[0].current().hold()
        sending, receiving = groups[0].send(ranks[0].put(np.ones(100)), 1), groups[1].recv(src=0)
        await turns(groups)
        yield groups, ranks, sending, receiving, gate


async def test_a_receiver_whose_device_fails_later(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with under_way(devices) as (groups, ranks, sending, receiving, gate):
        with monkeypatch.context() as broken:
            broken.setattr(standin.StandinEvent, "done", fails)
            for work in (receiving, sending):
                with pytest.raises(ProtocolError):
                    await work
        gate.set()
        await check_next(groups, ranks)


async def test_a_message_that_was_not_read_stays_if_its_receive_is_cancelled(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with under_way(devices) as (groups, ranks, sending, receiving, gate):
        receiving.cancel()
        with monkeypatch.context() as broken:
            broken.setattr(standin.StandinEvent, "done", fails)
            await turns(groups)
        gate.set()
        np.testing.assert_array_equal(ranks[1].get(await groups[1].recv(src=0)), np.ones(100))
        await sending


async def test_a_copy_to_publish_that_fails(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    (device,) = devices(1)
    gate = device.current().hold()
    copying = asyncio.ensure_future(hosting.on_host(device.put(np.ones(3))))
    await asyncio.sleep(0)
    with monkeypatch.context() as broken:
        broken.setattr(standin.StandinEvent, "done", fails)
        with pytest.raises(RuntimeError, match="the device is broken"):
            await copying
    gate.set()


async def test_a_section_that_is_not_copied_is_copied_at_the_end(
    devices: Devices, blind: Blind, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = devices(2)
    blind(ranks[1])
    monkeypatch.setattr(sections, "SECTION", 1000)
    copy, failed = ranks[1].copy, []

    def fails_once(*args: Any) -> None:
        if not failed:
            failed.append(True)
            fails()
        copy(*args)

    monkeypatch.setattr(ranks[1], "copy", fails_once)
    async with aiodist.local(2) as groups:
        groups[1]._context.device_memory.use(ranks[1])
        receiving = groups[1].recv(src=0)
        await groups[0].send(ranks[0].put(np.arange(1000.0)), 1)
        np.testing.assert_array_equal(ranks[1].get(await receiving), np.arange(1000.0))
        assert failed


@pytest.mark.parametrize("sections_before", [0, 2])
async def test_a_sender_that_cannot_copy(
    devices: Devices, blind: Blind, monkeypatch: pytest.MonkeyPatch, sections_before: int
) -> None:
    ranks = devices(2)
    blind(ranks[1])
    monkeypatch.setattr(sections, "SECTION", 1000)
    steps = iter([ranks[0].host] * sections_before)

    def host(*args: Any) -> Any:
        return next(steps, fails)(*args)

    async with aiodist.local(2) as groups:
        groups[1]._context.device_memory.use(ranks[1])
        with monkeypatch.context() as broken:
            broken.setattr(ranks[0], "host", host)
            receiving = groups[1].recv(src=0)
            with pytest.raises(RuntimeError, match="the device is broken"):
                await groups[0].send(ranks[0].put(np.ones(1000)), 1)
        await groups[0].send("next", 1)
        assert await receiving == "next"
        await check_next(groups, ranks)


async def test_memory_of_a_failed_device_is_kept(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aiodist.group")
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        gate = ranks[1].current().hold()
        works = [g.all_reduce(d.put(np.ones(3))) for g, d in zip(groups, ranks, strict=True)]
        await turns(groups)
        with monkeypatch.context() as broken:
            broken.setattr(standin.StandinEvent, "done", fails)
            ends = await asyncio.gather(*works, return_exceptions=True)
            assert {type(end) for end in ends} <= {RuntimeError, CollectiveAbortedError}
            assert any(isinstance(end, RuntimeError) for end in ends)
            await turns(groups)  # FLUSH is not answered, and no link is lost
        gate.set()
        assert all(g._context.device_memory._limbo for g in groups)
        assert any("because the device fails: the device is broken" in m for m in caplog.messages)
