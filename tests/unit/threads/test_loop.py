"""What one thread does to the files that are watched while another one waits for them."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiodist.threads.loop import Selector, Visit

READ = selectors.EVENT_READ


class Interrupted:
    """The system's selector: after it has waited, and before anybody looks at what came of that,
    another thread has its turn."""

    def __init__(self, real: Any, turn: Callable[[], object]) -> None:
        self._real = real
        self._turns = [turn]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def poll(self, *args: object) -> Any:
        found = self._real.poll(*args)
        if self._turns:
            self._turns.pop()()
        return found


class Files:
    """Pipes, of which the first has something to read."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.other, self.end = os.pipe()
        os.write(self.write, b"x")

    def swap(self) -> None:
        """The number of the first is the second's, which has nothing to read."""
        os.dup2(self.other, self.read)


@contextmanager
def watching(turn: Callable[[Any, Files], object]) -> Iterator[tuple[Selector, Files]]:
    """A selector that watches the first of the files; `turn` is what another thread does while it
    waits."""
    lock = threading.RLock()
    files = Files()
    with lock:
        selector: Any = Selector(lock, lambda: None)
        selector.register(files.read, READ, "old")
        selector._selector = Interrupted(selector._selector, lambda: turn(selector, files))
        try:
            yield selector, files
        finally:
            selector.close()
            for fd in vars(files).values():
                os.close(fd)


def replace(selector: Selector, files: Files) -> None:
    selector.unregister(files.read)
    files.swap()
    selector.register(files.read, READ, "new")


def drive(selector: Selector) -> list[object]:
    """What a visitor that waits for a result is told."""
    selector.visit = Visit(lambda: False, limit=float("inf"))
    return [key.data for key, _ in selector.select(0)]


def stay(selector: Selector) -> list[object]:
    """What the loop's own thread is told."""
    return [key.data for key, _ in selector.select(0)]


@pytest.mark.parametrize("wait", [drive, stay])
def test_a_file_is_not_taken_for_the_one_that_had_its_number(
    wait: Callable[[Selector], list[object]],
) -> None:
    with watching(replace) as (selector, files):
        assert wait(selector) == []
        assert wait(selector) == []
        os.write(files.end, b"y")
        assert wait(selector) == ["new"]


@pytest.mark.parametrize("wait", [drive, stay])
def test_what_is_watched_anew_is_told_of_with_the_next_wait(
    wait: Callable[[Selector], list[object]],
) -> None:
    def again(selector: Selector, files: Files) -> None:
        selector.unregister(files.read)
        selector.register(files.read, READ, "new")

    with watching(again) as (selector, _):
        assert wait(selector) == []
        assert wait(selector) == ["new"]


@pytest.mark.parametrize("wait", [drive, stay])
def test_nobody_is_told_of_what_is_not_watched_any_more(
    wait: Callable[[Selector], list[object]],
) -> None:
    with watching(lambda selector, files: selector.unregister(files.read)) as (selector, _):
        assert wait(selector) == []
