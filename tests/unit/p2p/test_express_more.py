"""What can go wrong around messages of the short way: odd dtypes, and code that runs within its
calls, such as a finalizer or a handler of a signal."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from over_links import until

import aiodist
from aiodist import compiled
from aiodist.buffers.dtypes import TORCH
from aiodist.errors import MismatchError
from aiodist.transports import polling
from aiodist.transports.shm_rings import Rings

torch = pytest.importorskip("torch")

KIB = 1024


@asynccontextmanager
async def pair(monkeypatch: pytest.MonkeyPatch):
    """Two ranks that have a link in shared memory, and whose loop is never due for a turn."""
    monkeypatch.setattr(polling, "LOOP_DUE", 60.0)
    async with aiodist.local(2, transports=("shm",), op_timeout=30.0) as ranks:
        a, b = ranks
        await a.send(None, 1)
        await b.recv()
        yield ranks


def tensor(name: str) -> Any:
    """Return a tensor of 8 bytes, or None if there can be none of this dtype."""
    if name == "bool":
        return torch.tensor([True, False] * 4)
    try:
        return torch.arange(8, dtype=torch.uint8).view(getattr(torch, name))
    except (RuntimeError, TypeError):
        return None


NAMES = [name for name in sorted(TORCH) if hasattr(torch, name) and tensor(name) is not None]


def content(x: Any) -> bytes:
    return bytes(x.untyped_storage())


@pytest.mark.one_loop
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(13)
async def test_each_dtype_arrives(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also beside one that looks alike to DLPack: int4 and int8, for example."""
    x = tensor(name)
    async with pair(monkeypatch) as (a, b):
        for other in ("uint8", "int8", name):
            known = torch.arange(x.numel(), dtype=torch.uint8)
            known = x if other == name else known.view(getattr(torch, other)).reshape(x.shape)
            for _ in range(3):
                await a.send(known, 1)
                assert (await b.recv()).dtype == known.dtype
                place = torch.zeros_like(known.view(torch.uint8)).view(known.dtype)
                await a.send(known, 1)
                assert await b.recv(out=place) is place
                assert content(place) == content(known)
                gathered = await asyncio.gather(a.all_gather(known), b.all_gather(known))
                for found in gathered[0] + gathered[1]:
                    assert (found.dtype, content(found)) == (known.dtype, content(known))


async def test_a_place_of_another_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4, dtype=torch.uint8)
    async with pair(monkeypatch) as (a, b):
        for _ in range(3):
            await a.send(x, 1)
            await b.recv(out=torch.zeros(4, dtype=torch.uint8))
        await a.send(x, 1)
        with pytest.raises(MismatchError, match="out: is uint4"):
            await b.recv(out=torch.zeros(4, dtype=torch.uint8).view(torch.uint4))
        assert (await b.recv()).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("known", [False, True])
