"""The messages between ranks of a group."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any, Never

from aiodist import timeouts
from aiodist.buffers import places
from aiodist.composing import both
from aiodist.errors import AiodistError, GroupClosedError
from aiodist.operations.starts import OperationStarts
from aiodist.p2p.point_to_point import Envelope, as_source, as_tag
from aiodist.phases import base
from aiodist.signatures import Signatures, typed
from aiodist.types import ANY_SOURCE, ANY_TAG, AnyTag, Src
from aiodist.work import Work

_REFUSALS = (TypeError, ValueError, AiodistError, MemoryError)
"""What a receive raises itself. Its message stays queued."""


class MessageOperations(OperationStarts):
    """Messages from one rank to another. Each call starts at once, and returns a `Work`."""

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
            raise self._misused("send", unknown)
        self._enter()
        if timeout is not None:
            timeouts.check_timeout(timeout)
        try:
            at_once = self._context.p2p_express.send(x, dst, tag)
            return at_once or self._send(x, dst, tag, timeout)
        except BaseException as error:
            self._broken_off(error)
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
            raise self._misused("ssend", unknown)
        self._enter()
        timeouts.check_timeout(timeout)
        try:
            return self._send(x, dst, tag, timeout, synchronous=True)
        except BaseException as error:
            self._broken_off(error)
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
            raise self._misused("recv", unknown)
        self._enter()
        if timeout is not None:
            timeouts.check_timeout(timeout)
        if partial:
            _check_partial(out)
        try:
            work = None if partial else self._context.p2p_express.recv(src, tag, out)
            return work or self._recv(src, tag, out, partial, timeout)
        except BaseException as error:
            self._broken_off(error, may_be=not isinstance(error, _REFUSALS))
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
            raise self._misused("sendrecv", unknown)
        self._enter()
        if recv_tag is None:
            recv_tag = tag
        if timeout is not None:
            timeouts.check_timeout(timeout)
        sending = None
        try:
            # Before the send, because a message that has left does not come back.
            as_source(src, self._context.size)
            if recv_tag is not ANY_TAG:
                as_tag(recv_tag)
            places.check_out(out)
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
            self._broken_off(error, may_be=sending is not None and not isinstance(error, _REFUSALS))
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
            raise self._misused("probe", unknown)
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
        Raises `PeerLostError` if a `probe` would.

        For example::

            found = group.iprobe()
            if found is not None:
                value = await group.recv(src=found.source, tag=found.tag, timeout=10)
        """
        if unknown:
            raise self._misused("iprobe", unknown)
        self._enter()
        return self._context.p2p.iprobe(src=src, tag=tag)

    def acknowledge_lost(self) -> tuple[int, ...]:
        """Go on without the ranks that are lost, and return them.

        After a loss, receives from several ranks or any rank fail if no message is here for them,
        because what the lost rank would have sent is missing. After this call they wait for
        messages of the living ranks, until another rank is lost. The call affects only this rank
        and this group. (MPI's ULFM calls it `failure_ack`.)

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


def send_steady(
    group: MessageOperations, x: Any, dst: int, *, tag: str | int, timeout: float | None = None
) -> Work[None]:
    """Send memory that is never written again while there is a reference to it.

    A link that may have to send it again need not copy it then. The Work is done when everything
    has left. This is for the library itself, which sends versions of weights like this, because
    nothing can check whether a user keeps that promise.
    """
    return group._send(x, dst, tag, timeout, steady=True)


def _check_partial(out: Any) -> None:
    if not getattr(out, "shape", ()):
        raise TypeError(
            "partial=True may fill only a part of out=: give a numpy array or tensor with at least "
            f"one dimension, not {'none' if out is None else f'a {type(out).__name__}'}"
        )
