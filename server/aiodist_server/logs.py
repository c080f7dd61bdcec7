"""The log lines of the daemon: one event a line, with fields, on stderr."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog

from aiodist.errors import printable
from aiodist.files import write_all
from aiodist_server.config import Config

MOST_BYTES = 1 << 20
"""The most bytes of lines that wait for a reader of stderr."""

CLOSE_SECONDS = 2.0
"""Seconds for lines that wait when the daemon ends."""

_STDERR = 2


def _printable(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Replace characters that a terminal would obey, because much of the text comes from the
    network."""

    def shown(key: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        lines = value.split("\n") if key == "exception" else [value]  # a traceback has many
        return "\n".join(map(printable, lines))

    return {key: shown(key, value) for key, value in event.items()}


class _Lines(logging.Handler):
    """Writes to stderr from a thread of its own, so that a reader that stops reading does not stop
    the coordinator. Lines for which there is no room are counted, and left out."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._left_out = 0  # lines after those that wait
        self._ended = False
        # A daemon on a raw descriptor, because a stuck write must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="aiodist log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if self._left_out or len(self._waiting) + len(line) > MOST_BYTES:
                self._left_out += 1
            else:
                self._waiting += line
            self._changed.notify()

    def end(self) -> None:
        """End the thread, and wait a moment for a reader to take the last lines."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(sys.stderr.encoding, "backslashreplace")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._left_out or self._ended)
                data, left_out = self._waiting, self._left_out
                self._waiting, self._left_out = bytearray(), 0
            if left_out:
                data += self._line(_gap(left_out))
            if not data:
                return
            with suppress(OSError):  # the reader is gone
                write_all(_STDERR, data)


def _gap(lines: int) -> logging.LogRecord:
    """Say that lines are missing here."""
    said = {"event": "lines left out", "lines": lines, "reason": "stderr was not read"}
    level = {"levelname": "WARNING", "levelno": logging.WARNING}
    return logging.makeLogRecord({"name": "aiodist.daemon", **level, **said})


@contextmanager
def logging_to_stderr(config: Config) -> Iterator[None]:
    """Write what the logger "aiodist" gets to stderr, in the format of `config`."""
    before: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # The coordinator passes the event's name and fields as `extra`.
        structlog.stdlib.ExtraAdder(),
        structlog.processors.format_exc_info,
    ]
    if config.log_format == "console":  # JSON escapes them
        before.append(_printable)
    renderer: Any = (
        structlog.processors.JSONRenderer(default=str)
        if config.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = _Lines()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                renderer,
            ],
        )
    )
    logger = logging.getLogger("aiodist")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(config.log_level.upper())
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        handler.end()
        handler.close()
