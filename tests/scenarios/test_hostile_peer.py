"""Bytes of strangers at a rank's door: their connection closes, nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import random
import socket

import pytest

import aiodist
from aiodist.transports import sparing
from aiodist.wire import kinds
from aiodist.wire.frames import encode, pack_fields, prefix

pytestmark = pytest.mark.usefixtures("no_ruling")

HELLO = pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, "world", "x" * 32, "y" * 32)


def door(group):
    """Where `group`'s rank listens."""
    (address,) = [a for a in group._actor.view.members[group.rank].addresses if "tcp://" in a]
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


async def until_closed(host, port, data):
    """Send `data`, and wait until the other side closes."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, port))
        try:
            await loop.sock_sendall(sock, data)
            while await loop.sock_recv(sock, 4096):
                pass
        except ConnectionError:
            pass


HOSTILE = {
    "noise": random.Random(1).randbytes(5000),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "long header": prefix(b"x" * 5000, 0)[:4] + b"x" * 5000,
    "forged length": prefix(HELLO, 2**32 - 1),
    "payload before hello": encode(HELLO, b"x" * 100),
    "no msgpack": encode(b"\xc1\xc1\xc1"),
    "no hello": encode(pack_fields(kinds.MESSAGE, b"12345678", None, 0, 0, b"barrier()")),
    "not a member": encode(HELLO),
    "another group": encode(
        pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, "other", "x", "y")
    ),
    "another version": encode(pack_fields(kinds.HELLO, kinds.MAGIC, 99, "world", "x", "y")),
    "odd types": encode(pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, "world", 2, None)),
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
def test_strangers_are_turned_away(run, caplog, what):
    async def main():
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            await asyncio.gather(*[g.barrier() for g in ranks])
            with caplog.at_level(logging.WARNING):
                await until_closed(*door(ranks[0]), HOSTILE[what])
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [2, 2]

    run(main())
    assert any("closed" in r.getMessage() or "closing" in r.getMessage() for r in caplog.records)


def test_random_frames_of_strangers(run):
    chooser = random.Random(7)

    def frame():
        fields = chooser.choices(
            [
                kinds.HELLO,
                kinds.MAGIC,
                kinds.VERSION,
                "world",
                1,
                0,
                -1,
                None,
                b"\0" * 8,
                "x",
                [],
                {},
            ],
            k=chooser.randrange(12),
        )
        data = encode(pack_fields(*fields), chooser.randbytes(chooser.choice([0, 0, 5])))
        return data[: chooser.randrange(1, len(data) + 1)] + chooser.randbytes(chooser.randrange(9))

    async def main():
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            host, port = door(ranks[1])
            for _ in range(200):
                with socket.socket() as sock:
                    sock.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(sock, (host, port))
                    sock.send(frame())
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [2, 2]

    run(main())


@pytest.mark.parametrize(
    "header",
    [
        pack_fields(kinds.MESSAGE, "not bytes", None, 0, 0, b"x"),
        pack_fields(99, b"CONTEXT", None, 0),
        pack_fields(kinds.MESSAGE, b"CONTEXT", None, 0, 0),
        pack_fields(kinds.MESSAGE, b"CONTEXT", 1.5, 0, 0, b"x"),
        pack_fields(kinds.MESSAGE, b"CONTEXT", None, -1, 0, b"x"),
        pack_fields(kinds.GRANT, b"CONTEXT", None, 0, "1", b"x"),
        pack_fields(kinds.ABORT, b"CONTEXT", None, 0, "error", "text", 7, {}, []),
        pack_fields(kinds.ABORT, b"CONTEXT", None, 0, "error", "text", 1, {}, [7]),
        pack_fields(kinds.ABORT, b"CONTEXT", None, 0, "error"),
        pack_fields(kinds.STATUS, b"CONTEXT", None, 0, 1, "x"),
        pack_fields(kinds.P2P, b"CONTEXT", 77),
        pack_fields(kinds.TAGS, b"CONTEXT", 0, 0, [], []),
        pack_fields(kinds.REVOKE, b"CONTEXT", 3),
        pack_fields(kinds.REVOKE, b"CONTEXT"),
        pack_fields(kinds.REVOKE, b"CONTEXT", 0),
    ],
)
def test_a_member_that_sends_garbage_is_lost_to_those_who_got_it(run, caplog, header):
    async def main():
        async with aiodist.local(3, transports=("tcp",)) as ranks:
            await asyncio.gather(*[g.barrier() for g in ranks])
            pending = ranks[0].recv(src=1)
            link = ranks[1]._actor.endpoint.peer(0).link
            context = b"\xc4\x08" + ranks[0]._context.id
            link.send(header.replace(b"\xc4\x07CONTEXT", context))
            with pytest.raises(aiodist.PeerLostError, match="rank 1") as caught:
                await pending
            assert caught.value.ranks == (1,)
            sent = ranks[2].send("hello", 0)
            assert await ranks[0].recv(src=2) == "hello"
            await sent

    run(main())
    assert any("closing the link" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("side", ["rank", "coordinator"])
def test_floods_of_strangers_do_not_fill_the_log(run, caplog, monkeypatch, side):
    monkeypatch.setattr(sparing, "PERIOD", 3600.0)

    async def main():
        async with aiodist.Coordinator() as coordinator:
            connecting = aiodist.connect(coordinator.address, rank=0, size=1, transports=("tcp",))
            async with connecting as group:
                host, _, port = coordinator.address.removeprefix("tcp://").rpartition(":")
                where = door(group) if side == "rank" else (host, int(port))
                for _ in range(50):
                    await until_closed(*where, HOSTILE["http"])

    caplog.clear()
    run(main())
    assert 1 <= len([one for one in caplog.records if one.levelno == logging.WARNING]) <= 10
