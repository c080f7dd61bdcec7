"""Small arrays by the short way: what it gives, and that it stays out of the way of the others."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest
from over_links import until

import aiodist
from aiodist import compiled
from aiodist.errors import MessageTooLargeError, MismatchError, PeerLostError, ProtocolError
from aiodist.p2p.credit import COST, EAGER, WINDOW
from aiodist.p2p.express import P2PExpress
from aiodist.p2p.frames import CREDIT
from aiodist.p2p.frames import EAGER as EAGER_FRAME
from aiodist.p2p.message_forms import Credits
from aiodist.p2p.sender import Sender
from aiodist.transports import polling as progress
from aiodist.transports.shm_link import ShmLink
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields, prefix

torch = pytest.importorskip("torch")

TRANSPORTS = ["shm", "tcp"]


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@asynccontextmanager
async def pair(transport, **options):
    """Two ranks that have a link."""
    async with aiodist.local(2, transports=(transport,), op_timeout=30.0, **options) as ranks:
        a, b = [group._context.p2p for group in ranks]
        a.send(None, 1)
        await b.recv()
        yield ranks


@pytest.fixture
def short(monkeypatch):
    """By call: the name of what went the short way, or None."""
    seen = []
    monkeypatch.setattr(progress, "LOOP_DUE", 60.0)  # a slow test is not due for a turn of the loop
    make = P2PExpress.__init__

    def noted(real, name, *args):
        work = real(*args)
        seen.append(None if work is None else name)
        return work

    def made(self, context):
        make(self, context)
        for name in ("send", "recv"):
            setattr(self, name, partial(noted, getattr(self, name), name))

    monkeypatch.setattr(P2PExpress, "__init__", made)
    return seen


ARRAYS = {
    "numpy": np.arange(5, dtype=np.float32),
    "0-d": np.array(7, np.int64),
    "2-d": np.arange(6, dtype=np.complex128).reshape(2, 3),
    "bool": np.array([True, False]),
    "torch": torch.arange(5, dtype=torch.float32),
    "torch 0-d": torch.tensor(3.5, dtype=torch.float64),
    "half": torch.ones(3, dtype=torch.float16),
    "64 KiB": np.arange(1 << 14, dtype=np.float32),
}


def same(a, b):
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


@pytest.mark.parametrize("name", ARRAYS)
async def test_an_array_arrives(transport, short, name):
    x = ARRAYS[name]
    async with pair(transport) as (a, b):
        for tag in (0, 5, "rows", 2**40):
            out = x * 0 if x.dtype not in (np.bool_, torch.bool) else np.zeros_like(x)
            if np.ndim(out) == 0 and not isinstance(out, torch.Tensor):
                out = np.array(out)
            sent = a.send(x, 1, tag=tag)
            assert sent.done() and (sent.op, sent.tag) == ("send", tag)
            received = b.recv(src=0, tag=tag, out=out)
            assert await received is out
            assert same(out, x)
            assert (received.source, received.tag, received.op) == (0, tag, "recv")
            assert received.nbytes == sent.nbytes == x.nbytes
    assert short == ["send", "recv"] * 4


@pytest.mark.parametrize("x", [np.arange(4.0), {"task": 3}], ids=["array", "plain"])
async def test_the_short_way_is_byte_for_byte_the_ordinary_one(transport, monkeypatch, x):
    """Whoever receives the ordinary way cannot tell, and the other way round."""
    nbytes = x.nbytes if isinstance(x, np.ndarray) else 0
    async with pair(transport) as (a, b):
        ways = [group._context.p2p_express for group in (a, b)]
        short = ways[0].send, ways[1].recv
        for send, recv in ((True, True), (True, False), (False, True), (False, False)):
            monkeypatch.setattr(ways[0], "send", short[0] if send else lambda *_: None)
            monkeypatch.setattr(ways[1], "recv", short[1] if recv else lambda *_: None)
            moved = a.bytes_moved[0], b.bytes_moved[1]
            a.send(x, 1, tag="t")
            out = np.zeros(4) if nbytes else None
            found = await b.recv(src=0, tag="t", out=out)
            assert same(found, x) if nbytes else found == x
            # Metadata counts, alike for all.
            meta = a.bytes_moved[0] - moved[0] - nbytes
            assert 0 < meta < 32 and b.bytes_moved[1] - moved[1] == nbytes + meta


def has_leave(group, dst):
    """Whether what is sent to `dst` may be pushed."""
    return group._context.p2p.sender._peers[dst].may_push


async def meet(a, b, x):
    """Send as much as `x` to a receive that waits, which gives leave."""
    work = b.recv(src=a.rank, out=x.copy())
    await a.send(x, b.rank)
    await work
    await until(lambda: has_leave(a, b.rank))


LARGE = {"just": np.arange(EAGER, dtype=np.uint8), "most": np.arange(1 << 18, dtype=np.float32)}


@pytest.mark.parametrize("name", LARGE)
async def test_what_is_larger_is_pushed_in_the_call_where_receives_wait(short, name):
    x = LARGE[name].copy()
    async with pair("shm") as (a, b):
        await meet(a, b, x)
        del short[:]
        for tag in (0, "rows"):
            out = np.zeros_like(x)
            moved = a.bytes_moved[0], b.bytes_moved[1]
            sent = a.send(x, 1, tag=tag)
            assert sent.done() and sent.nbytes == x.nbytes
            x[:] = 0  # it is the sender's again
            received = b.recv(src=0, tag=tag, out=out)
            assert await received is out
            x[:] = LARGE[name]
            assert same(out, x)
            meta = a.bytes_moved[0] - moved[0] - x.nbytes
            assert 0 < meta < 32 and b.bytes_moved[1] - moved[1] == x.nbytes + meta
            await until(lambda: has_leave(a, 1))
    assert short == ["send", "recv"] * 2


async def test_there_and_back_everything_is_pushed(short):
    """The leave for the next message goes ahead of the answer."""
    x, out = LARGE["most"], np.zeros_like(LARGE["most"])
    async with pair("shm") as (a, b):
        await meet(a, b, x)
        await meet(b, a, x)
        del short[:]
        for _ in range(20):
            for src, dst in ((a, b), (b, a)):
                src.send(x, dst.rank)
                assert same(await dst.recv(src=src.rank, out=out), x)
                out[:] = 0
    assert short == ["send", "recv"] * 40


@pytest.mark.skipif(compiled.core is None, reason=compiled.reason)
@pytest.mark.parametrize("tag", [0, "rows"])
async def test_the_compiled_part_pushes(monkeypatch, short, tag):
    """It sends, receives, and takes the leave for the next message."""
    by_python, real = [], (Sender.pulled, P2PExpress._push)
    x = LARGE["most"].copy()
    out = np.zeros_like(x)
    async with pair("shm") as (a, b):
        await meet(a, b, x)
        await meet(b, a, x)
        for turn in range(8):
            if turn == 2:  # from now on, the compiled part knows both messages
                monkeypatch.setattr(Sender, "pulled", lambda *_: by_python.append("pulled"))
                monkeypatch.setattr(P2PExpress, "_push", lambda *_: by_python.append("push"))
                monkeypatch.setattr(ShmLink, "look_for_whole", lambda *_: by_python.append("look"))
            for src, dst in ((a, b), (b, a)):
                x += 1
                await src.send(x, dst.rank, tag=tag)
                assert same(await dst.recv(src=src.rank, tag=tag, out=out), x)
        assert by_python == []
        for src, dst in ((a, b), (b, a)):
            sends, receives = src._context.p2p.sender, dst._context.p2p.receiver
            assert sends._peers[dst.rank].sid == receives._origins[src.rank].sid
            assert sends.books(dst.rank)[1] == receives.books(src.rank)[1]
        monkeypatch.setattr(Sender, "pulled", real[0])
        monkeypatch.setattr(P2PExpress, "_push", real[1])
        await until(lambda: has_leave(b, 0))


@pytest.mark.parametrize("shorter", ["send", "recv"])
async def test_what_is_pushed_the_short_way_is_byte_for_byte_the_same(monkeypatch, shorter):
    x, out = LARGE["just"], np.zeros_like(LARGE["just"])
    async with pair("shm") as (a, b):
        await meet(a, b, x)
        for group, name in ((a, "send"), (b, "recv")):
            if name != shorter:
                monkeypatch.setattr(group._context.p2p_express, name, lambda *_: None)
        a.send(x, 1, tag="t")
        assert same(await b.recv(src=0, tag="t", out=out), x)
        await until(lambda: has_leave(a, 1))


async def test_without_leave_or_room_it_goes_the_ordinary_way(short):
    x, out = LARGE["most"], np.zeros_like(LARGE["most"])
    async with pair("shm") as (a, b):
        await meet(a, b, x)
        for _ in range(2):
            a.send(np.zeros(40_000, np.uint8), 1)  # there is no room for all of them
        work = a.send(x, 1)
        assert not work.done()
        for _ in range(2):
            await b.recv(src=0, out=np.zeros(40_000, np.uint8))
        assert same(await b.recv(src=0, out=out), x)
        await work
    assert short[-4:-3] == [None]


async def test_a_receive_that_gives_up_in_the_midst_gets_the_message_all_the_same(monkeypatch):
    """As where its sender lost the core while it wrote."""
    x, out = LARGE["most"], np.zeros_like(LARGE["most"])
    async with pair("shm") as (a, b):
        await meet(a, b, x)
        link = b._context.link(0)
        there = type(link._rings).available
        monkeypatch.setattr(
            type(link._rings), "available", lambda rings: min(there(rings), 3 * EAGER)
        )
        a.send(x, 1)
        work = b.recv(src=0, out=out)
        assert not work.done()
        assert out[0] == x[0] and out[1] == x[1] and not out[-1]
        monkeypatch.undo()
        assert same(await work, x)
        await until(lambda: has_leave(a, 1))


async def test_what_was_written_to_counts_for_autograd():
    async with pair("shm") as (a, b):
        out = torch.zeros(3)
        before = out._version
        a.send(torch.ones(3), 1)
        await b.recv(src=0, out=out)
        assert out._version > before


async def test_without_out_what_came_before_is_expected(short):
    async with pair("shm") as (a, b):
        for round in range(3):
            x = torch.full((2, 2), float(round))
            a.send(x, 1, tag=7)
            assert same(await b.recv(src=0), x)
    assert short == ["send", None, *["send", "recv"] * 2]


async def test_arrays_of_another_kind_fit(short):
    """A sender's tensors may go to numpy arrays, as ever."""
    async with pair("shm") as (a, b):
        for round in range(3):
            out = np.zeros(3, np.float32)
            a.send(torch.full((3,), float(round)), 1)
            assert (await b.recv(src=0, out=out) == round).all()
    assert short == ["send", None, *["send", "recv"] * 2]


