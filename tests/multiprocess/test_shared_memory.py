"""Ranks in processes of their own: their collectives without a tag run in shared memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import heard, processes

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux shares memory"),
    pytest.mark.usefixtures("no_shared_files"),
]

PRELUDE = """
import asyncio, json, logging, os, sys
import numpy as np
import aiodist

async def settled(group):
    over = 0
    while not over:  # as often on all ranks
        over = await group.all_reduce(int(group._context._setup.over), aiodist.ReduceOp.MIN)

def say(value):
    print(json.dumps(value), flush=True)

def held():
    return [line for line in open("/proc/self/maps") if "/memfd:aiodist" in line]

async def start():
    logging.basicConfig(format="%(message)s")
    rank, size = int(sys.argv[2]), int(sys.argv[3])
    group = await aiodist.connect(sys.argv[1], rank=rank, size=size, op_timeout=200)
    await program(group)
    await group.close()

def go():
    asyncio.run(start())
"""


def ranks_of(program, size, **options):
    """`size` ranks that run `program`: see `processes`."""
    return processes(f"{PRELUDE}{program}\ngo()\n", size, size, **options)


async def ends(process):
    """What it wrote to stderr; it ends well."""
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return errors.decode()


EVERYTHING = """
async def program(group):
    rank, size = group.rank, group.size
    everyone = range(size)
    await settled(group)
    say(group._context.lane is not None)
    for n in (1, 5, 1000, 30_000, 200_000):
        for _ in range(2):
            x = np.arange(n, dtype=np.float64) + rank
            total = np.arange(n) * size + sum(everyone)
            for y in (await group.all_reduce(x.copy()), await group.all_reduce(x, out=x.copy())):
                np.testing.assert_array_equal(y, total)
            y = await group.reduce(x.copy(), 1)
            assert (y is None) == (rank != 1)
            if y is not None:
                np.testing.assert_array_equal(y, total)
            y = await group.reduce_scatter(x)
            np.testing.assert_array_equal(y, np.array_split(total, size)[rank])
            y = await group.scan(x.copy())
            np.testing.assert_array_equal(y, np.arange(n) * (rank + 1) + sum(range(rank + 1)))
            for src, y in enumerate(await group.all_gather(x)):
                np.testing.assert_array_equal(y, np.arange(n) + src)
            y = await group.broadcast(x if rank == 2 else None, 2)
            np.testing.assert_array_equal(y, np.arange(n) + 2)
            for src, y in enumerate(await group.all_to_all([x + dst for dst in everyone])):
                np.testing.assert_array_equal(y, np.arange(n) + src + rank)
            assert await group.all_reduce(rank) == sum(everyone)
    before = group.bytes_moved
    works = [group.all_reduce(np.full(7, float(k))) for k in range(200)]
    for k, work in enumerate(works):
        assert (await work == size * k).all()
    assert group.bytes_moved >= before
    pair = await group.split("alone" if rank == 1 else "pair")
    if pair.size > 1:
        await settled(pair)
    assert await pair.all_reduce(1) == pair.size
    await pair.close()
    await group.close()
    import gc
    gc.collect()
    say(held())
"""


def test_everything(run):
    async def main():
        async with ranks_of(EVERYTHING, 3) as ranks:
            for process in ranks:
                assert await heard(process) is True
            for process in ranks:
                assert await heard(process) == []  # no memory is left when the group is closed
            for process in ranks:
                assert await ends(process) == ""

    run(main())


NONE_HERE = """
if os.environ.get("NO_MEMORY"):
    from aiodist.prepared import lane_setup
    lane_setup.unsupported_reason = lambda: "no memfd today"

async def program(group):
    await settled(group)
    for number in range(5):
        assert (await group.all_reduce(np.full(50_000, float(number))) == 3 * number).all()
    say(group._context.lane is None)
