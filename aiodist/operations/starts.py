"""What the operations of a group have in common: how a call is checked and started, and what
becomes of one that cannot be."""

from __future__ import annotations

import asyncio
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from aiodist import timeouts
from aiodist.engine import deadlines, failures
from aiodist.errors import GroupClosedError
from aiodist.p2p.point_to_point import as_tag
from aiodist.phases import base
from aiodist.rank.context import Context
from aiodist.transports.surroundings import running_loop
from aiodist.types import Tag, hints, unexpected
from aiodist.work import SENDS, Unseen, UnseenWork, Work

STACK_TO_ABORT = 100
"""How many levels of the stack a call gets beyond the recursion limit, to abort its group."""


class OperationStarts(ABC):
    """How the ranks of one context start what they do together."""

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop

    @property
    def closed(self) -> bool:
        """Whether the group has ended on this rank."""
        return self._context.ended is not None

    @property
    def _unseen(self) -> Unseen:
        return self._context.records.unseen

    def _enter(self) -> None:
        if self._context.ended is not None or running_loop() is not self._loop:
            self._context.check_open()
            self._check_loop()

    def _check_loop(self) -> None:
        if running_loop() is not self._loop:
            # In a forked child the loop does not run, and the group has ended: that says more.
            if isinstance(self._context.ended, GroupClosedError):
                self._context.check_open()
            raise RuntimeError(
                f"{self!r} belongs to the event loop that made it; each asyncio.run makes a new "
                "one: make the group in this loop. In other threads, use group.blocking()"
            )

    def _start(
        self,
        op: str,
        tag: Tag,
        timeout: float | None,
        make: Callable[..., base.Call],
        *args: Any,
        prepared: bool = True,
    ) -> Work[Any]:
        """Start the collective ``make(context, *args)``.

        If that raises, the collective still uses up its number, and the other ranks hear why.
        `prepared`: calls like earlier ones may be done within the call. They are found by `op`, so
        all such calls of one `op` have the same `make`.
        """
        self._enter()
        context = self._context
        if tag is None:
            express = context.express
        else:
            tag, express = as_tag(tag), context.tagged_express
        seconds = context.op_timeout
        if timeout is not None:
            if timeouts.is_timeout(timeout):
                seconds = timeout
            else:
                express = None
        try:
            if express is not None and prepared:
                work = express.start(op, make, args, seconds, tag)
                if work is not None:
                    if type(work) is not UnseenWork:
                        work.of_prepared_call(context.records.unseen)
                    return work
            try:
                if timeout is not None:
                    timeouts.check_timeout(timeout)
                call = make(context, *args)
            except BaseException as error:
                context.calls.forgo(op, tag, error)
                raise
            # Encoding the user's values may run their code, which may have ended the group.
            if express is not None and context.ended is None:
                work = express.begin(call, args, seconds, tag)
                if work is not None:
                    return work.for_user(context.records.unseen)
            return context.calls.launch(
                call.op,
                call.text,
                call.start,
                tag=tag,
                timeout=timeout,
                nbytes=call.nbytes,
                place=call.place,
                settles=call.settles,
            ).for_user(context.records.unseen)
        except BaseException as error:
            self._broken_off(error, may_be=True)
            raise

    def _broken_off(self, error: BaseException, *, may_be: bool = False) -> None:
        """Abort the group if `error` may have broken a call off midway.

        That is the end of the stack, or what is no `Exception`, such as a KeyboardInterrupt of a
        signal handler. It is not known what the call has begun, on this rank and on others in this
        loop. So ranks might wait for ever, or the next call might take what this one has left. The
        others hear why. A call whose arguments were refused has begun nothing.

        `may_be`: any other error means the same, such as a TimeoutError of a signal handler. A
        collective may not have used up its number, and a receive may have lost its message. But a
        send may raise whatever code of the user does that makes a message of a value.
        """
        if failures.is_forgone(error):
            return
        if not isinstance(error, RecursionError):
            has_ended = self._context.ended is not None  # then no call begins anything
            if not isinstance(error, Exception) or (may_be and not has_ended):
                self.abort(f"{type(error).__name__} broke a call off")
            return
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + STACK_TO_ABORT)
        try:
            self._loop.call_soon(self.abort, f"a call ran out of stack: {error}")
        finally:
            sys.setrecursionlimit(limit)

    @abstractmethod
    def abort(self, reason: str = "aborted") -> None:
        """See `Group.abort`."""

    def _refused(self, op: str, tag: Tag, unknown: dict[str, Any]) -> TypeError:
        """Return the error of a collective that got unknown arguments.

        The collective uses up its number, and the other ranks hear why, as for other bad arguments.
        """
        self._enter()
        error = self._misused(op, unknown)
        self._context.calls.forgo(op, None if tag is None else as_tag(tag), error)
        return error

    def _forgo(self, error: BaseException, tag: Tag = None) -> None:
        """Use up the number of a collective that was not called, because its arguments are bad.

        `error` says what was wrong. If a method of this class raised it, the number is used up
        already. For code that calls collectives for others.
        """
        self._check_loop()
        if not (self.closed or failures.is_forgone(error)):
            tag = None if tag is None else as_tag(tag)
            self._context.calls.forgo("collective", tag, error)

    def _deadline(
        self, work: Work[Any], timeout: float | None, default: float, missing: Sequence[int]
    ) -> Work[Any]:
        context = self._context
        work = deadlines.arm_message(context, context.p2p, work, timeout, default, missing)
        unseen = context.records.unseen
        # The program need not look at a send: its message arrives, or its failure is reported.
        return work.after_turn(unseen) if work.op in SENDS else work.for_user(unseen)

    def _misused(self, op: str, unknown: dict[str, Any]) -> TypeError:
        """Return the error of a call with unknown arguments."""
        names = inspect.signature(getattr(self, op)).parameters
        return unexpected(f"group.{op}", unknown, hints(names))
