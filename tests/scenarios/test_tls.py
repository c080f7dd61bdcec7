"""TLS and mutual TLS between ranks, and between ranks and the coordinator."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from authority import Authority, Contexts

import aiodist
from aiodist.links import caller, greeting
from aiodist.testing import links
from aiodist.testing.conformance import LinkConformance
from aiodist.transports import bundle
from aiodist.transports.base import Transport
from aiodist.transports.certificates import contexts_in
from aiodist.transports.tcp import TcpTransport
from aiodist.transports.tls import TlsContexts, TlsLink
from aiodist_cli import status, tls


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def mutual(authority: Authority) -> Contexts:
    return authority.contexts("rank", mutual=True)


@pytest.fixture(scope="class")
def for_kit(request: pytest.FixtureRequest, mutual: Contexts) -> None:
    request.cls.contexts = TlsContexts(*mutual)


@pytest.mark.usefixtures("for_kit")
class TestTls(LinkConformance):
    contexts: TlsContexts
    # Who was connected to has the end of the handshake to take in first.
    test_poll_alone_moves_frames = None

    def transport(self) -> Transport:
        return TcpTransport(self.contexts)


class Bundled(TcpTransport):
    def _is_far(self, sock: socket.socket) -> bool:
        return True

    def _wants_bundle(self, sock: socket.socket) -> bool:
        return True


class TestBundledTls(TestTls):
    @pytest.fixture(autouse=True)
    def _use_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bundle, "EVENTS", 0)  # once one is full, and not for what it loses

    def transport(self) -> Transport:
        return Bundled(self.contexts)


class TestTlsOnUvloop(TestTls):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()


class FullSocket(socket.socket):
    """A socket in place of `sock`, of which nothing but its number was used. It takes nothing."""

    room = False

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.setblocking(False)

    def send(self, data: Any, flags: int = 0) -> int:
        if not self.room:
            raise BlockingIOError
        return super().send(data, flags)


async def test_what_is_encrypted_is_sent_though_the_peer_has_ended(mutual: Contexts) -> None:
    """Both finish: the end of the peer comes while the last bytes wait for room."""
    async with links.connected(TcpTransport(TlsContexts(*mutual))) as ends:
        assert isinstance(ends.a, TlsLink)
        full = ends.a._socket = FullSocket(ends.a._socket)
        ends.a._direct = False  # so the last frame and the end are encrypted in one go
        ends.a.send(b"last", [memoryview(bytes(1000))])
        finishing = asyncio.gather(ends.a.finish(20.0), ends.b.finish(20.0))
        for _ in range(100_000):
            if ends.a._peer_ended:
                break
            await asyncio.sleep(0)
        assert ends.a._cipher and not ends.a.backlog
        full.room = True
        await finishing
        assert ends.at_b.frames == [(b"last", bytes(1000))]
        assert ends.at_a.ends == ends.at_b.ends == [None]


async def test_a_dial_that_is_cancelled_as_its_handshake_ends(
    mutual: Contexts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As happens if both ranks call each other."""
    shake = ssl.SSLObject.do_handshake

    def do_handshake(side: ssl.SSLObject) -> None:
        shake(side)  # raises until it is done
        if not side.server_side:
            dialling.cancel()

    monkeypatch.setattr(ssl.SSLObject, "do_handshake", do_handshake)
    transport = TcpTransport(TlsContexts(*mutual))
    accepted: list[Any] = []
    listener = await transport.listen(accepted.append, host="127.0.0.1")
    receiver = links.RecordingReceiver(asyncio.Event())
    dialling = asyncio.ensure_future(transport.dial(listener.address, receiver))
    await asyncio.wait({dialling})
    assert dialling.cancelled()
    assert not caplog.records
    listener.close()
    for link in accepted:
        link.close()


async def connected(address: str, contexts: list[Any], **options: Any) -> list[aiodist.Group]:
    joining = [
        asyncio.ensure_future(
            _one(address, rank=rank, size=len(contexts), ssl=one, transports=("tcp",), **options)
        )
        for rank, one in enumerate(contexts)
    ]
    return list(await asyncio.gather(*joining))


