"""After a fork the child's copy of a group is closed, and the parent's works on."""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import aiodist
from aiodist.errors import GroupRevokedError


def in_child(group, call: str = "barrier") -> str:
    """What a forked child says about its copy of `group`, of which it makes this call."""
    return raised_in_child(getattr(group, call), lambda: f" closed={group.closed}")


def raised_in_child(call: Callable[[], object], more: Callable[[], str] = str) -> str:
    """The error that a call raises in a forked child, and `more`."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                call()
                said = "no error"
            except (RuntimeError, aiodist.GroupClosedError) as error:
                said = f"{type(error).__name__}{more()}"
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said


def test_a_forked_child_holds_nothing(run):
    async def main():
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            await asyncio.gather(*[g.barrier() for g in ranks])
            assert in_child(ranks[0]).endswith("closed=True")
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [2, 2]

    run(main())


@pytest.mark.parametrize("call", ["abort", "revoke", "dup", "shrink", "acknowledge_lost"])
def test_each_call_tells_a_child_of_the_fork(run, call):
    async def main():
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            assert in_child(ranks[0], call) == "GroupClosedError closed=True"
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [2, 2]

    run(main())


def test_a_child_takes_part_in_nothing_even_if_closing_fails(run, monkeypatch):
    def fail():
        raise OSError("planted")

    async def main():
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            await asyncio.gather(*[g.barrier() for g in ranks])
            for group in ranks:
                monkeypatch.setattr(group._actor, "close_in_child", fail)
            assert in_child(ranks[0]) == "GroupClosedError closed=True"
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [2, 2]

    run(main())


def test_closing_one_that_fails_does_not_keep_others_open(run, monkeypatch):
    closed = []

    def fail():
        closed.append(True)
        raise OSError("planted")

    async def main():
        async with aiodist.local(3, transports=("tcp",)) as ranks:
            for group in ranks:
                monkeypatch.setattr(group._actor, "close_in_child", fail)
            if (child := os.fork()) == 0:
                os._exit(len(closed))
            assert exit_code(child) == 3

    run(main())


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


Call = Callable[[], Awaitable[object]]


@asynccontextmanager
async def entered(what: str, address: str) -> AsyncIterator[Call]:
    """The context `what`; gives a call that works within it."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        match what:
            case "local":
                (group,) = await enter(aiodist.local(1))
                yield group.barrier
            case "publisher":
                out = await enter(aiodist.publisher("p", address=address))
                await out.publish(np.ones(3), version=1)
                yield lambda: out.publish(np.ones(3), version=2)
            case "subscriber":
                out = await enter(aiodist.publisher("p", address=address))
                await out.publish(np.ones(3), version=1)
                yield (await enter(aiodist.subscriber("p", address=address))).latest
            case "averager":
                averager = await enter(aiodist.averager("a", address=address))
                averager._connection.spawn(asyncio.Event().wait(), "ends with the context")
                yield lambda: averager.average(np.ones(3))
            case "lifespan":
                lifespan = aiodist.lifespan(address, min_size=1)
                await enter(lifespan(SimpleNamespace(state=SimpleNamespace())))
                yield lambda: lifespan.call(aiodist.Group.barrier)
            case "epochs":
                epochs = aiodist.epochs(address, min_size=1)
                await enter(aclosing(epochs))
                yield (await enter(await anext(epochs))).barrier
            case _:
                group = await enter(aiodist.connect(address, rank=0, size=1))
                if what == "window":
                    await enter(await group.expose(np.zeros(3)))
                elif what == "dup":
                    group = await enter(await group.dup())
                elif what == "watch":
                    await enter(group.store.watch("key"))
                elif what == "closed group":
                    await group.close()
                yield group.close if group.closed else group.barrier


@pytest.mark.parametrize("what", ["publisher", "subscriber", "averager"])
def test_a_call_in_a_child_raises(run, what):
    async def main():
        async with aiodist.Coordinator() as one, entered(what, one.address) as call:

            async def called() -> None:
                await asyncio.wait_for(call(), 20)

            assert raised_in_child(lambda: asyncio.run(called())) == "GroupClosedError"
            await call()

    run(main())


class Planted(GroupRevokedError):
    """An error of the program, after which `epochs` would go on in the parent."""


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize(
    "what",
    ["connect", "closed group", "dup", "window", "watch", "local", "publisher", "subscriber",
     "averager", "lifespan", "epochs"],
)  # fmt: skip
def test_a_child_leaves_a_context_as_it_wants_to(run, what, raises):
    async def main():
        parent, code = os.getpid(), 1

        def turn() -> None:  # leaving must not wait, because other tasks would go on in the child
            if os.getpid() != parent:
                os._exit(2)

        try:
            async with aiodist.Coordinator() as one, entered(what, one.address) as call:
                asyncio.get_running_loop().call_soon(turn)
                if (child := os.fork()) == 0:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.alarm(60)  # the test ends even if the child does not
                    if raises:
                        raise Planted("planted")
                else:
                    assert exit_code(child) == 0
                    await call()
            code = 0
        except Planted:
            code = 0
        finally:
            if os.getpid() != parent:
                if code:
                    traceback.print_exc()  # the parent sees only the exit code
                os._exit(code)

    run(main())
