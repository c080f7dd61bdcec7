"""A call that is broken off, by the end of the stack or by a signal handler: nothing waits for its
deadline."""

from __future__ import annotations

import asyncio
import gc
import inspect
import math
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.engine.calls import Calls
from aiodist.p2p.point_to_point import PointToPoint

Call = Callable[[aiodist.Group], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "all_reduce": lambda g: g.all_reduce(np.ones(2)),
    "large": lambda g: g.all_reduce(np.ones(100_000)),
    "broadcast": lambda g: g.broadcast({"a": np.ones(2)}),
    "sendrecv": lambda g: g.sendrecv(np.ones(3), 1 - g.rank),
}


def with_stack(levels: int, call: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
    """What `call` gives, if so many levels of the stack are left to it."""

    def deeper(left: int) -> Awaitable[Any]:
        return deeper(left - 1) if left else call()

    return deeper(sys.getrecursionlimit() - len(inspect.stack(0)) - levels)


# What a call was just making when its stack ran out (a socket, a coroutine) may be left behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sample(6)
def test_nothing_waits_for_its_deadline(run: Any, groups: Any, name: str, first: int) -> None:
    """Wherever in a call the stack ends, before or after the other rank has called it: the group
    works on if nothing had begun, and fails everywhere otherwise."""
    call = CALLS[name]

    async def outcomes(levels: int) -> list[Any]:
        async with groups(2, op_timeout=math.inf) as ranks:
            deep, other = ranks[first], ranks[1 - first]
            calls: list[Any] = [call(other)] if first else []
            errors: list[Any] = []
            try:
                calls.append(with_stack(levels, lambda: call(deep)))
            except RecursionError as error:
                errors.append(error)
                await asyncio.sleep(0)  # the turn with which the group ends
                if not deep.closed:
                    calls.append(call(deep))
            if not first:
                calls.append(call(other))
            if errors and not deep.closed:
                # If the stack ended while arguments were checked, the call counts as one with a
                # wrong argument: it fails on the other rank, too, and both make the next one.
                others = calls[0 if first else -1]
                await asyncio.wait([others])
                if others.exception() is not None:
                    calls.append(call(other))
            return errors + await asyncio.gather(*calls, return_exceptions=True)

    async def main() -> None:
        seen = [type(each) for levels in range(4, 100, 3) for each in await outcomes(levels)]
        assert RecursionError in seen
        errors = {each for each in seen if issubclass(each, BaseException)}
        assert all(issubclass(each, (RecursionError, aiodist.AiodistError)) for each in errors)

    run(main())
    gc.collect()  # what was left behind is told of here, and not in the next test


class Endless:
    """Its unpickling takes all of the stack."""

    def __reduce__(self) -> Any:
        return endless, ()


def endless() -> Any:
    return endless()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", ["broadcast", "all_gather"])
def test_code_of_the_user_that_takes_all_of_the_stack_fails_the_operation_alone(
    run: Any, groups: Any, name: str, first: int
) -> None:
    """In a callback of a link there is no call that could abort the group, and the peer is well."""

    async def main() -> None:
        async with groups(2, allow_pickle=True) as ranks:
            for _ in range(3):  # the later ones may be done within the call
                works: list[Any] = [None, None]
                for rank in (first, 1 - first):
                    x = None if name == "broadcast" and rank else Endless()
                    works[rank] = getattr(ranks[rank], name)(x)
                    await asyncio.sleep(0)
                await asyncio.wait(works)
                errors = {type(work.exception()) for work in works}
                assert RecursionError in errors
                # The rank that broadcasts reads no value, and may have completed.
                assert errors <= {RecursionError, aiodist.CollectiveAbortedError, type(None)}
                assert await asyncio.gather(*[rank.all_reduce(1) for rank in ranks]) == [2, 2]

    run(main())


@pytest.mark.parametrize("length", [3, 1_000_000])
async def test_a_stack_that_ends_in_the_receive_of_a_sendrecv(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    def overflow(*_: Any, **__: Any) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    async with aiodist.local(2, op_timeout=math.inf) as (one, two):
        waiting = two.barrier()
        with monkeypatch.context() as patched:
            patched.setattr(PointToPoint, "recv", overflow)
            with pytest.raises(RecursionError):
                one.sendrecv(np.ones(length), 1)
        with pytest.raises(aiodist.PeerLostError, match="ran out of stack"):
            await waiting


@pytest.mark.parametrize(
    ("place", "name"), [(Calls, "launch"), (PointToPoint, "send"), (PointToPoint, "recv")]
)
async def test_a_signal_handler_that_raises_within_a_call(
    monkeypatch: pytest.MonkeyPatch, place: type, name: str
) -> None:
    """The group ends at once, because its next call might take what this one has left."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    async with aiodist.local(2, op_timeout=math.inf) as (one, two):
        waiting = two.barrier()
        with monkeypatch.context() as patched:
            patched.setattr(place, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                one.all_reduce(np.ones(3)) if place is Calls else one.sendrecv(
                    np.ones(1_000_000), 1
                )
        with pytest.raises(aiodist.GroupClosedError, match="KeyboardInterrupt broke a call off"):
            one.barrier()
        with pytest.raises(aiodist.PeerLostError, match="KeyboardInterrupt broke a call off"):
            await waiting