async def _one(*arguments: Any, **options: Any) -> aiodist.Group:
    return await aiodist.connect(*arguments, **options)


@pytest.mark.parametrize("kind", ["one-sided", "mutual"])
def test_all_that_leaves_a_rank_is_encrypted(run: Any, authority: Authority, kind: str) -> None:
    contexts = authority.contexts(kind, mutual=kind == "mutual")

    async def main() -> None:
        server = contexts[1]
        async with aiodist.Coordinator("tls://127.0.0.1:0", ssl=server, token="t") as coordinator:
            groups = await connected(coordinator.address, [contexts] * 3, token="t")
            for member in groups[0]._actor.view.members:
                assert any(one.startswith("tls://127.0.0.1:") for one in member.addresses)
                assert not any(one.startswith("tcp://") for one in member.addresses)
            xs = [np.arange(1_000_000.0) * (rank + 1) for rank in range(3)]
            await asyncio.gather(*(g.all_reduce(x) for g, x in zip(groups, xs, strict=True)))
            assert all((x == np.arange(1_000_000.0) * 6).all() for x in xs)
            for length in (1, 1000, 100_000):
                small = [np.full(length, float(rank)) for rank in range(3)]
                for _ in range(5):
                    await asyncio.gather(
                        *(g.all_reduce(x) for g, x in zip(groups, small, strict=True))
                    )
            for number in range(9):
                # Of one shape, so that later calls look for a frame that they know.
                x = np.full(9, number)
                works = [g.sendrecv(x, (g.rank + 1) % 3, src=(g.rank - 1) % 3) for g in groups]
                assert all((got == x).all() for got in await asyncio.gather(*works))
            await groups[0].store.set("k", b"v")
            await asyncio.gather(*(group.close() for group in groups))

    run(main())


