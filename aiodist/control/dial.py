"""Reach the coordinator: connect, TLS, greeting, and clear errors."""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import ssl as tls
from dataclasses import dataclass

from aiodist.control.connection import ControlSocket
from aiodist.errors import AuthenticationError, JoinError, JoinTimeoutError, ProtocolError
from aiodist.transports import inproc_names
from aiodist.transports.certificates import CA, CERT, TLS_BROKEN
from aiodist.transports.silence import round_trip
from aiodist.transports.surroundings import (
    chooser_on,
    closed_on_error,
    look_up,
    new_socket,
    ready,
)
from aiodist.wire.activity import LONG_WAIT
from aiodist.wire.address import Address, parse_address
from aiodist.wire.codec import decode_message, encode_message
from aiodist.wire.frames import Frame
from aiodist.wire.limits import PROTOCOL_VERSION
from aiodist.wire.messages import MAGIC, Challenge, Failed, Failure, Hello, Message, Proof, Welcome
from aiodist.wire.proof import NONCE_BYTES, check_proof, make_proof, secret_of

log = logging.getLogger("aiodist.control")

ATTEMPT_SECONDS = 5.0
"""The longest time of one attempt, because a firewall that drops packets gives no answer at all."""

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.5

HUSHED = "it did not answer"

SILENT = "it closed the connection without a greeting"
SILENT_TLS = f"{SILENT}, after the TLS handshake"
"""With TLS 1.3 this is how a rank sees that its certificate was refused: its own handshake is over
before the coordinator has seen the certificate."""
SILENT_SECONDS = 3.0
"""Seconds after which the log tells of a service that only closes connections.

A coordinator may do that now and then, when it ends or has too many connections.
"""


class ForeignServiceError(JoinError):
    """The service at the address is not an aiodist coordinator."""


class NoAnswerError(JoinError):
    """No coordinator answered. `last`: what the last attempt met."""

    def __init__(self, message: str, last: str) -> None:
        super().__init__(message)
        self.last = last


