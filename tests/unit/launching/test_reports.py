"""Reports of ended functions, through a pipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from aiodist.errors import AiodistError
from aiodist.launching import reports
from aiodist.launching.reports import ReportOutcome, ReportReading


@pytest.fixture
def pipe() -> Iterator[tuple[ReportReading, int]]:
    """The reader of a report, and where to write it."""
    ours, theirs = os.pipe()
    reading = ReportReading(ours)
    yield reading, theirs
    reading.close()
    reading.close()
    os.close(theirs)


def sent(report: reports.Report) -> bytes:
    """The bytes of a short report."""
    ours, theirs = os.pipe()
    reports.send(theirs, report)
    os.close(theirs)
    with open(ours, "rb") as file:
        return file.read()


@pytest.mark.parametrize("value", [None, {"a": [1, 2]}, "ä" * 5])
def test_a_report_byte_by_byte(pipe: tuple[ReportReading, int], value: object) -> None:
    reading, theirs = pipe
    data = sent(reports.returned(value))
    for at in range(len(data)):
        assert reading.report is None
        assert reading.has_begun == (at > 0)
        os.write(theirs, data[at : at + 1])
        reading.read()
    assert reading.report is not None
    assert not reading.has_begun and not reading.is_over
    assert reading.report.outcome is ReportOutcome.RETURNED
    assert reports.value_of(reading.report) == value


def test_a_report_that_breaks_off() -> None:
    ours, theirs = os.pipe()
    reading = ReportReading(ours)
    os.write(theirs, sent(reports.returned("all of it"))[:-1])
    os.close(theirs)
    reading.read()
    assert (reading.report, reading.has_begun, reading.is_over) == (None, True, True)
    reading.close()


def test_what_was_raised_comes_with_its_traceback(pipe: tuple[ReportReading, int]) -> None:
    reading, theirs = pipe
    try:
        raise KeyError("\udcff", "lone surrogates have no UTF-8")
    except KeyError as error:
        os.write(theirs, sent(reports.raised(error)))
    reading.read()
    report = reading.report
    assert report is not None and report.outcome is ReportOutcome.RAISED
    assert 'raise KeyError("' in report.text
    assert isinstance(reports.value_of(report), KeyError)


class Elsewhere(Exception):
    """Unpickled, it is none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("text",)


class TwoArguments(Exception):
    """Its pickle has one argument."""

    def __init__(self, step: str, reason: str = "") -> None:
        if not reason:
            raise TypeError("a reason is needed")
        super().__init__(step)


class Odd(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        raise RecursionError("not this one")


@pytest.mark.parametrize("error", [Elsewhere("odd"), Odd("odd"), TwoArguments("odd", "b")])
def test_exceptions_that_do_not_survive_are_told_of(error: Exception) -> None:
    report = reports.raised(error)
    assert report.outcome is ReportOutcome.OPAQUE
    assert reports.value_of(report) == f"{type(error).__name__}: odd"
    assert f"{type(error).__name__}: odd" in report.text


def test_values_that_cannot_be_pickled() -> None:
    with pytest.raises(AiodistError, match=r"main returned cannot be pickled: .*not this one"):
        reports.returned(Odd())