def test_who_has_no_certificate_is_not_let_in(
    run: Any, authority: Authority, mutual: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trusting = ssl.create_default_context(cafile=authority._folder / "ca.pem")

    async def main() -> None:
        async with aiodist.Coordinator("tls://127.0.0.1:0", ssl=mutual[1]) as coordinator:
            with pytest.raises(aiodist.JoinError, match="refused this rank's certificate"):
                await aiodist.connect(
                    coordinator.address, rank=0, size=1, ssl=trusting, timeout=0.5
                )
            assert "TLS handshake failed: [SSL: PEER_DID_NOT_RETURN" in caplog.messages[0]
            [group] = await connected(coordinator.address, [mutual])
            await group.close()

    run(main())


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says nothing that makes sense is given up after a second, not after ten."""
    monkeypatch.setattr(caller, "REACH_TIMEOUT", 1.0)
    monkeypatch.setattr(greeting, "HANDSHAKE_TIMEOUT", 1.0)


async def loses_the_other(served: ssl.SSLContext, ranks: list[Any], says: str) -> None:
    """Of two ranks with these contexts, the first one cannot reach the other, and says why."""
    async with aiodist.Coordinator("tls://127.0.0.1:0", ssl=served) as coordinator:
        groups = await connected(coordinator.address, ranks)
        with pytest.raises(aiodist.PeerLostError, match=says):
            await groups[0].barrier(timeout=20)
        for group in groups:
            group.abort("over")
            await group._actor.gone()


@pytest.mark.usefixtures("soon")
def test_ranks_with_and_without_tls_do_not_talk(run: Any, mutual: Any) -> None:
    run(loses_the_other(mutual[1], [mutual, mutual[0]], "encrypted, this rank's connections"))


@pytest.mark.usefixtures("soon")
def test_a_peer_of_another_authority_is_lost(
    run: Any, tmp_path: Path, authority: Authority, mutual: Any
) -> None:
    other = Authority(tmp_path).contexts("other", mutual=True)
    mixed = (mutual[0], other[1])  # the coordinator knows it, peers do not

    run(loses_the_other(mutual[1], [mutual, mixed], r"no TLS .*check the certificate"))


@pytest.fixture
def called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller, "PAUSES", [])
    monkeypatch.setattr(caller, "LATER_PAUSES", [])


@pytest.mark.usefixtures("called_once")
@pytest.mark.parametrize(
    ("version", "kind", "says"),
    [
        (ssl.TLSVersion.TLSv1_3, "none", "accept .*: certificate required; give that rank one"),
        (ssl.TLSVersion.TLSv1_3, "foreign", "accept .*: unknown ca; give that rank one"),
        (ssl.TLSVersion.TLSv1_2, "foreign", "accept .*: unknown ca; give that rank one"),
        (ssl.TLSVersion.TLSv1_2, "none", "; check that both ranks have certificates"),
    ],
)
def test_a_rank_whose_certificate_is_refused_hears_what_to_do(
    run: Any,
    tmp_path: Path,
    authority: Authority,
    mutual: Any,
    version: ssl.TLSVersion,
    kind: str,
    says: str,
) -> None:
    """In TLS 1.3 it hears that after the handshake, in 1.2 amid it."""
    client = ssl.create_default_context(cafile=authority._folder / "ca.pem")
    client.maximum_version = version
    if kind == "foreign":
        Authority(tmp_path).contexts("other", mutual=True)
        client.load_cert_chain(tmp_path / "other.pem", tmp_path / "other.key")
    open_to_all = authority.contexts("coordinator", mutual=False)[1]

    run(loses_the_other(open_to_all, [(client, mutual[1]), mutual], f"{says}.*AIODIST_TLS_CERT"))


@pytest.mark.usefixtures("called_once")
def test_a_rank_that_listens_without_a_certificate_is_named(
    run: Any, authority: Authority, mutual: Any
) -> None:
    bare = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority._folder / "ca.pem")

    run(loses_the_other(mutual[1], [mutual, (mutual[0], bare)], "check that both ranks have cert"))


class BreakingSocket(FullSocket):
    """It is broken amid its write of this number."""

    room = True

    def __init__(self, sock: socket.socket, number: int) -> None:
        super().__init__(sock)
        self.left = number

    def send(self, data: Any, flags: int = 0) -> int:
        self.left -= 1
        sent = super().send(data if self.left else data[:-9], flags)
        if not self.left:
            self.shutdown(socket.SHUT_RDWR)
        return sent


@pytest.mark.parametrize("at", [6, 7, 10, 11])
def test_a_connection_that_breaks_amid_a_write_is_made_again(
    run: Any, mutual: Any, at: int
) -> None:
    async def main() -> None:
        async with aiodist.Coordinator("tls://127.0.0.1:0", ssl=mutual[1]) as coordinator:
            ranks = await connected(coordinator.address, [mutual] * 2, op_timeout=30)
            await asyncio.gather(*(group.barrier() for group in ranks))
            link: Any = ranks[0]._actor.endpoint.peer(1).link
            broken = link._socket = BreakingSocket(link._socket, at)
            xs = [np.full(300_000, group.rank + 1.0) for group in ranks]
            outs = [[np.empty_like(x) for _ in range(3)] for x in xs]
            works = [
                group.all_reduce(xs[group.rank], out=out, tag=f"{number}")
                for group in ranks
                for number, out in enumerate(outs[group.rank])
            ]
            await asyncio.gather(*works)
            assert all((out == 3.0).all() for mine in outs for out in mine)
            assert broken.left <= 0
            await asyncio.gather(*(group.close() for group in ranks))

    run(main())


@pytest.mark.parametrize("at", [1, 3, 10, 40, 150])
def test_a_connection_that_breaks_is_made_again(run: Any, mutual: Any, at: int) -> None:
    def cut(group: aiodist.Group, other: int) -> int:
        link = group._actor.endpoint.peer(other).link
        if not isinstance(link, TlsLink) or link.is_severed:
            return 0
        link._socket.shutdown(socket.SHUT_RDWR)
        return 1

    async def main() -> None:
        async with aiodist.Coordinator("tls://127.0.0.1:0", ssl=mutual[1]) as coordinator:
            ranks = await connected(coordinator.address, [mutual] * 2, op_timeout=30)
            await asyncio.gather(*(group.barrier() for group in ranks))
            arrays = [np.full(300_000, group.rank + 1.0) for group in ranks]
            works = [group.all_reduce(x) for group, x in zip(ranks, arrays, strict=True)]
            works += [group.all_gather(group.rank, tag="a") for group in ranks]
            for _ in range(at):
                await asyncio.sleep(0)
            cuts = cut(ranks[0], 1)
            outcomes = await asyncio.gather(*works)
            assert all((x == 3.0).all() for x in arrays)
            assert outcomes[2:] == [[0, 1]] * 2
            assert await asyncio.gather(*(group.all_reduce(1) for group in ranks)) == [2, 2]
            assert cuts == 1
            await asyncio.gather(*(group.close() for group in ranks))

    run(main())


async def test_ranks_take_their_certificates_from_the_environment(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, server = authority.contexts("node", mutual=True)
    folder = authority._folder
    for name, file in (("CA", "ca.pem"), ("CERT", "node.pem"), ("KEY", "node.key")):
        monkeypatch.setenv(f"AIODIST_TLS_{name}", str(folder / file))
    async with aiodist.Coordinator("tls://127.0.0.1:0", ssl=server) as coordinator:
        groups = await connected(coordinator.address, [None, None])
        assert await asyncio.gather(*[g.all_reduce(1) for g in groups]) == [2, 2]
        found = await status.ask(coordinator.address, None, 5.0)
        assert len(found["groups"][0]["members"]) == 2
        said = [one for m in groups[0]._actor.view.members for one in m.addresses]
        assert [one.partition("://")[0] for one in said if "//" in one] == ["tls", "tls"]
        await asyncio.gather(*[group.close() for group in groups])


async def test_without_a_certificate_ranks_of_one_host_still_meet(authority: Authority) -> None:
    client, server = authority.contexts("alone", mutual=False)
    async with aiodist.Coordinator("tls://127.0.0.1:0", ssl=server) as coordinator:
        groups = await connected(coordinator.address, [client, (client, None)])
        assert [group._actor.is_over for group in groups] == [False, False]
        assert await asyncio.gather(*[g.all_reduce(1) for g in groups]) == [2, 2]
        await asyncio.gather(*[group.close() for group in groups])


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"AIODIST_TLS_KEY": "x"}, r"AIODIST_TLS_CERT \(--tls-cert\) is not"),
        ({"AIODIST_TLS_CERT": "x"}, r"AIODIST_TLS_CA \(--tls-ca\) is not"),
        ({"AIODIST_TLS_CA": "/nowhere"}, r"AIODIST_TLS_CA=/nowhere \(--tls-ca\)"),
        (
            {"AIODIST_TLS_CA": "CA", "AIODIST_TLS_CERT": "/nowhere"},
            r"AIODIST_TLS_CERT=/nowhere \(--tls-cert\)",
        ),
    ],
)
def test_what_makes_no_sense_is_named(
    authority: Authority, environ: dict[str, str], says: str
) -> None:
    ca = str(authority._folder / "ca.pem")
    environ = {name: ca if value == "CA" else value for name, value in environ.items()}
    with pytest.raises(ValueError, match=says):
        contexts_in(environ, "tls://127.0.0.1:5")
    assert contexts_in(environ, "tcp://127.0.0.1:5") == (None, None)


async def test_a_certificate_that_is_not_trusted_names_what_to_trust(authority: Authority) -> None:
    _, server = authority.contexts("unknown", mutual=False)
    async with aiodist.Coordinator("tls://127.0.0.1:0", ssl=server) as coordinator:
        with pytest.raises(aiodist.JoinError, match=r"AIODIST_TLS_CA .*--tls-ca.* ssl=") as caught:
            await status.ask(coordinator.address, None, 5.0)
        assert "certificate verify failed" in str(caught.value).replace("_", " ").lower()


def test_options_of_commands_are_for_all_that_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.setenv(f"AIODIST_TLS_{name}", "as it was")
    tls.use("ca.pem", "rank.pem", None)
    assert [os.environ[f"AIODIST_TLS_{name}"] for name in ("CA", "CERT", "KEY")] == [
        *("ca.pem", "rank.pem", "as it was")
    ]
