"""Proofs of a token."""

from __future__ import annotations

import pytest

from aiodist.wire.proof import check_proof, make_proof, mark_of, membership_key, secret_of

ONE, TWO = bytes(32), b"2" * 32


def test_a_token_is_text_or_bytes_but_not_empty() -> None:
    assert secret_of("é") == secret_of("é".encode()) == b"\xc3\xa9"
    assert secret_of(None) is None
    for empty in ("", b""):
        with pytest.raises(ValueError, match="the token is empty"):
            secret_of(empty)
    with pytest.raises(TypeError, match="a str or bytes, not a value of type int") as caught:
        secret_of(41)  # type: ignore[arg-type]
    assert "41" not in str(caught.value)


def test_the_right_token_is_proved() -> None:
    mac = make_proof(b"secret", "member", ONE, TWO)
    assert len(mac) == 32
    assert check_proof(mac, b"secret", "member", ONE, TWO)


def test_nothing_else_is() -> None:
    mac = make_proof(b"secret", "member", ONE, TWO)
    assert not check_proof(mac, b"other", "member", ONE, TWO)
    assert not check_proof(mac, b"secret", "coordinator", ONE, TWO)
    assert not check_proof(mac, b"secret", "member", TWO, ONE)
    assert not check_proof(b"", b"secret", "member", ONE, TWO)


def test_short_nonces_prove_nothing() -> None:
    mac = make_proof(b"secret", "member", b"", TWO)
    assert not check_proof(mac, b"secret", "member", b"", TWO)
    mac = make_proof(b"secret", "member", ONE, b"")
    assert not check_proof(mac, b"secret", "member", ONE, b"")


def test_members_have_a_key_of_their_own() -> None:
    key = membership_key(b"token", "g", ["a", "b"])
    assert key == membership_key(b"token", "g", ["a", "b"])
    others = [
        membership_key(None, "g", ["a", "b"]),
        membership_key(b"token", "h", ["a", "b"]),
        membership_key(b"token", "g", ["b", "a"]),
        membership_key(b"token", "g", ["ab"]),
    ]
    assert len({key, *others}) == 5


def test_a_mark_tells_members_apart() -> None:
    assert mark_of("a") == mark_of("a") != mark_of("b")
    assert len(mark_of("a")) == 8
