"""The log lines of the daemon: one event a line, with fields, on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from aiodist.errors import printable
from aiodist_server.config import Config


def _printable(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Replace characters that a terminal would obey, because much of the text comes from the
    network."""
    return {
        key: printable(value) if isinstance(value, str) else value for key, value in event.items()
    }


@contextmanager
def logging_to_stderr(config: Config) -> Iterator[None]:
    """Write what the logger "aiodist" gets to stderr, in the format of `config`."""
    before: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # The coordinator passes the event's name and fields as `extra`.
        structlog.stdlib.ExtraAdder(),
    ]
    if config.log_format == "console":  # JSON escapes them
        before.append(_printable)
    renderer: Any = (
        structlog.processors.JSONRenderer(default=str)
        if config.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
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
        handler.close()
