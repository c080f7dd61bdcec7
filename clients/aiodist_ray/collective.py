"""The backend of `ray.util.collective`: each of its groups is one of aiodist, on a thread of its
own.

Ray's calls block, in any thread of an actor. Its lists are for several GPUs of one rank, so they
have one tensor each here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
    unset_timeout_ms,
)

from aiodist import ReduceOp
from aiodist.launching.spawn import new_event_loop
from aiodist_ray.session import connect

T = TypeVar("T")

NAME = "AIODIST"
"""The backend as Ray writes it. `backend="aiodist"` means it."""


def register() -> None:
    """Make the backend known to Ray in this process. Idempotent."""
    if not hasattr(Backend, NAME):
        register_collective_backend(NAME, CollectiveGroup)


class CollectiveGroup(BaseGroup):
    """The group that Ray calls in the actor with rank `rank` of `world_size`."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._loop = new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"aiodist {group_name}", daemon=True
        )
        self._thread.start()
        try:
            group = self._run(self._join())
        except BaseException:
            self._end()
            raise
        self._group = group.blocking()

    async def _join(self) -> Any:
        # A name of its own, because a group of `aiodist_ray.connect` may have the same name.
        name = f"ray.util.collective/{self.group_name}"
        return await connect(name, rank=self.rank, size=self.world_size)

    def destroy_group(self) -> None:
        """Leave, once the receivers have all that was sent."""
        try:
            self._group.close()
        finally:
            self._end()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @classmethod
    def backend(cls) -> str:
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    # -- operations: Ray gives a list of one tensor, and options as a class or an object of it ----

    def allreduce(self, tensor: list[Any], allreduce_options: Any = AllReduceOptions) -> None:
        options = allreduce_options
        self._group.all_reduce(_one(tensor), _operator(options), timeout=_seconds(options))

    def barrier(self, barrier_options: Any = BarrierOptions) -> None:
        self._group.barrier(timeout=_seconds(barrier_options))

    def reduce(self, tensor: list[Any], reduce_options: Any = ReduceOptions) -> None:
        options = reduce_options
        self._group.reduce(
            _one(tensor), options.root_rank, _operator(options), timeout=_seconds(options)
        )

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any],
        allgather_options: Any = AllGatherOptions,
    ) -> None:  # fmt: skip
        self._group.all_gather(
            _one(tensor), out=_one(tensor_list), timeout=_seconds(allgather_options)
        )

    def broadcast(self, tensor: list[Any], broadcast_options: Any = BroadcastOptions) -> None:
        options = broadcast_options
        self._group.broadcast(_one(tensor), options.root_rank, timeout=_seconds(options))

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]],
        reducescatter_options: Any = ReduceScatterOptions,
    ) -> None:  # fmt: skip
        options = reducescatter_options
        self._group.reduce_scatter(
            _one(tensor_list), _operator(options), out=_one(tensor), timeout=_seconds(options)
        )

    def send(self, tensor: list[Any], send_options: Any = SendOptions) -> None:
        _check_whole(send_options)
        self._group.send(_one(tensor), send_options.dst_rank, timeout=_seconds(send_options))

    def recv(self, tensor: list[Any], recv_options: Any = RecvOptions) -> None:
        _check_whole(recv_options)
        self._group.recv(
            src=recv_options.src_rank, out=_one(tensor), timeout=_seconds(recv_options)
        )


def _one(tensors: list[Any]) -> Any:
    if len(tensors) != 1:
        raise ValueError(
            f"aiodist takes one tensor a rank, not {len(tensors)}: make each GPU a rank of its own"
        )
    return tensors[0]


def _operator(options: Any) -> ReduceOp:
    operator: ReduceOp = getattr(ReduceOp, options.reduceOp.name)  # Ray's names are ours
    return operator


def _seconds(options: Any) -> float | None:
    """Return the deadline in `options`; None: that of the group."""
    # RecvOptions lacks it, because Ray has given it another name there.
    given = getattr(options, "timeout_ms", unset_timeout_ms)
    if not isinstance(given, timedelta):
        given = timedelta(milliseconds=given)
    return given.total_seconds() if given > timedelta(0) else None


def _check_whole(options: Any) -> None:
    if options.n_elements:
        raise ValueError(
            f"aiodist sends whole tensors, not {options.n_elements} elements of one: send "
            f"tensor[:{options.n_elements}]"
        )
