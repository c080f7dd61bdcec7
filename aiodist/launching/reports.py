"""The report of a process that ran a function, through a pipe.

The reader never blocks, because the process may be stopped or die in the middle of its report.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import struct
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from aiodist.errors import AiodistError, in_words
from aiodist.files import write_all
from aiodist.launching import spawn

_HEADER = struct.Struct(">B?QQ")  # outcome, is_consequence, bytes of text, bytes of the pickle
_AT_ONCE = 16 << 20
"""The most bytes that are read in one go, before the reader looks at its clock."""


class ReportOutcome(IntEnum):
    """How the function ended. `OPAQUE`: by an exception that does not survive pickling."""

    RETURNED = 0
    RAISED = 1
    OPAQUE = 2


class Report(NamedTuple):
    """`text` is the traceback of what was raised. `pickled` is what was returned or raised, or an
    opaque exception in words. `is_consequence`: it was raised because another rank failed."""

    outcome: ReportOutcome
    text: str
    pickled: bytes | memoryview
    is_consequence: bool = False


Dumps = Callable[[Any], bytes]


def pickler(by_value: bool) -> Dumps:
    """Return `pickle.dumps`, or that of cloudpickle if `by_value`.

    cloudpickle packs functions and classes of ``__main__`` as a whole, not by name. pickle reads
    both.
    """
    dumps: Dumps = importlib.import_module("cloudpickle" if by_value else "pickle").dumps
    return dumps


def returned(value: Any, dumps: Dumps = pickle.dumps) -> Report:
    """Make the report of a result. Raises AiodistError if `value` cannot be pickled."""
    try:
        return Report(ReportOutcome.RETURNED, "", dumps(value))
    except Exception as error:  # whatever the value's own methods raise
        text = f"what main returned cannot be pickled: {in_words(error)}"
        raise AiodistError(text) from error


def raised(error: BaseException, dumps: Dumps = pickle.dumps) -> Report:
    """Make the report of `error`: in words if it does not survive pickling."""
    text = "".join(traceback.format_exception(error))
    is_consequence = spawn.is_consequence(error)  # here, because pickling loses its cause
    with contextlib.suppress(Exception):  # whatever the exception's own methods raise
        pickled = dumps(error)
        if isinstance(pickle.loads(pickled), BaseException):
            return Report(ReportOutcome.RAISED, text, pickled, is_consequence)
    words = pickle.dumps(in_words(error))
    return Report(ReportOutcome.OPAQUE, text, words, is_consequence)


def value_of(report: Report) -> Any:
    """Return what was returned or raised, or an opaque exception in words. Raises unpickling
    errors."""
    return pickle.loads(report.pickled)


def send(fd: int, report: Report) -> None:
    """Write `report`, and block until it is written. Raises OSError."""
    text = report.text.encode(errors="backslashreplace")
    sizes = len(text), len(report.pickled)
    header = _HEADER.pack(report.outcome, report.is_consequence, *sizes)
    write_all(fd, header + text)
    write_all(fd, report.pickled)


class ReportReading:
    """Reads one report from the pipe `fd`, which it owns."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.is_over = False
        """Whether nothing more will come."""
        self._header = b""
        self._body = bytearray()
        self._came = 0

    @property
    def has_begun(self) -> bool:
        """Whether a part of the report has come, and not all."""
        return bool(self._header) and self.report is None

    @property
    def report(self) -> Report | None:
        """The report, once all of it has come."""
        if len(self._header) < _HEADER.size or self._came < len(self._body):
            return None
        outcome, is_consequence, text_bytes, _ = _HEADER.unpack(self._header)
        body = memoryview(self._body)
        text = str(body[:text_bytes], "utf-8")
        return Report(ReportOutcome(outcome), text, body[text_bytes:], is_consequence)

    def read(self) -> None:
        """Read what has come, without blocking."""
        # We read by hand, because readers of pickle and multiprocessing block until they have it
        # all. A rank that was stopped in the middle of its report would stop the launcher, too, and
        # the deadline that is to end this rank.
        left = _AT_ONCE
        while left > 0 and not self.is_over and self.report is None:
            try:
                came = self._read_some()
            except BlockingIOError:
                return
            left -= came
            self.is_over = came == 0

    def _read_some(self) -> int:
        if len(self._header) < _HEADER.size:
            came = os.read(self.fd, _HEADER.size - len(self._header))
            self._header += came
            if len(self._header) == _HEADER.size:
                self._body = bytearray(sum(_HEADER.unpack(self._header)[2:]))
            return len(came)
        number = os.readv(self.fd, [memoryview(self._body)[self._came :]])
        self._came += number
        return number

    def close(self) -> None:
        """Close the pipe, and forget what came. Idempotent."""
        self._header, self._body, self._came = b"", bytearray(), 0
        fd, self.fd = self.fd, -1
        if fd != -1:
            os.close(fd)
