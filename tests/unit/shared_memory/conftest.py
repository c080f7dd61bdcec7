"""Several ranks of one lane in one thread: the engine on made-up loops and links, in any order.

The test chooses who calls, whose callbacks run, which frames arrive (kicks and aborts among them),
and when an operation is given up. Whatever it chooses: what nobody gave up completes everywhere,
with the right values; what somebody gave up completes with these or fails; then the next ones work.
"""

from __future__ import annotations

import itertools
import math
import mmap
import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiodist.collectives import reductions, values
from aiodist.errors import CollectiveAbortedError, PeerLostError
from aiodist.links.moved import Moved, Traffic
from aiodist.links.owner import EndpointOwner
from aiodist.phases import base
from aiodist.rank.context import Context
from aiodist.recorder import Recorder
from aiodist.schedules.teams import Teams, team_view
from aiodist.shared_memory.board import SEGMENT, Board
from aiodist.shared_memory.lane import Lane, Layout, Sharing
from aiodist.transports.base import deliver
from aiodist.transports.copies import Copies
from aiodist.transports.polling import CorePace
from aiodist.types import SUM, ReduceOp
from aiodist.wire import kinds
from aiodist.wire.frames import unpack_fields

POISON = -1e9
"""What a user writes to an array after giving up the operation on it."""


class Loop:
    """What the engine asks of an event loop."""

    def __init__(self) -> None:
        self.ready: deque[tuple[Any, tuple[Any, ...]]] = deque()

    def get_debug(self) -> bool:
        return False

    def time(self) -> float:
        return 0.0

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> None:
        self.ready.append((callback, args))

    def run_one(self) -> None:
        callback, args = self.ready.popleft()
        callback(*args)


class Chance:
    """Choices by a random generator."""

    def __init__(self, seed: Any) -> None:
        self._random = random.Random(str(seed))

    def pick(self, options: list[Any]) -> Any:
        return self._random.choice(options)

    def rarely(self) -> bool:
        return self._random.random() < 0.1


class Path:
    """Choices that follow `prefix`, then take the first option; `taken`: (option, of how many)."""

    def __init__(self, prefix: list[int]) -> None:
        self._prefix = prefix
        self.taken: list[tuple[int, int]] = []

    def pick(self, options: list[Any]) -> Any:
        at = len(self.taken)
        index = self._prefix[at] if at < len(self._prefix) else 0
        self.taken.append((index, len(options)))
        return options[index]

    def rarely(self) -> bool:
        return False

    def following(self) -> list[int] | None:
        """The prefix of the next path; None after the last."""
        taken = list(self.taken)
        while taken:
            index, count = taken.pop()
            if index + 1 < count:
                return [before for before, _ in taken] + [index + 1]
        return None


class Progress(CorePace):
    """`aiodist.transports.polling.Progress` without a clock: it looks once."""

    def __init__(self, chooser: Any, loop: Loop) -> None:
        self.polls = False  # it does not look at the clock
        self._due = math.inf  # so that the compiled part asks `finish`
        self._chooser = chooser
        self._loop = loop

    def is_due(self) -> bool:
        return self._chooser.rarely()

    def is_unread(self) -> bool:
        return False  # what is sent is delivered when the test says so

    def finish(self, work: Any, result: Any, ended: float) -> None:
        if self.is_due():
            self._loop.call_soon(work.finish_within_call, result, ended)
        else:
            work.finish_within_call(result, ended)

    def inline(self, is_done: Any, link_of: Any) -> None: ...

    def watch(self, board: Any, peers: Any, stamp: int, *, crowded: bool) -> bool:
        return board.met(peers, stamp) is True


class Endpoint:
    """Links that deliver when the test says so."""

    def __init__(self, world: World, rank: int) -> None:
        self.loop = Loop()
        self.rank = rank
        self.progress = Progress(world.chooser, self.loop)
        self.recorder = Recorder()
        self.lost: dict[int, str] = {}
        self.doubted: set[int] = set()
        self.owner = EndpointOwner()  # a lost rank is dead here, beyond doubt
        self.reads_devices = False
        self.traffic = Traffic({})
        self.copies = Copies()
        self._world = world

    def peer(self, root):
        return Peer(self._world, self.rank, root)

    def add(self, context): ...
    def remove(self, context, reason=""): ...
    def poll(self): ...


class Peer:
    """Another rank, to whom nothing is sent but by `World.wires`."""

    link = None

    def __init__(self, world: World, rank: int, root: int) -> None:
        self._world = world
        self._way = rank, root

    def send(self, header, payload=(), *, done=None, token=None, urgent=False, dial=True):
        assert dial  # no rank leaves here
        self._world.wires[self._way].append((header, b"".join(payload)))
        if done is not None:
            done()

    def discard(self, token): ...


