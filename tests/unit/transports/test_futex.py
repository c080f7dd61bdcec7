"""Futexes of this system, on memory that two mappings show."""

from __future__ import annotations

import mmap
import os
import threading

import pytest

from aiodist.transports import futex

pytestmark = pytest.mark.skipif(not futex.works(), reason="this system has no futexes")


@pytest.fixture
def mappings():
    """The same page, once to write and once to read."""
    fd = os.memfd_create("words")
    os.ftruncate(fd, mmap.PAGESIZE)
    with (
        mmap.mmap(fd, mmap.PAGESIZE) as own,
        mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ) as other,
    ):
        os.close(fd)
        with memoryview(own) as one, memoryview(other) as two:
            yield one, two


def test_who_has_seen_an_older_word_does_not_sleep(mappings):
    own, other = mappings
    own.cast("Q")[0] = (1 << 40) + 5
    futex.wait(futex.address_of(other), (1 << 40) + 4, 3600.0)


def test_a_sleep_ends_by_itself(mappings):
    _, other = mappings
    futex.wait(futex.address_of(other), 0, 1e-6)


@pytest.mark.parametrize("rings_by", ["own", "other"])
def test_a_ring_wakes_who_only_reads_the_word(mappings, rings_by):
    own, other = mappings
    words = own.cast("Q")
    woken = []

    def sleep() -> None:
        while other.cast("Q")[0] == 7:
            futex.wait(futex.address_of(other), 7, 3600.0)
        woken.append(True)

    words[0] = 7
    sleeper = threading.Thread(target=sleep, daemon=True)
    sleeper.start()
    words[0] = 8  # before it sleeps, or while it does
    futex.ring(futex.address_of(own if rings_by == "own" else other))
    sleeper.join(60)
    assert woken
