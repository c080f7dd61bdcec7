"""The operations of a group: all collectives, and point to point.

`Group` adds the rest: members, epochs and the end. Threads call the same operations through
`aiodist.blocking`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Never, TypeVar

from aiodist import timeouts
from aiodist.buffers import places
from aiodist.codecs.base import Codec
from aiodist.collectives import coded, resharding, values
from aiodist.composing import both
from aiodist.device_programs import loans
from aiodist.device_programs import reductions as device_reductions
from aiodist.engine import deadlines, failures
from aiodist.errors import GroupClosedError
from aiodist.p2p.point_to_point import Envelope, as_source, as_tag
from aiodist.phases import base
from aiodist.rank.context import Context
from aiodist.signatures import Signatures, typed
from aiodist.transports.surroundings import running_loop
from aiodist.types import (
    ANY_SOURCE,
    ANY_TAG,
    SUM,
    AnyTag,
    Op,
    Src,
    Tag,
    hints,
    unexpected,
)
from aiodist.work import Unseen, UnseenWork, Work

T = TypeVar("T")


STACK_TO_ABORT = 100
"""How many levels of the stack a call gets beyond the recursion limit, to abort its group."""


class Operations(ABC):
    """What the ranks of one context do together. Each call starts at once and returns a `Work`."""

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
        **unknown: Never,
    ) -> Work[Any]:
        """Reduce `x` of all ranks, element by element. Every rank gets the result.

        Args:
            x: an array, a number, or a flat list of arrays that are reduced together. All ranks
                need the same dtypes and shapes.
            op: a `ReduceOp`, or a function of two arrays.
            out: the place for the result, with the form, dtypes and shapes of `x`. None: the result
                replaces `x`. A number is returned instead.
            codec: sends arrays of float32, float16 or bfloat16 in fewer bytes between hosts, for
                SUM and AVG (`aiodist.codecs`). Nothing is lost within a host, and all ranks get the
                same bits. A codec with error feedback needs a `tag`, because what one call loses is
                added to the next call of that tag. Await each such call before the next one.

        Raises:
            TypeError: the operator has no meaning for the dtype, such as AVG for integer arrays;
                `x` is neither array nor number; or `out` has another dtype.
            ValueError: `out` has another shape, or arrays of the result share memory.

        For example::

            x = np.ones(3)
            await group.all_reduce(x)  # x has the sum of all ranks
            loss = await group.all_reduce(0.5, aiodist.ReduceOp.AVG)
        """
        if unknown:
            raise self._refused("all_reduce", tag, unknown)
        if codec is not None:
            return self._start("all_reduce", tag, timeout, coded.all_reduce, x, op, codec, tag, out)
        if running_loop() is not self._loop:
            self._enter()
        context = self._context
        express = context.express if tag is None else context.post_express
        if out is None and express is not None:
            # There is an express way, so the group has not ended.
            seconds = context.op_timeout if timeout is None else timeout
            if timeout is None or timeouts.is_timeout(timeout):
                tag = tag if tag is None else as_tag(tag)
                try:
                    work = express.all_reduce(x, op, seconds, tag)
                except RecursionError as error:
                    self._overflowed(error)
                    raise
                if work is not None:
                    if type(work) is not UnseenWork:
                        work.of_prepared_call(context.records.unseen)
                    return work
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
        **unknown: Never,
    ) -> Work[Any]:
        """Reduce `x` of all ranks, element by element. Rank `dst` gets the result, the others None.

        At `dst` the result replaces `x`, or goes to `out`. On other ranks `x` is never changed.

        Raises as `all_reduce` does, and ValueError for an `out` on another rank than `dst`.

        For example::

            total = await group.reduce(group.rank, dst=0)  # None at the other ranks
        """
        if unknown:
            raise self._refused("reduce", tag, unknown)
        return self._start("reduce", tag, timeout, device_reductions.reduce, x, dst, op, out)

    @typed(Signatures.broadcast)
    def broadcast(
        self,
        x: Any = None,
        src: int = 0,
        *,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Give every rank the value `x` of rank `src`.

        On other ranks, `x` may be an array or a tree of arrays that receives the value in place. It
        must have the dtypes and shapes of the value. If it does not fit on one rank, all ranks get
        a `MismatchError`, and no array is written. If `x` is None, the Work returns a new value.

        For example::

            name = await group.broadcast("a" if group.rank == 0 else None)
        """
        if unknown:
            raise self._refused("broadcast", tag, unknown)
        return self._start("broadcast", tag, timeout, values.broadcast, x, src)

    @typed(Signatures.all_gather)
    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Give every rank the list of all ranks' `x`. Types and shapes may differ between ranks.

        `out` receives the values in place. It is a list with an array for each rank, or one array
        in which the values follow each other along the first dimension. If it does not fit on one
        rank, all ranks get a `MismatchError`. `x` may be a part of `out`. If it is in its own place
        there, it is not copied.

        Returns `out`. If `out` is a list with slots that are None or hold numbers, returns a new
        list, because those values have no place in `out`.

        Raises ValueError if arrays of `out` share memory.

        For example::

            ranks = await group.all_gather(group.rank)  # [0, 1, …]
        """
        if unknown:
            raise self._refused("all_gather", tag, unknown)
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
        **unknown: Never,
    ) -> Work[Any]:
        """Give rank `dst` the list of all ranks' `x`. The others get None.

        `out` is as in `all_gather`, at `dst` only: another rank raises ValueError.

        For example::

            x = np.arange(group.rank + 1)  # lengths may differ
            xs = await group.gather(x, dst=0)
        """
        if unknown:
            raise self._refused("gather", tag, unknown)
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
        **unknown: Never,
    ) -> Work[Any]:
        """Give each rank its item of a list of rank `src`: ``xs[rank]``.

        At `src`, `xs` is a list with one value for each rank. On other ranks it is None.

        `out` receives the value in place, and may be a part of `xs`. If it does not fit on one
        rank, all ranks get a `MismatchError`.

        For example::

            xs = [n * n for n in range(group.size)] if group.rank == 0 else None
            x = await group.scatter(xs)
        """
        if unknown:
            raise self._refused("scatter", tag, unknown)
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
        **unknown: Never,
    ) -> Work[Any]:
        """Reduce slot by slot over all ranks. Each rank gets the result of its own slot.

        `xs` is a list with an array or a number for each rank, or one array that is split along its
        first dimension, as `numpy.array_split` does. It is never changed. The result is a new array
        or number, or goes to `out`.

        Raises as `all_reduce` does.

        For example::

            x = np.ones(4 * group.size)
            part = await group.reduce_scatter(x)  # four elements, each of them group.size
        """
        if unknown:
            raise self._refused("reduce_scatter", tag, unknown)
        return self._start(
            "reduce_scatter", tag, timeout, device_reductions.reduce_scatter, xs, op, out
        )

    @typed(Signatures.all_to_all)
    def all_to_all(
        self,
        xs: Any,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Send ``xs[i]`` to each rank i. Every rank gets the list of what was sent to it, by rank.

        `xs` is a list with one value for each rank. Types and shapes may differ. `out` is as in
        `all_gather`, and may be `xs`.

        For example::

            xs = [f"from {group.rank} to {rank}" for rank in range(group.size)]
            ys = await group.all_to_all(xs)  # ys[0] is from rank 0
        """
        if unknown:
            raise self._refused("all_to_all", tag, unknown)
        return self._start("all_to_all", tag, timeout, values.all_to_all, xs, out)

    def reshard(
        self, /, x: Any, out: T, *, tag: Tag = None, timeout: float | None = None, **unknown: Never
    ) -> Work[T]:
        """Move parts of arrays from the ranks that hold them to the ranks that want other parts of
        them.

        `x` is what this rank holds, or None. `out` is what it wants, or None. The result is `out`,
        filled. Both are trees of dicts, lists and tuples. A leaf is an `aiodist.Shard`, a DTensor,
        or an array, which is the whole of itself. Leaves with the same place in both trees belong
        to the same array.

        Each byte that a rank wants and does not hold comes once, and no other byte comes. If
        several ranks hold the same part, they share the sending.

        All ranks must agree on the dtype and the whole shape of each array, and every part that a
        rank wants must be held by a rank. Otherwise all ranks get a `MismatchError`, and nothing is
        written.

        Raises:
            TypeError: a leaf is of another type, or is on a device. Only arrays of the host can be
                moved.
            ValueError: `out` shares memory with `x`, or arrays of `out` share a part of theirs.

        For example::

            row = np.full((1, group.size), group.rank)  # row `rank` of a square
            shape = (group.size, group.size)
            held = aiodist.Shard(row, (slice(group.rank, group.rank + 1), slice(None)), shape)
            whole = await group.reshard(held, np.empty(shape, row.dtype))
        """
        if unknown:
            raise self._refused("reshard", tag, unknown)
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
        **unknown: Never,
    ) -> Work[Any]:
        """Reduce `x` of ranks 0 to `rank`, element by element. The result replaces `x`, or goes to
        `out`.

        LAND, LOR and LXOR give 0 or 1, on rank 0, too. Raises as `all_reduce` does. AVG is a
        TypeError: use SUM, and divide.

        For example::

            before_me_and_mine = await group.scan(len("abc"))
        """
        if unknown:
            raise self._refused("scan", tag, unknown)
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
        **unknown: Never,
    ) -> Work[Any]:
        """Reduce `x` of ranks 0 to `rank` - 1. The result replaces `x`, or goes to `out`.

        Rank 0 has no rank before it, so its result is `x` unchanged. Raises as `scan` does.

        For example::

            sizes_before = await group.exscan(10)  # rank 0 keeps its 10
        """
        if unknown:
            raise self._refused("exscan", tag, unknown)
        return self._start("exscan", tag, timeout, device_reductions.exscan, x, op, out)

    def barrier(
        self, /, *, tag: Tag = None, timeout: float | None = None, **unknown: Never
    ) -> Work[None]:
        """Wait until all ranks have called this.

        For example::

            await group.barrier(timeout=30)
        """
        if unknown:
            raise self._refused("barrier", tag, unknown)
        return self._start("barrier", tag, timeout, base.barrier)

    @typed(Signatures.share)
    def share(
        self,
        x: Any = None,
        src: int = 0,
        *,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Let all ranks use the same memory: that of `x` of rank `src`. A collective.

        `x` is a CUDA tensor, a numpy array, a tensor of the host, or a tree of these. On other
        ranks it is None. Numbers and strings in a tree are copied, as in `broadcast`.

        * **CUDA tensors** must be contiguous. They stay in their place, and `src` gets `x` back.
        * **Arrays of the host** are copied once, into memory that all ranks map. All ranks get an
          array in that memory, `src` too. `x` is left alone.

        A write to the result changes the memory of all ranks, so the ranks have to agree on when to
        write. The memory exists until the last view of it is gone, even if `src` drops its own view
        or leaves the group.

        The Work fails with OSError on all ranks if a rank cannot map the memory, for example
        because it is on another host.

        Raises:
            TypeError: `x` has no array, or has arrays of the host and of a device.
            ValueError: a CUDA tensor is not contiguous, or a rank other than `src` gives `x`.

        For example::

            table = await group.share(np.arange(1000) if group.rank == 0 else None)
        """
        if unknown:
            raise self._refused("share", tag, unknown)
        return self._start("share", tag, timeout, loans.loan, x, src)

    # -- point to point ---------------------------------------------------------------------------

    def send(
        self,
        /,
        x: Any,
        dst: int,
        *,
        tag: str | int = 0,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[None]:
        """Send `x` to rank `dst`. The Work is done when you may change the memory of `x`.

        Messages of one sender and tag keep their order. If the receiver does not keep up, sends
        stay pending, so that the memory of neither side grows without bound.

        For example::

            if group.rank == 0:
                await group.send({"step": 7}, 1, tag="state")
            elif group.rank == 1:
                state = await group.recv(src=0, tag="state")
        """
        if unknown:
            raise _misused("send", unknown)
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
        self,
        /,
        x: Any,
        dst: int,
        *,
        tag: str | int = 0,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[None]:
        """Send `x` to rank `dst`, and wait until a receive of `dst` has taken it.

        The Work is done then, and you may change the memory of `x`. Messages of `send` and `ssend`
        with one tag keep their order.

        For example::

            if group.rank == 0:
                await group.ssend("go", 1)  # rank 1 has taken it
            elif group.rank == 1:
                await group.recv(src=0)
        """
        if unknown:
            raise _misused("ssend", unknown)
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
        **unknown: Never,
    ) -> Work[Any]:
        """Receive the next message of rank `src` with `tag`.

        When the Work is done, its `source` and `tag` are those of the message. There is no deadline
        unless you give a `timeout`. A cancelled receive loses no message.

        Args:
            src: a rank, a list of ranks, or any rank. Ranks that have sent something take turns.
            tag: the tag of the message, or any tag.
            out: an array or a tree of arrays that receives the value in place. It must have the
                dtypes and shapes of the message.
            partial: `out` is one array that may be longer than the message in its first dimension.
                The result is the part that was written, ``out[:n]``. The rest of `out` does not
                change.
            timeout: seconds until the receive fails.

        Raises:
            MismatchError: the message does not fit `out`. It stays queued.
            MemoryError: there is no memory for the message. It stays queued.
            PeerLostError: no message can come from `src` any more. For several ranks, that is as
                soon as one of them is lost, because it may have had something to send, or when none
                of them is left. Call `acknowledge_lost` to go on without the lost ranks.

        For example::

            group.send(np.ones(3), (group.rank + 1) % group.size)
            x = np.empty(3)
            await group.recv(out=x)
        """
        if unknown:
            raise _misused("recv", unknown)
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
        self,
        src: Src,
        tag: str | int | AnyTag,
        out: Any,
        partial: bool,
        timeout: float | None,
        *,
        is_part: bool = False,
    ) -> Work[Any]:
        source = as_source(src, self._context.size)
        work = self._context.p2p.recv(src=src, tag=tag, out=out, partial=partial, is_part=is_part)
        missing = (source,) if isinstance(source, int) else ()
        context = self._context
        # Do not poll if this call has done so in vain. If several receives wait, an earlier one has
        # polled.
        if not (work.done() or context.p2p_express.in_vain or context.p2p.receiver.has_several):
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
        **unknown: Never,
    ) -> Work[Any]:
        """Send `x` to `dst`, and receive from `src` at the same time. The result is what was
        received.

        The message to `dst` has `tag`. The receive takes `recv_tag`, or `tag` if that is None.
        `out` may share memory with `x`: the values that `x` has at the call are sent.

        For example::

            right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
            x = await group.sendrecv(group.rank, right, src=left)
        """
        if unknown:
            raise _misused("sendrecv", unknown)
        self._enter()
        if recv_tag is None:
            recv_tag = tag
        if timeout is not None:
            timeouts.check_timeout(timeout)
        sending = None
        try:
            sending = self._context.p2p_express.send(x, dst, tag)
            if sending is None:
                # Links read `x` until it has left, and the receive may write there meanwhile.
                aside = out is not None and places.meet(x, out)
                sending = self._send(x, dst, tag, timeout, aside=aside)
            # If the send fails or is cancelled, the message must be able to go back.
            is_part = not sending.done()
            receiving = None if is_part else self._context.p2p_express.recv(src, recv_tag, out)
            if receiving is None:
                receiving = self._recv(src, recv_tag, out, False, timeout, is_part=is_part)
        except BaseException as error:
            if isinstance(error, RecursionError):
                self._overflowed(error)
            if sending is not None:
                sending.cancel()
            raise
        unseen = self._context.records.unseen
        # Most are done by now, and need no Work beside them. Those with a record keep what it says.
        if receiving.is_prepared and sending.is_prepared:
            receiving.op, receiving.tag = "sendrecv", sending.tag
            return receiving.of_prepared_call(unseen)
        return both(self._loop, sending, receiving).for_user(unseen)

    def probe(
        self,
        /,
        *,
        src: Src = ANY_SOURCE,
        tag: str | int | AnyTag = ANY_TAG,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Envelope]:
        """Wait for a message without taking it.

        The result is its `Envelope(source, tag, nbytes)`. If the message is an array, the envelope
        has its `dtype` and `shape`, too.

        The sender may still withdraw that message, if it cancels its `send` or runs out of time.
        So give the `recv` that follows a `timeout`, because it may find no message any more.

        For example::

            group.send(b"abc", group.rank)
            found = await group.probe(src=group.rank)
            value = await group.recv(src=found.source, tag=found.tag, timeout=10)
        """
        if unknown:
            raise _misused("probe", unknown)
        self._enter()
        source = as_source(src, self._context.size)
        timeouts.check_timeout(timeout)
        work = self._context.p2p.probe(src=src, tag=tag)
        missing = (source,) if isinstance(source, int) else ()
        return self._deadline(work, timeout, math.inf, missing)

    def iprobe(
        self, *, src: Src = ANY_SOURCE, tag: str | int | AnyTag = ANY_TAG, **unknown: Never
    ) -> Envelope | None:
        """Return the envelope of a message that has arrived, or None, without taking it.

        As with `probe`, the sender may still withdraw the message. So give `recv` a `timeout`.

        For example::

            found = group.iprobe()
            if found is not None:
                value = await group.recv(src=found.source, tag=found.tag, timeout=10)
        """
        if unknown:
            raise _misused("iprobe", unknown)
        self._enter()
        return self._context.p2p.iprobe(src=src, tag=tag)

    def acknowledge_lost(self) -> tuple[int, ...]:
        """Go on without the ranks that are lost, and return them.

        After a loss, receives from several ranks or any rank fail, because what the lost rank would
        have sent is missing. After this call they take messages of the living ranks, until another
        rank is lost. The call affects only this rank and this group. (MPI's ULFM calls it
        `failure_ack`.)

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
        """Iterate over messages as they arrive: ``async for value, source, tag in
        group.messages(tag=…)``.

        The loop ends when this program closes the group. It raises GroupClosedError if the group
        ends here in another way, for example because the coordinator removes this rank. It raises
        PeerLostError if a rank that could send is lost, or none is left. After `acknowledge_lost`,
        call this again to go on.

        For example::

            group.send("end", group.rank, tag="log")
            async for value, source, tag in group.messages(tag="log"):
                if value == "end":
                    break
        """
        while True:
            # The group may close while this waits, or while the program handles a message.
            try:
                work = self.recv(src=src, tag=tag)
                value = await work
            except GroupClosedError as error:
                if error.in_order:
                    return
                raise
            assert work.source is not None
            yield value, work.source, work.tag

    # -- checks -----------------------------------------------------------------------------------

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
    ) -> Work[Any]:
        """Start the collective ``make(context, *args)``.

        If that raises, the collective still uses up its number, and the other ranks hear why.
        """
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
            ).for_user(context.records.unseen)
        except RecursionError as error:
            self._overflowed(error)
            raise

    def _overflowed(self, error: RecursionError) -> None:
        """Abort the group in the next turn of the loop, because a call has run out of stack.

        It is not known what the call has begun, on this rank and on others in this loop, so ranks
        might wait for ever. The others hear why. A call whose arguments were refused has begun
        nothing.
        """
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

    def _refused(self, op: str, tag: Tag, unknown: dict[str, Any]) -> TypeError:
        """Return the error of a collective that got unknown arguments.

        The collective uses up its number, and the other ranks hear why, as for other bad arguments.
        """
        self._enter()
        error = _misused(op, unknown)
        self._context.calls.forgo(op, None if tag is None else as_tag(tag), error)
        return error

    def _forgo(self, error: BaseException, tag: Tag = None) -> None:
        """Use up the number of a collective that was not called, because its arguments are bad.

        `error` says what was wrong. If a method of this class raised it, the number is used up
        already. For code that calls collectives for others.
        """
        self._check_loop()
        if not (self.closed or failures.is_forgone(error)):
            self._context.calls.forgo("collective", tag, error)

    def _deadline(
        self, work: Work[Any], timeout: float | None, default: float, missing: Sequence[int]
    ) -> Work[Any]:
        context = self._context
        work = deadlines.arm_message(context, context.p2p, work, timeout, default, missing)
        unseen = context.records.unseen
        # The program need not look at a send: its message arrives, or its failure is reported.
        is_send = work.op in ("send", "ssend")
        return work.after_turn(unseen) if is_send else work.for_user(unseen)


def send_steady(
    group: Operations, x: Any, dst: int, *, tag: str | int, timeout: float | None = None
) -> Work[None]:
    """Send memory that is never written again while there is a reference to it.

    A link that may have to send it again need not copy it then. The Work is done when everything
    has left. This is for the library itself, which sends versions of weights like this, because
    nothing can check whether a user keeps that promise.
    """
    return group._send(x, dst, tag, timeout, steady=True)


def _misused(op: str, unknown: dict[str, Any]) -> TypeError:
    """Return the error of a call with unknown arguments."""
    names = inspect.signature(getattr(Operations, op)).parameters
    return unexpected(f"group.{op}", unknown, hints(names))


def _check_partial(out: Any) -> None:
    if not getattr(out, "shape", ()):
        raise TypeError(
            "partial=True may fill only a part of out=: give a numpy array or tensor with at least "
            f"one dimension, not {'none' if out is None else f'a {type(out).__name__}'}"
        )
