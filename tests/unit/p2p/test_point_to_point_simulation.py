"""The engine over random interleavings, against a model: nothing is lost, doubled, mixed up, or
waits for ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist.errors import MessageTooLargeError, MismatchError, PeerLostError
from aiodist.links.peer import LEFT
from aiodist.types import ANY_SOURCE, ANY_TAG

TAGS: list[Any] = [0, 1, "1", "a longer tag"]
ASKED: list[Any] = [ANY_TAG, *TAGS, "a tag of no message"]
SIZES = [0, 1, 3, 50, 100, 150, 400, 900]
"""Elements of 4 bytes: eager up to about 100, pulled above."""

GARBAGE = 0xDEADBEEF
UNTOUCHED = 0xABCDABCD


class Message:
    def __init__(self, number: int, src: int, dst: int, tag: Any, size: int, shape: str) -> None:
        self.number, self.src, self.dst, self.tag = number, src, dst, tag
        self.array = np.full(size, number, np.uint32)
        self.more = np.full(7, number, np.uint32)
        self.shape = shape
        # Names that make the metadata too long to travel with an announcement.
        self.value: Any = self.array
        if shape == "tree":
            self.value = {"number": number, "a": self.array, "b": [self.more] * 5}
        elif shape == "meta":
            self.value = {"number": number, "a": self.array, "text": "x" * 300}
        self.work: Any = None
        self.cancelled = False
        self.delivered = False

    def spoil(self) -> None:
        """The memory may be reused: whoever still reads it gets garbage."""
        self.array[:] = GARBAGE
        self.more[:] = GARBAGE


class Receive:
    def __init__(self, rank: int, src: Any, tag: Any, out: Any) -> None:
        self.rank, self.src, self.tag, self.out = rank, src, tag, out
        self.work: Any = None
        self.kept: Any = None  # what `out` held when the receive was cancelled
        self.counted = False

    def matches(self, message: Message) -> bool:
        return (
            message.dst == self.rank
            and _covers(self.src, message.src)
            and (self.tag is ANY_TAG or _same(self.tag, message.tag))
        )


def _covers(named: Any, src: int | None) -> bool:
    return named in (ANY_SOURCE, src) or (isinstance(named, list) and src in named)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


class World:
    """Engines, and what a user of them may expect."""

    def __init__(self, net: Any, choose: random.Random, *, outs: bool = True) -> None:
        self.net = net
        self.outs = outs
        self.choose = choose
        self.messages: list[Message] = []
        self.receives: list[Receive] = []
        self.probes: list[Receive] = []
        self.lost: int | None = None
        self.left = False  # whether that one went in order: then the others are waited for
        self.order: dict[tuple[int, int, Any], list[int]] = {}

    # -- what happens ----------------------------------------------------------------------------

    def living(self) -> int:
        return self.choose.choice([r for r in range(self.net.size) if r != self.lost])

    def send(self) -> None:
        pick = self.choose
        shape = pick.choice(["array", "array", "array", "tree", "meta"])
        dst = pick.randrange(self.net.size)
        message = Message(
            len(self.messages), self.living(), dst, pick.choice(TAGS), pick.choice(SIZES), shape
        )
        message.work = self.net.engines[message.src].send(message.value, dst, message.tag)
        if dst == self.lost:
            assert isinstance(message.work.exception(), PeerLostError)
            message.cancelled = True
            return
        self.messages.append(message)
        self.check()

    def receive(self, rank: int | None = None, *, anything: bool = False) -> Receive:
        pick = self.choose
        rank = self.living() if rank is None else rank
        src = self.source()
        tag = pick.choice(ASKED)
        out = None
        if self.outs and pick.random() < 0.4:
            out = np.full(pick.choice(SIZES), UNTOUCHED, np.uint32)
        if anything:
            src, tag, out = ANY_SOURCE, ANY_TAG, None
        receive = Receive(rank, src, tag, out)
        receive.work = self.net.engines[rank].recv(src, tag, out)
        if self.left and src is ANY_SOURCE and receive.work.done():
            assert not isinstance(receive.work.exception(), PeerLostError)
        self.receives.append(receive)
        self.check()
        return receive

    def source(self) -> Any:
        """Of a receive: a rank, any, or a list."""
        ranks = range(self.net.size)
        several = self.choose.sample(ranks, self.choose.randint(1, self.net.size))
        return self.choose.choice([ANY_SOURCE, several, *ranks])

    def probe(self) -> None:
        rank = self.living()
        src = self.source()
        tag = self.choose.choice(ASKED)
        if self.choose.random() < 0.5:
            engine = self.net.engines[rank]
            try:
                engine.iprobe(src, tag)
            except PeerLostError:
                assert isinstance(engine.probe(src, tag).exception(), PeerLostError)
            return
        probe = Receive(rank, src, tag, None)
        probe.work = self.net.engines[rank].probe(src, tag)
        self.probes.append(probe)

    def cancel_receive(self) -> None:
        pending = [r for r in [*self.receives, *self.probes] if not r.work.done()]
        if pending:
            receive = self.choose.choice(pending)
            assert receive.work.cancel()
            if receive.out is not None:
                receive.kept = receive.out.copy()
            self.check()

    def cancel_send(self) -> None:
        pending = [m for m in self.messages if not m.work.done()]
        if pending:
            message = self.choose.choice(pending)
            assert message.work.cancel()
            message.cancelled = True
            message.spoil()
            self.check()

    def move(self) -> None:
        pick = self.choose
        pipe = pick.choice(list(self.net.pipes.values()))
        for _ in range(pick.choice([1, 1, 2, 20])):
            step = pick.choice([pipe.leave, pipe.arrive])
            step(pick.choice([1, 7, 100, 1000]))
        self.check()

    def turn(self) -> None:
        self.net.loop.turn()
        self.check()

    def wait(self) -> None:
        self.net.loop.advance(0.03)
        self.check()

    def lose(self) -> None:
        if self.lost is None and self.net.size > 2:
            self.lost = self.choose.randrange(self.net.size)
            self.left = self.choose.random() < 0.5
            self.net.lose(self.lost, LEFT if self.left else "connection reset")
            self.check()

    # -- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        """After every step."""
        for message in self.messages:
            if not message.cancelled and message.work.done():
                error = message.work.exception()
                if isinstance(error, MessageTooLargeError):
                    assert message.array.nbytes > 2500
                    message.cancelled = True
                elif error is not None:
                    assert isinstance(error, PeerLostError)
                    assert self.lost in (message.dst, message.src)
                message.spoil()
        for receive in self.receives:
            if receive.work.done() and not receive.counted:
                receive.counted = True
                if not receive.work.cancelled():
                    self.completed(receive)

    def completed(self, receive: Receive) -> None:
        work = receive.work
        error = work.exception()
        if error is not None:
            if receive.out is not None:
                receive.kept = receive.out.copy()
            if isinstance(error, PeerLostError):
                assert _covers(receive.src, self.lost)
            elif isinstance(error, MessageTooLargeError):
                assert self.net.max_message_bytes == 3000
            else:
                assert isinstance(error, MismatchError)
                assert receive.out is not None
            return
        value = work.result()
        number = self.number(value, receive)
        if number is None:  # an empty array does not say
            number = next(
                m.number
                for m in self.messages
                if m.src == work.source
                and m.dst == receive.rank
                and _same(m.tag, work.tag)
                and not (m.delivered or m.cancelled)
                and m.array.size == 0
                and m.shape == "array"
            )
        message = self.messages[number]
        assert not message.delivered and not message.cancelled
        message.delivered = True
        assert receive.matches(message)
        assert work.source == message.src and _same(work.tag, message.tag)
        arrays = self.arrays(value)
        assert arrays[0].shape == message.array.shape
        assert all((array == number).all() for array in arrays)
        assert work.nbytes == sum(array.nbytes for array in arrays)
        if receive.out is not None:
            assert value is receive.out
        self.order.setdefault((message.src, message.dst, message.tag), []).append(number)

    def number(self, value: Any, receive: Receive) -> int | None:
        if isinstance(value, dict):
            return int(value["number"])
        return int(value[0]) if value.size else None

    def arrays(self, value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [value["a"], *value.get("b", [])]
        return [value]

    def check_nobody_waits(self) -> None:
        """Everything has happened that can without time passing."""
        for receive in [*self.receives, *self.probes]:
            if not receive.work.done():
                for message in self.messages:
                    waiting = not (message.delivered or message.cancelled)
                    dead = self.lost in (message.src, message.dst, receive.rank)
                    assert not (waiting and not dead and receive.matches(message)), (
                        f"a receive waits for {receive.src} {receive.tag!r}, and message "
                        f"{message.number} of {message.src} {message.tag!r} for a receive"
                    )
                if self.lost is not None and receive.rank != self.lost:
                    assert receive.src not in (self.lost, [self.lost])
                    assert self.left or not _covers(receive.src, self.lost)

    def check_out(self) -> None:
        for receive in self.receives:
            if receive.kept is not None:
                assert (receive.out == receive.kept).all(), "written after the receive had ended"

    def finish(self) -> None:
        """Receive all that is left; then nothing may be left of it."""
        self.net.settle()
        self.check()
        self.check_nobody_waits()
        for receive in [*self.receives, *self.probes]:
            receive.work.cancel()
        for rank in range(self.net.size):
            if rank == self.lost:
                continue
            while True:
                self.net.settle()
                receive = self.receive(rank, anything=True)
                self.net.settle()
                self.check()
                refused = receive.work.done() and isinstance(
                    receive.work.exception(), MessageTooLargeError
                )
                if not refused and (not receive.work.done() or receive.work.exception()):
                    receive.work.cancel()
                    break
        self.net.settle()
        self.net.loop.advance(0.03)
        self.net.settle()
        self.check()
        self.check_out()
        for message in self.messages:
            if self.lost in (message.src, message.dst):
                continue
            if message.cancelled:
                assert not message.delivered
            elif self.lost is None or self.left:
                assert message.delivered, f"message {message.number} is lost"
                assert message.work.done()
        if self.lost is None:
            assert all(engine.idle for engine in self.net.engines)
        else:
            self.net.engines[self.lost].close(PeerLostError("dead", ranks=[self.lost]))


ACTIONS = {
    "send": World.send,
    "receive": World.receive,
    "probe": World.probe,
    "cancel_receive": World.cancel_receive,
    "cancel_send": World.cancel_send,
    "move": World.move,
    "turn": World.turn,
    "wait": World.wait,
    "lose": World.lose,
}


def run(
    make: Callable[[], Any],
    seed: int,
    steps: int,
    weights: dict[str, int],
    limited: Callable[[], Any],
    *,
    outs: bool = True,
) -> World:
    """A world on the net that `make` makes, whose limits are the small ones from the start."""
    choose = random.Random(seed)
    with limited():
        world = World(make(), choose, outs=outs)
        for name in choose.choices(list(weights), list(weights.values()), k=steps):
            ACTIONS[name](world)
        world.finish()
    return world


many = settings(max_examples=50, deadline=None)


@pytest.fixture(scope="session", params=[0, 4000], ids=["near", "far"])
def make_net(make_net: Any, request: Any) -> Any:
    """Of ranks that are near each other, or far."""
    return partial(make_net, way=request.param)


@many
@given(st.integers(0, 2**64), st.integers(2, 3), st.integers(1, 150))
def test_nothing_is_lost_or_waits_for_ever(
    make_net: Any, limited: Any, seed: int, size: int, steps: int
) -> None:
    weights = {"send": 8, "receive": 5, "probe": 2, "cancel_receive": 3, "cancel_send": 2}
    run(lambda: make_net(size), seed, steps, weights | {"move": 20, "turn": 5, "wait": 1}, limited)


CROWDED = {"send": 20, "receive": 1, "probe": 3, "cancel_receive": 2, "cancel_send": 1}
CROWDED |= {"move": 20, "turn": 2}
"""Far more is sent than received: the total is used up most of the time."""


@many
@given(st.integers(0, 2**64), st.integers(50, 300))
def test_unreceived_tags_block_nobody(make_net: Any, limited: Any, seed: int, steps: int) -> None:
    run(lambda: make_net(2), seed, steps, CROWDED, limited)


def test_the_simulation_reaches_every_kind_of_frame(make_net: Any, limited: Any) -> None:
    seen: set[int] = set()
    for seed in range(20):
        weights = CROWDED | {"receive": 1 + seed % 2 * 10}  # pushed is where receives wait
        world = run(lambda: make_net(2, max_message_bytes=3000), seed, 300, weights, limited)
        seen |= {fields[0] for _, _, fields in world.net.sent}
    assert seen == set(range(13 if world.net.way else 12))


@many
@given(st.integers(0, 2**64), st.integers(50, 200))
def test_the_loss_of_a_rank(make_net: Any, limited: Any, seed: int, steps: int) -> None:
    weights = {"send": 8, "receive": 8, "probe": 1, "cancel_receive": 1, "cancel_send": 1}
    run(lambda: make_net(3), seed, steps, weights | {"move": 20, "turn": 5, "lose": 1}, limited)


@many
@given(st.integers(0, 2**64), st.integers(2, 3), st.integers(1, 200))
def test_one_receive_at_a_time_sees_messages_in_order(
    make_net: Any, limited: Any, seed: int, size: int, steps: int
) -> None:
    """Whatever is cancelled: a rank that has one receive out at a time gets the messages of each
    (source, tag) in the order they were sent."""
    choose = random.Random(seed)
    with limited():
        world = World(make_net(size), choose)
        current: dict[int, Receive] = {}
        for _ in range(steps):
            action = choose.choices(
                ["send", "receive", "cancel_receive", "cancel_send", "move", "turn"],
                [8, 8, 2, 1, 20, 5],
            )[0]
            if action == "receive":
                rank = world.living()
                if rank not in current or current[rank].work.done():
                    current[rank] = world.receive(rank)
            else:
                ACTIONS[action](world)
        world.finish()
    for numbers in world.order.values():
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sample(17)
def test_without_cancels_receives_match_in_the_order_they_were_posted(
    make_net: Any, limited: Any, seed: int
) -> None:
    weights = {"send": 8, "receive": 8, "move": 20, "turn": 5}
    # A message given back because `out` did not fit may come after a later one.
    world = run(lambda: make_net(3), seed, 200, weights, limited, outs=False)
    for src in range(3):
        for dst in range(3):
            for tag in TAGS:
                taken = [
                    (r.work.source, world.number(r.work.result(), r))
                    for r in world.receives
                    if r.rank == dst
                    and not r.work.cancelled()
                    and r.work.exception() is None
                    and _same(r.work.tag, tag)
                ]
                numbers = [number for source, number in taken if source == src and number]
                assert numbers == sorted(numbers)
