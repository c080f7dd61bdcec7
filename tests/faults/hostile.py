"""Members that were let in, and harm: they have the token, and are of the group that they attack.

What they send is sound for the most part, since the first frame that is none ends a link; they
break their links, go on over others with claims that are true or not, dial and are dialled.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from corpus import CONTROL, PEER, Corpus

from aiodist.links.greeting import Claim, Identity
from aiodist.membership.machine import Membership
from aiodist.p2p import frames as p2p_frames
from aiodist.rank import deriving
from aiodist.transports.retransmission import ACK, ASK, own_frame, read_own
from aiodist.wire import codec, kinds, messages
from aiodist.wire.frames import Decoder, Frame, encode, pack_fields, unpack_fields
from aiodist.wire.messages import EpochView, Leave, MemberInfo
from aiodist.wire.proof import make_proof
from aiodist.wire.returning import Rejoin

SAID = [cls for cls in CONTROL if cls in Membership()._handlers]
"""What members say to a coordinator; another message ends the connection."""

QUIET = [cls for cls in SAID if cls not in (Leave, Rejoin, messages.JoinRequest)]
"""What leaves them members."""

LOUD = ("HELLO", "CHALLENGE", "PROOF", "HELLO_ACK", "TAGS", "P2P", "REVOKE", "FAREWELL")
"""Kinds of frames that mostly end a link, or all there is to attack."""
CALM = [kind for kind in PEER if kind not in LOUD]

FLOODS = ("MESSAGE", "GRANT", "ABORT", "INQUIRE", "KNOCK", "REGION", "WANT", "STRAY")
"""What a victim is flooded with: what it keeps of each has to have an end."""
FLOOD = 200_000
"""Frames of a flood."""

BURST = 40
"""Frames that are sent before one looks what has come."""


class Wire:
    """A socket, and the frames that come over it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(5.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.ended = False
        self._decoder = Decoder(max_payload=2**26)
        self._frames: list[Frame] = []

    def send(self, data: bytes, *, deaf: bool = False) -> None:
        """Send, and take in meanwhile what comes: else the other side may not read either. `deaf`:
        let it lie, as long as the other side reads."""
        if deaf:
            self.sock.sendall(data)
            return
        view = memoryview(data)
        self.sock.setblocking(False)
        try:
            while view and not self.ended:
                with contextlib.suppress(BlockingIOError):
                    view = view[self.sock.send(view) :]
                self._read()
        finally:
            self.sock.settimeout(5.0)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self.sock.recv(1 << 20)
            self.ended = not data
            self._frames += self._decoder.feed(data)

    def frame(self) -> Frame:
        """The next frame. Raises OSError where none comes."""
        while not self._frames:
            if self.ended:
                raise ConnectionResetError("the other side has ended")
            self._read()
        return self._frames.pop(0)

    def frames(self) -> list[Frame]:
        """What has come by now."""
        self.sock.setblocking(False)
        try:
            while not self.ended:
                data = self.sock.recv(1 << 20)
                self.ended = not data
                self._frames += self._decoder.feed(data)
        except BlockingIOError:
            pass
        finally:
            self.sock.settimeout(5.0)
        found, self._frames = self._frames, []
        return found

    def reset(self) -> None:
        """Break the connection."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def show_token(wire: Wire, token: bytes) -> None:
    """The greeting of a member, up to its proof."""
    nonce = secrets.token_bytes(32)
    wire.send(codec.encode_message(messages.Hello(nonce)))
    found = codec.decode_message(wire.frame())[1]
    assert isinstance(found, messages.Challenge)
    mac = make_proof(token, "member", nonce, found.nonce)
    wire.send(codec.encode_message(messages.Proof(mac)))


class Hostile:
    """One member. It sorts before all others where it is to dial them, else behind them."""

    def __init__(
        self,
        corpus: Corpus,
        door: tuple[str, int],
        group: str,
        token: bytes,
        *,
        dials: bool,
        size: int,
    ) -> None:
        self.sent = 0
        self._corpus = corpus
        self._dials = dials
        self._token = token
        self._id = ("!" if dials else "~") + corpus.rng.randbytes(16).hex()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self._claims: dict[str, Claim] = {}
        self._control = Wire(socket.create_connection(door, timeout=10))
        show_token(self._control, token)
        port = self._listener.getsockname()[1]
        ask = messages.JoinRequest(
            group=group, id=self._id, size=size, addresses=(f"tcp://127.0.0.1:{port}",), host_id="h"
        )
        self._control.send(codec.encode_message(ask, 1))
        self._identity = Identity(group, self._id, token)

    def join(self) -> None:
        """Wait until all are there."""
        found: object = None
        while not isinstance(found, EpochView):
            found = codec.decode_message(self._control.frame())[1]
        corpus = self._corpus
        corpus.learn(found.context, found.digest, found.epoch, found.group)
        current = [found.context] * 10
        # Mostly the group; also one that is gone, and those that are to come.
        corpus.contexts = [*corpus.contexts[:3], *current, *self._to_come(found), *current]
        self._victims = [one for one in found.members if one.rank < 2]
        for member in found.members:
            corpus.learn(member.id)
            self._claims[member.id] = Claim(0, 0)

    def _to_come(self, view: EpochView) -> list[bytes]:
        """The contexts of groups that the victims make of theirs later."""
        parent: Any = SimpleNamespace(id=view.context, derived={})
        ranks = [member.rank for member in view.members]
        return [deriving._id_of(parent, "dup", ranks) for _ in range(5)]

    def attack(self) -> None:
        """All that it does, to all victims and to the coordinator."""
        for victim in self._victims:
            for _ in range(self._corpus.rng.randrange(1, 4)):
                with contextlib.suppress(OSError):
                    self._assault(victim.id, *self._linked(victim))
        with contextlib.suppress(OSError):
            self._say_to_coordinator()

    def flood(self, kind: str) -> None:
        """Send one victim more frames of a kind than it may keep, each about something else."""
        corpus, number = self._corpus, 0
        with contextlib.suppress(OSError):
            wire, _ = self._linked(self._victims[corpus.rng.randrange(2)])
            while number < FLOOD and not wire.ended:
                frames = []
                for _ in range(FLOOD // 100):
                    number += 1
                    frames.append(_frame_of_flood(kind, corpus.contexts[-1], number))
                wire.send(b"".join(frames), deaf=True)
                self.sent += len(frames)
            wire.reset()

    def close(self) -> None:
        self._listener.close()
        self._control.sock.close()

    # -- links ------------------------------------------------------------------------------------

    def _linked(self, victim: MemberInfo) -> tuple[Wire, int]:
        """A link to a victim, or, where it is to be dialled, to one of them."""
        if self._dials:
            [address] = [one for one in victim.addresses if one.startswith("tcp://")]
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            wire = Wire(socket.create_connection((host, int(port)), timeout=10))
            return wire, self._greet(wire, victim)
        wire = Wire(self._listener.accept()[0])
        return wire, self._answer(wire)

    def _claim(self, peer: str) -> Claim:
        """What it says of the links before: the truth, or not."""
        claim = self._claims[peer]
        if self._corpus.rng.random() < 0.15:
            claim = Claim(self._corpus.rng.randrange(5), self._corpus.rng.getrandbits(8))
        return claim

    def _greet(self, wire: Wire, victim: MemberInfo) -> int:
        nonce, claim = secrets.token_bytes(32), self._claim(victim.id)
        wire.send(encode(pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, nonce)))
        theirs = unpack_fields(wire.frame().header)[1]
        mac = self._identity.prove("dialler", victim.id, (nonce, theirs), claim)
        wire.send(encode(pack_fields(kinds.PROOF, self._identity.mark, mac, *claim)))
        kind, *_, links, came = unpack_fields(wire.frame().header)
        if kind != kinds.HELLO_ACK:
            raise ConnectionRefusedError("it is leaving, or has lost this member")
        self._begun(victim.id, links)
        return int(came)

    def _answer(self, wire: Wire) -> int:
        theirs = unpack_fields(wire.frame().header)[3]
        nonce = secrets.token_bytes(32)
        wire.send(encode(pack_fields(kinds.CHALLENGE, nonce)))
        _, mark, _, links, came = unpack_fields(wire.frame().header)
        [peer] = [one.id for one in self._victims if Identity("", one.id).mark == mark]
        claim = self._claim(peer)
        mac = self._identity.prove("listener", peer, (theirs, nonce), claim)
        sent = encode(pack_fields(kinds.HELLO_ACK, mac, *claim))
        if self._corpus.rng.random() < 0.1:
            sent = self._corpus.damaged(sent)
        wire.send(sent)
        self._begun(peer, links)
        return int(came)

    def _begun(self, peer: str, links: int) -> None:
        before = self._claims[peer]
        self._claims[peer] = Claim(max(before.generation, links) + 1, before.came)

    def _assault(self, peer: str, wire: Wire, came: int) -> None:
        """Send frames until the link ends, or it is broken off. `came`: how many the peer has."""
        corpus = self._corpus
        heard = 0
        for frame in self._frames_for(came):
            wire.send(frame)
            self.sent += 1
            if self.sent % BURST == 0:
                heard = self._hear(wire, heard)
                if wire.ended:
                    break
        before = self._claims[peer]
        self._claims[peer] = Claim(before.generation, before.came + heard)
        if corpus.rng.random() < 0.5:
            wire.reset()
        else:
            wire.sock.close()

    def _hear(self, wire: Wire, heard: int) -> int:
        """Take in what has come, and answer what links ask of each other."""
        for frame in wire.frames():
            if frame.header:
                heard += 1
                self._corpus.learn_frame(frame.header)
            elif frame.payload and read_own(frame.payload, 0)[0] == ASK:
                wire.send(own_frame(ACK, heard))
        return heard

    def _frames_for(self, came: int) -> Iterator[bytes]:
        corpus, rng = self._corpus, self._corpus.rng
        if rng.random() < 0.5:
            yield own_frame(ASK)
        calm = rng.choice([0.75, 0.75, 0.0])  # without them the link lasts longer
        for _ in range(rng.choice([5, 100, 400])):
            way = rng.random()
            if way < calm:
                yield corpus.peer(corpus.pick(CALM))
            elif way < 0.985:
                yield corpus.again()
            elif way < 0.99:
                yield corpus.own(came)
            else:
                yield corpus.peer(corpus.pick(LOUD))
        if rng.random() < 0.5:
            data = corpus.peer(corpus.pick([*PEER]))
            yield data[: rng.randrange(len(data))]  # the link breaks in the midst of a frame
        else:
            yield from [corpus.damaged(corpus.bad_peer()), corpus.own(), corpus.bad_peer()]

    # -- the coordinator --------------------------------------------------------------------------

    def _say_to_coordinator(self) -> None:
        corpus, wire = self._corpus, self._control
        data = [corpus.control(corpus.pick(QUIET)) for _ in range(100)]
        data += [corpus.control(corpus.pick(SAID)), corpus.damaged(corpus.bad_control())]
        data += [corpus.control(corpus.pick(CONTROL))]
        for frame in data:
            wire.send(frame)
            self.sent += 1
        for frame in wire.frames():
            if not frame.header:
                raise AssertionError("the coordinator sent a frame without a header")


def _frame_of_flood(kind: str, context: bytes, number: int) -> bytes:
    """A frame that is sound, and about something that no other frame is about."""
    tag = f"{number:x}" * 10
    if kind == "MESSAGE":
        header = pack_fields(kinds.MESSAGE, context, tag, 0, 0, b"barrier()")
        return encode(header, bytes(2**18 if number % 100 == 0 else 0))
    rest: dict[str, tuple[object, ...]] = {
        "GRANT": (kinds.GRANT, context, None, number, 1, b"x" * 100),
        "ABORT": (kinds.ABORT, context, tag, 0, "error", "x" * 9999, 2, {}, [0, 1]),
        "INQUIRE": (kinds.INQUIRE, context, None, 0),
        "KNOCK": (kinds.KNOCK, context, tag, 0),
        "REGION": (kinds.REGION, context, number, "unix-abstract:aiodist-none", b"", 8),
        "WANT": (kinds.P2P, context, p2p_frames.WANT, tag * 10),
        "STRAY": (kinds.MESSAGE, number.to_bytes(8, "big"), None, 0, 0, b""),
    }
    return encode(pack_fields(*rest[kind]))
