"""The operations of a group as ordinary calls."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import BlockingGroup, BlockingWork, Group, Window
from aiodist.blocking.store import BlockingStore
from aiodist.blocking.window import BlockingWindow
from aiodist.control.store import Store

Ranks = Callable[..., list[Any]]


def names_of(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_it_has_all_that_a_group_has() -> None:
    assert names_of(BlockingWindow) == names_of(Window)
    assert names_of(BlockingGroup) - {"start"} == names_of(Group) - {"blocking"}
    assert names_of(BlockingStore) == names_of(Store)


@pytest.mark.parametrize(
    ("cls", "blocking"),
    [(Group, BlockingGroup), (Store, BlockingStore), (Window, BlockingWindow)],
    ids=["group", "store", "window"],
)
def test_its_calls_take_the_same_arguments(cls: type, blocking: type) -> None:
    for name in names_of(blocking) - {"start"}:
        own, given = (inspect.getattr_static(one, name) for one in (blocking, cls))
        assert isinstance(own, property) == isinstance(given, property), name
        if not isinstance(own, property):
            takes, is_to_take = (inspect.signature(f).parameters for f in (own, given))
            assert list(takes.values()) == list(is_to_take.values()), name
        assert own.__doc__, name


def test_what_it_is(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        assert (group.size, group.local_size, group.name, group.epoch) == (2, 2, "world", 1)
        assert [member.rank for member in group.members] == [0, 1]
        assert group.address.startswith("tcp://")
        assert not group.closed
        assert sum(group.bytes_moved) >= 0
        group.close()
        assert group.closed
        with pytest.raises(aiodist.GroupClosedError):
            group.barrier()
        return group.rank, group.local_rank

    assert ranks(2, body) == [(0, 0), (1, 1)]


def test_any_operation_starts_without_waiting(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        other = 1 - group.rank
        x = np.full(3, group.rank + 1.0)
        first = group.start(group.all_reduce, x)
        assert isinstance(first, BlockingWork)
        works: list[BlockingWork[Any]] = [
            group.start(group.all_gather, group.rank, tag="ranks"),
            group.start(group.send, group.rank, other, tag="t"),
            group.start(group.recv, src=other, tag="t"),
            group.start(group.isend, group.rank, other, tag="i"),
            group.start(aiodist.Grid(group, (2,)).neighbor_all_gather, group.rank, tag="grid"),
            group.start(group.broadcast, "b" if group.rank == 0 else None),
        ]
        assert group.recv(tag="i") == other
        found = [work.result(timeout=60) for work in works]
        assert first.result() is x
        assert first.done()
        assert first.op == "all_reduce"
        neighbors = [None, 1] if group.rank == 0 else [0, None]
        assert found == [[0, 1], None, other, None, neighbors, "b"]
        return x.tolist()

    assert ranks(2, body) == [[3.0] * 3] * 2


def test_what_is_started_may_be_waited_for_and_cancelled(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        if group.rank == 0:
            work = group.start(group.barrier, tag="late")
            with pytest.raises(TimeoutError, match="it goes on"):
                work.result(timeout=0.001)
            assert not work.done()
            assert work.cancel()
            with pytest.raises(asyncio.CancelledError):
                work.result()
            group.send("cancelled", 1)
        else:
            group.recv(src=0)
            with pytest.raises(aiodist.CollectiveAbortedError):
                group.barrier(tag="late")
        group.barrier()

    ranks(2, body)


def test_only_operations_of_the_group_are_started(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        with pytest.raises(TypeError, match="to reduce"):
            group.start(group.all_reduce, "no number")
        other = group.dup()
        strange: list[Callable[..., Any]] = [other.barrier, group.close, print, lambda: None]
        strange.append(aiodist.Grid(other, (1,)).neighbor_all_gather)
        for operation in strange:
            with pytest.raises(TypeError, match="start takes an operation of this group, such as"):
                group.start(operation)

    ranks(1, body)


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_and_groups_made_of_it(ranks: Ranks, size: int) -> None:
    def body(group: BlockingGroup) -> Any:
        x = group.empty(4, np.float64)
        x[:] = group.rank
        assert group.all_reduce(x) is x
        part = group.split(group.rank % 2)
        assert part is not None
        assert part.all_gather(group.rank) == list(range(group.rank % 2, size, 2))
        with pytest.raises(TypeError, match="to reduce"):
            group.dup().all_reduce("no number")
        assert group.agree(group.rank < 5)
        return x.tolist()

    assert ranks(size, body) == [[sum(range(size))] * 4] * size


def test_messages_without_waiting(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        other = 1 - group.rank
        coming = group.irecv(tag="x")
        assert isinstance(coming, BlockingWork)
        group.barrier()
        assert not coming.done()
        with pytest.raises(TimeoutError, match="it goes on"):
            coming.wait(timeout=0.001)
        group.barrier()
        leaving = group.isend(np.arange(3.0), other, tag="x")
        assert coming.wait().tolist() == [0, 1, 2]
        assert leaving.wait(timeout=10) is None
        assert (coming.source, coming.tag, coming.nbytes, coming.op) == (other, "x", 24, "recv")
        assert coming.elapsed > 0
        assert coming.done()
        assert not coming.cancel()
        return True

    assert ranks(2, body) == [True, True]


def test_who_sent(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        if group.rank:
            group.send(group.rank * 10, 0, tag=group.rank)
            group.barrier()
            return None
        found = sorted(itertools.islice(group.messages(), 2))
        assert group.iprobe() is None
        group.barrier()
        return found

    assert ranks(3, body)[0] == [(10, 1, 1), (20, 2, 2)]


def test_messages_end_with_the_group(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        coming = group.messages()
        group.send("x", group.rank, tag=1)
        assert next(coming) == ("x", group.rank, 1)
        group.close()
        return list(coming)

    assert ranks(1, body) == [[]]


def test_messages_of_a_group_that_was_aborted_raise(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        coming = group.messages()
        group.abort("enough")
        with pytest.raises(aiodist.GroupClosedError, match="enough"):
            next(coming)
        return True

    assert ranks(1, body) == [True]


def test_a_cancelled_receive_loses_no_message(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        if group.rank:
            group.barrier()
            group.send(b"x", 0)
            return None
        work = group.irecv(src=1)
        assert work.cancel()
        with pytest.raises(asyncio.CancelledError):
            work.wait()
        group.barrier()
        return group.recv(src=1)

    assert ranks(2, body)[0] == b"x"


def test_a_call_that_makes_no_sense_raises_at_once(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        with pytest.raises(ValueError, match="dst"):
            group.isend(1, 7)
        return True

    assert ranks(1, body) == [True]


def test_the_store(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        store = group.store
        with store.watch("done") as changes:
            group.barrier()
            store.add("n", group.rank + 1)
            group.barrier()
            if group.rank == 0:
                store.set("done", b"yes")
            assert next(changes) == ("done", b"yes")
        assert list(changes) == []
        store.wait("done")
        assert store.compare_set("done", b"no", b"") is False
        group.barrier()
        found = store.get("n"), store.get("done")
        group.barrier()
        store.delete("done")
        return found

    assert ranks(2, body) == [(b"3", b"yes")] * 2


def test_views_and_recovery(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        views = group.views()
        assert len(next(views).members) == 3
        group.barrier()
        if group.rank == 2:
            group.abort("enough")
            assert group.closed
            return None
        view = next(view for view in views if view.lost)
        assert list(view.lost) == [2]
        views.close()
        with pytest.raises(aiodist.AiodistError):
            group.barrier()
        group = group.shrink()
        group.revoke()
        group = group.rendezvous(min_size=2)
        return group.epoch, group.all_reduce(1)

    assert ranks(3, body) == [(3, 2), (3, 2), None]


def test_receives_after_a_loss(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        if group.rank == 2:
            group.abort("enough")
            return None
        other = 1 - group.rank
        with pytest.raises(aiodist.PeerLostError):
            group.recv(src=[2, other], tag="none")
        assert group.acknowledge_lost() == (2,)
        group.isend("after", other)
        return next(group.messages(src=[0, 1, 2]))

    assert ranks(3, body) == [("after", 1, 0), ("after", 0, 0), None]


def test_an_exception_aborts(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        if group.rank:
            raise LookupError("of rank 1")
        with pytest.raises(aiodist.PeerLostError, match="of rank 1"):
            group.recv(src=1)
        return None

    with pytest.raises(LookupError, match="of rank 1"):
        ranks(2, body)


def test_memory_of_others(ranks: Ranks) -> None:
    def body(group: BlockingGroup) -> Any:
        with group.expose(np.zeros(4)) as window:
            window.put(1 - group.rank, slice(1, 3), group.rank + 1)
            window.fence()
            window.accumulate(0, 0, 1.0)
            window.fence()
            return window.get(0).tolist()

    assert ranks(2, body) == [[2.0, 2.0, 2.0, 0.0], [2.0, 2.0, 2.0, 0.0]]
