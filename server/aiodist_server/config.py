"""The settings of the daemon: keywords, AIODIST_COORDINATOR_* variables, and AIODIST_TOKEN."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from aiodist.environment import token_in
from aiodist.wire.address import Address, parse_address


class Config(BaseSettings):
    """The settings. Raises pydantic.ValidationError (a ValueError) for invalid ones.

    `listen` is ``tcp://host:port``, ``tls://host:port`` (with `tls_cert`, and `tls_key` unless the
    certificate file holds the key too) or ``unix:///path``. `token` or `token_file` is the secret
    that members have to prove (neither: AIODIST_TOKEN, if it is set). `insecure` allows to listen
    without a token at an address that other hosts can reach.

    `http` is ``host:port``, which serves a page with what groups do, and metrics, without a token.
    If other hosts can reach it, it needs `insecure`, too. `drain`: how many seconds the first
    SIGTERM or SIGINT waits for groups to end. `state` is a file that keeps groups, epochs and
    stores over restarts. `force`: start even if acknowledged writes are missing at its end.
    `recovery_seconds`: how long no group forms after the start, so that members of a former daemon
    come back first.
    """

    model_config = SettingsConfigDict(
        env_prefix="AIODIST_COORDINATOR_",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,  # because it holds the token
    )

    listen: str = "tcp://127.0.0.1:29500"
    token: SecretStr | None = None
    token_file: Path | None = None
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    http: str | None = None
    state: Path | None = None
    force: bool = False
    recovery_seconds: float = Field(default=1.0, ge=0.0)
    drain: float = Field(default=30.0, ge=0.0)
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="before")
    @classmethod
    def _take_token(cls, given: dict[str, Any]) -> dict[str, Any]:
        # Also for AIODIST_COORDINATOR_TOKEN, because every setting has such a variable. A user who
        # sets that one must not find the door open, or shut.
        if given.get("token") is None and given.get("token_file") is None:
            return {**given, "token": token_in(os.environ)}
        return given

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, listen: str) -> str:
        parse_address(listen)
        return listen

    @field_validator("token_file", "tls_cert", "tls_key", "state")
    @classmethod
    def _check_file(cls, file: Path | None) -> Path | None:
        if file == Path():  # as an empty text is, from a variable that is not set
            raise ValueError("expected a file, not an empty name: give one, or leave this out")
        return file

    @model_validator(mode="after")
    def _check(self) -> Config:
        address = parse_address(self.listen)
        http = self.http_address
        if address.scheme == "inproc":
            raise ValueError(
                f"listen={self.listen}: no other program runs in the process of a daemon: "
                "listen on tcp://, tls:// or unix://"
            )
        if self.token is not None and self.token_file is not None:
            raise ValueError("give token or token_file, not both")
        if self.token is not None and not self.token.get_secret_value():
            raise ValueError("token is empty: give a token, or none")
        if (address.scheme == "tls") != (self.tls_cert is not None):
            raise ValueError("a tls:// address and tls_cert belong together: give both, or neither")
        if self.force and self.state is None:
            raise ValueError("force is for a state file: give state (--state FILE), too")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key needs tls_cert")
        has_token = self.token is not None or self.token_file is not None
        if not (address.is_loopback or has_token or self.insecure):
            raise ValueError(
                f"listen={self.listen} can be reached from other hosts, and there is no token: "
                "any program that can connect could join any group. Set AIODIST_TOKEN, give a "
                "token_file (--token-file), or insecure=True (--insecure) if the network is trusted"
            )
        if http is not None and not (http.is_loopback or self.insecure):
            raise ValueError(
                f"http={self.http} can be reached from other hosts, and the token does not guard "
                "it: any program that can connect sees the groups and what they do. Listen on "
                "127.0.0.1, or give insecure=True (--insecure) if the network is trusted"
            )
        return self

    @property
    def http_address(self) -> Address | None:
        """The address of HTTP; None: no HTTP. Raises ValueError."""
        if self.http is None:
            return None
        rest = self.http.removeprefix("http://")
        try:
            return parse_address(f"tcp://{rest}")
        except ValueError as error:
            raise ValueError(f"http={self.http}: expected host:port ({error})") from None

    def read_token(self) -> str | None:
        """Return the token, read from its file if need be. Raises OSError, ValueError for a file
        that is empty or no text."""
        if self.token is not None:
            return self.token.get_secret_value()
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text("utf-8").strip()
        except OSError as error:
            text = f"the token file {self.token_file} cannot be read ({error.strerror})"
            raise OSError(error.errno, text) from None
        except UnicodeDecodeError:
            raise ValueError(
                f"the token file {self.token_file} is no text in UTF-8: make one with "
                "openssl rand -hex 32"
            ) from None
        if not token:
            raise ValueError(f"the token file {self.token_file} is empty")
        return token

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the server-side context for `tls_cert`. Raises OSError for unusable files."""
        if self.tls_cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as error:
            files = f"{self.tls_cert}" + (f" and {self.tls_key}" if self.tls_key else "")
            raise OSError(f"{files}: expected a certificate and its key ({error})") from error
        return context