"""


def test_a_rank_without_shared_memory(run):
    async def main():
        async with ranks_of(NONE_HERE, 3, env={1: {"NO_MEMORY": "1"}}) as ranks:
            for process in ranks:
                assert await heard(process) is True
            logs = [await ends(process) for process in ranks]
            for rank, log in enumerate(logs):
                assert len(log.splitlines()) == 1
                assert f"rank {rank} uses sockets" in log
                assert ("no memfd today" in log) == (rank == 1)

    run(main())


BY_CHOICE = """
async def program(group):
    for number in range(12):
        assert (await group.all_reduce(np.full(50_000, float(number))) == 3 * number).all()
    say(group._context.lane is None)
"""


def test_a_rank_that_is_not_to_share(run):
    async def main():
        async with ranks_of(BY_CHOICE, 3, env={2: {"AIODIST_TRANSPORTS": "unix"}}) as ranks:
            for process in ranks:
                assert await heard(process) is True
            for process in ranks:
                assert await ends(process) == ""

    run(main())


BLOCKS = """
async def program(group):
    await settled(group)
    for length in (4, 400_000):
        if group.rank == 1:
            say("blocks")
            sys.stdin.readline()
            value = await group.all_reduce(np.ones(length))
        else:
            work = group.all_reduce(np.ones(length))
            for _ in range(5000):
                await asyncio.sleep(0)
            assert not work.done()
            assert await group.recv(src=2 - group.rank, tag="x") == 5 \
                if group.rank == 2 else (await group.send(5, 2, tag="x")) is None
            say("turned")
            value = await work
        assert (value == 3).all()
"""


def test_a_rank_that_blocks_its_loop(run):
    """The others' loops turn; they go on once it returns."""

    async def main():
        async with ranks_of(BLOCKS, 3) as ranks:
            for _ in range(2):
                assert await heard(ranks[1]) == "blocks"
                for process in (ranks[0], ranks[2]):
                    assert await heard(process) == "turned"
                ranks[1].stdin.write(b"\n")
            for process in ranks:
                assert await ends(process) == ""

    run(main())


TURNS = """
async def program(group):
    await settled(group)
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    calls = at_once = 0
    x = np.zeros(4)
    # Until all have counted, or it has obviously no end.
    while calls < 300_000:
        work = group.all_reduce(x)
        at_once += work.done()
        calls += 1
        await work
        if not calls % 100 and await group.all_reduce(turns, aiodist.ReduceOp.MIN) > 20:
            break
    say([turns > 20, at_once > 0])
    # A large one takes its time, and gives the loop its turns.
    x = np.zeros(16_000_000, np.float32)
    before = turns
    work = group.all_reduce(x)
    say(work.done())
    await work
    say(turns > before)
    counting.cancel()
"""


def test_the_loop_gets_its_turn(run):
    async def main():
        async with ranks_of(TURNS, 2) as ranks:
            counts = [await heard(process) for process in ranks]
            assert all(turned for turned, _ in counts)
            assert any(at_once for _, at_once in counts)
            for process in ranks:
                assert await heard(process) is False
                assert await heard(process) is True
            for process in ranks:
                assert await ends(process) == ""

    run(main())


GIVES_UP = """
async def outcome(work):
    try:
        return float((await work)[0])
    except (aiodist.AiodistError, asyncio.CancelledError, TimeoutError) as error:
        missing = list(getattr(error, "missing", []))
        return [type(error).__name__, getattr(error, "rank", None), missing]

async def program(group):
    await settled(group)
    for length in (4, 400_000):
        results = []
        for way in ("cancel", "timeout", "deadline"):
            work = None
            if group.rank == 0 and way == "cancel":
                work = group.all_reduce(np.ones(length))
                work.cancel()
                results.append(await outcome(work))
            elif group.rank == 0 and way == "timeout":
                try:
                    async with asyncio.timeout(0.01):
                        await group.all_reduce(np.ones(length))
                except TimeoutError:
                    results.append("TimeoutError")
            elif group.rank == 0:
                await group.recv(src=2)  # it has entered
                results.append(await outcome(group.all_reduce(np.ones(length), timeout=0.05)))
            if group.rank == 0:
                await group.barrier(tag=way)
            else:
                if way != "deadline" or group.rank == 1:
                    await group.barrier(tag=way)
                    results.append(await outcome(group.all_reduce(np.ones(length))))
                else:
                    work = group.all_reduce(np.ones(length))
                    await group.send(None, 0)
                    results.append(await outcome(work))
                    await group.barrier(tag=way)
            results.append(await outcome(group.all_reduce(np.ones(length))))
        say(results)
"""


