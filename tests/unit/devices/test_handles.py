"""What ranks tell each other of their devices, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.buffers.dtypes import carrier
from aiodist.devices.base import Location
from aiodist.devices.handles import KNOWN, NEWS, Handles
from aiodist.errors import ProtocolError


class Device:
    """Arrays are (allocation, offset, length) of float32."""

    kind = "fake"

    def __init__(self) -> None:
        self.there = {1, 2}
        self.opened: list[bytes] = []

    def describe(self, array: Any) -> tuple[str, tuple[int, ...]]:
        return "float32", (array[2],)

    def locate(self, array: Any) -> Location:
        return Location(array[0], b"memory %d" % array[0], array[1])

    def holds(self, allocation: int) -> bool:
        return allocation in self.there

    def open(self, handle: bytes) -> bytes:
        self.opened.append(handle)
        return handle

    open_event = open

    def at(self, memory: bytes, offset: int, name: str, length: int, owner: object) -> Any:
        return memory, offset, name, length


EVENTS = [(number, SimpleNamespace(handle=b"event %d" % number)) for number in range(4)]


@pytest.fixture
def freed() -> list[int]:
    return []


@pytest.fixture
def handles(freed: list[int]) -> Handles:
    timer = SimpleNamespace(cancel=lambda: None)
    loop: Any = SimpleNamespace(call_later=lambda delay, call: timer)
    return Handles(0, loop, freed.append)


def work(device: Device) -> Any:
    return SimpleNamespace(device=device, numbered=EVENTS)


def test_handles_are_told_until_the_others_have_them(handles: Handles) -> None:
    device: Any = Device()
    words = handles.describe(work(device), [(1, 0, 5), (1, 20, 3)])
    assert words[:1] == NEWS
    assert handles.describe(work(device), [(1, 0, 5)])[:1] == NEWS  # nobody has said anything yet
    handles.told(words)
    again = handles.describe(work(device), [(1, 8, 5)])
    assert again[:1] == KNOWN
    assert b"memory" not in again
    assert handles.describe(work(device), [(2, 0, 1)])[:1] == NEWS


def test_what_all_others_have_the_rank_itself_has_not(handles: Handles) -> None:
    device: Any = Device()
    handles.told(handles.describe(work(device), [(1, 0, 5)]))
    assert handles.describe(work(device), [(1, 0, 5)], peer=1)[:1] == KNOWN
    words = handles.describe(work(device), [(1, 0, 5)], peer=0)
    assert words[:1] == NEWS
    handles.told(words, peer=0)
    assert handles.describe(work(device), [(1, 0, 5)], peer=0)[:1] == KNOWN


def test_what_one_peer_has_the_others_have_not(handles: Handles) -> None:
    device: Any = Device()
    handles.told(handles.describe(work(device), [(1, 0, 5)], peer=1), peer=1)
    assert handles.describe(work(device), [(1, 0, 5)], peer=1)[:1] == KNOWN
    assert handles.describe(work(device), [(1, 0, 5)], peer=2)[:1] == NEWS


def test_each_allocation_of_a_peer_is_opened_once(handles: Handles) -> None:
    device: Any = Device()
    words = handles.describe(work(device), [(1, 0, 5), (1, 20, 3)])
    for _ in range(2):
        found = handles.open(lambda kind: device, 3, words, None)
    assert found.arrays == [(b"memory 1", 0, "float32", 5), (b"memory 1", 20, "float32", 3)]
    assert device.opened == [b"event 0", b"event 1", b"memory 1"]
    handles.rank_lost(3)
    handles.open(lambda kind: device, 3, words, None)
    assert len(device.opened) == 6


def test_each_device_opens_an_allocation_for_itself(handles: Handles) -> None:
    devices: Any = Device(), Device()
    words = handles.describe(work(devices[0]), [(1, 0, 5)])
    handles.open(lambda kind: devices[0], 3, words, None)
    handles.told(words)
    known = handles.describe(work(devices[0]), [(1, 0, 5)])
    for _ in range(2):
        found = handles.open(lambda kind: devices[1], 3, known, None)
        assert found.arrays == [(b"memory 1", 0, "float32", 5)]
    assert devices[0].opened == devices[1].opened == [b"event 0", b"event 1", b"memory 1"]
    handles.drop(3, 1)
    with pytest.raises(ProtocolError, match="rank 3"):
        handles.open(lambda kind: devices[1], 3, known, None)


def test_a_device_that_cannot_open_an_allocation_uses_what_another_has_opened(
    handles: Handles,
) -> None:
    devices: Any = Device(), Device()

    def refuse(handle: bytes) -> None:
        raise OSError("no peer access")

    devices[1].open = devices[1].open_event = refuse
    words = handles.describe(work(devices[0]), [(1, 0, 5)])
    with pytest.raises(OSError, match="no peer access"):
        handles.open(lambda kind: devices[1], 3, words, None)
    handles.open(lambda kind: devices[0], 3, words, None)
    handles.told(words)
    known = handles.describe(work(devices[0]), [(1, 0, 5)])
    found = handles.open(lambda kind: devices[1], 3, known, None)
    assert found.arrays == [(b"memory 1", 0, "float32", 5)]


def test_what_is_freed_is_told_and_told_anew(handles: Handles, freed: list[int]) -> None:
    device: Any = Device()
    handles.told(handles.describe(work(device), [(1, 0, 5)]))
    device.there = {2}
    handles.review()
    assert freed == [1]
    device.there = {1, 2}
    again = handles.describe(work(device), [(1, 0, 5)])
    assert b"memory 1" in again and b"event 1" not in again


def test_words_that_make_no_sense_are_refused(handles: Handles) -> None:
    device: Any = Device()
    words = handles.describe(work(device), [(1, 0, 5)])
    handles.told(words)
    known = handles.describe(work(device), [(1, 0, 5)])
    with pytest.raises(ProtocolError, match="rank 3"):  # it names what it has never shown
        handles.open(lambda kind: device, 3, known, None)
    with pytest.raises(OSError, match="no device of the kind 'fake'"):
        handles.open(lambda kind: None, 3, words, None)
    device.at = lambda memory, offset, name, *rest: carrier(f"{name}?")
    with pytest.raises(ProtocolError, match="float32\\?"):
        handles.open(lambda kind: device, 3, words, None)