class _Refused(Exception):
    """An answer that would be the same at another attempt."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@dataclass(frozen=True, slots=True)
class Greeted:
    """A connection whose greeting is complete, and what Welcome said.

    `trip` is the round trip in seconds, 0 if it is not known.
    """

    sock: ControlSocket
    local_host: str
    trip: float
    welcome: Welcome


async def dial(
    address: str,
    *,
    token: str | bytes | None,
    ssl: tls.SSLContext | None,
    timeout: float,
    retry: bool,
    caller: str = "",
) -> Greeted:
    """Connect to the coordinator at `address` and exchange greetings.

    `caller` is the line of the program that waits, for the log. Unless `retry` is False, this tries
    again until `timeout` seconds are over, if that may help.

    Raises JoinTimeoutError, JoinError, ForeignServiceError, AuthenticationError, and ValueError for
    a bad address or an empty token.
    """
    target = parse_address(address)
    # What may change in a moment is tried again, and everything else is an error at once::
    #
    #     nothing listens, or the name is unknown     it may be about to start: again
    #     the connection ends without a word          it ends, or is overrun: again. The log says so
    #                                                 after a while, for a proxy that never stops
    #     it says that it is busy                     thousands join at once: again
    #     it does not answer within an attempt        a firewall that drops packets: again
    #     another protocol, TLS that does not fit,    another attempt would find the same: an error
    #     a wrong token or version
    secret = secret_of(token)
    loop = asyncio.get_running_loop()
    start = loop.time()
    chooser = chooser_on(loop)
    pause = FIRST_PAUSE
    attempts = 0
    warned = told = False
    last = HUSHED
    while True:
        attempts += 1
        patient_until = loop.time() + ATTEMPT_SECONDS
        until = min(start + timeout, patient_until)
        try:
            async with asyncio.timeout_at(until):
                return await _attempt(target, secret, ssl, until)
        except _Refused as refused:
            raise refused.error from None
        except TimeoutError:
            # If the last attempt was cut short, the error before it says more.
            if loop.time() >= patient_until:
                last = HUSHED
        except OSError as error:
            last = error.strerror or str(error) or type(error).__name__
        spent = loop.time() - start
        if not retry:
            raise NoAnswerError(_unreachable(target, spent, attempts, last), last)
        left = timeout - spent
        if last in (SILENT, SILENT_TLS) and spent > SILENT_SECONDS and not warned:
            warned = told = True
            log.warning("%s Trying until %g s are over.", _silent(target, last), timeout)
        if spent > LONG_WAIT and not told and left >= FIRST_PAUSE:
            told = True
            tried = _unreachable(target, spent, attempts, last)
            log.warning("%s Trying until %g s are over%s", tried, timeout, caller)
        if left < FIRST_PAUSE:
            raise JoinTimeoutError(_unreachable(target, spent, attempts, last))
        # Spread in time, because there may be thousands of ranks.
        await asyncio.sleep(min(pause * chooser.uniform(0.5, 1.0), left / 2))
        pause = min(2 * pause, LONGEST_PAUSE)


def _unreachable(target: Address, spent: float, attempts: int, last: str) -> str:
    tries = "1 attempt" if attempts == 1 else f"{attempts} attempts, the last one"
    tried = f"no coordinator answered at {target} for {spent:.1f} s ({tries}: {last})"
    if last in (SILENT, SILENT_TLS):
        return f"{tried}. {_silent(target, last)}"
    if target.scheme == "inproc":
        return f"{tried}. Make an `aiodist.Coordinator` for this address in this process first"
    if target.scheme == "tls":
        serve = (
            "No rank serves a tls:// address: run `aiodist coordinator` with --tls-cert, or use "
            "`aiodist.Coordinator` with ssl="
        )
    else:
        serve = (
            "Rank 0 serves an address of the environment (AIODIST_ADDRESS). For an address given "
            "in code or to a command, for several nodes, or for an elastic group, run `aiodist "
            "coordinator`, or use `aiodist.Coordinator`"
        )
    return (
        f"{tried}. Is it up? {serve}. Are host and port right on this rank? Is there a firewall "
        "between?"
    )


OTHERS = "torchrun keeps a TCPStore on MASTER_PORT; a coordinator with TLS needs tls://"


def _silent(target: Address, last: str) -> str:
    if last == SILENT_TLS:
        return (
            f"What listens at {target} closes every connection after the TLS handshake: it has "
            "probably refused this rank's certificate (none given, expired, or of another "
            f"authority). See the coordinator's log. Name a certificate by {CERT} (commands: "
            "--tls-cert), or pass ssl= to connect."
        )
    return (
        f"What listens at {target} closes every connection without a greeting: is it another "
        f"service ({OTHERS}), or a proxy that has no coordinator behind it yet?"
    )


def _foreign(target: Address, what: str) -> ForeignServiceError:
    return ForeignServiceError(
        f"what listens at {target} is no aiodist coordinator: {what}. Another service has that "
        f"port ({OTHERS}): check the port, or give the coordinator another one"
    )


async def _attempt(
    target: Address, token: bytes | None, context: tls.SSLContext | None, until: float
) -> Greeted:
    sock = await _connect(target, until)
    with closed_on_error(sock):
        local_host = "127.0.0.1"
        # The round trip of the connecting itself, because later answers may have waited to share a
        # packet.
        trip = round_trip(sock) or 0.0
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            local_host = sock.getsockname()[0].removeprefix("::ffff:")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if target.scheme == "tls" or (target.scheme == "tcp" and context is not None):
            sock = await _encrypt(sock, context or tls.create_default_context(), target)
    with closed_on_error(sock):  # TLS has put another socket in its place
        greeting = _Greeting(sock, target, token)
    with closed_on_error(greeting.sock):
        welcome = await greeting.done
    return Greeted(greeting.sock, local_host, trip, welcome)


async def _connect(target: Address, until: float) -> socket.socket:
    if target.scheme == "inproc":
        return inproc_names.connect(target.host)
    if target.scheme == "unix":
        return await _connect_one(socket.AF_UNIX, target.path)
    found = await look_up(target.host, target.port)
    failed: OSError = OSError(errno.EADDRNOTAVAIL, f"{target.host} has no address")
    now = asyncio.get_running_loop().time
    for tried, (family, _, _, _, where) in enumerate(found):
        # Each address has its share of the time, because one that gives no answer would take all.
        share = (until - now()) / (len(found) - tried)
        try:
            async with asyncio.timeout(share):
                return await _connect_one(family, where)
        except OSError as error:
            failed = error
    raise failed


async def _connect_one(family: int, where: tuple[object, ...] | str) -> socket.socket:
    sock = new_socket(family)
    sock.setblocking(False)
    with closed_on_error(sock):
        await asyncio.get_running_loop().sock_connect(sock, where)
        if family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname() == sock.getpeername():
            # A connection to a free port of this host can, by chance, connect to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "no process listens at this address")
    return sock


async def _encrypt(sock: socket.socket, context: tls.SSLContext, target: Address) -> tls.SSLSocket:
    """Make the TLS handshake. Returns the socket that takes the place of `sock`."""
    loop = asyncio.get_running_loop()
    secure = context.wrap_socket(
        sock,
        server_hostname=target.host,
        do_handshake_on_connect=False,
    )
    with closed_on_error(secure):
        while True:
            try:
                secure.do_handshake()
                return secure
            except tls.SSLWantReadError:
                await ready(secure, loop.add_reader, loop.remove_reader)
            except tls.SSLWantWriteError:
                await ready(secure, loop.add_writer, loop.remove_writer)
            except TLS_BROKEN as error:
                what = f"it broke off the TLS handshake: {error.reason or error}"
                raise ConnectionResetError(errno.ECONNRESET, what) from None
            except tls.SSLError as error:
                raise _Refused(_no_tls(target, error)) from None


def _no_tls(target: Address, error: tls.SSLError) -> JoinError:
    why = error.reason or error
    if isinstance(error, tls.SSLCertVerificationError):
        why = f"{why} ({error.verify_message})"
    return JoinError(
        f"no TLS connection to {target}: {why}. Is it a tls:// coordinator? Is "
        "its certificate from an authority that this process trusts? Name that authority by "
        f"{CA} (commands: --tls-ca), or pass ssl= to connect. Does it ask for a certificate? "
        f"Name one by {CERT} (commands: --tls-cert)"
    )


class _Greeting:
    """The greeting: Hello →, ← Challenge, Proof →, ← Welcome. `done` gives Welcome."""

    def __init__(self, sock: socket.socket, target: Address, token: bytes | None) -> None:
        self.done: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._target = target
        self._token = token
        # The coordinator's proof must contain this.
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._challenge: Challenge | None = None  # None: the coordinator has said nothing yet
        self._silence = SILENT_TLS if isinstance(sock, tls.SSLSocket) else SILENT
        # Goes on to the client if all is well.
        self.sock = ControlSocket(sock, self._on_frame, self._on_closed)
        self.sock.send(encode_message(Hello(self._nonce)))

    def _on_frame(self, frame: Frame) -> None:
        if not self.done.done():
            _, message = decode_message(frame, rows=False)
            try:
                self._take(message)
            except (ProtocolError, AuthenticationError, JoinError) as error:
                self._fail(_Refused(error))

    def _take(self, message: Message) -> None:
        if isinstance(message, Failed):
            if message.kind is Failure.AUTHENTICATION:
                raise AuthenticationError(
                    f"the coordinator at {self._target} refused this process: {message.text}. "
                    "Set AIODIST_TOKEN to the token that the coordinator was given. A program may "
                    "pass it to connect instead, as token="
                )
            if message.kind is Failure.BUSY:
                self._fail(OSError(errno.EBUSY, f"it is busy: {message.text}"))
                return
            raise JoinError(f"the coordinator at {self._target} refused: {message.text}")
        if self._challenge is None:
            if not isinstance(message, Challenge) or message.magic != MAGIC:
                raise _foreign(self._target, f"it greets with {type(message).__name__}")
            if message.version != PROTOCOL_VERSION:
                raise JoinError(
                    f"the coordinator at {self._target} speaks version {message.version} of the "
                    f"protocol, this process {PROTOCOL_VERSION}: install the same aiodist on both"
                )
            self._on_challenge(message)
        else:
            if not isinstance(message, Welcome):
                raise _foreign(self._target, f"it welcomes with {type(message).__name__}")
            self._on_welcome(self._challenge, message)

    def _on_challenge(self, challenge: Challenge) -> None:
        self._challenge = challenge
        if self._token is not None and not challenge.token_needed:
            raise AuthenticationError(
                f"a token was given, but the coordinator at {self._target} asks for none, so "
                "it cannot show that it is the right one: start it with the token, or pass no "
                "token= and unset AIODIST_TOKEN"
            )
        mac = b""
        if self._token is not None:
            mac = make_proof(self._token, "member", self._nonce, challenge.nonce)
        self.sock.send(encode_message(Proof(mac)))

    def _on_welcome(self, challenge: Challenge, welcome: Welcome) -> None:
        if self._token is not None and not check_proof(
            welcome.mac, self._token, "coordinator", self._nonce, challenge.nonce
        ):
            raise AuthenticationError(
                f"the coordinator at {self._target} did not show that it has the token: is it "
                "the right one?"
            )
        self.sock.welcomed()
        self.done.set_result(welcome)

    def _fail(self, error: OSError | _Refused) -> None:
        """Fail the greeting. After an OSError, another attempt may go better."""
        if not self.done.done():
            self.done.set_exception(error)

    def _on_closed(self, error: Exception) -> None:
        if isinstance(error, ProtocolError):
            what = f"its answer is not of the protocol ({error})"
            self._fail(_Refused(_foreign(self._target, what)))
        elif isinstance(error, tls.SSLError) and not isinstance(error, TLS_BROKEN):
            self._fail(_Refused(_no_tls(self._target, error)))
        elif self._challenge is None:
            self._fail(OSError(errno.ECONNRESET, self._silence))
        else:
            self._fail(OSError(errno.ECONNRESET, f"it broke off the greeting: {error}"))
