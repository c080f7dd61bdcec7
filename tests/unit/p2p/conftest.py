"""A simulated network for the point-to-point engine: every step of it is taken by the test."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from aiodist.errors import AiodistError
from aiodist.p2p import credit, pieces
from aiodist.p2p import frames as p2p_frames
from aiodist.p2p import sender as p2p_sender
from aiodist.p2p.point_to_point import PointToPoint
from aiodist.transports.base import Landing, deliver
from aiodist.wire.frames import pack_fields, unpack_fields


class VirtualLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that futures need. Time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.reports: list[dict[str, Any]] = []
        self._number = itertools.count()

    def get_debug(self) -> bool:
        return False

    def time(self) -> float:
        return self.now

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.reports.append(context)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.now + delay, callback, args, self, context)
        heapq.heappush(self.timers, (handle.when(), next(self._number), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...

    def turn(self) -> bool:
        """One turn: what was ready before it. True: something was."""
        moved = False
        for _ in range(len(self.ready)):
            handle = self.ready.popleft()
            if not handle.cancelled():
                moved = True
                handle._run()
        assert not self.reports, self.reports
        return moved

    def advance(self, seconds: float) -> None:
        self.now += seconds
        while self.timers and self.timers[0][0] <= self.now:
            _, _, handle = heapq.heappop(self.timers)
            if not handle.cancelled():
                handle._run()
        self.turn()


class Frame:
    def __init__(
        self,
        fields: tuple[Any, ...],
        payload: Sequence[memoryview],
        done: Callable[[], None] | None,
        token: object,
    ) -> None:
        self.header = pack_fields(*fields)
        self.payload = list(payload)
        self.nbytes = sum(view.nbytes for view in payload)
        self.left = self.nbytes
        self.started = False
        self.done = done
        self.token = token

    def take(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            view = self.payload[0]
            part = bytes(view[: count - len(data)])
            data += part
            if len(part) == view.nbytes:
                del self.payload[0]
            else:
                self.payload[0] = view[len(part) :]
        self.left -= count
        return data


class Pipe:
    """One direction of a link. Bytes leave the sender's memory, and arrive some time later."""

    def __init__(self, net: Net, src: int, dst: int) -> None:
        self.net, self.src, self.dst = net, src, dst
        self.urgent: deque[Frame] = deque()
        self.bulk: deque[Frame] = deque()
        self.partial: Frame | None = None
        self.flying: deque[tuple[bytes, int] | bytes] = deque()
        self.landing: Landing | None = None
        self.filled = 0
        self.to_come = 0
        self.open = True

    @property
    def memory(self) -> memoryview | None:
        """Where the payload goes that has come in part."""
        return None if self.landing is None else self.landing.memory

    @property
    def queued(self) -> list[Frame]:
        partial = [] if self.partial is None else [self.partial]
        return [*partial, *self.urgent, *self.bulk]

    def leave(self, most: int) -> bool:
        """Take up to `most` payload bytes of the next frame (and all of its header)."""
        frame = self.partial
        if frame is None:
            queue = self.urgent or self.bulk
            if not queue:
                return False
            frame = self.partial = queue.popleft()
        if not frame.started:
            frame.started = True
            self.flying.append((frame.header, frame.nbytes))
        count = min(most, frame.left)
        if count:
            self.flying.append(frame.take(count))
        if not frame.left:
            self.partial = None
            if frame.done is not None:
                frame.done()
        return True

    def arrive(self, most: int) -> bool:
        """Hand up to `most` bytes that have left to the receiver."""
        if not self.flying:
            return False
        engine = self.net.engines[self.dst]
        item = self.flying.popleft()
        if isinstance(item, tuple):
            header, nbytes = item
            self.landing = engine.frame(self.src, unpack_fields(header), nbytes)
            self.filled, self.to_come = 0, nbytes
            if not nbytes:
                deliver(self.landing, (), 0)
            return True
        if len(item) > most:
            self.flying.appendleft(item[most:])
            item = item[:most]
        memory = self.memory
        if memory is not None:
            assert memory.nbytes == self.filled + self.to_come
            memory[self.filled : self.filled + len(item)] = item
        self.filled += len(item)
        self.to_come -= len(item)
        if not self.to_come and self.landing is not None:
            landing, self.landing = self.landing, None
            if memory is not None:
                landing.landed()
        return True

    def flow(self) -> None:
        """Let everything arrive that is queued now."""
        for _ in self.queued:
            self.leave(1 << 30)
        while self.arrive(1 << 30):
            pass

    def discard(self, token: object) -> None:
        self.bulk = deque(frame for frame in self.bulk if frame.token is not token)
        frame = self.partial
        if frame is not None and frame.token is token:
            frame.payload = [memoryview(bytes(frame.left))]
            frame.done = None

    def cut(self) -> None:
        self.open = False
        self.urgent.clear()
        self.bulk.clear()
        self.flying.clear()
        self.partial = self.landing = None


