"""Links over an ordered stream of bytes, whatever carries them: the frames of both directions.

Sending: a frame goes out right inside `send` where nothing is queued and all of it fits, else
through the outbox. Receiving: `_parse` takes frames out of bytes that have come; a payload that
is not complete there is under way (`_to_come` > 0), and the rest of it goes straight into the
memory of its landing, which is kept here and nowhere else.

The end of the stream is said by a frame without header and payload (`BYE`): a connection that
ends without it is broken. Other frames without a header are the link's own, see `kept`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
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
from aiodist.wire.frames import parse_prefix, prefix

BYE = prefix(b"", 0)
"""The last frame of a stream that ends in order."""


class Whole:
    """Frames that are expected in one piece: bytes that are known, data that goes `into` memory,
    and bytes that are known again."""

    __slots__ = ("end", "into", "nbytes", "start", "there")

    def __init__(self, start: bytes, into: memoryview, end: bytes) -> None:
        self.start, self.into, self.end = start, into, end
        self.nbytes = len(start) + len(into) + len(end)
        self.there = 0
        """So many bytes were found right, or copied."""


class FramedLink(BaseLink):
    """The frames of a link; subclasses move the bytes. Call `start` once the receiver is set."""

    __slots__ = (
        "_accepts", "_again", "_arrived", "_broken", "_busy", "_came", "_direct", "_header",
        "_kept", "_landing", "_to_come",
    )  # fmt: skip

    def __init__(
        self, loop: asyncio.AbstractEventLoop, kind: str, peer_name: str, receiver: Receiver | None
    ) -> None:
        super().__init__(loop, kind, peer_name, receiver)
        # The way of a frame out, and what `_direct` spares it::
        #
        #     _direct    send ──> _write_frame ──> all of it left: done
        #                             └─ a part, or nothing ──> outbox, no more _direct, _arm
        #     else       send ──> outbox <── what there is no room for ──┐
        #                           └──────> _flush, by the loop ────────┴─ empty: _direct again
        #
        # Nearly every small frame finds an empty outbox and room in the socket, and costs one call
        # of the system and one look at a flag. The flag stands for five conditions, which are all
        # looked at where one of them changes: nothing queued, not inside a `done`, not broken, not
        # severed, not finishing.
        # Sending. `_direct`: nothing is queued and nothing forbids a write right inside `send`.
        self._direct = True  # what is sent may be written at once
        self._accepts = True  # what cannot be sent now is queued
        self._busy = False  # inside a write or a `done`
        self._broken: OSError | None = None  # writing failed; what has arrived is still read
        self._kept: RetransmissionBuffer | None = (
            None  # what may have to be sent again; None: nothing will be
        )
        # Receiving.
        self._landing: Landing | None = None  # of the payload under way; None: it is skipped
        self._arrived = 0  # payload bytes of the frame under way that are here
        self._to_come = 0  # and those that are not
        self._header = b""  # of the frame under way
        self._came = 0  # frames
        # A frame that was under way when the connection before broke, and comes again.
        self._again: tuple[bytes, int, Landing | None] | None = None

    @abstractmethod
    def start(self) -> None:
        """Begin to receive."""

    @abstractmethod
    def open_process(self) -> io.FileIO | None:
        """See `processes.open_behind`: the process at the other end."""

    @abstractmethod
    def _write_frame(self, head: bytes, payload: Sequence[memoryview], nbytes: int) -> int:
        """Write one frame, or the first bytes of it: how many. Raises as `_write`."""

    @abstractmethod
    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Write as much of `buffers` as there is room for: how many bytes. Raises BlockingIOError
        where there is no room at all, OSError where the peer cannot be written to any more,
        ProtocolError where what it says of the room makes no sense."""

    @abstractmethod
    def _arm(self) -> None:
        """Have `_flush` called by the loop, once there is room."""

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
        """Send a frame: its first bytes, and the rest of its payload of `nbytes`, which may be
        written to as soon as this has returned. False: there is no room for any of it now, and
        nothing has happened."""
        if not self._direct:
            return False
        size = len(start) + len(rest)
        kept = self._kept
        # `rest` may be written to once this has returned, and a frame that is kept may have to be
        # sent again later: so a large one is copied. Small ones are joined in `_write_frame`, which
        # keeps what it has joined.
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

    def post_whole(self, buffers: Sequence[bytes | memoryview], nbytes: int) -> bool:
        """Send frames in one piece, with payloads of `nbytes` bytes, which may be written to as
        soon as this has returned. False: not here, or not now, and nothing has happened."""
        return False

    @property
    def is_clear(self) -> bool:
        """Whether nothing is queued, no payload is under way, and it has not ended."""
        return self._direct and not (
            self._to_come or self._polling or self._peer_ended or self._again
        )

    @abstractmethod
    def look_for(self, prefix: bytes, into: memoryview) -> bool | None:
        """Read what has come, in case that it is the frame with this prefix (which may go on with
        the first bytes of its payload).

        True: it is; the rest of its payload is in `into`, which is of its size. None: nothing has
        come, or only a part of it; look again, or leave it to `poll` and the loop. False: something
        else came first, and went to the receiver, if that has no payload maybe alone; or the link
        has ended.
        """

    def look_for_whole(self, whole: Whole, _: object = None) -> bool | None:
        """Read frames that were sent in one piece, as `look_for` reads one: None until all of them
        are there. Their data is copied as it comes, but stays in the link as well until then."""
        return False

    def doze(self, seconds: float) -> bool:
        """Sleep within the call, for so long at most, until the peer has sent more than what was
        looked at. False: this link cannot, or has ended."""
        return False

    def _queue_rest(self, frame: Outgoing, sent: int, urgent: bool) -> None:
        """Queue a frame of which `sent` bytes were written, and no more for now."""
        self._direct = False
        # A frame of which a part is out goes first, whatever else is queued: nothing may come
        # between its bytes.
        if sent:
            frame.trim(sent)
            self._outbox.push_partial(frame)
        else:
            self._outbox.push(frame, urgent)
        if self._broken is None:
            self._arm()

    def _finished(self, done: Done) -> None:
        """Call the `done` of a frame sent directly; what it sends is queued, then sent here."""
        self._direct = False
        self._busy = True
        try:
            # Frames that `done` sends stand behind this one in the order of the link, and a `done`
            # of theirs may send again: written at once, each would be one call deeper. So they are
            # queued here, and leave after it has returned.
            done()
        except Exception as error:
            self._failed(error)
        self._busy = False
        if self._outbox.backlog:
            self._flush()
        else:
            self._direct = self._accepts and self._broken is None

    def _flush(self) -> bool:
        """Write what is queued until there is no room or a turn's worth is out."""
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
        except Exception as error:
            self._failed(error)
        self._busy = False
        if kept is not None and not kept.limit:
            self._ask()
        if not (outbox.backlog or self._closed or self._broken):
            if not self._finishing:
                self._direct = True
            elif self._is_out:  # else again, once it is
                self._all_sent()
        return moved

    def _cannot_send(self, error: OSError) -> None:
        """Writing failed: what the peer sent before is still taken in, then the link closes."""
        self._broken = error
        self._direct = False
        # A link that keeps its frames may get another connection: it goes on taking in what is to
        # be sent. One that keeps none has no use for it any more.
        if self._kept is None:
            self._accepts = False
            self._outbox.clear()
        # Not from inside of `send`: to take in what has come calls the receiver, who may be the one
        # that sends just now.
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
        """Whether the system has all that was sent. What was only taken out of the queue is not:
        to close the connection then would cut it off."""
        return not self._outbox.backlog

    def _all_sent(self) -> None:
        """Everything and the BYE is out."""
        if self._peer_ended:
            self.close()

    # ---- receiving ----

    def poll(self) -> bool:
        if self._polling or self._busy:
            return False
        moved = self._flush() if self._outbox.backlog else False
        return self._receive() or moved

    def _parse(
        self, data: bytes | bytearray | memoryview, view: memoryview, start: int, stop: int
    ) -> int:
        """Take the frames in ``data[start:stop]`` (`view` is of the same bytes) until one is
        under way: where the first byte lies that was not taken. It is `stop`, or the start of a
        prefix that is not complete, or anywhere once the link or the peer has ended."""
        while start < stop and not self._closed:
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
        """Where the payload of a frame goes that had begun to come before."""
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
        """Take the frames that lie from `start` to `stop` where the link receives."""

    def _take_safely(self, start: int, stop: int) -> None:
        """`_take`, from outside of `_receive`."""
        self._polling = True
        try:
            self._take(start, stop)
        except Exception as error:
            self._failed(error)
        self._polling = False
        if self._closed and not self._told:
            self._tell()

    def _arrive(self, count: int) -> Landing | None:
        """`count` more bytes of the payload under way are in. Returns its landing if these were the
        last ones, and it is to be told. The caller tells it, rather than this: what a landing sets
        off may send in its turn, and each call on the way down to that costs all of them."""
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
        """Ask the peer what has come: `_kept` says that it is time."""

    def _own(self, code: int, number: int) -> None:
        """The peer's link has said something."""
        raise ProtocolError(f"{self._peer_name} sent a frame without a header")

    def _lost(self, error: BaseException) -> None:
        """The connection is gone."""
        self.close(error)

    # ---- the end ----

    def _bye(self, nbytes: int, more: int) -> None:
        if nbytes or more:
            raise ProtocolError(f"{self._peer_name} sent {nbytes + more} bytes after its end")
        self._peer_ended = True
        # The end in order takes both sides; who says it first waits for the other::
        #
        #     this side                       the peer
        #     finish: queue, BYE  ────────>   takes all, sees the BYE: sends its own, closes
        #     sees that BYE: closes <──────
        #
        # A side that still has something queued does not say BYE: that would be lost, and the peer
        # must see a broken connection rather than an end that seems to be in order.
        if not self._finishing:
            if self._is_out:
                with contextlib.suppress(OSError):  # the peer may be gone already
                    self._write((BYE,))
            self.close()
        elif self._is_out:
            self.close()

    def _end_of_file(self) -> None:
        """The peer has closed the connection, and all that it wrote before was taken in."""
        if self._finishing and self._is_out:
            self.close()  # the peer took our BYE and left, maybe amid a frame nobody wants
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
