"""Without the token nobody gets in, and nobody hears a word about the group; it is never told."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import aiodist
from aiodist.errors import ProtocolError
from aiodist.links.endpoint import Endpoint
from aiodist.links.greeting import Claim, Identity
from aiodist.transports.base import Link, Receiver
from aiodist.transports.tcp import TcpTransport
from aiodist.wire import kinds
from aiodist.wire.frames import Decoder, encode, pack_fields, unpack_fields
from aiodist.wire.messages import Result, StoreChanged, StoreCompareSet, StoreSet
from aiodist.wire.proof import check_proof, mark_of

TOKEN = "the-secret-token"
PAYLOAD = b"the-secret-payload"
NAME = "the-secret-name"

CLAIM = Claim(0, 0)


def address_of(group: aiodist.Group) -> tuple[str, int]:
    (found,) = [
        one for one in group._actor.view.members[group.rank].addresses if one.startswith("tcp://")
    ]
    host, _, port = found.removeprefix("tcp://").rpartition(":")
    return host, int(port)


async def overheard(group: aiodist.Group, frames: list[bytes]) -> bytes:
    """All that the listener of `group` says to who sends `frames`."""
    reader, writer = await asyncio.open_connection(*address_of(group))
    writer.write(b"".join(frames))
    heard = b""
    try:
        async with asyncio.timeout(20):
            while more := await reader.read(65536):
                heard += more
    except ConnectionError:
        pass
    writer.close()
    return heard


def test_a_stranger_hears_nothing_of_the_group(run: Any, caplog: Any) -> None:
    async def main() -> None:
        options = {"group": NAME, "token": TOKEN, "transports": ("tcp",)}
        async with aiodist.local(2, **options) as ranks:
            await asyncio.gather(*(rank.barrier() for rank in ranks))
            view = ranks[0]._actor.view
            # It knows all but the token.
            ids = [member.id for member in view.members]
            nonce = bytes(range(32))
            hello = encode(pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, nonce))
            for own in (*ids, "somebody"):
                identity = Identity(view.group, own, b"guessed")
                mac = identity.prove("dialler", ids[0], (nonce, bytes(32)), CLAIM)
                proof = encode(pack_fields(kinds.PROOF, identity.mark, mac, *CLAIM))
                heard = await overheard(ranks[0], [hello, proof])
                [challenge] = Decoder().feed(heard)
                kind, theirs = unpack_fields(challenge.header)
                assert (kind, len(theirs)) == (kinds.CHALLENGE, 32)
            assert await asyncio.gather(*(rank.all_reduce(1) for rank in ranks)) == [2, 2]

    run(main())
    assert "did not prove that it is a member" in caplog.text
    assert "is no known member of the group" in caplog.text


class Door:
    """An endpoint behind a TCP listener, of the member `id` of "a" and "b"."""

    def __init__(self, id: str, token: bytes) -> None:
        self.endpoint = Endpoint(asyncio.get_running_loop())
        self.identity = Identity(NAME, id, token)
        self.address = ""

    async def open(self) -> None:
        self.listener = await TcpTransport().listen(self.endpoint.accept, host="127.0.0.1")
        self.address = self.listener.address

    def activate(self, peer: str) -> None:
        async def dial(rank: int, receiver: Receiver, patience: float) -> Link:
            return await TcpTransport().dial(peer, receiver)

        self.endpoint.activate(self.identity, dial)
        self.endpoint.admit(["a", "b"])

    async def close(self) -> None:
        await self.endpoint.finish(1)
        self.listener.close()


@pytest.mark.parametrize("same", [True, False])
def test_peers_show_each_other_the_key(run: Any, same: bool) -> None:
    async def main() -> None:
        doors = [Door("a", b"token"), Door("b", b"token" if same else b"another")]
        for door in doors:
            await door.open()
        doors[0].activate(doors[1].address)
        doors[0].endpoint.peer(1).send(pack_fields(kinds.KICK, b"12345678"))
        # Its proof waits there until the membership is known.
        async with asyncio.timeout(20):
            greeters = doors[1].endpoint._entrance._greeters
            for _ in iter(lambda: any(greeter._shown for greeter in greeters), True):
                await asyncio.sleep(0)
        doors[1].activate(doors[0].address)
        async with asyncio.timeout(20):
            await asyncio.gather(*doors[0].endpoint._tasks)
        assert (doors[0].endpoint.lost == {}) == same
        assert (doors[1].endpoint.peer(0).link is not None) == same
        for door in doors:
            await door.close()

    run(main())


def test_an_impostor_hears_nothing_of_the_group(run: Any) -> None:
    """Somebody listens where a peer was."""

    async def main() -> None:
        heard: list[bytes] = []
        done = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read(65536))
            writer.write(encode(pack_fields(kinds.CHALLENGE, bytes(32))))
            heard.append(await reader.read(65536))
            writer.write(encode(pack_fields(kinds.HELLO_ACK, bytes(32), *CLAIM)))
            heard.append(await reader.read())
            writer.close()
            done.set()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        door = Door("a", TOKEN.encode())
        await door.open()
        door.activate(f"tcp://127.0.0.1:{port}")
        door.endpoint.peer(1).send(pack_fields(kinds.KICK, NAME.encode()))
        await done.wait()
        server.close()
        assert list(door.endpoint.lost) == [1]
        assert NAME.encode() not in b"".join(heard)
        _hello, proof, after = heard
        assert after == b""
        [frame] = Decoder().feed(proof)
        kind, mark, mac, *claim = unpack_fields(frame.header)
        assert (kind, mark, len(mac), *claim) == (kinds.PROOF, mark_of("a"), 32, 0, 0)
        await door.close()

    run(main())


def test_a_proof_is_of_one_rank_to_another() -> None:
    one, two, three = (Identity(NAME, id, b"token") for id in ("a", "b", "c"))
    nonces = (bytes(32), bytes(range(32)))
    mac = one.prove("dialler", "b", nonces, CLAIM)
    assert two.check("dialler", "a", mac, nonces, CLAIM)
    assert not two.check("dialler", "c", mac, nonces, CLAIM)
    assert not three.check("dialler", "a", mac, nonces, CLAIM)
    assert not two.check("listener", "a", mac, nonces, CLAIM)
    assert not one.check("dialler", "b", mac, nonces, CLAIM)  # sent back to who made it
    assert not two.check("dialler", "a", mac, nonces[::-1], CLAIM)
    assert not two.check("dialler", "a", mac, nonces, Claim(0, 1))  # altered on its way
    assert not two.check("dialler", "a", mac, (bytes(32), bytes(32)), CLAIM)  # played back later
    assert check_proof(b"", b"key", "dialler", *nonces) is False


def test_too_many_that_wait_for_the_membership(run: Any) -> None:
    async def main() -> None:
        endpoint = Endpoint(asyncio.get_running_loop(), expected=1)
        listener = await TcpTransport().listen(endpoint.accept, host="127.0.0.1")
        host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
        hello = encode(pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, bytes(32)))
        proof = encode(pack_fields(kinds.PROOF, bytes(8), bytes(32), *CLAIM))
        callers = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        closed = 0
        for reader, writer in callers:
            writer.write(hello + proof)
            await reader.readexactly(1)
        for reader, _writer in callers[1:]:
            with pytest.raises((ConnectionError, EOFError)):
                async with asyncio.timeout(20):
                    while await reader.read(100):
                        pass
                    raise EOFError
            closed += 1
        assert closed == 2
        for _reader, writer in callers:
            writer.close()
        await endpoint.finish(0)
        listener.close()

    run(main())


def test_secrets_are_not_in_texts(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        connecting = aiodist.connect("inproc://x", size=1, token=TOKEN)
        assert TOKEN not in repr(vars(connecting))
        async with aiodist.local(2, token=TOKEN, transports=("tcp",)) as ranks:
            assert TOKEN not in repr(ranks) + repr(ranks[0]._actor.control)
            await ranks[0].store.set("k", PAYLOAD)
            with pytest.raises(ValueError) as caught:
                await ranks[1].store.add("k")
            assert PAYLOAD.decode() not in str(caught.value)
            sent = ranks[0].send(PAYLOAD, 1)
            assert await ranks[1].recv() == PAYLOAD
            await sent
        async with aiodist.Coordinator(token=TOKEN) as coordinator:
            assert TOKEN not in repr(coordinator)
            with pytest.raises(aiodist.AuthenticationError) as refused:
                await aiodist.connect(coordinator.address, size=1, token="wrong-token")
            assert "wrong-token" not in str(refused.value)

    run(main())
    for secret in (TOKEN, "wrong-token", PAYLOAD.decode()):
        assert secret not in caplog.text
    for message in (
        StoreSet("k", PAYLOAD),
        StoreCompareSet("k", PAYLOAD, PAYLOAD),
        StoreChanged("k", PAYLOAD),
        Result(PAYLOAD),
    ):
        assert PAYLOAD.decode() not in repr(message)


@pytest.mark.parametrize(
    "fields",
    [
        [kinds.HELLO, kinds.MAGIC, kinds.VERSION, bytes(31)],
        [kinds.HELLO, kinds.MAGIC, kinds.VERSION, "x" * 32],
        [kinds.HELLO, kinds.MAGIC, kinds.VERSION + 1, bytes(32)],
        [kinds.HELLO, "other", kinds.VERSION, bytes(32)],
        [kinds.PROOF, 0, bytes(32)],
    ],
)
def test_hellos_that_are_none(run: Any, fields: list[Any]) -> None:
    async def main() -> None:
        async with aiodist.local(1, transports=("tcp",)) as ranks:
            assert await overheard(ranks[0], [encode(pack_fields(*fields))]) == b""

    run(main())


@pytest.mark.parametrize(
    "fields",
    [
        [kinds.PROOF, 0],
        [kinds.PROOF, "0", bytes(32), 0, 0],
        [kinds.PROOF, bytes(8), "x", 0, 0],
        [kinds.PROOF, bytes(8), bytes(32)],
        [kinds.HELLO, bytes(8), bytes(32), 0, 0],
    ],
)
def test_proofs_that_are_none(run: Any, fields: list[Any], caplog: Any) -> None:
    async def main() -> None:
        async with aiodist.local(1, transports=("tcp",)) as ranks:
            hello = pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, bytes(32))
            heard = await overheard(ranks[0], [encode(hello), encode(pack_fields(*fields))])
            assert len(Decoder().feed(heard)) == 1

    run(main())
    assert ProtocolError.__name__ not in caplog.text  # said in words
    assert "proof" in caplog.text
