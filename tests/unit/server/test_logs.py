"""The log lines of the daemon."""

from __future__ import annotations

import json
import logging
import threading
from typing import Literal

import pytest

from aiodist_server import logs
from aiodist_server.config import Config
from aiodist_server.logs import logging_to_stderr

EVIL = "\x1b]0;evil\x07\x9b2J\u202e\nforged"


@pytest.mark.parametrize("format", ["console", "json"])
def test_nothing_in_a_line_is_obeyed_by_a_terminal(
    capfd: pytest.CaptureFixture[str], format: Literal["console", "json"]
) -> None:
    with logging_to_stderr(Config(log_format=format)):
        logging.getLogger("aiodist.coordinator").warning(
            "lost: reason=%s", EVIL, extra={"event": "lost", "reason": EVIL, "rank": 3}
        )
    [line] = capfd.readouterr().err.splitlines()
    assert line.isprintable()
    if format == "json":
        assert json.loads(line)["reason"] == EVIL
    else:
        assert "?]0;evil??2J??forged" in line


def test_nothing_in_a_traceback_is_obeyed_by_a_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with logging_to_stderr(Config()):
        logging.getLogger("aiodist.daemon").error("a fault", exc_info=ValueError(EVIL))
    lines = capfd.readouterr().err.splitlines()
    assert all(line.isprintable() for line in lines)
    assert lines[1:] == ["ValueError: ?]0;evil??2J?", "forged"]


def test_a_reader_that_stops_reading_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no room is left out and counted. The end does not wait for the reader, either."""
    stuck, reads_again = threading.Event(), threading.Event()
    written = bytearray()

    def write(fd: int, data: bytearray) -> None:
        stuck.set()
        reads_again.wait()
        written.extend(data)

    monkeypatch.setattr(logs, "write_all", write)
    monkeypatch.setattr(logs, "MOST_BYTES", 1000)
    monkeypatch.setattr(logs, "CLOSE_SECONDS", 0.0)
    with logging_to_stderr(Config(log_format="json")):
        (thread,) = [one for one in threading.enumerate() if one.name == "aiodist log"]
        logging.getLogger("aiodist.coordinator").info("0")
        stuck.wait()
        for number in range(1, 100):
            logging.getLogger("aiodist.coordinator").info("%d", number)
    reads_again.set()
    thread.join()
    *lines, gap = [json.loads(line) for line in written.splitlines()]
    assert [line["event"] for line in lines] == [str(number) for number in range(len(lines))]
    assert (gap["event"], gap["lines"]) == ("lines left out", 100 - len(lines))
    assert 1 < len(lines) < 100
