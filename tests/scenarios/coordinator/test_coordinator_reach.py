"""Reaching a coordinator: addresses, tokens, TLS, and what listens there instead."""

from __future__ import annotations

import asyncio
import errno
import math
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from idle_time import on_idle_time

from aiodist.control import dial as control_dial
from aiodist.control.client import ControlClient
from aiodist.control.dial import ForeignServiceError
from aiodist.coordinator import entrance
from aiodist.coordinator.actor import Coordinator
from aiodist.errors import AuthenticationError, JoinError, JoinTimeoutError
from aiodist.launching.spawn import free_port
from aiodist.wire.codec import encode_message
from aiodist.wire.limits import PROTOCOL_VERSION
from aiodist.wire.messages import Challenge, Failed, Failure, Goodbye, Welcome

Play = Callable[[Callable[..., Coroutine[Any, Any, None]]], None]


def test_nobody_listens(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        with pytest.raises(JoinTimeoutError, match=f"no coordinator answered at {address} for 0"):
            await site.process(address, timeout=0.1)
        with pytest.raises(
            JoinError, match=r"\(1 attempt: .*Is it up\? .* in code .* run .* firewall"
        ) as info:
            await site.process(address, retry=False)
        assert not isinstance(info.value, JoinTimeoutError)
        with pytest.raises(JoinError, match=r"listens on inproc://absent .* Make an `aiodist\.C"):
            await site.process("inproc://absent", retry=False)
        with pytest.raises(JoinError, match="No such file"):
            await site.process("unix:///nowhere/s", retry=False)
        with pytest.raises(ValueError, match="has no scheme"):
            await site.process("nonsense")


def test_a_coordinator_that_comes_later_is_found(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        opening = asyncio.create_task(site.process(address))
        with pytest.raises(JoinError):
            await site.process(address, retry=False)
        async with Coordinator(address):
            process = await opening
            assert await process.join(size=1)
            process.client.close()


def test_names_are_resolved(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        async with Coordinator("tcp://localhost:0") as coordinator:
            assert coordinator.address.startswith("tcp://localhost:")
            process = await site.process(coordinator.address)
            assert process.client.local_host == "127.0.0.1"


def test_ipv6(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        try:
            coordinator = Coordinator("tcp://[::1]:0")
            await coordinator.start()
        except OSError:
            pytest.skip("no IPv6 here")
        process = await site.process(coordinator.address)
        assert (process.client.local_host, process.client.seen_host) == ("::1", "::1")
        process.client.close()
        await coordinator.stop()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes(8),
        encode_message(Goodbye()),
        encode_message(Challenge(bytes(32), False, magic="other")),
        encode_message(Challenge(bytes(32), False)) + encode_message(Goodbye()),
    ],
    ids=["http", "zeros", "no challenge", "another magic", "no welcome"],
)
def test_a_foreign_service_is_told_apart_at_once(play: Play, answer: bytes) -> None:
    @play
    async def scenario(site: Any) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(answer)
            await reader.read()

        address = await site.serve(handler)
        with pytest.raises(ForeignServiceError, match=r"is no aiodist coordinator.*check the port"):
            await site.process(address)


@on_idle_time
def test_a_service_that_hangs_up_is_tried_again(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be a proxy whose coordinator is yet to come."""
    monkeypatch.setattr(control_dial, "SILENT_SECONDS", 0.0)

    @play
    async def scenario(site: Any) -> None:
        calls = []

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            calls.append(await reader.read(10))

        address = await site.serve(handler)
        silent = "closes every connection without a greeting.* TLS needs tls://"
        with pytest.raises(JoinTimeoutError, match=silent):
            await site.process(address, timeout=0.3)
        assert len(calls) > 3
        [warning] = [one for one in caplog.messages if "without a greeting" in one]
        assert warning.endswith("Trying until 0.3 s are over.")
        with pytest.raises(JoinError, match=silent):
            await site.process(address, retry=False)
        caplog.clear()


def test_a_service_that_says_nothing_is_given_up(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_dial, "ATTEMPT_SECONDS", 0.02)

    @play
    async def scenario(site: Any) -> None:
        accepted = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set()
            await reader.read()

        address = await site.serve(handler)
        with pytest.raises(JoinError, match=r"\(1 attempt: it did not answer"):
            await site.process(address, retry=False)
        await accepted.wait()  # a busy machine may accept the connection after it was given up


def test_a_coordinator_that_breaks_off_is_tried_again(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(encode_message(Challenge(bytes(32), False)))

        address = await site.serve(handler)
        with pytest.raises(JoinError, match="it broke off the greeting"):
            await site.process(address, retry=False)


def test_other_versions(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        answers = [
            encode_message(Challenge(bytes(32), False, version=99)),
            encode_message(Failed(Failure.VERSION, "I speak 99")),
        ]

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(answers.pop(0))
            await reader.read()

        address = await site.serve(handler)
        text = f"speaks version 99 of the protocol, this process {PROTOCOL_VERSION}"
        with pytest.raises(JoinError, match=text):
            await site.process(address)
        with pytest.raises(JoinError, match="refused: I speak 99"):
            await site.process(address)


def test_a_token_lets_in_who_has_it(play: Play, any_address: str) -> None:
    @play
    async def scenario(site: Any) -> None:
        async with Coordinator(any_address, token="secret") as coordinator:
            process = await site.process(coordinator.address, token="secret")
            assert await process.join(size=1)
            process.client.close()
            process = await site.process(coordinator.address, token=b"secret")
            with pytest.raises(AuthenticationError, match="not the one of this coordinator"):
                await site.process(coordinator.address, token="Secret")
            with pytest.raises(AuthenticationError, match=r"asks for a token\. Set AIODIST_TOKEN"):
                await site.process(coordinator.address)
            process.client.close()


def test_the_coordinator_has_to_have_the_token_too(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        with pytest.raises(AuthenticationError, match="asks for none, so it cannot show"):
            await site.process(coordinator.address, token="secret")

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(encode_message(Challenge(bytes(32), True)))
            await reader.read(1)
            writer.write(encode_message(Welcome("127.0.0.1", bytes(32), "c", 1, True)))
            await reader.read()

        address = await site.serve(handler)
        with pytest.raises(AuthenticationError, match="did not show that it has the token"):
            await site.process(address, token="secret")


def test_what_is_in_use_is_not_taken(play: Play, any_address: str) -> None:
    @play
    async def scenario(site: Any) -> None:
        async with Coordinator(any_address) as coordinator:
            with pytest.raises(OSError, match="in use") as info:
                await Coordinator(coordinator.address).start()
            assert info.value.errno == errno.EADDRINUSE
            process = await site.process(coordinator.address)
            assert await process.join(size=1)
            process.client.close()
            address = coordinator.address
        async with Coordinator(address):
            pass


def test_a_unix_socket_is_for_its_user_and_is_cleaned_up(play: Play, tmp_path: Path) -> None:
    @play
    async def scenario(site: Any) -> None:
        path = tmp_path / "s"
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        async with Coordinator(f"unix://{path}"):
            assert path.stat().st_mode & 0o777 == 0o600
        assert not path.exists()
        path.write_text("a file of somebody")
        with pytest.raises(OSError, match=r"cannot listen on unix://.*in use"):
            await Coordinator(f"unix://{path}").start()
        assert path.read_text() == "a file of somebody"


def test_addresses_that_cannot_be_listened_on(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        with pytest.raises(OSError, match=r"cannot listen on tcp://192\.0\.2\.1:1: "):
            await Coordinator("tcp://192.0.2.1:1").start()
        with pytest.raises(OSError, match="cannot listen on unix:///nowhere/s: No such file"):
            await Coordinator("unix:///nowhere/s").start()


def test_what_a_coordinator_is_told_has_to_make_sense(play: Play) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(ValueError, match="needs ssl="):
        Coordinator("tls://127.0.0.1:0")
    with pytest.raises(ValueError, match="is for tcp:// and tls://"):
        Coordinator("unix:///tmp/s", ssl=context)
    with pytest.raises(ValueError, match="the token is empty"):
        Coordinator(token="")
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        _ = Coordinator().address

    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        with pytest.raises(RuntimeError, match="listens already"):
            await coordinator.start()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = (
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=test -addext subjectAltName=IP:127.0.0.1 -keyout {path} -out {path}.crt"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=30)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@on_idle_time
def test_tls(play: Play, certificate: Path) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate)
    client = ssl.create_default_context(cafile=f"{certificate}.crt")

    @play
    async def scenario(site: Any) -> None:
        async with Coordinator("tcp://127.0.0.1:0", ssl=server, token="secret") as coordinator:
            assert coordinator.address.startswith("tls://127.0.0.1:")
            one = await site.process(coordinator.address, ssl=client, token="secret")
            two = await site.process(
                coordinator.address.replace("tls", "tcp"), ssl=client, token="secret"
            )
            await asyncio.gather(one.join(), two.join())
            value = bytes(range(256)) * 4096
            await one.store.set("k", value)
            assert await two.store.get("k") == value
            with pytest.raises(JoinError, match=r"no TLS connection .*CERTIFICATE_VERIFY_FAILED"):
                await site.process(coordinator.address)
            with pytest.raises(JoinTimeoutError, match="a coordinator with TLS needs tls://"):
                await site.process(coordinator.address.replace("tls", "tcp"), timeout=0.1)
        async with Coordinator("tcp://127.0.0.1:0") as plain:
            with pytest.raises(JoinError, match=r"no TLS .*PROTOCOL_VERSION.* a tls:// coord"):
                await site.process(plain.address, ssl=client)
            one.client.close()
            two.client.close()


def test_cancelling_closes_what_was_opened(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        connected = asyncio.Event()
        ended = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set()
            await reader.read()
            ended.set()

        opening = asyncio.create_task(ControlClient.open(await site.serve(handler)))
        await connected.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await ended.wait()


def test_who_finds_a_full_house_comes_again(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one who asks is told so, and tries until its own timeout."""
    answers: list[Failure] = []
    turned_away = asyncio.Event()
    take = control_dial._Greeting._take

    def counted(greeting: Any, message: Any) -> None:
        if isinstance(message, Failed):
            answers.append(message.kind)
            turned_away.set()
        take(greeting, message)

    monkeypatch.setattr(control_dial._Greeting, "_take", counted)
    monkeypatch.setattr(entrance, "MOMENT_SECONDS", math.inf)

    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        turned_away.clear()
        coordinator._clients._entrance._unproven.most = 2
        mute = await site.raw(coordinator.address)
        # Its time may end amid an attempt.
        with pytest.raises(JoinTimeoutError, match=r"it is busy: too many new conn|did not answer"):
            await site.process(coordinator.address, timeout=0.1)
        turned_away.clear()
        opening = asyncio.ensure_future(site.process(coordinator.address))
        await turned_away.wait()
        mute.writer.close()
        assert await (await opening).join(size=1)
        assert {*answers} == {Failure.BUSY}


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_burst_of_joins(play: Play, certificate: Path, encrypted: bool) -> None:
    """Five times as many as there is room for."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), None
    server.load_cert_chain(certificate)
    if encrypted:
        client = ssl.create_default_context(cafile=str(certificate))

    @play
    async def scenario(site: Any) -> None:
        context = server if encrypted else None
        async with Coordinator("tcp://127.0.0.1:0", ssl=context) as coordinator:
            coordinator._clients._entrance._unproven.most = 16
            async with asyncio.TaskGroup() as group:
                for _ in range(40):
                    group.create_task(site.process(coordinator.address, ssl=client))
            assert len(site.clients) == 40
            await site.close()
