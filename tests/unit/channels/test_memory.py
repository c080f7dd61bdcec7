"""Memory of versions that are over is used again, when nobody reads it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from aiodist.buffers.segment import unsupported_reason
from aiodist.channels.memory import MemoryBlock, Spare, VersionMemory

SIZE = 1000
LINUX = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


@pytest.fixture(params=[False, pytest.param(True, marks=LINUX)])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def spare() -> Iterator[Spare]:
    made = Spare()
    yield made
    made.close()


def address(one: VersionMemory) -> int:
    return np.frombuffer(one.view, np.uint8).ctypes.data


def over(spare: Spare, shared: bool) -> int:
    """Where the memory of a version was that is over."""
    one = VersionMemory(SIZE, shared=shared, spare=spare)
    found = address(one)
    one.close()
    return found


def test_memory_is_used_again(spare: Spare, shared: bool) -> None:
    before = over(spare, shared)
    assert spare.nbytes == SIZE
    with closing(VersionMemory(SIZE, shared=shared, spare=spare)) as again:
        assert address(again) == before
        assert spare.nbytes == 0
        with closing(VersionMemory(SIZE, shared=shared, spare=spare)) as other:
            assert address(other) != before


@pytest.mark.parametrize(
    "made",
    [
        lambda view: view[10:20],
        lambda view: np.frombuffer(view, np.uint8),
        lambda view: np.frombuffer(view[8:], np.float32, 4).reshape(2, 2)[1:].T,
        lambda view: memoryview(np.frombuffer(view, np.uint8)[3:])[1:],
    ],
)
def test_memory_of_which_a_user_has_a_view_is_not(
    spare: Spare, shared: bool, made: Callable[[memoryview], object]
) -> None:
    one = VersionMemory(SIZE, shared=shared, spare=spare)
    before = address(one)
    view = made(one.view)
    one.close()
    with closing(VersionMemory(SIZE, shared=shared, spare=spare)) as other:
        assert address(other) != before
    assert view is not None
    del view
    spare.close()


def test_it_is_once_that_view_is_gone(spare: Spare, shared: bool) -> None:
    one = VersionMemory(SIZE, shared=shared, spare=spare)
    before, view = address(one), one.view[3:]
    one.close()
    del view
    assert over(spare, shared) == before


def test_memory_of_another_size_or_kind_is_not(spare: Spare) -> None:
    over(spare, shared=False)
    with closing(VersionMemory(SIZE + 1, shared=False, spare=spare)) as larger:
        assert len(larger.view) == SIZE + 1
        assert spare.nbytes == 0  # of no use from now on


@LINUX
def test_what_others_have_is_not_used_again(spare: Spare) -> None:
    block = MemoryBlock(SIZE, shared=True)
    passed = block.for_readers()
    spare.keep(block)
    with closing(spare.block(SIZE, shared=True)) as other:
        assert other is not block
    passed.close()
    with closing(spare.block(SIZE, shared=True)) as other:
        assert other is block


@LINUX
def test_where_readers_cannot_be_known_memory_is_never_used_again(
    spare: Spare, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = MemoryBlock(SIZE, shared=True)

    def refuses(path: str, flags: int) -> int:
        raise OSError(f"no {path}")

    with monkeypatch.context() as during:
        during.setattr(os, "open", refuses)
        passed = block.for_readers()
    assert passed.fd != -1
    passed.close()
    spare.keep(block)
    with closing(spare.block(SIZE, shared=True)) as other:
        assert other is not block


@LINUX
def test_what_a_child_may_have_is_not_used_again(spare: Spare, shared: bool) -> None:
    """It has the arrays that there were when it was forked; what is private it has copies of."""
    block = MemoryBlock(SIZE, shared=shared)
    view = block.view()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert len(view) == SIZE
    del view
    spare.keep(block)
    with closing(spare.block(SIZE, shared=shared)) as other:
        assert (other is block) != shared


def test_one_block_is_kept_and_rather_one_that_is_free(spare: Spare) -> None:
    one, other, third = (MemoryBlock(SIZE, shared=False) for _ in range(3))
    view = one.view()
    spare.keep(one)
    spare.keep(other)  # somebody has the first one
    spare.keep(third)
    assert spare.nbytes == SIZE
    assert spare.block(SIZE, shared=False) is other
    assert spare.block(SIZE, shared=False) not in (one, third)
    assert len(view) == SIZE


def test_nothing_is_kept_of_who_has_left(shared: bool) -> None:
    spare = Spare()
    one = VersionMemory(SIZE, shared=shared, spare=spare)
    over(spare, shared)
    spare.close()
    one.close()
    one.close()
    assert spare.nbytes == 0
