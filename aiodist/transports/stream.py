"""Links over stream sockets (TCP and Unix): frames gathered into writes, payloads read in place.

Sockets of our own, non-blocking, watched by the loop's `add_reader` and `add_writer`. A small
frame is one `send` of joined bytes. Prefixes are read into a small scratch; payloads are read
straight into the memory the receiver gave, and the same call takes the beginning of the next
frame into the scratch.

The end of the stream is said by a frame without header and payload (`BYE`): end of file without
it is a broken connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence

from aiodist.errors import ProtocolError
from aiodist.transports.base import Done, Receiver
from aiodist.transports.link import TURN, BaseLink
from aiodist.transports.outbox import MOST_BUFFERS, Outbox, Outgoing
from aiodist.wire.frames import MAX_HEADER, OVERHEAD, parse_prefix, prefix

BYE = prefix(b"", 0)
"""The last frame of a stream that ends in order."""

SCRATCH = 16 * 1024
"""Bytes read at once where the next frame is not known yet."""

LOOKAHEAD = 512
"""Bytes taken beyond a payload under way: the next prefix, and few payload bytes to copy."""

READ = 256 * 1024
"""Most payload bytes of one read."""

JOINED = 4096
"""Payloads up to this are copied behind their prefix: cheaper than a gathered write."""


class StreamLink(BaseLink):
    """A link over a connected, non-blocking stream socket, which it owns from now on.

    Call `start` once the receiver is set.
    """

    __slots__ = (
        "_armed",
        "_arrived",
        "_broken",
        "_busy",
        "_destination",
        "_direct",
        "_fd",
        "_held",
        "_outbox",
        "_peer_ended",
        "_polling",
        "_reading",
        "_scratch",
        "_scratch_view",
        "_socket",
        "_to_come",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        *,
        kind: str,
        peer_name: str,
        receiver: Receiver | None = None,
    ) -> None:
        super().__init__(loop, kind, peer_name, receiver)
        self._socket = sock
        self._fd = sock.fileno()
        self._reading = False
        # Sending. `_direct`: nothing is queued and nothing forbids a write right inside `send`.
        self._outbox = Outbox()
        self._direct = True
        self._busy = False  # inside a write or a `done`
        self._armed = False  # the loop watches for room to write
        self._broken: OSError | None = None  # writing failed; what has arrived is still read
        # Receiving. While a payload is under way (`_to_come` > 0) the scratch is empty.
        self._polling = False
        self._scratch = bytearray(SCRATCH)
        self._scratch_view = memoryview(self._scratch)
        self._held = 0  # bytes of an incomplete prefix at the start of the scratch
        self._destination: memoryview | None = None
        self._arrived = 0  # payload bytes of the frame under way that are here
        self._to_come = 0  # and those that are not
        self._peer_ended = False

    def start(self) -> None:
        """Begin to receive."""
        if not self._closed:
            self._loop.add_reader(self._fd, self._readable)
            self._reading = True

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
            if not nbytes:
                sent = self._socket.send(head)
            elif nbytes <= JOINED:
                sent = self._socket.send(b"".join((head, *payload)))
            else:
                sent = self._socket.sendmsg((head, *payload[:MOST_BUFFERS]))
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._cannot_send(error)
            return
        if sent == len(head) + nbytes:
            self._outbox.sent_bytes += nbytes
            if done is not None:
                self._finished(done)
            return
        frame = Outgoing(head, payload, nbytes, done, token)
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
        """Write what is queued until the socket is full or a turn's worth is out."""
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
                    sent = self._socket.sendmsg(buffers)
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

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        self._flush()
        # Disarmed here only: `poll` may have sent all, and more may be queued before the next turn.
        if self._armed and not self._outbox.backlog:
            self._armed = False
            self._loop.remove_writer(self._fd)

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
            return
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._cannot_send(error)

    # ---- receiving ----

    def poll(self) -> bool:
        if self._polling or self._busy:
            return False
        moved = self._flush() if self._outbox.backlog else False
        return self._receive() or moved

    def _readable(self) -> None:
        self._receive()

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

    def _read(self) -> bool:
        sock = self._socket
        budget = TURN
        while True:
            destination = self._destination
            rest = self._to_come
            held = self._held
            try:
                if destination is None:
                    room = len(self._scratch) - held
                    if held:
                        count = sock.recv_into(self._scratch_view[held:])
                    else:
                        count = sock.recv_into(self._scratch)
                elif rest > READ:
                    room = rest = READ
                    count = sock.recv_into(destination[self._arrived : self._arrived + READ])
                else:
                    room = rest + LOOKAHEAD
                    count = sock.recvmsg_into(
                        (destination[self._arrived :], self._scratch_view[:LOOKAHEAD])
                    )[0]
            except (BlockingIOError, InterruptedError):
                return budget < TURN
            except OSError as error:
                self.close(self._broken or error)
                return True
            if not count:
                self._end_of_file()
                return True
            budget -= count
            if destination is None:
                if rest:
                    taken = min(rest, count)
                    self._to_come -= taken
                    self._arrived += taken
                    if taken == rest:
                        self._received_bytes += self._arrived
                    self._parse(taken, count)
                else:
                    self._held = 0
                    self._parse(0, held + count)
            else:
                taken = min(rest, count)
                self._arrived += taken
                self._to_come -= taken
                if not self._to_come:
                    self._complete()
                    if count > taken:
                        self._parse(0, count - taken)
            if self._closed or self._peer_ended or count < room or budget <= 0:
                return True

    def _complete(self) -> None:
        self._destination = None
        self._received_bytes += self._arrived
        self.receiver.payload(self)

    def _parse(self, start: int, stop: int) -> None:
        """Take the frames in ``scratch[start:stop]``; keep an incomplete prefix for later."""
        scratch = self._scratch
        while start < stop and not self._closed:
            parsed = parse_prefix(scratch, start, stop, self.max_header, self.max_payload)
            if parsed is None:
                self._keep(start, stop)
                return
            header, nbytes, taken = parsed
            start += taken
            if not header:
                self._bye(nbytes, stop - start)
                return
            destination = self.receiver.frame(self, header, nbytes)
            if self._closed:
                return
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
                destination[:here] = self._scratch_view[start : start + here]
            start += here
            self._arrived = here
            self._to_come = nbytes - here
            self._destination = destination
            if here < nbytes:
                return
            if destination is not None:
                self._complete()
            else:
                self._received_bytes += nbytes

    def _keep(self, start: int, stop: int) -> None:
        self._held = held = stop - start
        if start:
            self._scratch[:held] = self._scratch[start:stop]
        if held == len(self._scratch):  # a header longer than the scratch, within the limits
            grown = bytearray(MAX_HEADER + OVERHEAD)
            grown[:held] = self._scratch
            self._scratch = grown
            self._scratch_view = memoryview(grown)

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
        self._stop_reading()
        if not self._finishing:
            if not self._outbox.backlog:
                with contextlib.suppress(OSError):  # the peer may be gone already
                    self._socket.send(BYE)
            self.close()
        elif not self._outbox.backlog:
            self.close()

    def _end_of_file(self) -> None:
        if self._finishing and not self._outbox.backlog:
            self.close()  # the peer took our BYE and left, maybe amid a frame nobody wants
            return
        self.close(
            self._broken
            or ConnectionResetError(f"{self._peer_name} closed the connection without ending it")
        )

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _release(self) -> None:
        if not self._loop.is_closed():
            self._stop_reading()
            if self._armed:
                self._loop.remove_writer(self._fd)
        self._armed = False
        self._forget()
        self._socket.close()

    def _forget(self) -> None:
        self._direct = False
        self._outbox.clear()
        self._destination = None
        self._to_come = 0

    def close_in_child(self) -> None:
        """After a fork, in the child: close its copy of the socket, leaving the loop alone (its
        epoll is the parent's too). Nobody is told."""
        if self._closed:
            return
        self._closed = self._told = True
        self._forget()
        self._socket.close()
