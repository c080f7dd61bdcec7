"""Checks of timeouts, before a call starts."""

from __future__ import annotations

import math
import sys

LONGEST = sys.float_info.max
"""The longest timeout in seconds. Timers count in floats, and an int may be larger than any
float."""


def is_timeout(timeout: float) -> bool:
    """Tell whether `timeout` is a number of seconds from now."""
    return type(timeout) in (int, float) and is_seconds(timeout)


def is_seconds(number: float) -> bool:
    """Tell whether a timer can wait for so many seconds. `math.inf` means no deadline."""
    return 0 < number <= LONGEST or number == math.inf


def is_number(given: object) -> bool:
    """Tell whether `given` can be formatted and sent as seconds. The numbers of other libraries
    often cannot, for example float32 of numpy."""
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def check_timeout(timeout: float | None, name: str = "timeout") -> None:
    """Raises TypeError or ValueError if `timeout` is not a deadline. `name` is that of the
    argument."""
    if timeout is not None:
        check_seconds(name, timeout, "a number of seconds or None")


def check_wait(timeout: float | None) -> None:
    """Raises TypeError or ValueError if `timeout` is no time to wait for a result.

    It may be 0 or less: a program that subtracts from a deadline gets TimeoutError then.
    """
    if timeout is None or not is_number(timeout) or not timeout <= 0:
        check_timeout(timeout)


def check_seconds(name: str, number: float, kind: str = "a number of seconds") -> None:
    """Raises TypeError or ValueError if no timer can wait for so many seconds. `name` is that of
    the argument, and `kind` says what it takes."""
    if not is_number(number):
        raise TypeError(f"{name} is {kind}, not {number!r}")
    if number > LONGEST and not is_seconds(number):
        raise ValueError(f"{name} is at most {LONGEST:g} seconds, or math.inf for no deadline")
    if not is_seconds(number):
        raise ValueError(f"{name} is more than 0 seconds, not {number!r}")
