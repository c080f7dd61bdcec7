"""Standard input, passed on to a rank."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from aiodist_cli import input as passed_on


def test_input_that_does_not_block_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin, keyboard = os.pipe()
    os.set_blocking(stdin, False)

    def select(*_: object) -> None:
        os.write(keyboard, b"late")
        os.close(keyboard)

    monkeypatch.setattr(passed_on, "_STDIN", stdin)
    monkeypatch.setattr(passed_on, "select", SimpleNamespace(select=select), raising=False)
    with passed_on.source() as reading, os.fdopen(os.dup(reading), "rb") as rank:
        assert rank.read() == b"late"
    os.close(stdin)
