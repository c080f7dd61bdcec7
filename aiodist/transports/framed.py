"""Links over an ordered stream of bytes: the frames of both directions.

Sending: if nothing is queued and all of a frame fits, it leaves inside `send`, else through the
outbox. Receiving: `_parse` takes frames out of bytes that have come. A payload that is not complete
is under way (`_to_come` > 0), and the rest of it goes straight into the memory of its landing,
which only the link keeps.

A frame without header and payload (`BYE`) ends the stream in order. A connection that ends without
it is broken. Other frames without a header belong to the link itself: see `retransmission`.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Sequence

from aiodist.buffers.copying import copy
from aiodist.errors import ProtocolError
from aiodist.transports.base import Done, Landing, Receiver, wrong_size
from aiodist.transports.link import POLL_BUDGET, BaseLink
from aiodist.transports.outbox import Outgoing
from aiodist.transports.retransmission import (
    JOINED,
    OWN_PAYLOAD,
    OWN_SIZE,
    RetransmissionBuffer,
    read_own,
)
from aiodist.transports.shm_rings import Rings
from aiodist.wire.frames import parse_prefix, prefix

BYE = prefix(b"", 0)
"""The last frame of a stream that ends in order."""


MANY = 1 << 30
"""As many frames as there are."""


class Whole:
    """Frames that are expected in one piece: known bytes, data that goes `into` memory, known
    bytes."""

    __slots__ = ("end", "into", "nbytes", "start", "there")

    def __init__(self, start: bytes, into: memoryview, end: bytes) -> None:
        self.start, self.into, self.end = start, into, end
        self.nbytes = len(start) + len(into) + len(end)
        self.there = 0
        """How many bytes were found right, or copied."""


class FramedLink(BaseLink):
    """The frames of a link. Subclasses move the bytes. Call `start` once the receiver is set."""

    __slots__ = (
        "_accepts", "_again", "_arrived", "_broken", "_busy", "_came", "_direct", "_header",
        "_kept", "_landing", "_to_come",
    )  # fmt: skip

    def __init__(
        self, loop: asyncio.AbstractEventLoop, kind: str, peer_name: str, receiver: Receiver | None
    ) -> None:
        super().__init__(loop, kind, peer_name, receiver)
        # The way of a frame out, and what `_direct` saves::
        #
        #     _direct    send ──> _write_frame ──> all of it left: done
        #                             └─ a part, or nothing ──> outbox, no more _direct, _arm
        #     else       send ──> outbox <── what there is no room for ──┐
        #                           └──────> _flush, by the loop ────────┴─ empty: _direct again
        #
        # Nearly every small frame finds an empty outbox and room in the socket, and costs one
        # system call and one check of a flag. The flag stands for five conditions, which are
        # checked only when one changes: nothing queued, not inside a `done`, not broken, not
        # severed, not finishing.
        self._direct = True  # what is sent may be written at once
        self._accepts = True  # what cannot be sent now is queued
        self._busy = False  # inside a write or a `done`
        self._broken: OSError | None = None  # writing failed; what has come is still read
        self._kept: RetransmissionBuffer | None = (
            None  # what may have to be sent again; None: nothing will be
        )
        # Receiving.
        self._landing: Landing | None = None  # of the payload under way; None: it is skipped
        self._arrived = 0  # payload bytes of the frame under way that have come
        self._to_come = 0  # payload bytes of it that have not come
        self._header = b""  # of the frame under way
        self._came = 0  # frames
        # A frame that was under way when the last connection broke, and comes again.
        self._again: tuple[bytes, int, Landing | None] | None = None

    @abstractmethod
    def start(self) -> None:
        """Begin to receive."""

    @abstractmethod
    def _write_frame(self, head: bytes, payload: Sequence[memoryview], nbytes: int) -> int:
        """Write one frame, or its first bytes. Returns how many. Raises as `_write`."""

    @abstractmethod
    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Write as much of `buffers` as there is room for. Returns how many bytes.

        Raises BlockingIOError if there is no room at all, and OSError if the peer cannot be written
        to any more. Raises ProtocolError if the peer's account of the room makes no sense.
        """

    def _write_one(self, data: bytes) -> int:
        """Do what `_write` does with one buffer, perhaps faster."""
        return self._write((data,))

    @abstractmethod
    def _arm(self) -> None:
        """Make the loop call `_flush` once there is room."""

    # ---- sending ----

    def send(
        self,
        header: bytes,
        payload: Sequence[memoryview] = (),
        *,
        done: Done | None = None,
        token: object = None,
        urgent: bool = False,
    ) -> None:
        if not header:
            raise ValueError("a frame needs a header: the empty one is the end of the stream")
        nbytes = 0
        for view in payload:
            nbytes += view.nbytes
        head = prefix(header, nbytes)
        if not self._direct:
            if self._accepts:
                self._outbox.push(Outgoing(head, payload, nbytes, done, token), urgent)
            return
        try:
            sent = self._write_frame(head, payload, nbytes)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._cannot_send(error)
            if self._accepts:
                self._outbox.push(Outgoing(head, payload, nbytes, done, token), urgent)
            return
        except ProtocolError as error:
            self._failed(error)
            return
        if sent == len(head) + nbytes:
            self._outbox.sent_bytes += nbytes
            if nbytes > JOINED and self._kept is not None:
                self._kept.lend(head, payload, nbytes, token)
                if not self._kept.limit:
                    self._ask()
            if done is not None:
                self._finished(done)
            return
        self._queue_rest(Outgoing(head, payload, nbytes, done, token), sent, urgent)

    def post(self, start: bytes, rest: memoryview, nbytes: int) -> bool:
        """Send a frame, given its first bytes and the rest of its payload of `nbytes`.

        `rest` may be written to when this has returned. Returns False, having done nothing, if
        there is no room for any of it now.
        """
        if not self._direct:
            return False
        size = len(start) + len(rest)
        kept = self._kept
        # `rest` may change after this call, and a frame that is kept may be sent again later. So a
        # large one is copied. Small ones are joined in `_write_frame`, which keeps the joined
        # bytes.
        copy = None if kept is None or len(rest) <= JOINED else b"".join((start, rest))
        try:
            if copy is None:
                sent = self._write_frame(start, (rest,), len(rest))
            else:
                sent = self._write((copy,))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._cannot_send(error)
            if not self._accepts:
                return True
            sent = 0
        except ProtocolError as error:
            self._failed(error)
            return True
        if sent == size:
            self._outbox.sent_bytes += nbytes
            if copy is not None and kept is not None:
                kept.hold(copy)
                if not kept.limit:
                    self._ask()
        else:
            frame = copy or b"".join((start, rest))
            head, payload = frame[: size - nbytes], memoryview(frame)[size - nbytes :]
            self._queue_rest(Outgoing(head, (payload,), nbytes, None, None), sent, False)
        return True

    def send_copy(self, prefix: bytes, payload: memoryview, made: bytes | None = None) -> None:
        """Send one urgent frame whose prefix is made. `payload` may change when this has returned.

        `made` is all of the frame, if that exists already.
        """
        if self._direct:
            data = prefix + payload if made is None else made
            sent = 0
            try:
                sent = self._write_one(data)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._cannot_send(error)
            except ProtocolError as error:
                self._failed(error)
                return
            if sent == len(data):
                self._outbox.sent_bytes += payload.nbytes
                kept = self._kept
                if kept is not None:
                    frames = kept.frames
                    frames.append(data)
                    if payload.nbytes > JOINED:
                        kept.count(payload.nbytes)
                    if len(frames) > kept.limit:
                        self._ask()
            elif self._accepts:
                self._queue_rest(self._copied(prefix, payload), sent, urgent=True)
        elif self._accepts:
            self._outbox.push(self._copied(prefix, payload), urgent=True)

    @staticmethod
    def _copied(prefix: bytes, payload: memoryview) -> Outgoing:
        return Outgoing(prefix, (memoryview(bytes(payload)),), payload.nbytes, None, None)

    def post_whole(self, buffers: Sequence[bytes | memoryview], nbytes: int) -> bool:
        """Send frames in one piece, with payloads of `nbytes`. The buffers may change after that.

        Returns False, having done nothing, if this link cannot do it, or not now.
        """
        return False

    @property
    def rings(self) -> Rings | None:
        """The memory that the compiled part uses, if the frames go through such memory."""
        return None

    @property
    def is_clear(self) -> bool:
        """Whether nothing is queued, no payload is under way, and the link has not ended."""
        return self._direct and not (
            self._to_come or self._polling or self._peer_ended or self._again
        )

    @abstractmethod
    def look_for(self, prefix: bytes, into: memoryview) -> bool | None:
        """Read what has come, if it is the frame with this prefix and maybe first payload bytes.

        Returns True if it is: the rest of its payload is in `into`, which has its size. None:
        nothing has come, or only a part of it; look again, or leave it to `poll` and the loop.
        False: something else came first and went to the receiver, maybe alone if it has no payload;
        or the link has ended.
        """

    def look_for_whole(self, whole: Whole, _: object = None) -> bool | None:
        """Read frames that were sent in one piece, as `look_for` reads one. None until all have
        come.

        Their data is copied as it comes, but also stays in the link until then.
        """
        return False

    def leave_to_call(self) -> None:
        """Leave what comes to the next call: the loop does not read it in its next two turns.

        For a program that has sent a message, and goes on after a turn of the loop. It probably
        receives the answer next, and a call receives faster what it finds in the link.
        """

    def doze(self, seconds: float) -> bool:
        """Sleep within the call, at most so many seconds, until the peer has sent more.

        Returns False if this link cannot do that, or has ended.
        """
        return False

    def _queue_rest(self, frame: Outgoing, sent: int, urgent: bool) -> None:
        """Queue a frame of which `sent` bytes were written, and no more for now."""
        self._direct = False
        # A frame of which a part is out goes first, because nothing may come between its bytes.
        if sent:
            frame.trim(sent)
            self._outbox.push_partial(frame)
        else:
            self._outbox.push(frame, urgent)
        if self._broken is None:
            self._arm()

    def _finished(self, done: Done) -> None:
        """Call the `done` of a frame that was sent directly. What it sends is queued, then sent
        here."""
        self._direct = False
        self._busy = True
        try:
            # Frames that `done` sends come after this one, and their `done` may send again. Written
            # at once, each would be one call deeper. So they are queued here, and leave after it
            # has returned.
            done()
        except BaseException as error:
            self._failed(error)
        finally:
            self._busy = False
        if self._outbox.backlog:
            self._flush()
        else:
            self._direct = self._accepts and self._broken is None

    def _flush(self) -> bool:
        """Write queued frames until there is no room or the budget of one turn is used up."""
        if self._busy or self._closed or self._broken:
            return False
        outbox = self._outbox
        kept = self._kept
        self._busy = True
        budget = POLL_BUDGET
        moved = False
        try:
            while outbox.backlog:
                if budget <= 0:
                    self._arm()
                    break
                buffers = outbox.gather()
                try:
                    sent = self._write(buffers)
                except (BlockingIOError, InterruptedError):
                    self._arm()
                    break
                except OSError as error:
                    self._cannot_send(error)
                    break
                moved = True
                budget -= sent
                for frame in outbox.advance(sent):
                    if kept is not None:
                        kept.finished(frame)
                    if frame.done is not None:
                        frame.done()
        except BaseException as error:
            self._failed(error)
        finally:
            self._busy = False
        if kept is not None and not kept.limit:
            self._ask()
        if not (outbox.backlog or self._closed or self._broken):
            if not self._finishing:
                self._direct = True
            elif self._is_out:  # else later, once it is out
                self._all_sent()
        return moved

    def _cannot_send(self, error: OSError) -> None:
        """Handle a failed write: read what the peer sent before, then close the link."""
        self._broken = error
        self._direct = False
        # A link that keeps its frames may get another connection, so it still accepts frames. One
        # that keeps none has no use for them.
        if self._kept is None:
            self._accepts = False
            self._outbox.clear()
        # Not inside of `send`, because reading calls the receiver, which may be the one that sends
        # now.
        self._loop.call_soon(self._after_broken)

    def _after_broken(self) -> None:
        while self._receive():
            pass
        if self._broken is not None:
            self._lost(self._broken)

    def _send_bye(self) -> None:
        self._direct = False
        self._accepts = False
        if self._broken is None:
            self._outbox.push(Outgoing(BYE, (), 0, None, None), urgent=False)
            self._flush()

    @property
    def _is_out(self) -> bool:
        """Whether the system has all that was sent, so that closing the connection cuts nothing
        off."""
        return not self._outbox.backlog

    def _all_sent(self) -> None:
        """Handle that everything and the BYE is out."""
        if self._peer_ended:
            self.close()

    # ---- receiving ----

    def poll(self) -> bool:
        if self._polling or self._busy:
            return False
        moved = self._flush() if self._outbox.backlog else False
        return self._receive() or moved

    def _parse(
        self,
        data: bytes | bytearray | memoryview,
        view: memoryview,
        start: int,
        stop: int,
        most: int = MANY,
    ) -> int:
        """Take the frames in ``data[start:stop]`` (`view` is of the same bytes) until one is under
        way, or until there were so many.

        Returns the position of the first byte that was not taken. It is `stop`, or the start of a
        frame or incomplete prefix, or anywhere once the link or the peer has ended.
        """
        while start < stop and most and not self._closed:
            most -= 1
            parsed = parse_prefix(data, start, stop, self.max_header, self.max_payload)
            if parsed is None:
                return start
            header, nbytes, taken = parsed
            if not header and nbytes == OWN_PAYLOAD:
                if stop - start < OWN_SIZE:
                    return start
                self._own(*read_own(data, start + taken))
                start += OWN_SIZE
                continue
            start += taken
            if not header:
                self._bye(nbytes, stop - start)
                return start
            if self._again is None:
                landing = self.receiver.frame(self, header, nbytes)
            else:
                landing = self._come_again(header, nbytes)
            if self._closed:
                return start
            if not nbytes:
                self._came += 1
                if landing is not None:
                    landing.landed()
                continue
            here = min(nbytes, stop - start)
            memory = None if landing is None else landing.memory
            if memory is not None:
                if len(memory) != nbytes:
                    raise wrong_size(memory, nbytes)
                copy(memory[:here], view[start : start + here])
            start += here
            self._header = header
            self._landing = landing
            self._arrived = 0
            self._to_come = nbytes
            landing = self._arrive(here)
            if landing is not None:
                landing.landed()
        return start

    def _come_again(self, header: bytes, nbytes: int) -> Landing | None:
        """Return the landing of a frame that had begun to come over an earlier connection."""
        assert self._again is not None
        again, size, landing = self._again
        self._again = None
        if (again, size) != (header, nbytes):
            raise ProtocolError(
                f"{self._peer_name} did not go on with the frame that it had begun to send"
            )
        return landing

    @abstractmethod
    def _take(self, start: int, stop: int) -> None:
        """Take the frames that lie from `start` to `stop` in the link's memory."""

    def _take_safely(self, start: int, stop: int) -> None:
        """Do what `_take` does, from outside of `_receive`."""
        self._polling = True
        try:
            self._take(start, stop)
        except BaseException as error:
            self._failed(error)
        finally:
            self._polling = False
        if self._closed and not self._told:
            self._tell()

    def _arrive(self, count: int) -> Landing | None:
        """Count `count` more bytes of the payload under way.

        Returns its landing if these were the last ones and the landing wants to hear. The caller
        tells it, because a landing may send in its turn, and each call on the way there costs time.
        """
        self._arrived += count
        self._to_come -= count
        if self._to_come:
            return None
        self._came += 1
        self._received_bytes += self._arrived
        landing, self._landing = self._landing, None
        return None if landing is None or landing.memory is None else landing

    # ---- for links that outlive a connection, see `lasting` ----

    @abstractmethod
    def _ask(self) -> None:
        """Ask the peer what has come, because `_kept` says that it is time."""

    def _own(self, code: int, number: int) -> None:
        """Handle a frame of the peer's link itself."""
        raise ProtocolError(f"{self._peer_name} sent a frame without a header")

    def _lost(self, error: BaseException) -> None:
        """Handle the loss of the connection."""
        self.close(error)

    # ---- the end ----

    def _bye(self, nbytes: int, more: int) -> None:
        if nbytes or more:
            raise ProtocolError(f"{self._peer_name} sent {nbytes + more} bytes after its end")
        self._peer_ended = True
        # An orderly end takes both sides. The one that begins waits for the other::
        #
        #     this side                       the peer
        #
        #     finish: queue, BYE  ────────>   takes all, sees the BYE: sends its own, closes
        #     sees that BYE: closes <──────
        #
        # A side that still has frames queued does not say BYE: these would be lost, and the peer
        # must see a broken connection instead of an orderly end.
        if not self._finishing:
            if self._is_out:
                with contextlib.suppress(OSError):  # the peer may be gone already
                    self._write((BYE,))
            self.close()
        elif self._is_out:
            self.close()

    def _end_of_file(self) -> None:
        """Handle that the peer has closed the connection, after everything it wrote was read."""
        if self._finishing and self._is_out:
            self.close()  # the peer took our BYE and left, maybe in the middle of a frame
            return
        self._lost(
            self._broken
            or ConnectionResetError(f"{self._peer_name} closed the connection without ending it")
        )

    def _forget(self) -> None:
        self._direct = self._accepts = False
        self._outbox.clear()
        self._landing = None
        self._to_come = 0
