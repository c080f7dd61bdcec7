"""Links over an ordered stream of bytes, whatever carries them: the frames of both directions.

Sending: a frame goes out right inside `send` where nothing is queued and all of it fits, else
through the outbox. Receiving: `_parse` takes frames out of bytes that have come; a payload that
is not complete there is under way (`_to_come` > 0), and the rest of it goes straight to its
destination.

The end of the stream is said by a frame without header and payload (`BYE`): a connection that
ends without it is broken.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Sequence

from aiodist.errors import ProtocolError
from aiodist.transports.base import Done, Receiver
from aiodist.transports.link import TURN, BaseLink
from aiodist.transports.outbox import Outbox, Outgoing
from aiodist.wire.frames import parse_prefix, prefix

BYE = prefix(b"", 0)
"""The last frame of a stream that ends in order."""

JOINED = 4096
"""Payloads up to this are copied behind their prefix: cheaper than a gathered write."""


class FramedLink(BaseLink):
    """The frames of a link; subclasses move the bytes. Call `start` once the receiver is set."""

    __slots__ = (
        "_arrived",
        "_broken",
        "_busy",
        "_destination",
        "_direct",
        "_outbox",
        "_peer_ended",
        "_polling",
        "_to_come",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, kind: str, peer_name: str, receiver: Receiver | None
    ) -> None:
        super().__init__(loop, kind, peer_name, receiver)
        # Sending. `_direct`: nothing is queued and nothing forbids a write right inside `send`.
        self._outbox = Outbox()
        self._direct = True
        self._busy = False  # inside a write or a `done`
        self._broken: OSError | None = None  # writing failed; what has arrived is still read
        # Receiving.
        self._polling = False
        self._destination: memoryview | None = None
        self._arrived = 0  # payload bytes of the frame under way that are here
        self._to_come = 0  # and those that are not
        self._peer_ended = False

    @abstractmethod
    def start(self) -> None:
        """Begin to receive."""

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

    @abstractmethod
    def _read(self) -> bool:
        """Take in what is there, a turn's worth at most. True: something happened."""

    @property
    def backlog(self) -> int:
        return self._outbox.backlog

    @property
    def sent_bytes(self) -> int:
        return self._outbox.sent_bytes

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
            if not (self._closed or self._finishing or self._broken):
                self._outbox.push(Outgoing(head, payload, nbytes, done, token), urgent)
            return
        try:
            sent = self._write_frame(head, payload, nbytes)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._cannot_send(error)
            return
        except ProtocolError as error:
            self._failed(error)
            return
        if sent == len(head) + nbytes:
            self._outbox.sent_bytes += nbytes
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
        try:
            sent = self._write_frame(start, (rest,), len(rest))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._cannot_send(error)
            return True
        except ProtocolError as error:
            self._failed(error)
            return True
        if sent == size:
            self._outbox.sent_bytes += nbytes
        else:
            frame = b"".join((start, rest))
            head, payload = frame[: size - nbytes], memoryview(frame)[size - nbytes :]
            self._queue_rest(Outgoing(head, (payload,), nbytes, None, None), sent, False)
        return True

    @property
    def is_clear(self) -> bool:
        """Whether nothing is queued, no payload is under way, and it has not ended."""
        return self._direct and not (self._to_come or self._polling or self._peer_ended)

    @abstractmethod
    def look_for(self, prefix: bytes, into: memoryview) -> bool | None:
        """Read what has come, in case that it is the frame with this prefix (which may go on with
        the first bytes of its payload).

        True: it is; the rest of its payload is in `into`, which is of its size. None: nothing has
        come, or only a part of it; look again, or leave it to `poll` and the loop. False: something
        else came first, and went to the receiver, if that has no payload maybe alone; or the link
        has ended.
        """

    def _queue_rest(self, frame: Outgoing, sent: int, urgent: bool) -> None:
        """Queue a frame of which `sent` bytes were written, and no more for now."""
        self._direct = False
        if sent:
            frame.trim(sent)
            self._outbox.push_partial(frame)
        else:
            self._outbox.push(frame, urgent)
        self._arm()

    def _finished(self, done: Done) -> None:
        """Call the `done` of a frame sent directly; what it sends is queued, then sent here."""
        self._direct = False
        self._busy = True
        try:
            done()
        except Exception as error:
            self._failed(error)
        self._busy = False
        if self._outbox.backlog:
            self._flush()
        else:
            self._direct = not (self._closed or self._finishing)

    def _flush(self) -> bool:
        """Write what is queued until there is no room or a turn's worth is out."""
        if self._busy or self._closed:
            return False
        outbox = self._outbox
        self._busy = True
        budget = TURN
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
                for done in outbox.advance(sent):
                    done()
        except Exception as error:
            self._failed(error)
        self._busy = False
        if not (outbox.backlog or self._closed or self._broken):
            if self._finishing:
                self._all_sent()
            else:
                self._direct = True
        return moved

    def _cannot_send(self, error: OSError) -> None:
        """Writing failed: what the peer sent before is still taken in, then the link closes."""
        self._broken = error
        self._direct = False
        self._outbox.clear()
        self._loop.call_soon(self._after_broken)

    def _after_broken(self) -> None:
        while self._receive():
            pass
        self.close(self._broken)

    def discard(self, token: object) -> None:
        self._outbox.discard(token)

    def _send_bye(self) -> None:
        self._direct = False
        if self._broken is None:
            self._outbox.push(Outgoing(BYE, (), 0, None, None), urgent=False)
            self._flush()

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

    def _receive(self) -> bool:
        """Read until nothing is there or a turn's worth is in. True: something happened."""
        moved = False
        if not (self._closed or self._peer_ended):
            self._polling = True
            try:
                moved = self._read()
            except Exception as error:
                self._failed(error)
            self._polling = False
        if self._closed and not self._told:
            self._tell()
            return True
        return moved

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
            start += taken
            if not header:
                self._bye(nbytes, stop - start)
                return start
            destination = self.receiver.frame(self, header, nbytes)
            if self._closed:
                return start
            if not nbytes:
                self.receiver.payload(self)
                continue
            if destination is not None and len(destination) != nbytes:
                raise ValueError(
                    f"the receiver gave {len(destination)} bytes for a payload of {nbytes}:"
                    " it must give a view of exactly as many bytes, or None"
                )
            here = min(nbytes, stop - start)
            if destination is not None and here:
                destination[:here] = view[start : start + here]
            start += here
            self._arrived = here
            self._to_come = nbytes - here
            self._destination = destination
            if here < nbytes:
                return start
            self._complete()
        return start

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

    def _arrive(self, count: int) -> None:
        """`count` more bytes of the payload under way are at its destination."""
        self._arrived += count
        self._to_come -= count
        if not self._to_come:
            self._complete()

    def _complete(self) -> None:
        self._received_bytes += self._arrived
        if self._destination is not None:
            self._destination = None
            self.receiver.payload(self)

    def divert(self, into: memoryview | None) -> int:
        if self._destination is None:
            return 0
        if into is not None and len(into) != len(self._destination):
            raise ValueError(
                f"diverting a payload of {len(self._destination)} bytes into {len(into)}:"
                " the new destination must have the same size"
            )
        self._destination = into
        return self._arrived

    # ---- the end ----

    def _bye(self, nbytes: int, more: int) -> None:
        if nbytes or more:
            raise ProtocolError(f"{self._peer_name} sent {nbytes + more} bytes after its end")
        self._peer_ended = True
        if not self._finishing:
            if not self._outbox.backlog:
                with contextlib.suppress(OSError):  # the peer may be gone already
                    self._write((BYE,))
            self.close()
        elif not self._outbox.backlog:
            self.close()

    def _end_of_file(self) -> None:
        """The peer has closed the connection, and all that it wrote before was taken in."""
        if self._finishing and not self._outbox.backlog:
            self.close()  # the peer took our BYE and left, maybe amid a frame nobody wants
            return
        self.close(
            self._broken
            or ConnectionResetError(f"{self._peer_name} closed the connection without ending it")
        )

    def _forget(self) -> None:
        self._direct = False
        self._outbox.clear()
        self._destination = None
        self._to_come = 0