class World:
    """`size` ranks that share memory: all of them, or those of each of `teams`. `late`: each does
    so from some time on, as the last step of the set-up is taken by each for itself. `hears_late`:
    a rank may be woken late, so that it looks at its links before it looks at memory."""

    def __init__(
        self,
        size: int,
        chooser: Any,
        *,
        polls: bool = False,
        first: int = 0,
        teams: Teams | None = None,
        late: bool = False,
        hears_late: bool = False,
    ) -> None:
        self.chooser = chooser
        self._hears_late = hears_late
        self.teams = teams or (tuple(range(size)),)
        self.size = size
        self.ranks = range(size)
        self.dead: set[int] = set()
        self.wires: dict[tuple[int, int], deque[tuple[bytes, bytes]]] = {
            pair: deque() for pair in itertools.permutations(self.ranks, 2)
        }
        self.memories = [memoryview(mmap.mmap(-1, SEGMENT)) for _ in self.ranks]
        self.contexts = [self._context(rank) for rank in self.ranks]
        for context in self.contexts:
            context.records.unseen.mute()  # tests start calls that the user would look at
        self._lanes = {rank: self._lane(rank, polls, first) for rank in self.ranks}
        if not late:
            for rank in self.ranks:
                self.do(("share", rank))

    def _context(self, rank: int) -> Context:
        endpoint: Any = Endpoint(self, rank)
        return Context(
            endpoint,
            id=b"12345678",
            group="world",
            epoch=1,
            ranks=self.ranks,
            op_timeout=math.inf,
            max_message_bytes=1 << 30,
            allow_pickle=False,
            layout=Layout(Sharing.NONE, self.teams),
        )

    def _lane(self, rank: int, polls: bool, first: int) -> Lane:
        context = self.contexts[rank]
        endpoint = context.endpoint
        others = {r: self.memories[r].toreadonly() for r in team_view(self.teams, rank).mates}
        board = Board(rank, self.memories[rank], others)
        return Lane(
            board,
            endpoint.loop,
            endpoint.progress,
            context.kick,
            first,
            Moved(),
            size=self.size,
            crowded=self.size > 2,
            polls=polls,
        )

    def events(self) -> list[tuple[Any, ...]]:
        """What can happen next by itself."""
        alive = [rank for rank in self.ranks if rank not in self.dead]
        ready = [("run", rank) for rank in alive if self.contexts[rank].loop.ready]
        ready += [("wire", *pair) for pair, queue in self.wires.items() if queue]
        if not ready or self.chooser.rarely():
            ready += [("share", rank) for rank in alive if rank in self._lanes]
        return ready

    def do(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("run", rank):
                self.contexts[rank].loop.run_one()
            case ("share", rank):
                self.contexts[rank].share_memory(self._lanes.pop(rank))
            case ("wire", src, dst):
                wire = self.wires[src, dst]
                if self._hears_late and _wakes(wire[0]) and self.chooser.pick([False, True]):
                    wire.rotate(-1)  # to the end
                header, data = wire.popleft()
                if dst not in self.dead:
                    self._deliver(self.contexts[dst], src, header, data)

    def _deliver(self, context: Context, src: int, header: bytes, data: bytes) -> None:
        landing = context.frame(src, unpack_fields(header), len(data))
        deliver(landing, (memoryview(data),), len(data))

    def settle(self) -> None:
        """Let happen all that can."""
        for _ in range(100_000):
            events = self.events()
            if not events:
                return
            self.do(self.chooser.pick(events))
        raise AssertionError("it goes on for ever")

    def kill(self, rank: int) -> None:
        """`rank` does nothing any more; the others have not heard yet."""
        self.dead.add(rank)

    def tell_of(self, dead: int) -> None:
        for rank, context in enumerate(self.contexts):
            if rank not in self.dead:
                while self.wires[dead, rank]:
                    self.do(("wire", dead, rank))
                context.endpoint.lost[dead] = "killed"
                context.rank_lost(dead, "killed")


def _wakes(frame: tuple[bytes, bytes]) -> bool:
    return unpack_fields(frame[0])[0] == kinds.KICK


class Call:
    """One collective, the same on all ranks, and what became of it on each."""

    def __init__(
        self,
        number: int,
        kind: str,
        length: int,
        canceller: int | None = None,
        tag: object = None,
    ) -> None:
        self.number = number
        self.tag = tag
        self.kind = kind
        self.length = length
        self.canceller = canceller
        self.works: dict[int, Any] = {}
        self._arrays: dict[int, list[Any]] = {}

    def value(self, rank: int) -> float:
        return 10.0 * self.number + rank + 1

    def start(self, context: Context) -> None:
        rank = context.rank
        express: Any = context.express if self.tag is None else context.post_express
        x = np.full(self.length, self.value(rank))
        arrays = self._arrays[rank] = [x]
        root = self.number % context.size
        match self.kind:
            case "express" if express is not None:
                work = express.all_reduce(x, SUM, math.inf, self.tag)
                if work is not None:
                    self.works[rank] = work
                    return
                op, make, args = "", reductions.all_reduce, (x, SUM, None)
            case "express" | "all_reduce":
                op, make, args = "", reductions.all_reduce, (x, SUM, None)
            case "reduce":
                op, make, args = "reduce", reductions.reduce, (x, root, SUM, None)
            case "reduce_scatter":
                slots = [x + slot for slot in range(context.size)]
                op, make, args = "reduce_scatter", reductions.reduce_scatter, (slots, SUM, None)
            case "slots":  # in one array
                arrays[0] = x = np.concatenate([x + slot for slot in range(context.size)])
                op, make, args = "reduce_scatter", reductions.reduce_scatter, (x, SUM, None)
            case "out":
                arrays.append(np.empty_like(x))
                op, make, args = "all_reduce", reductions.all_reduce, (x, SUM, arrays[1])
            case "max":  # of another dtype, in another array
                arrays[0] = x = x.astype(np.int32)
                arrays.append(np.empty_like(x))
                op, make, args = "", reductions.all_reduce, (x, ReduceOp.MAX, arrays[1])
            case "list":
                arrays.append(x.astype(np.float32))
                op, make, args = "", reductions.all_reduce, (list(arrays), SUM, None)
            case "exscan":
                make = partial(reductions.scan, exclusive=True)
                op, args = "", (x, SUM, None)
            case "number":
                op, make, args = "", reductions.all_reduce, (self.value(rank), SUM, None)
            case "tree":
                tree = {"x": x, "name": "tree"}
                op, make = "broadcast", values.broadcast
                args = (tree if rank == root else None, root)
            case "all_gather":
                op, make, args = "all_gather", values.all_gather, (x, None)
            case "gather":
                op, make, args = "gather", values.gather, (x, root, None)
            case "scatter":
                slots = [x + slot for slot in range(context.size)]
                op, make = "scatter", values.scatter
                args = (slots if rank == root else None, root, None)
            case "all_to_all":
                slots = [x + slot for slot in range(context.size)]
                op, make, args = "all_to_all", values.all_to_all, (slots, None)
            case "broadcast":
                op, make, args = "broadcast", values.broadcast, (x if rank == root else None, root)
            case "into":
                op, make, args = "broadcast", values.broadcast, (x, root)
            case _:
                op, make, args = "barrier", base.barrier, ()
        # Ranks may go either way, each for itself.
        if (rank + root) % 3 == 0:
            express = None
        work = None
        if express is not None and op:
            work = express.start(op, make, args, math.inf, self.tag)
        call = make(context, *args) if work is None else None
        if express is not None and call is not None:
            work = express.begin(call, args, math.inf, self.tag)
        if work is None:
            assert call is not None
            work = context.calls.launch(call.op, call.text, call.start, tag=self.tag)
        self.works[rank] = work

    def cancel(self, rank: int) -> None:
        if self.works[rank].cancel():
            for array in self._arrays[rank]:
                array[...] = POISON

    def is_right(self, rank: int, size: int) -> bool:
        result = self.works[rank].result()
        everyone = [self.value(r) for r in range(size)]
        match self.kind:
            case "express" | "all_reduce" | "out":
                parts = [(result, sum(everyone))]
            case "reduce":
                if rank != self.number % size:
                    return result is None
                parts = [(result, sum(everyone))]
            case "reduce_scatter" | "slots":
                parts = [(result, sum(everyone) + size * rank)]
            case "max":
                parts = [(result, max(everyone))]
            case "list":
                parts = [(part, sum(everyone)) for part in result]
            case "exscan":
                parts = [(result, sum(everyone[:rank]) if rank else everyone[0])]
            case "all_gather":
                parts = list(zip(result, everyone, strict=True))
            case "gather":
                if rank != self.number % size:
                    return result is None
                parts = list(zip(result, everyone, strict=True))
            case "number":
                return result == sum(everyone)
            case "tree":
                if result["name"] != "tree":
                    return False
                parts = [(result["x"], everyone[self.number % size])]
            case "scatter":
                parts = [(result, everyone[self.number % size] + rank)]
            case "all_to_all":
                parts = list(zip(result, [value + rank for value in everyone], strict=True))
            case "broadcast" | "into":
                parts = [(result, everyone[self.number % size])]
            case _:
                return result is None
        return all(len(part) == self.length and (part == due).all() for part, due in parts)


class Users:
    """What the ranks' programs do: the same calls in the same order, at their own speed. `awaits`:
    each waits for the end of one call before the next."""

    def __init__(self, world: World, calls: list[Call], *, awaits: bool = False) -> None:
        self.world = world
        self.awaits = awaits
        self.calls = calls
        self._next = [0] * world.size
        self._cancels = {call.number: call for call in calls if call.canceller is not None}

    def events(self) -> list[tuple[Any, ...]]:
        calls = [
            ("call", rank)
            for rank, number in enumerate(self._next)
            if number < len(self.calls) and rank not in self.world.dead
            if not (self.awaits and number and not self.calls[number - 1].works[rank].done())
        ]
        cancels = [
            ("cancel", number)
            for number, call in self._cancels.items()
            if call.canceller in call.works and call.canceller not in self.world.dead
        ]
        return calls + cancels + self.world.events()

    def do(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("call", rank):
                call = self.calls[self._next[rank]]
                self._next[rank] += 1
                call.start(self.world.contexts[rank])
            case ("cancel", number):
                call = self._cancels.pop(number)
                assert call.canceller is not None
                call.cancel(call.canceller)
            case _:
                self.world.do(event)

    def go(self, steps: int) -> None:
        """Let so many things happen, where as many can."""
        for _ in range(steps):
            if events := self.events():
                self.do(self.world.chooser.pick(events))

    def run(self) -> None:
        for _ in range(100_000):
            events = self.events()
            if not events:
                return
            self.do(self.world.chooser.pick(events))
        raise AssertionError("it goes on for ever")

    def check(self) -> None:
        """All has happened that can."""
        size = self.world.size
        for call in self.calls:
            for rank, work in call.works.items():
                assert work.done(), f"rank {rank} hangs in {call.kind} #{call.number}"
                if work.cancelled():
                    assert call.canceller == rank
                elif (error := work.exception()) is not None:
                    assert call.canceller not in (None, rank), error
                    assert isinstance(error, CollectiveAbortedError)
                    assert error.rank == call.canceller
                else:
                    assert call.is_right(rank, size), (call.kind, call.number, rank, work.result())
        for context in self.world.contexts:
            assert not context.pending
            assert not context.calls.arrivals.verdicts
            assert context.lane is not None
            assert context.lane.idle

    def check_without(self, dead: int) -> int:
        """All has happened that can, to those who survived `dead`: values are right, and what is
        wrong is that this rank was lost. How many have failed."""
        failed = 0
        for call in self.calls:
            for rank, work in call.works.items():
                if rank == dead:
                    continue
                assert work.done(), f"rank {rank} hangs in {call.kind} #{call.number}"
                if (error := work.exception()) is None:
                    assert call.is_right(rank, self.world.size)
                else:
                    assert isinstance(error, PeerLostError)
                    assert error.ranks == (dead,)
                    failed += 1
        return failed


KINDS = ["express"] * 4 + ["all_reduce", "max", "list", "exscan", "all_gather", "broadcast", "bar"]
PREPARED = ["reduce", "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all", "into"]
LENGTHS = [1, 3, 3, 3, 0, 7000, 9000, 40_000]
"""In one small area for all, in the large one, in several pieces."""


def random_calls(
    chooser: random.Random, size: int, count: int, more: Sequence[str] = ()
) -> list[Call]:
    """`more`: kinds beside the usual ones."""
    kinds = [*KINDS, *more]
    return [
        Call(
            number,
            chooser.choice(kinds),
            chooser.choice(LENGTHS),
            chooser.choice([*[None] * 3, *range(size)]) if chooser.random() < 0.5 else None,
        )
        for number in range(count)
    ]


def every_path(make: Any) -> int:
    """Runs what `make(path)` gives for all paths: how many there are."""
    prefix: list[int] | None = []
    for count in itertools.count():
        if prefix is None:
            return count
        path = Path(prefix)
        users = make(path)
        users.run()
        users.check()
        prefix = path.following()
    raise AssertionError


@pytest.fixture
def lanes() -> SimpleNamespace:
    """What tests of lanes are made of."""
    return SimpleNamespace(
        World=World,
        Users=Users,
        Call=Call,
        Chance=Chance,
        Path=Path,
        random_calls=random_calls,
        PREPARED=[*PREPARED, "broadcast", "bar"],
        every_path=every_path,
    )
