"""What strangers can reach, and what is said or refused where they can."""

from __future__ import annotations

import logging
import ssl

import pytest

from aiodist.coordinator.exposure import Guard, narrow_hint
from aiodist.wire.address import parse_address

OPEN, CLOSED = Guard(keeps_out=False), Guard(keeps_out=True)
HERE, EVERYWHERE = "tcp://127.0.0.1:1", "tcp://0.0.0.0:1"


def server(mode: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = mode
    return context


@pytest.mark.parametrize(
    ("token", "mode", "keeps_out"),
    [
        (None, None, False),
        (b"t", None, True),
        (None, ssl.CERT_NONE, False),
        (None, ssl.CERT_OPTIONAL, False),
        (None, ssl.CERT_REQUIRED, True),
        (b"t", ssl.CERT_NONE, True),
    ],
)
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_what_keeps_strangers_out(
    token: bytes | None, mode: ssl.VerifyMode | None, keeps_out: bool, allow_pickle: bool
) -> None:
    context = None if mode is None else server(mode)
    guard = Guard.of(token, context, allow_pickle=allow_pickle)
    assert guard == Guard(keeps_out, allow_pickle)


@pytest.mark.parametrize("where", [HERE, EVERYWHERE])
@pytest.mark.parametrize("keeps_out", [False, True])
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_strangers_run_no_code(where: str, keeps_out: bool, allow_pickle: bool) -> None:
    guard = Guard(keeps_out, allow_pickle)
    if (where, keeps_out, allow_pickle) == (EVERYWHERE, False, True):
        with pytest.raises(ValueError, match=r"can connect to tcp://0\.0\.0\.0:1"):
            guard.check(where)
    else:
        guard.check(where)


@pytest.mark.parametrize(
    ("guard", "where", "warns"),
    [(OPEN, HERE, False), (OPEN, EVERYWHERE, True), (CLOSED, EVERYWHERE, False)],
)
def test_who_listens_to_everybody_is_warned(
    caplog: pytest.LogCaptureFixture, guard: Guard, where: str, warns: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        guard.warn(where)
    assert ("AIODIST_TOKEN" in caplog.text and where in caplog.text) is warns


def test_a_hint_where_others_may_not_reach_a_name() -> None:
    assert narrow_hint(parse_address(HERE)) == ""
    assert "what node0 means on its own host" in narrow_hint(parse_address("tcp://node0:1"))
