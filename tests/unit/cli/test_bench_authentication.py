"""The benchmark of what authenticating frames would cost."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import authentication


def test_without_cryptography(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It measures what Python has, and says what it lacks."""
    real = importlib.import_module

    def absent(name: str) -> Any:
        if name.startswith("cryptography"):
            raise ImportError("no cryptography")
        return real(name)

    monkeypatch.setattr(authentication.importlib, "import_module", absent)
    assert benchmarks.main(["authentication", "--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    assert [line.split("  ")[0] for line in out.splitlines()[1:]] == [
        "TCP",
        "HMAC-SHA256",
        "BLAKE2b, keyed",
    ]
    assert all(float(field) > 0 for line in out.splitlines()[1:] for field in line[30:].split())
    assert err == "not measured: TLS and ciphers (no cryptography): install cryptography\n"


def test_with_cryptography(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cryptography")
    assert benchmarks.main(["authentication", "--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 10
    assert err == ""
