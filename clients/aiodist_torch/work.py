"""`TorchWork`: an operation under way, as torch knows it."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

import aiodist
from aiodist import AiodistError, CollectiveAbortedError, CollectiveTimeoutError
from aiodist.threads.engine import Engine
from aiodist_torch import completions
from aiodist_torch.errors import as_torch, failures, without_frames
from aiodist_torch.untraced import untraced

log = logging.getLogger("aiodist.torch")

Start = Callable[[], Sequence["asyncio.Future[Any]"]]
"""Starts operations; runs on the engine. Their results are in the tensors given to them."""

_futures = threading.Lock()
"""Guards the futures of all works against being made and completed at once."""


@untraced
class TorchWork(dist.Work):
    """One call of torch: one operation of aiodist, or several that end together.

    `tensors`: where the results are. Safe to use from any thread.
    """

    def __init__(
        self, engine: Engine, group: aiodist.Group, start: Start, tensors: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._engine = engine
        self._group = group
        self._start = start
        self.tensors = tensors
        # The operations of aiodist that it is made of.
        self._works: Sequence[asyncio.Future[Any]] = ()
        self._left = 0  # works that are not done
        self._done = False  # all of them are
        self._error: BaseException | None = None  # what the first of them that failed raised
        self._gate: threading.Lock | None = None  # held until this is done
        # Torch's future of the result, where somebody asked for one.
        self._root: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None  # chained to the root

    # Who sets what, from which thread:
    #
    #     launch, _settle, _end    the engine: whoever has its lock, one thread at a time
    #     wait, get_future, ...    any thread, at any time
    #
    # So a waiter sees `_done` or it does not, and in the latter case there is a gate to wait at: a
    # lock that `_end` releases. It is made before the call can be over without this thread
    # (`close_gate`, as `later`, or in `launch`), and never where the result is there at once: that
    # is what most small collectives come to, and a lock would be the dearest part of them.
    #
    # A lock, not an Event: an Event is a lock and a condition, in Python. Each waiter that gets it
    # passes it on.

    # -- on the engine ----------------------------------------------------------------------------

    def launch(self) -> None:
        """Start. Runs on the engine."""
        try:
            self._works = works = self._start()
        except Exception as error:
            self._end(error)
            return
        except BaseException as error:
            self._end(error)  # an interrupt; the engine sees to the rest
            raise
        for work in works:
            if not work.done():
                # All are counted before the first has a callback: `_left` is 0 only when all of
                # them are done.
                self._left += 1
        if not self._left:
            self._settle()
            return
        if self._gate is None:
            self.close_gate()
        self._engine.began()
        for work in works:
            if not work.done():
                work.add_done_callback(self._one_is_done)

    def close_gate(self) -> None:
        """Let `wait` wait."""
        gate = threading.Lock()
        gate.acquire()
        self._gate = gate

    def _one_is_done(self, work: asyncio.Future[Any]) -> None:
        self._left -= 1
        if not self._left:
            self._engine.ended()
            self._settle()

    def _settle(self) -> None:
        failed: BaseException | None = None
        for work in self._works:
            if work.cancelled():
                failed = failed or CollectiveAbortedError(
                    "the operation was cancelled", rank=self._group.rank, reason="cancelled"
                )
            elif (error := work.exception()) is not None:
                failed = failed or error
        self._end(failed)

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self._error = as_torch(error)
            if isinstance(self._error, AiodistError):
                failures[self._group] = without_frames(self._error)
        with _futures:
            self._done = True
            # At once: who asks for a future just then, from another thread, either finds that this
            # is done, or has its future completed below.
            root = self._root
        if self._gate is not None:
            self._gate.release()
        if root is not None:
            completions.soon(lambda: _complete(root))

    def _cancel(self) -> None:
        for work in self._works:
            work.cancel()

    @property
    def operations(self) -> Sequence[asyncio.Future[Any]]:
        """aiodist's Works, once it has started."""
        return self._works

    # -- what torch calls -------------------------------------------------------------------------

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end, at most `timeout` (zero: as long as the operation's own deadline
        allows), without holding the GIL. True, or raises what went wrong.

        Meanwhile this thread does the engine's work if nobody else does. An operation that is
        waited for in vain goes on; one whose wait is interrupted by Ctrl-C is cancelled, on all
        ranks.
        """
        if not self._done:
            if profiler._is_profiler_enabled:
                with _RecordFunctionFast("aiodist:wait"):
                    self._wait(timeout.total_seconds())
            else:
                self._wait(timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return True

    def until_done(self) -> None:
        """Return when it has ended, well or not."""
        if not self._done:
            self._wait(0)

    def _wait(self, seconds: float) -> None:
        gate = self._gate
        assert gate is not None
        try:
            # First in the loop's place, which is the short way to the result. It comes back without
            # one where somebody else drives, or after a while (`LONGEST_DRIVE`): then it waits like
            # others.
            self._engine.drive(self.is_completed, seconds if seconds > 0 else math.inf)
            if not gate.acquire(timeout=min(seconds, threading.TIMEOUT_MAX) if seconds > 0 else -1):
                raise as_torch(
                    CollectiveTimeoutError(
                        f"not done within the {seconds:g} s given to wait(); it goes on",
                        group=self._group.name,
                        epoch=self._group.epoch,
                    )
                )
        except KeyboardInterrupt:
            self._engine.submit(self._cancel)
            raise
        # It stays open, for whoever waits next.
        gate.release()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if it has ended so."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the results; waits for them."""
        self.wait()
        return self.tensors

    def synchronize(self) -> None:
        """Wait until it has ended: results on the CPU are there when it returns."""
        self.wait()

    def source_rank(self) -> int:
        """The rank that a completed receive came from."""
        source = getattr(self._works[0], "source", None) if self._works else None
        if source is None:
            raise RuntimeError("source_rank() is for receives that are done: wait() first")
        rank: int = source
        return rank

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """The future of the list of result tensors. Callbacks chained to it may communicate.

        Where torch's own code in C++ asks for float16 tensors, the operation has ended when this
        returns: its FP16_COMPRESS hook takes a future of a list of C++ alone, and all that can be
        made here of that kind has a value already.
        """
        is_half = self.tensors and self.tensors[0].dtype is torch.float16
        if is_half and _asked_by_torch(sys._getframe().f_back):
            self.wait()
            fork: Any = torch._C.fork  # what it makes has the type of its value, and ends at once
            ended: torch.futures.Future[Any] = fork(lambda: self.tensors)
            return ended
        with _futures:
            if self._future is not None:
                return self._future
            # Two futures, as a torch future that is completed with an exception object keeps it
            # from C++: there an error has to be raised by a callback. So the root is completed with
            # nothing, and what the caller gets is chained to it, and gives the tensors or raises
            # (`_give`).
            root: torch.futures.Future[Any] = torch.futures.Future()
            self._root = root
            self._future = future = root.then(self._give)
            done = self._done
        if done:
            _complete(root)
        return future

    def _give(self, _: torch.futures.Future[Any]) -> list[torch.Tensor]:
        # Only an error that is raised in a callback is one for C++, too.
        if self._error is not None:
            raise self._error
        return self.tensors


def _asked_by_torch(caller: FrameType | None) -> bool:
    """Whether it is C++ that calls `get_future`: the innermost function in Python, if there is one,
    does not speak of it."""
    return caller is None or "get_future" not in caller.f_code.co_names


def _complete(root: torch.futures.Future[Any]) -> None:
    try:
        root.set_result(None)
    except Exception:
        log.exception("a callback chained to a future failed")