async def test_one_that_is_not_contiguous_spoils_nothing(short):
    async with pair("shm") as (a, b):
        wide, out = np.arange(8.0), np.zeros(4)
        for x in (wide[::2], wide[:4]):
            a.send(x, 1)
            assert same(await b.recv(src=0, out=out), x)
    assert short[0] is None and short[2:] == ["send", "recv"]


async def test_messages_do_not_overtake_those_that_wait(transport):
    async with pair(transport) as (a, b):
        a.send(np.array([1]), 1)
        await until(lambda: b.iprobe() is not None)  # it is taken in, and waits
        a.send(np.array([2]), 1)
        assert [(await b.recv(src=0, out=np.zeros(1, int)))[0] for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("earlier", [{}, {"src": 0}, {"tag": 4}, {"src": 0, "tag": 4}])
async def test_a_receive_that_was_posted_before_has_the_message(transport, earlier):
    async with pair(transport) as (a, b):
        first = b.recv(**earlier)
        a.send(np.array([1]), 1, tag=4)
        second = b.recv(src=0, tag=4, out=np.zeros(1, int))
        a.send(np.array([2]), 1, tag=4)
        assert ((await first)[0], (await second)[0]) == (1, 2)


async def test_other_tags_stay_queued(transport):
    async with pair(transport) as (a, b):
        a.send(np.array([1]), 1, tag="x")
        a.send(np.array([2]), 1, tag="y")
        assert (await b.recv(src=0, tag="y", out=np.zeros(1, int)))[0] == 2
        assert (await b.recv(src=0, tag="x", out=np.zeros(1, int)))[0] == 1


async def test_an_out_that_does_not_fit_leaves_the_message(transport):
    async with pair(transport) as (a, b):
        for round in range(2):
            a.send(np.array([round, 2]), 1)
            with pytest.raises(MismatchError, match="out= does not fit"):
                await b.recv(src=0, out=np.zeros(3, int))
            assert (await b.recv(src=0))[0] == round


async def test_sends_wait_for_credit_and_nothing_is_left_behind(transport, short):
    """A rank that does not receive holds its sender back; what was taken in is given back."""
    x = np.zeros(60_000, np.uint8)
    async with pair(transport) as (a, b):
        works = []
        for number in range(20):
            x[0] = number
            works.append(a.send(x.copy(), 1, tag="t"))
        at_once = sum(work.done() for work in works)
        assert at_once <= WINDOW // (COST + x.nbytes)
        assert short.count("send") == at_once
        for number in range(20):
            assert (await b.recv(src=0, tag="t", out=x))[0] == number
        await asyncio.gather(*works)
        engines = [group._context.p2p for group in (a, b)]
        await until(lambda: all(engine.idle for engine in engines))


async def test_credit_that_comes_first_is_no_hindrance(short):
    """There and back again, with so much that credit travels beside."""
    x, out = np.zeros(EAGER - 1024, np.uint8), np.zeros(EAGER - 1024, np.uint8)
    async with pair("shm") as (a, b):
        a.send(x, 1)
        await b.recv(src=0, out=out)
        b.send(x, 0)  # credit is before it
        await a.recv(src=1, out=out)
    assert short == ["send", "recv"] * 2


@pytest.mark.skipif(compiled.core is None, reason=compiled.reason)
@pytest.mark.parametrize("tag", [0, -1, 2**40, "weights", "é" * 100])
async def test_the_compiled_part_takes_credit(monkeypatch, short, tag):
    """Before the message that it receives, and before one for which there is no credit."""
    by_python, real = [], Sender.refunded
    monkeypatch.setattr(Sender, "refunded", lambda *args: (by_python.append(args), real(*args))[-1])
    async with pair("shm") as (a, b):
        x, out = np.zeros(8192), np.ones(8192)
        used = a._context.p2p.sender.books(1)[1]
        for turn in range(12):
            await a.send(x, 1, tag=tag)
            await b.recv(src=0, tag=tag, out=out)
            await b.send(x[:1], 0)
            await a.recv(src=1, out=out[:1])
            if turn == 2:
                by_python.clear()  # from now on, the compiled part knows both messages
            assert used.get(tag, 0) <= 2 * WINDOW // 3
        sent = 0
        while used.get(tag, 0) + EAGER <= WINDOW:
            await a.send(x, 1, tag=tag)
            sent += 1
        for _ in range(sent):
            await b.recv(src=0, tag=tag, out=out)
        await b.send(x[:1], 0)  # and credit before it
        before = len(short)
        await a.send(x, 1, tag=tag)
        assert (short[before:], by_python) == (["send"], [])
        await b.recv(src=0, tag=tag, out=out)
        sends, receives = a._context.p2p.sender.books(1)[0], b._context.p2p.receiver.books(0)
        assert used == receives[1] == {tag: used[tag]}  # both sides count alike
        assert sends._total == receives[0]._total == used[tag] <= EAGER + COST
        assert (await a.recv(src=1)).tolist() == [0]


@pytest.mark.parametrize("tag", [0, 127, -1, 2**40, "", "weights", "é" * 500])
@pytest.mark.parametrize("amount", [0x10000, 160_000, WINDOW, 2**32 - 1])
def test_how_frames_with_credit_begin(tag, amount):
    head = Credits(b"group")[tag]
    whole = prefix(pack_fields(kinds.P2P, b"group", CREDIT, tag, amount), 0)
    assert whole == head + amount.to_bytes(4, "big") + b"\xc6\0\0\0\0"


async def test_a_message_over_max_message_bytes_goes_the_ordinary_way(transport, short):
    async with pair(transport, max_message_bytes=1024) as (a, b):
        a.send(np.zeros(1024, np.uint8), 1)
        with pytest.raises(MessageTooLargeError):
            await b.recv(src=0, out=np.zeros(1024, np.uint8))
    assert short == [None, None]


async def test_a_lost_rank_is_not_waited_for(transport):
    x = np.zeros(1)
    async with pair(transport) as (a, b):
        b.abort("gone")
        await until(lambda: bool(a._context.lost()))
        for work in (a.send(x, 1), a.recv(src=1, out=x)):
            with pytest.raises(PeerLostError):
                await work


async def test_arguments_are_checked_as_ever():
    x = np.zeros(1)
    async with pair("shm") as (a, b):
        for bad in (True, 1.0, "1"):
            with pytest.raises(TypeError, match="dst is a rank"):
                a.send(x, bad)
            with pytest.raises(TypeError, match="src is a rank"):
                a.recv(src=bad, out=x)
        with pytest.raises(ValueError, match="2 is not a rank"):
            a.send(x, 2)
        with pytest.raises(TypeError, match="a tag is"):
            a.send(x, 1, tag=1.5)
        with pytest.raises(ValueError, match="64 bits"):
            a.recv(src=1, tag=2**63, out=x)
        with pytest.raises(ValueError, match="timeout"):
            a.send(x, 1, timeout=0)
        for tag, value in ((1, 1.0), ("1", 2.0), (np.int64(1), 3.0)):
            a.send(np.full(1, value), 1, tag=tag)
        got = [(await b.recv(src=0, tag=tag, out=x))[0] for tag in ("1", 1, 1)]
        assert got == [2.0, 1.0, 3.0]


@pytest.mark.parametrize("seed", range(6))
async def test_all_ways_together_keep_the_order(transport, seed):
    """Sizes and tags at random, received at random places, in order within each tag."""
    rng = random.Random(seed)
    sizes = [1, 100, 5000, EAGER // 8 + 1, 40_000]
    async with pair(transport) as ranks:

        async def send(group):
            count = {}
            for _ in range(60):
                tag = rng.choice([0, 1, "a"])
                number = count[tag] = count.get(tag, -1) + 1
                x = np.full(rng.choice(sizes), number, np.int64)
                work = group.send(x, 1 - group.rank, tag=tag)
                if rng.random() < 0.3:
                    await work
            return count

        async def receive(group, tag):
            got = []
            while True:
                value = await group.recv(src=1 - group.rank, tag=tag)
                if value is None:
                    return got
                assert (value == value[0]).all()
                got.append(int(value[0]))
                if rng.random() < 0.3:
                    await asyncio.sleep(0)

        receiving = {
            (group.rank, tag): asyncio.ensure_future(receive(group, tag))
            for group in ranks
            for tag in (0, 1, "a")
        }
        counts = await asyncio.gather(*[send(group) for group in ranks])
        for group in ranks:
            for tag in (0, 1, "a"):
                await group.send(None, 1 - group.rank, tag=tag)
        for (rank, tag), task in receiving.items():
            assert await task == list(range(counts[1 - rank].get(tag, -1) + 1))


async def test_the_loop_gets_its_turn_with_a_send(transport, short, monkeypatch):
    """The message is on its way already."""
    async with pair(transport) as ranks:
        x = np.arange(4.0)
        for _ in range(2):
            await ranks[0].send(x, 1)
            await ranks[1].recv(src=0)
        monkeypatch.setattr(progress, "LOOP_DUE", -1.0)
        polling = ranks[0]._context.endpoint.progress
        polling._turned()
        assert not polling.is_due()
        work = ranks[0].send(x, 1)
        assert short[-1] == "send"
        assert not work.done()
        await asyncio.sleep(0)
        assert work.done()
        assert (await ranks[1].recv(src=0) == x).all()

        # It has been sent, so it cannot be withdrawn meanwhile.
        polling._turned()
        assert not polling.is_due()
        work = ranks[0].send(x, 1)
        assert not work.cancel()
        assert work.result() is None
        assert (await ranks[1].recv(src=0) == x).all()


def test_metadata_that_is_garbage_fails_the_receive_that_takes_it_alone(run, transport):
    async def main():
        async with pair(transport) as (a, b):
            context = a._context
            header = pack_fields(kinds.P2P, context.id, EAGER_FRAME, 0, False, 10)
            context.peers[1].send(header, [memoryview(b"\xc1" * 10)])
            with pytest.raises(ProtocolError, match="metadata"):
                await b.recv(src=0)
            first, second = b.recv(src=0), b.recv(src=0)
            await asyncio.gather(a.send(np.ones(3), 1), a.send("fine", 1))
            assert (await first == 1).all()
            assert await second == "fine"

    run(main())


async def test_sendrecv_is_one_work(transport, short):
    """If both messages are done within the call, it is the one of the receive."""
    x, out = np.arange(3.0), np.zeros(3)
    async with pair(transport) as (a, b):
        for round in range(3):
            b.send(x + round, 0, tag="up")
            work = a.sendrecv(x, 1, src=1, tag="down", recv_tag="up", out=out)
            assert (work.op, work.tag, work.source) == ("sendrecv", "down", 1)
            assert await work is out
            assert (out == x + round).all()
            assert (await b.recv(src=0, tag="down", out=np.zeros(3)) == x).all()
        # A failed send fails it.
        b.send(x, 0)
        with pytest.raises(ValueError, match="2 is not a rank"):
            a.sendrecv(x, 2, src=1, out=out)
        assert (await a.recv(src=1) == x).all()


async def test_a_sendrecv_that_nobody_awaits_is_noticed(short):
    x, out = np.arange(3.0), np.zeros(3)
    async with pair("shm") as (a, b):
        for _ in range(2):
            b.send(x, 0)
            with pytest.warns(RuntimeWarning, match="sendrecv was dropped"):
                a.sendrecv(x, 1, src=1, out=out)
            await b.recv(src=0, out=out)
