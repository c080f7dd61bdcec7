"""What the daemon can be told, and what makes no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aiodist_server.config import Config


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"listen": "nothing"}, "the address 'nothing' has no scheme"),
        ({"listen": "inproc://x"}, "no other program runs in the process of a daemon"),
        ({"token": "a", "token_file": "b"}, "not both"),
        ({"token": ""}, "token is empty"),
        ({"listen": "tls://127.0.0.1:1"}, "belong together"),
        ({"tls_cert": "a"}, "belong together"),
        ({"tls_key": "a"}, "tls_key needs tls_cert"),
        ({"force": True}, "force is for a state file"),
        ({"listen": "tcp://0.0.0.0:1"}, "there is no token"),
        ({"http": "0.0.0.0:80"}, "the token does not guard"),
        ({"http": "nothing"}, "expected host:port"),
        ({"unknown": 1}, "Extra inputs"),
        ({"token_file": ""}, "not an empty name"),
        ({"tls_cert": ""}, "not an empty name"),
        ({"tls_key": Path()}, "not an empty name"),
        ({"state": ""}, "not an empty name"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Config(**options)


def test_an_error_does_not_show_the_token() -> None:
    with pytest.raises(ValueError, match="tls_key needs") as raised:
        Config(token="secret", tls_key="a")
    assert "secret" not in str(raised.value)


def test_strangers_are_kept_out_by_a_token_or_let_in_on_purpose() -> None:
    assert Config(listen="tcp://0.0.0.0:1", token="secret").read_token() == "secret"
    assert Config(listen="tcp://0.0.0.0:1", insecure=True).read_token() is None
    assert Config(listen="tcp://localhost:1").read_token() is None


def test_a_token_is_read_out_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    config = Config(token_file=file)
    with pytest.raises(FileNotFoundError, match=r"the token file .*token cannot be read"):
        config.read_token()
    file.write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        config.read_token()
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"the token file .*token is no text in UTF-8"):
        config.read_token()
    file.write_text("secret\n")
    assert config.read_token() == "secret"


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    config = Config(listen="tls://127.0.0.1:1", tls_cert=tmp_path / "cert", tls_key=tmp_path / "k")
    with pytest.raises(OSError, match=r"cert and .*k: expected a certificate and its key"):
        config.ssl_context()


@pytest.mark.parametrize("given", ["127.0.0.1:80", "http://127.0.0.1:80"])
def test_http_is_served_where_it_is_said(given: str) -> None:
    assert str(Config(http=given).http_address) == "tcp://127.0.0.1:80"
    assert Config().http_address is None


def test_the_environment_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_COORDINATOR_DRAIN", "7")
    assert Config().drain == 7
