"""The operations of a group: every collective, and point to point.

`Group` is made of these and of what a group is besides: its members, its epochs, its end. Threads
call the same operations by `aiodist.blocking`.
"""

from __future__ import annotations

import asyncio
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from aiodist import timeouts
from aiodist.buffers import places
from aiodist.codecs.base import Codec
from aiodist.collectives import coded, resharding, values
from aiodist.device_programs import loans
from aiodist.device_programs import reductions as device_reductions
from aiodist.engine import deadlines, failures
from aiodist.errors import GroupClosedError
from aiodist.p2p.point_to_point import Envelope, as_source, as_tag
from aiodist.phases import base
from aiodist.rank.context import Context
from aiodist.signatures import Signatures, typed
from aiodist.types import ANY_SOURCE, ANY_TAG, SUM, AnyTag, Op, Src, Tag, unexpected
from aiodist.work import Unseen, Work, both

T = TypeVar("T")

STACK_TO_ABORT = 100
"""Levels of the stack that a call gets on top of the recursion limit, to end its group."""


class Operations(ABC):
    """What the ranks of one context do together. Each call starts at once and returns a `Work`."""

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop

    @property
    def closed(self) -> bool:
        """Whether the group has ended here."""
        return self._context.ended is not None

    @property
    def _unseen(self) -> Unseen:
        return self._context.records.unseen

    # -- collectives ------------------------------------------------------------------------------

    @typed(Signatures.all_reduce)
    def all_reduce(
        self,
        x: Any,
        op: Op = SUM,
        *,
        out: Any = None,
        codec: Codec | None = None,
        tag: Tag = None,
        timeout: float | None = None,
    ) -> Work[Any]:
        """Reduce `x` of all ranks; every rank gets the result.

        `x` is an array, a scalar, or a flat list of arrays that are reduced together; dtypes and
        shapes are the same on all ranks. The result is in `x`, or in `out` where given.

        `codec`: sends arrays of float32, float16 or bfloat16 between hosts in fewer bytes, for SUM
        and AVG (`aiodist.codecs`). Within a host nothing is lost. All ranks get the same bits. A
        codec with error feedback needs a `tag`, because what one call loses is added to the next
        call of that tag; await a call before the next one.

        For example::

            x = np.ones(3)
            await group.all_reduce(x)  # x has the sum of all ranks
            loss = await group.all_reduce(0.5, aiodist.ReduceOp.AVG)
        """
        if codec is not None:
            return self._start("all_reduce", tag, timeout, coded.all_reduce, x, op, codec, tag, out)
        if asyncio._get_running_loop() is not self._loop:
            self._enter()
        context = self._context
        express = context.express if tag is None else context.post_express
        if out is None and express is not None:
            # Not None: the group has not ended.
            seconds = context.op_timeout if timeout is None else timeout
            if timeout is None or timeouts.is_timeout(timeout):
                tag = tag if tag is None else as_tag(tag)
                try:
                    work = express.all_reduce(x, op, seconds, tag)
                except RecursionError as error:
                    self._overflowed(error)
                    raise
                if work is not None:
                    return work.of_prepared_call(context.records.unseen)
        return self._start("all_reduce", tag, timeout, device_reductions.all_reduce, x, op, out)

    @typed(Signatures.reduce)
    def reduce(
        self,
        x: Any,
        dst: int = 0,
        op: Op = SUM,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Any,
    ) -> Work[Any]:
        """Reduce `x` of all ranks at `dst` (in `x`, or in `out`); None elsewhere, where `x` is
        never altered.

        For example::

            total = await group.reduce(group.rank, dst=0)  # None at the other ranks
        """
        if unknown:
            raise self._refused("reduce", tag, unknown, root="dst")
        return self._start("reduce", tag, timeout, device_reductions.reduce, x, dst, op, out)

    @typed(Signatures.broadcast)
    def broadcast(
        self,
        x: Any = None,
        src: int = 0,
        *,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Any,
    ) -> Work[Any]:
        """The value `x` of rank `src`, on every rank. Elsewhere an `x` given (an array, or a tree
        of arrays) receives it in place, and asserts dtype and shape: where it does not fit on one
        rank, it is a `MismatchError` on all, and no array is written.

        For example::

            name = await group.broadcast("a" if group.rank == 0 else None)
        """
        if unknown:
            raise self._refused("broadcast", tag, unknown, root="src")
        return self._start("broadcast", tag, timeout, values.broadcast, x, src)

    @typed(Signatures.all_gather)
    def all_gather(
        self, x: Any, *, out: Any = None, tag: Tag = None, timeout: float | None = None
    ) -> Work[Any]:
        """The list of all ranks' `x`, on every rank; shapes and kinds may differ.

        `out`: a list of arrays, one a rank, or one array for all of them, one after the other along
        its first dimension. Where it does not fit on one rank, it is a `MismatchError` on all. `x`
        may lie anywhere in it, in its own place without a copy. Arrays of the list that share
        memory are a ValueError.

        For example::

            ranks = await group.all_gather(group.rank)  # [0, 1, …]
        """
        return self._start("all_gather", tag, timeout, values.all_gather, x, out)

    @typed(Signatures.gather)
    def gather(
        self,
        x: Any,
        dst: int = 0,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Any,
    ) -> Work[Any]:
        """The list of all ranks' `x` at `dst`; None elsewhere. `out` as for `all_gather`.

        For example::

            x = np.arange(group.rank + 1)  # lengths may differ
            xs = await group.gather(x, dst=0)
        """
        if unknown:
            raise self._refused("gather", tag, unknown, root="dst")
        return self._start("gather", tag, timeout, values.gather, x, dst, out)

    @typed(Signatures.scatter)
    def scatter(
        self,
        xs: Any = None,
        src: int = 0,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Any,
    ) -> Work[Any]:
        """``xs[rank]`` of rank `src`; `xs` is a list of one value a rank there, None elsewhere.

        Where `out` does not fit on one rank, it is a `MismatchError` on all. It may lie in `xs`.

        For example::

            xs = [n * n for n in range(group.size)] if group.rank == 0 else None
            x = await group.scatter(xs)
        """
        if unknown:
            raise self._refused("scatter", tag, unknown, root="src")
        return self._start("scatter", tag, timeout, values.scatter, xs, src, out)

    @typed(Signatures.reduce_scatter)
    def reduce_scatter(
        self,
        xs: Any,
        op: Op = SUM,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
    ) -> Work[Any]:
        """The reduction of slot `rank` over all ranks.

        `xs` is a list of one array (or scalar) a rank, or one array that is split along its first
        dimension as `numpy.array_split` does. Never in place.

        For example::

            x = np.ones(4 * group.size)
            part = await group.reduce_scatter(x)  # four elements, each of them group.size
        """
        return self._start(
            "reduce_scatter", tag, timeout, device_reductions.reduce_scatter, xs, op, out
        )

    @typed(Signatures.all_to_all)
    def all_to_all(
        self, xs: Any, *, out: Any = None, tag: Tag = None, timeout: float | None = None
    ) -> Work[Any]:
        """``[xs of rank 0 [rank], xs of rank 1 [rank], …]``; shapes and kinds may differ.

        `out` as for `all_gather`; it may be `xs`.

        For example::

            xs = [f"from {group.rank} to {rank}" for rank in range(group.size)]
            ys = await group.all_to_all(xs)  # ys[0] is from rank 0
        """
        return self._start("all_to_all", tag, timeout, values.all_to_all, xs, out)

    def reshard(self, x: Any, out: T, *, tag: Tag = None, timeout: float | None = None) -> Work[T]:
        """Bring arrays that lie in parts on some ranks to where other parts of them are wanted:
        the result is `out`, filled.

        `x` is what this rank holds, `out` what it wants: a tree of dicts, lists and tuples whose
        leaves are `aiodist.Shard`, DTensors, or arrays, which are the whole of themselves. What
        has the same place in both trees is the same array. A rank that holds nothing gives None
        for `x`, one that wants nothing None for `out`. Where several ranks hold the same part they
        share the sending. Every byte that a rank wants and does not hold comes once, and no other.

        All ranks that hold or want an array agree on its dtype and on the shape of the whole, and
        what is wanted is held by somebody: otherwise it is a `MismatchError` on all, and nothing is
        written. For arrays of the host. Raises TypeError for other leaves, and arrays on devices;
        ValueError for an `out` in the memory of `x`.

        For example::

            row = np.full((1, group.size), group.rank)  # row `rank` of a square
            shape = (group.size, group.size)
            held = aiodist.Shard(row, (slice(group.rank, group.rank + 1), slice(None)), shape)
            whole = await group.reshard(held, np.empty(shape, row.dtype))
        """
        return self._start("reshard", tag, timeout, resharding.reshard, x, out)

    @typed(Signatures.scan)
    def scan(
        self,
        x: Any,
        op: Op = SUM,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
    ) -> Work[Any]:
        """The reduction of `x` of ranks 0 to `rank`, in `x` or in `out`.

        For example::

            before_me_and_mine = await group.scan(len("abc"))
        """
        return self._start("scan", tag, timeout, device_reductions.scan, x, op, out)

    @typed(Signatures.scan)
    def exscan(
        self,
        x: Any,
        op: Op = SUM,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
    ) -> Work[Any]:
        """The reduction of `x` of ranks 0 to `rank` - 1, in `x` or in `out`. At rank 0, where that
        is the reduction of nothing, the elements of `x` as they are.

        For example::

            sizes_before = await group.exscan(10)  # rank 0 keeps its 10
        """
        return self._start("exscan", tag, timeout, device_reductions.exscan, x, op, out)

    def barrier(self, *, tag: Tag = None, timeout: float | None = None) -> Work[None]:
        """Nothing but the meeting: done once all ranks have called it.

        For example::

            await group.barrier(timeout=30)
        """
        return self._start("barrier", tag, timeout, base.barrier)

    @typed(Signatures.share)
    def share(
        self, x: Any = None, src: int = 0, *, tag: Tag = None, timeout: float | None = None
    ) -> Work[Any]:
        """Let all ranks use the same memory: that of `x` of rank `src`, a CUDA tensor, a numpy
        array or a tensor of the host, or a tree of such. A collective; elsewhere `x` is None.

        CUDA tensors have to be contiguous, and stay where they are: `src` gets `x` back. Arrays of
        the host are copied, once, into memory that all ranks map: the result is that of all, also
        at `src`, and `x` is left alone. Whoever writes to the result writes to the one copy that
        there is, and sees to the order himself.

        The memory is there until the last view of it is gone, even if `src` drops its own or leaves
        the group. Numbers and strings in a tree travel as in `broadcast`. The Work fails with
        OSError on all ranks where not all can map it: those of another host cannot.

        Raises TypeError for what holds no array, or arrays of the host and of a device, ValueError
        for CUDA tensors that are not contiguous.

        For example::

            table = await group.share(np.arange(1000) if group.rank == 0 else None)
        """
        return self._start("share", tag, timeout, loans.loan, x, src)

    # -- point to point ---------------------------------------------------------------------------

    def send(
        self, x: Any, dst: int, *, tag: str | int = 0, timeout: float | None = None
    ) -> Work[None]:
        """Send `x` to rank `dst`. Done when the memory of `x` may be used again.

        Messages of one rank and tag do not overtake each other. Where the receiver does not keep
        up, sends stay pending: nobody's memory grows without bound.

        For example::

            if group.rank == 0:
                await group.send({"step": 7}, 1, tag="state")
            elif group.rank == 1:
                state = await group.recv(src=0, tag="state")
        """
        self._enter()
        if timeout is not None:
            timeouts.check_timeout(timeout)
        try:
            at_once = self._context.p2p_express.send(x, dst, tag)
            return at_once or self._send(x, dst, tag, timeout)
        except RecursionError as error:
            self._overflowed(error)
            raise

    def _send(
        self, x: Any, dst: int, tag: str | int, timeout: float | None, **how: bool
    ) -> Work[None]:
        dst = base.as_rank(dst, self._context.size, "dst")
        work = self._context.p2p.send(x, dst, tag=tag, **how)
        return self._deadline(work, timeout, self._context.op_timeout, (dst,))

    def ssend(
        self, x: Any, dst: int, *, tag: str | int = 0, timeout: float | None = None
    ) -> Work[None]:
        """`send` that is synchronous: done when a receive of `dst` has taken the message, and the
        memory of `x` may be used again. In the line of its tag with all other sends.

        For example::

            if group.rank == 0:
                await group.ssend("go", 1)  # rank 1 has taken it
            elif group.rank == 1:
                await group.recv(src=0)
        """
        self._enter()
        timeouts.check_timeout(timeout)
        try:
            return self._send(x, dst, tag, timeout, synchronous=True)
        except RecursionError as error:
            self._overflowed(error)
            raise

    @typed(Signatures.recv)
    def recv(
        self,
        *,
        src: Src = ANY_SOURCE,
        tag: str | int | AnyTag = ANY_TAG,
        out: Any = None,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Work[Any]:
        """The next message of rank `src` with `tag` (or any). `src` may be a list of ranks, or any:
        then the ranks that have sent something take turns.

        `out` (an array, or a tree of arrays) receives it in place and asserts dtype and shape: a
        message that does not fit raises here and stays queued. With `partial`, `out` is one array
        that may be longer, in its first dimension, than the message: the result is the part of it
        that was written, ``out[:n]``, and the rest is left as it is. The Work's `source` and `tag`
        are those of the message. No deadline but `timeout`. Cancelling loses no message.

        Raises PeerLostError once nothing can come of `src` any more. From a list or any: as soon as
        one of these ranks is lost, because it may have had something to send (`acknowledge_lost`
        goes on without it); and once none of them is left that could send.
        Raises MemoryError if there is no memory for the message, which stays queued.

        For example::

            group.send(np.ones(3), (group.rank + 1) % group.size)
            x = np.empty(3)
            await group.recv(out=x)
        """
        self._enter()
        if timeout is not None:
            timeouts.check_timeout(timeout)
        if partial:
            _check_partial(out)
        try:
            work = None if partial else self._context.p2p_express.recv(src, tag, out)
            return work or self._recv(src, tag, out, partial, timeout)
        except RecursionError as error:
            self._overflowed(error)
            raise

    def _recv(
        self, src: Src, tag: str | int | AnyTag, out: Any, partial: bool, timeout: float | None
    ) -> Work[Any]:
        source = as_source(src, self._context.size)
        work = self._context.p2p.recv(src=src, tag=tag, out=out, partial=partial)
        missing = (source,) if isinstance(source, int) else ()
        context = self._context
        # Do not poll where this call has done so in vain, or where several receives wait: the one
        # before has polled already.
        if not (work.done() or context.p2p_express.in_vain or context.p2p.has_several):
            context.inline(work, source if isinstance(source, tuple) else missing)
        return self._deadline(work, timeout, math.inf, missing)

    isend = send
    issend = ssend
    irecv = recv

    @typed(Signatures.sendrecv)
    def sendrecv(
        self,
        x: Any,
        dst: int,
        *,
        src: Src = ANY_SOURCE,
        tag: str | int = 0,
        recv_tag: str | int | AnyTag | None = None,
        out: Any = None,
        timeout: float | None = None,
    ) -> Work[Any]:
        """Send `x` to `dst` with `tag`, and receive from `src` with `recv_tag` (None: with `tag`,
        too), at once. The result is what was received. `out` may be memory of `x`, or share some
        with it: what is sent is what was there when this was called.

        For example::

            right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
            x = await group.sendrecv(group.rank, right, src=left)
        """
        self._enter()
        if recv_tag is None:
            recv_tag = tag
        if timeout is not None:
            timeouts.check_timeout(timeout)
        try:
            sending = self._context.p2p_express.send(x, dst, tag)
            if sending is None:
                # Then it is read until it has left, while what comes is written.
                aside = out is not None and places.meet(x, out)
                sending = self._send(x, dst, tag, timeout, aside=aside)
        except RecursionError as error:
            self._overflowed(error)
            raise
        try:
            receiving = self.recv(src=src, tag=recv_tag, out=out, timeout=timeout)
        except BaseException:
            sending.cancel()
            raise
        return both(self._loop, sending, receiving).for_user(self._context.records.unseen)

    def probe(
        self,
        *,
        src: Src = ANY_SOURCE,
        tag: str | int | AnyTag = ANY_TAG,
        timeout: float | None = None,
    ) -> Work[Envelope]:
        """Wait for a message without taking it: its `Envelope(source, tag, nbytes)`, which has the
        `dtype` and `shape` of a message that is an array.

        For example::

            group.send(b"abc", group.rank)
            found = await group.probe(src=group.rank)
            value = await group.recv(src=found.source, tag=found.tag)
        """
        self._enter()
        source = as_source(src, self._context.size)
        timeouts.check_timeout(timeout)
        work = self._context.p2p.probe(src=src, tag=tag)
        missing = (source,) if isinstance(source, int) else ()
        return self._deadline(work, timeout, math.inf, missing)

    def iprobe(
        self, *, src: Src = ANY_SOURCE, tag: str | int | AnyTag = ANY_TAG
    ) -> Envelope | None:
        """The envelope of a message that is there, or None.

        For example::

            if group.iprobe() is not None:
                value = await group.recv()
        """
        self._enter()
        return self._context.p2p.iprobe(src=src, tag=tag)

    def acknowledge_lost(self) -> tuple[int, ...]:
        """The ranks that are lost. From now on receives from a list of ranks or from any go on with
        those that live, until another rank is lost.

        After a loss they fail until this is called, because what the lost rank would have sent is
        missing. (MPI's ULFM calls it `failure_ack`.) Concerns this rank and this group alone.

        For example::

            group.send(1, group.rank)
            try:
                x = await group.recv()
            except aiodist.PeerLostError:
                print("go on without", group.acknowledge_lost())
        """
        self._enter()
        return self._context.p2p.acknowledge_lost()

    async def messages(
        self, *, tag: str | int | AnyTag = ANY_TAG, src: Src = ANY_SOURCE
    ) -> AsyncIterator[tuple[Any, int, str | int]]:
        """``async for value, source, tag in group.messages(tag=…)``: messages as they arrive.

        Ends when the group is closed here; fails when a rank that could send is lost, or none is
        left. After `acknowledge_lost`, call it again to go on.

        For example::

            group.send("end", group.rank, tag="log")
            async for value, source, tag in group.messages(tag="log"):
                if value == "end":
                    break
        """
        while True:
            # The group may be closed while this waits, and while a message is worked on.
            try:
                work = self.recv(src=src, tag=tag)
                value = await work
            except GroupClosedError:
                return
            assert work.source is not None
            yield value, work.source, work.tag

    # -- checks -----------------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._context.ended is not None or asyncio._get_running_loop() is not self._loop:
            self._context.check_open()
            self._check_loop()

    def _check_loop(self) -> None:
        if asyncio._get_running_loop() is not self._loop:
            raise RuntimeError(
                f"{self!r} belongs to the event loop that made it; each asyncio.run makes another "
                "one. From other threads use group.blocking()"
            )

    def _start(
        self,
        op: str,
        tag: Tag,
        timeout: float | None,
        make: Callable[..., base.Call],
        *args: Any,
    ) -> Work[Any]:
        """Start the collective ``make(context, *args)``. If that raises, the collective uses up its
        number all the same, and the others hear why."""
        self._enter()
        context = self._context
        if tag is None:
            express = context.express
        else:
            tag, express = as_tag(tag), context.post_express
        seconds = context.op_timeout
        if timeout is not None:
            if timeouts.is_timeout(timeout):
                seconds = timeout
            else:
                express = None
        try:
            if express is not None:
                work = express.start(op, make, args, seconds, tag)
                if work is not None:
                    return work.of_prepared_call(context.records.unseen)
            try:
                timeouts.check_timeout(timeout)
                call = make(context, *args)
            except BaseException as error:
                context.calls.forgo(op, tag, error)
                raise
            # Unless the group has ended meanwhile, by what the values of the user have called.
            if express is not None and not self.closed:
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
            ).for_user(context.records.unseen)
        except RecursionError as error:
            self._overflowed(error)
            raise

    def _overflowed(self, error: RecursionError) -> None:
        """A call has run out of stack. What it has begun, here and at other ranks of this loop, is
        not known, and might wait for ever: so the group is aborted with the next turn of the loop,
        and all others hear why. A call that was refused for its arguments has begun nothing."""
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + STACK_TO_ABORT)
        try:
            if not failures.is_forgone(error):
                self._loop.call_soon(self.abort, f"a call ran out of stack: {error}")
        finally:
            sys.setrecursionlimit(limit)

    @abstractmethod
    def abort(self, reason: str = "aborted") -> None:
        """See `Group.abort`."""

    def _refused(self, op: str, tag: Tag, unknown: dict[str, Any], **instead: str) -> TypeError:
        """The error of a collective with arguments that it does not have: see `unexpected`. As for
        other arguments that make no sense, it uses up its number, and the others hear why."""
        self._enter()
        error = unexpected(op, unknown, **instead)
        self._context.calls.forgo(op, None if tag is None else as_tag(tag), error)
        return error

    def _forgo(self, error: BaseException, tag: Tag = None) -> None:
        """A collective was not called, for want of arguments that make sense, as `error` says: it
        uses up its number here, unless a method of this class raised that, and has seen to it. For
        who calls collectives for others."""
        self._check_loop()
        if not (self.closed or failures.is_forgone(error)):
            self._context.calls.forgo("collective", tag, error)

    def _deadline(
        self, work: Work[Any], timeout: float | None, default: float, missing: Sequence[int]
    ) -> Work[Any]:
        context = self._context
        work = deadlines.arm_message(context, context.p2p, work, timeout, default, missing)
        # A send needs nobody to look at it: what it sends arrives, or its failure is reported.
        return work if work.op in ("send", "ssend") else work.for_user(context.records.unseen)


def send_steady(
    group: Operations, x: Any, dst: int, *, tag: str | int, timeout: float | None = None
) -> Work[None]:
    """`group.send` of memory that is never written again as long as anybody refers to it, as that
    of a version of weights: what may have to be sent again need not be copied then. The Work is
    done when all has left. For the library itself: nobody can see whether a user keeps to it."""
    return group._send(x, dst, tag, timeout, steady=True)


def _check_partial(out: Any) -> None:
    if not getattr(out, "shape", ()):
        raise TypeError(
            "partial=True takes less than a whole out=: give a numpy array or tensor with at least "
            f"one dimension, not {'none' if out is None else f'a {type(out).__name__}'}"
        )
