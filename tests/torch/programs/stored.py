"""Gloo meets at a store that a coordinator of aiodist keeps."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import aiodist
from aiodist_torch import Store


class Shortly:
    """A store with a key that is set and deleted within a wait for it, and stays the next time."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.get, self.waits = inner, inner.get, 0

    async def wait(self, keys: list[str], **options: Any) -> None:
        self.waits += 1
        await self.inner.set(keys[0], b"%d" % self.waits)
        await self.inner.wait(keys, **options)
        if self.waits == 1:
            await self.inner.delete(keys[0])


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = Store(sys.argv[1], size, rank=rank)
if rank == 0:
    c10d._test_python_store(store)
for backend in ("gloo", "aiodist"):
    meeting = dist.PrefixStore(backend, store)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=size)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert float(x) == size
    if rank == 0:
        assert store.compare_set("k", "", "1") == b"1"
        assert store.compare_set("k", "x", "2") == b"1"
        assert store.compare_set("none", "x", "2") == b"x"
        store.append("k", "2")
        store.append("new", "3")
        assert store.multi_get(["k", "new"]) == [b"12", b"3"]
        inner, store._store = store._store, Shortly(store._store)
        assert store.get("short") == b"2"
        store._store = inner
        assert store.delete_key("short")
        store.multi_set(["a", "b"], ["1", b"2"])
        try:
            store.multi_set(["c", "d"], ["1"])
            raise AssertionError("a key has no value")
        except ValueError as error:
            assert "2 keys and 1 values" in str(error)
        for wrong in (5, [1, 2]):
            try:
                store.set("c", wrong)
                raise AssertionError("a number was taken for bytes")
            except TypeError as error:
                assert "pass str(value)" in str(error)
        assert (store.add("a", 4), store.check(["a", "b"]), store.check(["c"])) == (5, True, False)
        assert [store.delete_key(key) for key in ("k", "k", "new")] == [True, False, True]
        assert store.clone() is store
        meeting.set("k", "1")
        assert [meeting.delete_key("k") for _ in range(2)] == [True, False]
        for each in (store, meeting):
            try:
                each.num_keys()
                raise AssertionError("keys were counted")
            except NotImplementedError as error:
                assert "count them" in str(error)
    dist.destroy_process_group()
try:
    store.wait(["never"], timedelta(milliseconds=50))
    raise AssertionError("a key that nobody set was found")
except aiodist.CollectiveTimeoutError as error:
    assert isinstance(error, dist.DistStoreError)
assert store.timeout == timedelta(seconds=300)
meeting.set_timeout(timedelta(milliseconds=50))
assert store.timeout == meeting.timeout == timedelta(milliseconds=50)
try:
    store.get("never")
    raise AssertionError("a key that nobody set was found")
except dist.DistStoreError as error:
    assert "never" in str(error)
store.close()
try:
    store.set("late", "x")
    raise AssertionError("the store was closed")
except aiodist.GroupClosedError:
    pass
print("stored")
