"""Broadcasts over links whose data is one frame behind known blobs: they wait without an operation.

Such a call waits for two known frames. One has the last blobs, here called *words*. The other has
the data, which goes straight to its place and is passed on to other ranks. With more ranks than
cores, nearly every call has to wait for these. An operation is ready for anything, so it would add
a tenth to the cost of a broadcast of 1 MiB. So the call is a `WaitingCall` that takes both frames
itself. If anything else happens, it becomes an operation, which continues at the same point:

* If words or data have not come, finished steps stay finished, as for a call that becomes an
  operation within its first phase (`link_express`). The operation does the rest.
* If a frame is on its way, the operation hears of it as if it began now. Its place is mostly the
  same memory, so the bytes that have come are there; if not, they are copied. The link keeps the
  landing that it has, which asks the operation for the place, and tells it of the end.
* If the data has come and was sent on, the operation waits until all frames have left (`Leaving`).

**Why data may be written before the words are here.** The data may overtake them, if it comes right
behind them or from another rank. The rank that sends it has all words, even those of this rank.
These words say to all ranks that data will move, and how much. So a frame of that rank with the
same text, number and size must be the data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from aiodist.engine.calls import Calls
from aiodist.engine.early import Key
from aiodist.engine.executor import ALL
from aiodist.engine.operation import Operation, Pause, Program
from aiodist.links.party import Party
from aiodist.prepared.express import failing, written
from aiodist.prepared.link_frames import ComingFrame
from aiodist.prepared.link_values import LinkValues, Route
from aiodist.prepared.taking import Given
from aiodist.transports.base import Landing
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields
from aiodist.work import Work


class Words(ComingFrame):
    """The last blobs of a call, which come in one frame."""

    __slots__ = ("is_coming",)

    def __init__(self, src: int, view: memoryview, came: Callable[[int], None]) -> None:
        super().__init__(src, view, came)
        self.is_coming = False


class MovingCall:
    """A call whose data moves. `message` takes its frames from the start."""

    __slots__ = (
        "_calls", "_done", "_finish", "_given", "_inflow", "_is_here", "_is_sending", "_operation",
        "_place", "_recipe", "_route", "_unsent", "_view", "_words", "key", "seconds", "waits",
        "work",
    )  # fmt: skip

    def __init__(
        self,
        calls: Calls,
        recipe: LinkValues,
        route: Route,
        given: Given,
        work: Work[Any],
        seconds: float,
        finish: Callable[[MovingCall], None],
    ) -> None:
        assert work.seq is not None
        self._calls = calls
        self._recipe = recipe
        self._route = route
        self._given = given
        self.work = work
        self.key: Key = (work.tag, work.seq)
        self.seconds = seconds  # time limit at the call
        self._finish = finish  # called when a call that has waited is done
        self._view = given.flats[0].view(np.uint8).data  # the array of the user
        self._place: memoryview | None = None  # the place of the frame on its way
        self._is_here = route.comes is None  # whether the data is here
        self._is_sending = False  # whether it is being passed on right now
        self._unsent = {peer for peer, _ in route.goes}  # peers to which it has not left
        self.waits = False  # for data, because all words are here
        self._done = ALL  # done steps of the words
        self._words: Words | None = None  # the last ones, if it waits for them
        self._operation: Operation | None = None  # the operation that it has become
        self._inflow: Landing | None = None  # the operation's place for that frame
        # Take frames from now on, because the data may come right behind the words.
        calls.waiting.takers[self.key] = self

    @property
    def call(self) -> bytes:
        return self._recipe.call

    def begin(self) -> bool:
        """Continue after all words. Return whether the call is done.

        If it is not done, it either `waits` for data, or has to become an operation.
        """
        calls, party = self._calls, self._calls.party
        if not self._recipe.is_known or party.ended is not None or party.lost():
            return False
        if self._is_here:
            self._pass_on()
            if not self._unsent:
                self._settle()
                del calls.waiting.takers[self.key]
                return True
        self.waits = True
        self._wait()
        return False

    def begin_with(self, done: int) -> bool:
        """Wait for the rest of the words, after so many `done` steps. Return whether it does."""
        party = self._calls.party
        last = self._recipe.last_words(done)
        if last is None or party.ended is not None or party.lost():
            return False
        self._done = done
        self._words = Words(*last, lambda _: self.all_is_said())
        self._wait()
        return True

    def _wait(self) -> None:
        calls = self._calls
        calls.tags.take(self.work.tag)
        calls.waiting.by_key[self.key] = self
        calls.waiting.wait(self)

    def all_is_said(self) -> None:
        """Continue, because the last words are here."""
        self._words, self._done = None, ALL
        if not self._recipe.is_known:
            self.to_operation()
            return
        self.waits = True
        if self._is_here:
            self._pass_on()
            if not self._unsent:
                self._end()

    @property
    def result(self) -> Any:
        """The result of a call that is done."""
        place = self._given.place
        return place if self._route.comes is None else written(place)

    # -- the frame --------------------------------------------------------------------------------

    def message(self, src: int, slot: int, call: bytes, nbytes: int) -> Landing | None:
        """See `waiting_calls.Taking`."""
        words = self._words
        if words is not None and src == words.src and not (slot or words.is_coming):
            words.is_coming = call == self.call and nbytes == len(words.view)
            return words if words.is_coming else None
        is_it = (src, slot) == self._route.comes and call == self.call
        if not is_it or self._is_here or self._place is not None or nbytes != len(self._view):
            return None
        self._place = self._view
        return self

    @property
    def memory(self) -> memoryview | None:
        return self._place if self._inflow is None else self._inflow.memory

    def landed(self) -> None:
        if self._inflow is not None:
            self._inflow.landed()
            return
        self._place = None
        self._is_here = True
        if self.waits:
            self._pass_on()
            if not self._unsent:
                self._end()

    def _pass_on(self) -> None:
        self._is_sending = True
        party = self._calls.party
        for peer, slot in self._route.goes:
            to = party.peers[peer]
            (to.link or to).send(
                pack_fields(kinds.MESSAGE, party.id, *self.key, slot, self.call),
                (self._view,),
                done=partial(self._left, peer),
                token=self,
                urgent=True,
            )
        self._is_sending = False

    def _left(self, peer: int) -> None:
        """Note that the frame for `peer` has left."""
        self._unsent.discard(peer)
        if self._operation is not None:
            self._operation.advance()
        elif not (self._unsent or self._is_sending):
            self._end()

    def _settle(self) -> None:
        """Let links copy what they may have to send again: the array is the user's again."""
        self._calls.party.settle_all([peer for peer, _ in self._route.goes], self)

    # -- its end ----------------------------------------------------------------------------------

    def _end(self) -> None:
        self._settle()
        waiting = self._calls.waiting
        del waiting.by_key[self.key], waiting.takers[self.key]
        self._finish(self)

    def to_operation(self) -> Operation | None:
        """See `WaitingCall`."""
        del self._calls.waiting.by_key[self.key]
        try:
            executor, rest = self._recipe.go_on(None, self._given, self._done)
        except Exception as error:  # what came makes no sense
            executor, rest = None, failing(error)
        if self.waits and self._is_here:
            rest.close()
            rest = self._leaves()
        operation = self._calls.take_over(
            self.work, self.call, executor, rest, self.seconds, came={}
        )
        self.becomes(operation)
        return operation

    def becomes(self, operation: Operation | None) -> None:
        """Become this operation; None: the group has ended."""
        del self._calls.waiting.takers[self.key]
        self._operation = operation
        words, self._words = self._words, None
        if words is not None and words.is_coming and operation is not None and not operation.done:
            words.inflow = operation.message(words.src, 0, len(words.view))
            into = words.inflow.memory
            if into is not None:
                into[:] = words.view
        place, self._place = self._place, None
        if self.waits and self._is_here:
            return
        if self._is_here:
            place = self._view
        if place is None or self._route.comes is None or operation is None or operation.done:
            return
        self._inflow = operation.message(*self._route.comes, len(place))
        into = self._inflow.memory
        if into is not None:
            into[:] = place  # mostly the same memory
        if self._is_here:
            self._inflow.landed()

    def _leaves(self) -> Program:
        """Return the program of a call whose data is here and was passed on."""
        yield Leaving(self._calls.party, self, [peer for peer, _ in self._route.goes], self._unsent)
        return self.result


class Leaving(Pause):
    """Waits until the frames with `token` have left.

    They go to `peers`; those for `unsent` have not left yet.
    """

    def __init__(
        self, party: Party, token: object, peers: Sequence[int], unsent: Collection[int]
    ) -> None:
        self._party = party
        self._token = token
        self._peers = peers
        self._unsent = unsent

    def needs(self, peer: int) -> bool:
        return peer in self._unsent

    def run(self) -> bool:
        return not self._unsent

    def close(self) -> None:
        for peer in self._peers:
            self._party.discard(peer, self._token)