@pytest.mark.parametrize("tag", ["", ", tag='t'"])
def test_giving_up(run, tag):
    program = GIVES_UP.replace("np.ones(length)", f"np.ones(length){tag}")

    async def main():
        async with ranks_of(program, 3) as ranks:
            for _ in range(2):
                aborted = ["CollectiveAbortedError", 0, []]
                late = ["CollectiveTimeoutError", None, [1]]
                zero, one, two = [await heard(process) for process in ranks]
                cancelled = ["CancelledError", None, []]
                assert zero == [cancelled, 3.0, "TimeoutError", 3.0, late, 3.0]
                assert one == [aborted, 3.0, aborted, 3.0, late, 3.0]
                assert two == [aborted, 3.0, aborted, 3.0, late, 3.0]
            for process in ranks:
                assert await ends(process) == ""

    run(main())


IN_ANY_ORDER = """
import random

async def program(group):
    await settled(group)
    chance, n = random.Random(group.rank), 50_000
    for round in range(3):
        works = {}
        for tag in chance.sample(range(12), 12):
            # Some lie in memory that all see, on some ranks.
            shared = tag == 3 or chance.random() < 0.2
            x = (group.empty if shared else np.empty)(n + 1000 * tag, "float64")
            x[:] = group.rank + tag
            match tag % 3:
                case 0:
                    works[tag] = group.all_reduce(x, tag=tag)
                case 1:
                    works[tag] = group.reduce(x, 1, tag=tag)
                case 2:
                    works[tag] = group.scan(x, tag=tag)
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        for tag, work in works.items():
            ranks = range(group.rank + 1 if tag % 3 == 2 else group.size)
            y = await work
            if tag % 3 != 1 or group.rank == 1:
                assert y.shape == (n + 1000 * tag,) and (y == sum(ranks) + len(ranks) * tag).all()
    await group.barrier()
    say([len(group._context.berths._all), all(each.is_free for each in group._context.berths._all)])
"""


def test_large_ones_with_tags_in_any_order(run):
    """On berths, of which ranks need several; then all are free."""

    async def main():
        async with ranks_of(IN_ANY_ORDER, 3) as ranks:
            for process in ranks:
                berths, free = await heard(process)
                assert berths > 1
                assert free
            for process in ranks:
                assert await ends(process) == ""

    run(main())


FORKS = """
async def program(group):
    await settled(group)
    x = np.ones(4)
    await group.all_reduce(x)
    waiting = group.all_reduce(np.ones(4)) if group.rank == 0 else None
    if group.rank == 0:
        pid = os.fork()
        if not pid:
            try:
                group.all_reduce(x)
            except (aiodist.GroupClosedError, RuntimeError):
                os._exit(7)
            os._exit(1)
        say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        await group.barrier(tag="forked")
        assert (await waiting == 2).all()
    else:
        await group.barrier(tag="forked")
        assert (await group.all_reduce(np.ones(4)) == 2).all()
    for _ in range(5):
        assert (await group.all_reduce(np.ones(4)) == 2).all()
    say("done")
"""


def test_a_child_of_fork_leaves_it_alone(run):
    async def main():
        async with ranks_of(FORKS, 2) as ranks:
            assert await heard(ranks[0]) == 7
            for process in ranks:
                assert await heard(process) == "done"
                assert await ends(process) == ""

    run(main())


