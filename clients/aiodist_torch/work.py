"""`TorchWork`: an operation under way, as torch knows it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

import aiodist
from aiodist import (
    AiodistError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    GroupClosedError,
)
from aiodist.threads.engine import Engine
from aiodist_torch import completions
from aiodist_torch.callbacks import Turn, name_future
from aiodist_torch.errors import as_torch, failures, without_frames
from aiodist_torch.untraced import untraced

log = logging.getLogger("aiodist.torch")

Start = Callable[[], Sequence["asyncio.Future[Any]"]]
"""Starts operations. Runs on the engine. Results go into the tensors that were given."""


class _FuturesGuard:
    """Guards the futures of all works against being made and completed at once."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin with a new lock, because a thread of the parent may hold the old one in a fork."""
        self.lock = threading.Lock()


_guard = _FuturesGuard()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guard.begin)


@untraced
class TorchWork(dist.Work):
    """One call of torch: one operation of aiodist, or several that end together.

    `tensors` hold the results. `turn` is that of a collective. Safe to use from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        group: aiodist.Group,
        start: Start,
        tensors: list[torch.Tensor],
        turn: Turn | None = None,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._group = group
        self._start = start
        self.tensors = tensors
        self.turn = turn
        # The operations of aiodist that it consists of.
        self._works: Sequence[asyncio.Future[Any]] = ()
        self._left = 0  # operations that are not done
        self._done = False  # all of them are done
        self._error: BaseException | None = None  # the error of the first one that failed
        self._gate: threading.Lock | None = None  # held until this is done
        # Torch's future of the result, if it was asked for.
        self._root: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None  # chained to the root

    # Which thread sets what::
    #
    #     launch, _settle, _end    the engine: the holder of its lock, one thread at a time
    #     wait, get_future, ...    any thread, at any time
    #
    # So a waiter sees `_done`, or there is a gate to wait at: a lock that `_end` releases. The gate
    # is made before the call can be over without this thread (`close_gate`, as `later`, or in
    # `launch`). It is not made if the result is there at once, as for most small collectives,
    # because a lock would cost more than the rest.
    #
    # A lock instead of an Event, because an Event is a lock and a condition, in Python. Each waiter
    # that gets the lock passes it on. Once all is done, to open the gate once more does no harm.

    # -- on the engine ----------------------------------------------------------------------------

    def launch(self) -> None:
        """Start. Runs on the engine."""
        try:
            self._works = works = self._start()
        except Exception as error:
            self._end(error)
            return
        except BaseException as error:
            self._end(error)  # an interrupt; the engine does the rest
            raise
        for work in works:
            if not work.done():
                # All are counted before the first has a callback, so that `_left` is 0 only when
                # all are done.
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
        """Make `wait` block."""
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
        with _guard.lock:
            self._done = True
            # At once: a thread that asks for a future now either finds that this is done, or its
            # future is completed below.
            root = self._root
        if self._gate is not None:
            _open(self._gate)
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
        """Wait for the end, without holding the GIL. Returns True, or raises the error.

        `timeout` is the longest wait (zero: until the operation's own deadline). Meanwhile this
        thread does the engine's work if no other thread does. After a timeout the operation goes
        on. Ctrl-C cancels it, on all ranks.
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
        try:
            # First in the loop's place, which is the short way to the result. It returns without
            # one if another thread drives, or after `LONGEST_DRIVE`. Then this thread waits at the
            # gate.
            self._engine.drive(self.is_completed, seconds if seconds > 0 else math.inf)
            gate = self._gate
            assert gate is not None
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
        except GroupClosedError as error:  # in a forked child
            raise as_torch(error) from None
        finally:
            # It stays open for the next waiter. An interrupt may have come just after this thread
            # got it.
            if self._done and self._gate is not None:
                _open(self._gate)

    def is_completed(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Tell whether it has ended well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error, if it has failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors with the results, and wait for them."""
        self.wait()
        return self.tensors

    def synchronize(self) -> None:
        """Wait until it has ended. Results on the CPU are there then."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank that a completed receive came from."""
        source = getattr(self._works[0], "source", None) if self._works else None
        if source is None:
            raise RuntimeError("source_rank() is for receives that are done: wait() first")
        rank: int = source
        return rank

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the list of result tensors. Its callbacks may communicate.

        Collectives of a callback match those of the same callback on the other ranks, also in
        chains as ``then(a).then(b)``. So all ranks attach the same callbacks by the same methods in
        the same order. There is no such match if a callback calls a group that has other members,
        and in callbacks of messages, of `torch.futures.collect_all` and of futures that you make
        yourself. Of those, let one end before you call the next collective of that group.

        If torch's own code in C++ asks for float16 tensors, the operation has ended when this
        returns. The FP16_COMPRESS hook takes only a future of a list made in C++, and those that
        can be made here have a value already.
        """
        is_half = self.tensors and self.tensors[0].dtype is torch.float16
        if is_half and _asked_by_torch(sys._getframe().f_back):
            self.wait()
            fork: Any = torch._C.fork  # its future has the type of its value, and is done at once
            ended: torch.futures.Future[Any] = fork(lambda: self.tensors)
            return ended
        with _guard.lock:
            if self._future is not None:
                return self._future
            # Two futures, because a torch future that is completed with an exception object hides
            # it from C++. For C++, a callback has to raise the error. So the root is completed with
            # None, and the caller gets a future chained to it, which gives the tensors or raises
            # (`_give`).
            root: torch.futures.Future[Any] = torch.futures.Future()
            self._root = root
            self._future = future = root.then(self._give)
            if self.turn is not None:
                name_future(future, self._group, self.turn)
            done = self._done
        if done:
            _complete(root)
        return future

    def _give(self, _: torch.futures.Future[Any]) -> list[torch.Tensor]:
        # Only an error that a callback raises is visible to C++.
        if self._error is not None:
            raise self._error
        return self.tensors


def _open(gate: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # it is open
        gate.release()


def _asked_by_torch(caller: FrameType | None) -> bool:
    """Tell whether C++ calls `get_future`: then the innermost Python function does not name it."""
    return caller is None or "get_future" not in caller.f_code.co_names


def _complete(root: torch.futures.Future[Any]) -> None:
    try:
        root.set_result(None)
    except Exception:
        log.exception("a callback chained to a future failed")


# In ``DistributedDataParallel.join(divide_by_initial_world_size=False)``, the reducer waits in the
# backward pass for a work of the forward pass. C++ has the only reference to it. That does not keep
# the part in Python alive, without which `wait` of a work never returns. So Python keeps it, too.
_core: Any = c10d.Reducer
_set_forward_work = _core._set_forward_pass_work_handle
_forward_works: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by reducer


@untraced
class _Replaced:
    def set_forward_work(self: Any, work: Any, use_static_world_size: bool) -> None:
        _forward_works[self] = work
        _set_forward_work(self, work, use_static_world_size)


_core._set_forward_pass_work_handle = _Replaced.set_forward_work
