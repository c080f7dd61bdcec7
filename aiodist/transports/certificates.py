"""TLS from the environment: the trusted authority, and the certificate to show."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from aiodist.transports.tls import TlsContexts
from aiodist.wire.address import parse_address

CA, CERT, KEY = "AIODIST_TLS_CA", "AIODIST_TLS_CERT", "AIODIST_TLS_KEY"
"""The certificate of the authority for coordinator and ranks; the certificate of this process; its
key, which may be in the same file."""

TLS_BROKEN = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""The connection ended. All other errors of TLS mean that the two sides do not agree."""

_BY = f"({CERT} and {KEY}, or load_cert_chain on both contexts of ssl=)"


def contexts_of(
    given: ssl.SSLContext | tuple[ssl.SSLContext | None, ssl.SSLContext | None] | None,
    environ: Mapping[str, str],
    address: str,
) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Return the contexts as a client and as a server that ``ssl=`` gives; None: `contexts_in`.

    Raises TypeError for anything else.
    """
    if given is None:
        return contexts_in(environ, address)
    pair = given if isinstance(given, tuple) else (given, None)
    if len(pair) != 2 or not all(one is None or isinstance(one, ssl.SSLContext) for one in pair):
        raise TypeError(f"ssl is an ssl.SSLContext, or (client side, server side), not {given!r}")
    return pair


def contexts_in(
    environ: Mapping[str, str], address: str
) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Return the contexts of this process as a client and as a server, for a coordinator at
    `address`.

    None if that is not ``tls://``, or if the environment has no settings. Both show certificates.
    Raises ValueError that names the variable and what is wrong with it.
    """
    ca, cert, key = [environ.get(name, "").strip() for name in (CA, CERT, KEY)]
    if parse_address(address).scheme != "tls" or not (ca or cert or key):
        return None, None
    if key and not cert:
        raise ValueError(
            f"{KEY} (--tls-key) is set, but {CERT} (--tls-cert) is not: expected the certificate "
            "of that key"
        )
    if not ca:
        raise ValueError(
            f"{CERT} (--tls-cert) is set, but {CA} (--tls-ca) is not: expected the certificate of "
            "the authority that has issued those of all ranks"
        )
    try:
        client = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ValueError(
            f"{CA}={ca} (--tls-ca): expected a file of certificates ({error})"
        ) from None
    if not cert:
        return client, None
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
    server.verify_mode = ssl.CERT_REQUIRED
    try:
        for context in (client, server):
            context.load_cert_chain(cert, key or None)
    except OSError as error:
        names = f"{CERT}={cert} (--tls-cert)" + (f" and {KEY}={key} (--tls-key)" if key else "")
        raise ValueError(f"{names}: expected a certificate and its key ({error})") from None
    return client, server


def both(client: ssl.SSLContext | None, server: ssl.SSLContext | None) -> TlsContexts | None:
    """Return what links between ranks use; None: TCP without encryption."""
    return None if client is None or server is None else TlsContexts(client, server)


def advice(error: BaseException | None) -> str:
    """Return what to do about an error of TLS between ranks; "": it is not about certificates.

    An alert is what the other rank said. In TLS 1.3 it may come after the caller's handshake. Other
    ranks hear the text as well, if one of the two is ruled lost, so it does not say "this rank".
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            "check the certificate of the rank that was called (its dates, its names, and its "
            f"authority), and the authority that the rank which called trusts ({CA}, or ssl=)"
        )
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    alert = (reason or "").partition("_ALERT_")[2].replace("_", " ").lower()
    if alert == "handshake failure":
        return f"check that both ranks have certificates {_BY}"
    if alert == "unknown ca" or "certificate" in alert:
        return (
            f"it did not accept the certificate of the rank that called: {alert}; give that rank "
            f"one that all trust {_BY}"
        )
    return ""