def test_nothing_is_in_a_directory():
    assert not [name for name in os.listdir("/dev/shm") if "aiodist" in name]
    assert not list(Path("/tmp").glob("aiodist-mem*"))


MESSAGES = """
from aiodist.transports import remote

if os.environ.get("FORBIDDEN"):
    def forbidden(*_):
        raise PermissionError("no memory of other processes today")
    remote.read = forbidden

async def program(group):
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    out = np.zeros(700_000)
    for number in range(3):
        x = np.arange(700_000.0) + group.rank + number
        value = await group.sendrecv([x, np.ones(2)], right, src=left)
        np.testing.assert_array_equal(value[0], x - group.rank + left)
        await group.sendrecv(x, right, src=left, out=out)
        np.testing.assert_array_equal(out, value[0])
    # How much of each depends on when a sender's loop gives a sign, and sends the rest.
    say(group._context.endpoint.traffic.moved.received > 0)
"""


def may_read_each_other():
    """Whether processes of one user may read each other's memory here, as far as Yama knows."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return not scope.exists() or scope.read_text(encoding="utf-8").strip() == "0"


@pytest.mark.parametrize("forbidden", [(), (1,), (0, 1, 2)])
def test_large_messages_are_read_where_that_is_allowed(run, forbidden):
    async def main():
        env = {rank: {"FORBIDDEN": "1"} for rank in forbidden}
        async with ranks_of(MESSAGES, 3, env=env) as ranks:
            for rank, process in enumerate(ranks):
                assert await heard(process) is (may_read_each_other() and rank not in forbidden)
            for process in ranks:
                assert await ends(process) == ""

    run(main())


KILLED = """
import select, signal
from aiodist.transports import remote

reads = 0

def read_of_the_dead(pid, address, into, real=remote.read):
    global reads
    reads += 1
    if reads == 2:  # a proof, and data: after that it may be asked to send the rest
        os.kill(sender, signal.SIGKILL)
        select.select([process], [], [])  # its memory is there until it is gone
    real(pid, address, into)

async def program(group):
    global sender, process
    sender = group.members[0].pid
    process = os.pidfd_open(sender)
    await group.barrier()
    if group.rank == 0:
        await group.send(np.full(3_000_000, 1.0), 1)
        return
    remote.read = read_of_the_dead
    out = np.zeros(3_000_000)
    try:
        await group.recv(src=0, out=out)
    except aiodist.PeerLostError as error:
        out[:] = 7
        for _ in range(100):
            await asyncio.sleep(0)
        say([error.ranks, bool((out == 7).all())])
    group.abort("seen enough")
"""


def test_a_sender_that_dies_while_it_is_read(run):
    async def main():
        async with ranks_of(KILLED, 2) as (_, receiver):
            if may_read_each_other():
                assert await heard(receiver) == [[0], True]

    run(main())


ANEW = """
async def program(group):
    rank = group.rank
    await settled(group)

    def gather(x):
        return group.all_gather(x, tag="t")

    for _ in range(4):
        await gather(np.full(50_000, float(rank)))
    x = group.empty(50_000, np.float64)
    x[:] = 7 + rank
    await gather(x)  # from here on it lies where the other rank sees it
    for theirs in (np.full(50_000, 8.0), x, x.copy()):
        if rank == 0:
            work = gather(x)
            group._context.calls.waiting.settle()  # as all do that have waited for long
            await group.send(None, 1)
        else:
            await group.recv(src=0)
            work = gather(theirs)
        say([float(each[0]) for each in await work])
"""


def test_an_array_that_all_see_and_that_was_posted_is_not_offered_once_more(run):
    async def main():
        async with ranks_of(ANEW, 2) as ranks:
            for process in ranks:
                assert [await heard(process) for _ in range(3)] == [[7.0, 8.0]] * 3
            for process in ranks:
                assert await ends(process) == ""

    run(main())
