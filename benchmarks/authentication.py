"""What it would cost to authenticate frames between hosts, beside what TCP and TLS take.

    python -m benchmarks authentication [--rounds 300]

Prints the processor time of one side for a MiB of 256 KiB payloads, in µs, as a rate in GB/s, and
for a frame of 64 bytes, in µs: the least of all rounds. TCP and TLS go over the loopback device,
both sides in one thread, and half of it is counted. Needs `cryptography`, and does without TLS and
the ciphers if that is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import hmac
import importlib
import os
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from aiodist.wire.frames import PIECE

SMALL = 64
Way = Callable[[memoryview], object]
"""Handles a payload, as a sender or as a receiver."""


def digests() -> Iterator[tuple[str, Way]]:
    """Authentication alone, with what comes with Python."""
    key = os.urandom(32)
    yield "HMAC-SHA256", lambda data: hmac.digest(key, data, "sha256")
    yield "BLAKE2b, keyed", lambda data: hashlib.blake2b(data, key=key, digest_size=16).digest()


def ciphers() -> Iterator[tuple[str, Way]]:
    """Authentication, and with encryption, by `cryptography`. Raises ImportError without it."""
    aead: Any = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
    poly1305: Any = importlib.import_module("cryptography.hazmat.primitives.poly1305")
    key, nonce = os.urandom(32), os.urandom(12)
    aes, chacha = aead.AESGCM(key), aead.ChaCha20Poly1305(key)
    yield "AES-256-GCM, tag alone", lambda data: aes.encrypt(nonce, b"", data)
    yield "Poly1305, tag alone", lambda data: poly1305.Poly1305.generate_tag(key, data)
    yield "AES-256-GCM, encrypting", lambda data: aes.encrypt(nonce, data, None)
    yield "ChaCha20-Poly1305, encrypting", lambda data: chacha.encrypt(nonce, data, None)


def one_side(way: Way, nbytes: int, total: int) -> float:
    """Seconds of the processor for `total` bytes in payloads of `nbytes`."""
    data = memoryview(os.urandom(nbytes))
    start = time.process_time()
    for _ in range(total // nbytes):
        way(data)
    return time.process_time() - start


def through(out: Any, into: Any, nbytes: int, total: int) -> float:
    """Seconds of the processor for `total` bytes in payloads of `nbytes`, of both ends of a
    connection together. No more is on its way than one write."""
    data, room = memoryview(os.urandom(nbytes)), memoryview(bytearray(nbytes))
    start = time.process_time()
    for _ in range(total // nbytes):
        at = 0
        while at < nbytes:
            piece = data[at : at + (32 << 10)]
            out.sendall(piece)
            end = at + len(piece)
            while at < end:
                at += into.recv_into(room[at:end])
    return time.process_time() - start


@contextlib.contextmanager
def tcp() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        out = socket.create_connection(listener.getsockname())
        into, _ = listener.accept()
    with out, into:
        for end in (out, into):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield out, into


@contextlib.contextmanager
def tls(cipher: str) -> Iterator[tuple[Any, Any]]:
    """Both ends of an encrypted connection. Raises ImportError without `cryptography`, which makes
    certificates."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for context in (server, client):
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # whose ciphers can be chosen
        context.set_ciphers(cipher)
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate())
        file.flush()
        server.load_cert_chain(file.name)
    with tcp() as (out, into):
        ends: list[Any] = [None]

        def accept() -> None:
            ends[0] = server.wrap_socket(into, server_side=True)

        thread = threading.Thread(target=accept)
        thread.start()
        wrapped = client.wrap_socket(out)
        thread.join()
        yield wrapped, ends[0]
        wrapped.close()
        ends[0].close()


def certificate() -> bytes:
    """A key and a certificate of its own."""
    x509: Any = importlib.import_module("cryptography.x509")
    hashes: Any = importlib.import_module("cryptography.hazmat.primitives.hashes")
    ec: Any = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ec")
    coding: Any = importlib.import_module("cryptography.hazmat.primitives.serialization")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "benchmark")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = coding.Encoding.PEM
    private = key.private_bytes(pem, coding.PrivateFormat.PKCS8, coding.NoEncryption())
    found: bytes = private + made.public_bytes(pem)
    return found


def show(label: str, measure: Callable[[int, int], float], rounds: int) -> None:
    """`measure`: the seconds of one side for payloads of a size, and for how many bytes."""
    large = min(measure(PIECE, 1 << 20) for _ in range(rounds))
    small = min(measure(SMALL, SMALL * 200) for _ in range(rounds)) / 200
    rate = (1 << 20) / large / 1e9
    print(f"{label:30} {large * 1e6:8.0f} {rate:8.2f} {small * 1e6:8.2f}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Measure each way in turn."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks authentication",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=300)
    rounds: int = parser.parse_args(arguments).rounds
    print(f"{'':30} {'µs/MiB':>8} {'GB/s':>8} {'µs/64 B':>8}")
    with tcp() as (out, into):
        show("TCP", lambda n, total: through(out, into, n, total) / 2, rounds)
    try:
        for label, cipher in (
            ("TLS, AES-256-GCM", "ECDHE-ECDSA-AES256-GCM-SHA384"),
            ("TLS, ChaCha20-Poly1305", "ECDHE-ECDSA-CHACHA20-POLY1305"),
        ):
            with tls(cipher) as (out, into):
                show(label, lambda n, t, a=out, b=into: through(a, b, n, t) / 2, rounds)
        ways = [*ciphers(), *digests()]
    except ImportError as error:
        print(f"not measured: TLS and ciphers ({error}): install cryptography", file=sys.stderr)
        ways = [*digests()]
    for label, way in ways:
        show(label, lambda n, total, way=way: one_side(way, n, total), rounds)
    return 0