async def test_what_no_tensor_shows_is_refused_as_ever(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    sparse = torch.eye(3).to_sparse()
    async with pair(monkeypatch) as (a, b):
        for _ in range(3 if known else 0):
            await a.send(torch.eye(3), 1)
            await b.recv()
        for x in (sparse, torch.zeros(3, device="meta")):
            with pytest.raises(TypeError, match="does not travel"):
                await a.send(x, 1)
        with pytest.raises(TypeError, match="does not travel"):
            await asyncio.gather(a.broadcast(sparse), b.broadcast(sparse))


@pytest.mark.parametrize("core", ["as it is", "python"])
async def test_ranks_take_turns(monkeypatch: pytest.MonkeyPatch, core: str) -> None:
    """Rank 0 receives from any rank what the others have sent before."""
    monkeypatch.setattr(polling, "LOOP_DUE", 60.0)
    async with aiodist.local(4, transports=("shm",), op_timeout=30.0) as ranks:
        group, *others = ranks
        if core == "python":
            for name in ("send", "recv"):
                vars(group._context.p2p_express).pop(name, None)
        for other in others:
            for _ in range(4):  # so that their kind is known
                await other.send(np.zeros(1), 0)
                await group.recv(src=other.rank)
        for number in range(10):
            for other in others:
                assert other.isend(np.full(1, 1.0 * number), 0).done()
        sources = []
        for _ in range(30):
            group._context.endpoint.progress._due = math.inf  # the loop needs no turn
            work = group.irecv()
            assert work.done()
            sources.append(work.source)
        for at in range(0, 30, 3):
            assert {*sources[at : at + 3]} == {1, 2, 3}


@pytest.mark.parametrize("core", ["as it is", "python"])
async def test_an_answer_waits_for_the_call_that_takes_it(
    monkeypatch: pytest.MonkeyPatch, core: str
) -> None:
    """The loop has a turn between a message and the call for its answer. It does not read that."""
    monkeypatch.setattr(polling, "LOOP_DUE", 60.0)
    async with pair(monkeypatch) as (a, b):
        if core == "python":
            vars(a._context.p2p_express).pop("send", None)
        x = np.zeros(8)
        for _ in range(4):  # so that their kind is known
            await a.send(x, 1)
            await b.recv(src=0, out=x)
        waiting, *_ = a._context.p2p.receiver.waiting
        for number in range(4):
            a._context.endpoint.progress._due = 0.0  # the loop is due
            sending = a.isend(x, 1)
            assert not sending.done()
            assert b.isend(np.full(8, 1.0 * number), 0).done()
            await sending
            assert not waiting
            answer = a.irecv(src=1)
            assert answer.done()
            assert (await answer)[0] == number
            await b.recv(src=0, out=x)
        assert b.isend(x, 0).done()  # no call takes this one, so the loop reads it all the same
        for _ in range(3):
            a._context.endpoint.progress._due = 0.0
            await a.isend(x, 1)
            await b.recv(src=0, out=x)
        assert waiting


@pytest.mark.parametrize("core", ["as it is", "python"])
async def test_a_receive_goes_on_for_a_while_after_the_loop_is_due(
    monkeypatch: pytest.MonkeyPatch, core: str
) -> None:
    async with pair(monkeypatch) as (a, b):
        if core == "python":
            vars(b._context.p2p_express).pop("recv", None)
        pace, x = b._context.endpoint.progress, np.arange(8.0)
        for _ in range(4):  # so that their kind is known
            await a.send(x, 1)
            await b.recv(src=0, out=np.zeros(8))
        for held in (0.0, math.inf, polling.HELD / 2):
            for _ in range(1000):  # the system may have taken the core in between
                assert a.isend(x, 1).done()
                pace._due = polling._clock() - held
                work = b.irecv(src=0, out=np.zeros(8))
                within = work.done()
                in_time = held == math.inf or polling._clock() < pace._due + polling.HELD
                assert (await work).sum() == x.sum()
                if in_time:
                    break
            else:
                pytest.skip("this machine is too busy")
            assert within == (held < math.inf)


@pytest.mark.parametrize("core", ["as it is", "python"])
async def test_a_link_that_has_ended_leaves_messages_of_others(
    monkeypatch: pytest.MonkeyPatch, core: str
) -> None:
    """The rank behind it is not known to be lost before the loop turns."""
    monkeypatch.setattr(polling, "LOOP_DUE", 60.0)
    async with aiodist.local(3, transports=("shm",), op_timeout=30.0) as ranks:
        group, *others = ranks
        if core == "python":
            vars(group._context.p2p_express).pop("recv", None)
        for other in others:
            for _ in range(4):  # so that their kind is known
                await other.send(np.zeros(1), 0)
                await group.recv()
        assert others[1].isend(np.full(1, 3.0), 0).done()
        group._context.link(1).close()
        work = group.irecv()
        assert (await work)[0] == 3.0
        assert work.source == 2


class Interrupt(Exception):
    """What a handler of a signal raises."""


@pytest.mark.skipif(compiled.core is None, reason="it may come between any two lines of Python")
@pytest.mark.parametrize("nbytes", [8, 64 * KIB, 256 * KIB])
async def test_an_interrupt_leaves_no_half_message(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """It comes while the sender wakes the receiver."""
    x, wake = np.ones(nbytes // 4, np.float32), Rings._wake_peer
    interrupts: list[Rings] = []

    def interrupted(rings: Rings) -> None:
        wake(rings)
        if not interrupts:
            interrupts.append(rings)
            raise Interrupt

    async with pair(monkeypatch) as (a, b):
        for _ in range(6):
            work = a.isend(x, 1, tag=1)
            await b.recv(src=0, tag=1)
            await work
        await until(lambda: b._context.link(0)._asleep)
        monkeypatch.setattr(Rings, "_wake_peer", interrupted)
        with pytest.raises(Interrupt):
            a.isend(x, 1, tag=1)
        other = a.isend(x[: len(x) // 2] * 2, 1, tag=2)
        assert (await b.recv(src=0, tag=2) == 2).all()
        await other
        if (found := b.irecv(src=0, tag=1)).done():  # it was sent, or it was not
            assert (await found == 1).all()
        else:
            found.cancel()


@pytest.mark.skipif(compiled.core is None, reason="it may come between any two lines of Python")
@pytest.mark.parametrize("what", ["send", "recv"])
async def test_an_interrupt_while_a_tensor_is_looked_at_ends_the_group(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It is not lost, though the compiled part leaves tensors that it cannot read to Python."""
    async with pair(monkeypatch) as (a, b):
        x, out = torch.arange(4.0), torch.zeros(4)
        call = partial(a.isend, x, 1) if what == "send" else partial(b.irecv, src=0, out=out)
        for _ in range(6):
            work = a.isend(x, 1)
            await b.recv(src=0, out=out)
            await work
        if what == "recv":
            assert a.isend(x, 1).done()
        with monkeypatch.context() as patch:

            def interrupt(_: Any) -> None:
                patch.undo()
                raise KeyboardInterrupt

            patch.setattr(torch.Tensor, "is_neg", interrupt)
            with pytest.raises(KeyboardInterrupt):
                call()
        with pytest.raises(aiodist.GroupClosedError, match="KeyboardInterrupt broke a call off"):
            call()


class Hooked(asyncio.SelectorEventLoop):
    """Calls `hook` once, the next time when a future is made."""

    hook: Callable[[], object] | None = None

    def get_debug(self) -> bool:
        if self.hook is not None:
            hook, self.hook = self.hook, None
            hook()
        return super().get_debug()


@pytest.fixture
def hooked():
    """Runs a test on such a loop. A finalizer may run anywhere, as the hook does."""
    with asyncio.Runner(loop_factory=Hooked) as runner:
        yield runner


def test_a_send_within_a_send(hooked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with pair(monkeypatch) as (a, b):
            for number in range(10):
                work = []
                for at in range(4):
                    x = np.full(1000, 10.0 * number + at)
                    if at == 2 and number > 3:
                        loop.hook = partial(a.isend, np.full(1000, -1.0), 1, tag="in")
                    work.append(a.isend(x, 1, tag=1))
                for at in range(4):
                    assert ((await b.recv(src=0, tag=1)) == 10 * number + at).all()
                if number > 3:
                    assert ((await b.recv(src=0, tag="in")) == -1).all()
                await asyncio.gather(*work)

    hooked.run(main())


def test_a_receive_within_a_receive(hooked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with pair(monkeypatch) as (a, b):
            out, inner = np.zeros(8), np.zeros(8)
            works: list[Any] = []

            def take(place: Any) -> None:
                works.append(b.irecv(src=0, tag=1, out=place))

            for number in range(10):
                works.clear()
                await a.send(np.full(8, 1.0 * number), 1, tag=1)
                await a.send(np.full(8, -1.0 * number), 1, tag=1)
                loop.hook = partial(take, inner)
                take(out)
                await asyncio.gather(*works)
                assert len(works) == 2
                assert sorted([out[0], inner[0]]) == [-number, number]

    hooked.run(main())


@pytest.mark.parametrize("what", ["send", "recv"])
def test_a_link_that_ends_within_a_call(
    hooked: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with pair(monkeypatch) as (a, b):
            x = np.zeros(8)
            for _ in range(4):
                await a.send(x, 1, tag=1)
                await b.recv(src=0, tag=1, out=x)
            if what == "send":
                loop.hook = a._context.link(1).close
                work = a.isend(x, 1, tag=1)
            else:
                await a.send(x, 1, tag=1)
                loop.hook = b._context.link(0).close
                work = b.irecv(src=0, tag=1, out=x)
            work.cancel()

    hooked.run(main())
