"""How two sides show each other that both have the token, without sending it.

Each side sends 32 random bytes; the proof is HMAC-SHA256 (RFC 2104) of both, keyed with the
token. The role is part of it, so that a proof cannot be played back to the side that made it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

NONCE_BYTES = 32

Role = Literal["member", "coordinator"]


def make_proof(token: bytes, role: Role, member_nonce: bytes, coordinator_nonce: bytes) -> bytes:
    """The 32 bytes that `role` shows."""
    said = b"aiodist %s\0" % role.encode() + member_nonce + coordinator_nonce
    return hmac.new(token, said, hashlib.sha256).digest()


def check_proof(
    mac: bytes, token: bytes, role: Role, member_nonce: bytes, coordinator_nonce: bytes
) -> bool:
    """Whether `mac` is what `role` has to show; takes the same time for every wrong answer."""
    if len(member_nonce) != NONCE_BYTES or len(coordinator_nonce) != NONCE_BYTES:
        return False
    return hmac.compare_digest(mac, make_proof(token, role, member_nonce, coordinator_nonce))
