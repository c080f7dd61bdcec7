"""How two sides show each other that both have a secret, without sending it.

Each side sends 32 random bytes; the proof is HMAC-SHA256 (RFC 2104) of both, keyed with the
secret. The role is part of it, so that a proof cannot be played back to the side that made it.

::

    who connects                              who listens
    Hello: nonce a           ──────────────>
                             <──────────────  Challenge: nonce b
    Proof: HMAC(secret,      ──────────────>  checks it; else the end, and nothing is said
       "member", a, b)
                             <──────────────  Welcome: HMAC(secret, "coordinator", a, b)
    checks it

Who listens sees a proof before it says anything but a random number, so a stranger learns nothing
of the group, not even whether it exists. A proof that was overheard is of no use later, for the
listener's nonce is another one then.

Members show the coordinator the token. Peers show each other the key of the two of them, which
comes from the token and from both member ids: 128 random bits each, that only members know. They
learn the ids of those who join later from the coordinator. Who one is, is said by a mark, from
which the id cannot be told.
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
    """`token` as bytes. Raises ValueError for an empty one, which would keep nobody out, and
    TypeError for what is no text (and is not shown: it may be the secret)."""
    if token is not None and not token:
        raise ValueError("the token is empty: give a token, or None for no authentication")
    if isinstance(token, str):
        return token.encode()
    if token is not None and not isinstance(token, bytes | bytearray):
        raise TypeError(f"a token is a str or bytes, not a value of type {type(token).__name__}")
    return token


def make_proof(
    secret: bytes, role: Role, first_nonce: bytes, second_nonce: bytes, about: bytes = b""
) -> bytes:
    """The 32 bytes that `role` shows. The first nonce is of the side that connects; `about` is
    said, too, and thereby vouched for."""
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
    """Whether `mac` is what `role` has to show; takes the same time for every wrong answer."""
    if len(first_nonce) != NONCE_BYTES or len(second_nonce) != NONCE_BYTES:
        return False
    expected = make_proof(secret, role, first_nonce, second_nonce, about)
    return hmac.compare_digest(mac, expected)


def membership_key(token: bytes | None, group: str, ids: Iterable[str]) -> bytes:
    """The secret that those share who have the token, and know these ids of one group."""
    said = b"aiodist membership\0" + pack_fields(group, *ids)
    return hmac.new(token or b"", said, hashlib.sha256).digest()


def mark_of(member_id: str) -> bytes:
    """What a member calls itself before it is known who listens: 8 bytes."""
    return hashlib.sha256(b"aiodist mark\0" + member_id.encode()).digest()[:8]
