"""The log lines of the daemon."""

from __future__ import annotations

import json
import logging
from typing import Literal

import pytest

from aiodist_server.config import Config
from aiodist_server.logs import logging_to_stderr

EVIL = "\x1b]0;evil\x07\x9b2J\u202e\nforged"


@pytest.mark.parametrize("format", ["console", "json"])
def test_nothing_in_a_line_is_obeyed_by_a_terminal(
    capsys: pytest.CaptureFixture[str], format: Literal["console", "json"]
) -> None:
    with logging_to_stderr(Config(log_format=format)):
        logging.getLogger("aiodist.coordinator").warning(
            "lost: reason=%s", EVIL, extra={"event": "lost", "reason": EVIL, "rank": 3}
        )
    [line] = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    if format == "json":
        assert json.loads(line)["reason"] == EVIL
    else:
        assert "?]0;evil??2J??forged" in line
