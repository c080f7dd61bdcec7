"""How two sides show each other that both have a secret, without sending it.

Each side sends 32 random bytes. The proof is the HMAC-SHA256 (RFC 2104) of both, keyed with the
secret. It contains the role, so that a proof cannot be sent back to the side that made it.

::

    connects                                  listens

    Hello: nonce a           ──────────────>
                             <──────────────  Challenge: nonce b
    Proof: HMAC(secret,      ──────────────>  checks it, or closes without a word
       "member", a, b)
                             <──────────────  Welcome: HMAC(secret, "coordinator", a, b)
    checks it

The listener sees a proof before it says anything but a random number, so a stranger learns nothing
of the group, not even whether it exists. A proof that was overheard is useless later, because the
listener then has another nonce.

Members show the coordinator the token. Two peers show each other a key of their own, made of the
token and both member ids. These ids are 128 random bits that only members know; the coordinator
tells members the ids of those that join later. A member names itself by a mark, from which its id
cannot be derived.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Literal

from aiodist.wire.frames import pack_fields

NONCE_BYTES = 32

Role = Literal["member", "coordinator", "dialler", "listener"]


def secret_of(token: str | bytes | None) -> bytes | None:
    """Return `token` as bytes.

    Raises ValueError for an empty token, which would keep no process out. Raises TypeError for
    another type, without the value, because that may be the secret.
    """
    if token is not None and not token:
        raise ValueError("the token is empty: give a token, or None for no authentication")
    if isinstance(token, str):
        return token.encode(errors="surrogateescape")  # as os.environ decodes bytes
    if token is not None and not isinstance(token, bytes | bytearray):
        raise TypeError(f"a token is a str or bytes, not a value of type {type(token).__name__}")
    return token


def make_proof(
    secret: bytes, role: Role, first_nonce: bytes, second_nonce: bytes, about: bytes = b""
) -> bytes:
    """Return the 32 bytes that `role` shows.

    The first nonce is that of the side that connects. `about` is covered by the proof as well.
    """
    said = b"aiodist %s\0" % role.encode() + first_nonce + second_nonce + about
    return hmac.new(secret, said, hashlib.sha256).digest()


def check_proof(
    mac: bytes,
    secret: bytes,
    role: Role,
    first_nonce: bytes,
    second_nonce: bytes,
    about: bytes = b"",
) -> bool:
    """Tell whether `mac` is right for `role`. Takes the same time for every wrong value."""
    if len(first_nonce) != NONCE_BYTES or len(second_nonce) != NONCE_BYTES:
        return False
    expected = make_proof(secret, role, first_nonce, second_nonce, about)
    return hmac.compare_digest(mac, expected)


def membership_key(token: bytes | None, group: str, ids: Iterable[str]) -> bytes:
    """Return the secret shared by all that have the token and know these ids of one group."""
    said = b"aiodist membership\0" + pack_fields(group, *ids)
    return hmac.new(token or b"", said, hashlib.sha256).digest()


def mark_of(member_id: str) -> bytes:
    """Return what a member calls itself before it knows who listens: 8 bytes."""
    return hashlib.sha256(b"aiodist mark\0" + member_id.encode()).digest()[:8]
