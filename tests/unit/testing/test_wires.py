"""Time and chance between simulated hosts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from aiodist.testing.virtual_loop import VirtualLoop
from aiodist.testing.wires import Conditions, Node, Port, Wires


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(1)
    yield loop
    loop.close()


def wires(loop: VirtualLoop, **conditions: object) -> tuple[Wires, Node, Node]:
    made = Wires(loop, "seed", Conditions(**conditions))
    return made, made.node("a"), made.node("b")


@pytest.mark.parametrize(
    "given",
    [
        {"loss": 1.0},
        {"loss": -0.1},
        {"delay": (2.0, 1.0)},
        {"delay": (-1.0, 1.0)},
        {"delay": (0.0, math.inf)},
        {"again": -1.0},
        {"rate": -5.0},
        {"room": (0, 5)},
        {"room": (6, 5)},
        {"largest": 0},
    ],
    ids=str,
)
def test_conditions_that_carry_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Conditions(**given)


def test_what_is_cut_comes_whole(loop: VirtualLoop) -> None:
    made, *_ = wires(loop, largest=10)
    data = bytes(range(256)) * 3
    packets = list(made.cut(data))
    assert b"".join(packets) == data
    assert len(packets) > 1
    assert made.bytes_carried == len(data)
    assert not list(made.cut(b""))


def test_what_is_lost_is_late(loop: VirtualLoop) -> None:
    calm, a, b = wires(loop, delay=(0.1, 0.2), loss=0.0)
    assert all(0.1 <= calm.delay(a, b) <= 0.2 for _ in range(50))
    rough, a, b = wires(loop, delay=(0.1, 0.2), loss=0.5, again=10.0)
    delays = [rough.delay(a, b) for _ in range(50)]
    assert max(delays) > 10 and {round(d // 10 * 10) for d in delays} >= {0, 10}


def test_partitions_are_between_pairs_and_heal(loop: VirtualLoop) -> None:
    made, a, b = wires(loop)
    c = made.node("c")
    made.partition([a], [a, b])
    assert made.is_cut(a, b) and made.is_cut(b, a)
    assert not made.is_cut(a, c) and not made.is_cut(a, a)
    made.heal()
    assert not made.is_cut(a, b)
    whole, half = made.partition([a], [b, c]), made.partition([a], [b])
    whole()
    whole()
    assert made.is_cut(a, b) and not made.is_cut(a, c)
    half()
    assert not made.is_cut(a, b)
    b.kill("silent")
    assert made.is_cut(a, b)


def test_a_node_dies_amid_what_it_sends(loop: VirtualLoop) -> None:
    _, a, _ = wires(loop)
    a.kill_after(10)
    a.has_sent(9)
    assert a.alive
    a.has_sent(1)
    assert not a.alive


def test_the_same_seed_gives_the_same_chances(loop: VirtualLoop) -> None:
    one, a, b = wires(loop)
    two, *_ = wires(loop)
    assert [one.delay(a, b) for _ in range(9)] == [two.delay(a, b) for _ in range(9)]


def test_packets_leave_a_port_one_after_the_other() -> None:
    port = Port(100.0, 50)
    assert port.take(1.0, 20) == pytest.approx(1.2)
    assert port.take(1.1, 20) == pytest.approx(1.4)
    assert port.take(1.1, 21) is None  # 30 bytes wait
    assert port.take(1.1, 20) == pytest.approx(1.6)
    assert port.take(9.0, 20) == pytest.approx(9.2)
    assert (port.carried, port.dropped) == (80, 1)


def test_a_host_sends_and_gets_no_faster_than_its_line(loop: VirtualLoop) -> None:
    made, a, b = wires(loop, rate=100.0)
    assert [made.leave(a, 50), made.leave(a, 50)] == [0.5, 1.0]
    assert made.come_in(a, 50) == 0.5  # the other way has its own
    assert made.leave(b, 50) == 0.5
    free, *_ = wires(loop)
    assert free.leave(free.node("a"), 50) == loop.time() == 0.0