class FakeChannel:
    def __init__(self, net: Net, rank: int) -> None:
        self.net = net
        self.rank = rank
        self.size = net.size
        self.max_message_bytes = net.max_message_bytes
        self.allow_pickle = False
        self.losses: dict[int, str] = {}

    def send(
        self,
        dst: int,
        fields: tuple[Any, ...],
        payload: Sequence[memoryview] = (),
        *,
        done: Callable[[], None] | None = None,
        token: object = None,
        urgent: bool = False,
    ) -> None:
        assert dst != self.rank
        pipe = self.net.pipes[self.rank, dst]
        if pipe.open:
            self.net.sent.append((self.rank, dst, fields))
            (pipe.urgent if urgent else pipe.bulk).append(Frame(fields, payload, done, token))

    def settle(self, dst: int, token: object) -> None: ...

    def ask(self, peer: int) -> None: ...

    def discard(self, dst: int, token: object) -> None:
        self.net.pipes[self.rank, dst].discard(token)

    def error(self, cls: type[AiodistError], message: str, **fields: Any) -> AiodistError:
        return cls(message, group="sim", epoch=1, **fields)

    def lost(self) -> Mapping[int, str]:
        return self.losses


class Net:
    """`size` engines, and the pipes between them."""

    def __init__(self, size: int = 2, *, max_message_bytes: int = 1 << 30, way: int = 0) -> None:
        self.size = size
        self.max_message_bytes = max_message_bytes
        self.way = way
        self.loop = VirtualLoop()
        self.sent: list[tuple[int, int, tuple[Any, ...]]] = []
        self.pipes = {
            (src, dst): Pipe(self, src, dst)
            for src in range(size)
            for dst in range(size)
            if src != dst
        }
        self.channels = [FakeChannel(self, rank) for rank in range(size)]
        self.engines = [PointToPoint(channel, self.loop, way=way) for channel in self.channels]

    def settle(self) -> None:
        """Let everything happen that can, without time passing."""
        moved = True
        while moved:
            moved = self.loop.turn()
            for pipe in self.pipes.values():
                while pipe.leave(1 << 30) or pipe.arrive(1 << 30):
                    moved = True

    def lose(self, rank: int, reason: str = "connection reset") -> None:
        """`rank` dies, or leaves: the others are told, one after the other."""
        for (src, dst), pipe in self.pipes.items():
            if rank in (src, dst):
                # A link is told of its end before anything else comes or goes.
                pipe.cut()
        for channel, engine in zip(self.channels, self.engines, strict=True):
            if channel.rank != rank:
                channel.losses[rank] = reason
                engine.rank_lost(rank, f"rank {rank} is lost: {reason}")

    def kinds(self, src: int, dst: int) -> list[int]:
        """The kinds of the frames that `src` sent to `dst` so far."""
        return [fields[0] for a, b, fields in self.sent if (a, b) == (src, dst)]


@contextmanager
def small_limits() -> Iterator[None]:
    """Limits that a short test reaches; related as the real ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(credit, "WINDOW", 4096)
        patch.setattr(credit, "TOTAL", 6144)
        patch.setattr(credit, "BATCH", 1024)
        patch.setattr(credit, "MOST", credit.COST + 512 + 32)
        patch.setattr(p2p_sender, "EAGER", 512)
        patch.setattr(p2p_frames, "MAX_EAGER", 512)
        patch.setattr(p2p_frames, "INLINE", 200)
        patch.setattr(p2p_frames, "MOST_PUSHED", 2000)
        patch.setattr(pieces, "ALONE", 100)
        patch.setattr(p2p_sender, "cut", lambda buffers: pieces.cut(buffers, 300))
        patch.setattr(p2p_sender, "BURST", 1200)
        yield


@pytest.fixture(scope="session")
def make_net() -> type[Net]:
    return Net


@pytest.fixture(scope="session")
def limited() -> Callable[[], Any]:
    return small_limits


@pytest.fixture
def net(make_net: type[Net], monkeypatch: pytest.MonkeyPatch) -> Net:
    # A MiB is several pieces.
    monkeypatch.setattr(p2p_sender, "cut", lambda buffers: pieces.cut(buffers, 256 * 1024))
    return make_net(2)
