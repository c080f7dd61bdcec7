"""Memory that a call gives twice: the result is right, or the call is refused; by every way."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import torch

from aiodist import CollectiveAbortedError

pytestmark = pytest.mark.strength(2)

SIZE = 3
CALLS = 3
"""So often everything is called: from the second or third time on it is prepared."""
KINDS = [("numpy", 8), ("torch", 8), ("numpy", 9_001), ("numpy", 150_001)]
"""And so long: what fits among the first words everywhere; in shared memory alone; nowhere."""


def room(kind: str, shape: tuple[int, ...]) -> Any:
    return torch.full(shape, -1.0) if kind == "torch" else np.full(shape, -1.0)


def ranks_of(group: Any, number: int) -> list[int]:
    """What the ranks have in the call of that number."""
    return [10 * number + rank for rank in range(group.size)]


# By name: a call of rank `group.rank` with arrays of length `n`, and its result: a list of arrays,
# of which all elements are the same, by that; or None.


def gathers(where: Any, out_of: Any) -> Any:
    """An all_gather whose `x` is ``where(out, rank)``."""

    def call(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
        out = room(kind, (SIZE, n))
        x = where(out, group.rank)
        x[:] = 10 * number + group.rank
        return group.all_gather(x, out=out_of(out)), ranks_of(group, number)

    return call


def gather(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
    out = room(kind, (SIZE, n))
    x = out[0]
    x[:] = 10 * number + group.rank
    if group.rank != 1:
        return group.gather(x, 1), None
    return group.gather(x, 1, out=[*out]), ranks_of(group, number)


def scatter(where: int) -> Any:
    def call(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
        xs = room(kind, (SIZE, n))
        for rank in range(SIZE):
            xs[rank] = 10 * number + rank
        given = [*xs] if group.rank == 1 else None
        return group.scatter(given, 1, out=xs[where]), [10 * number + group.rank]

    return call


def all_to_all(order: list[int]) -> Any:
    def call(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
        xs = room(kind, (SIZE, n))
        for rank in range(SIZE):
            xs[rank] = 10 * number + SIZE * group.rank + rank
        out = [xs[rank] for rank in order]
        expected = [10 * number + SIZE * src + group.rank for src in range(SIZE)]
        return group.all_to_all([*xs], out=out), expected

    return call


def columns(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
    """Places that lie between each other, and share nothing; `x` is one of them."""
    out = room(kind, (n, SIZE))
    x = out[:, (group.rank + 1) % SIZE]
    x[:] = 10 * number + group.rank
    return group.all_gather(x, out=[out[:, rank] for rank in range(SIZE)]), ranks_of(group, number)


def row_among_columns(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
    out = room(kind, (n, n if n < 100 else SIZE))[:, :SIZE]
    x = out.reshape(-1)[:n] if out.shape[0] * SIZE == n else room(kind, (n,))
    x[:] = 10 * number + group.rank
    return group.all_gather(x, out=[out[:, rank] for rank in range(SIZE)]), ranks_of(group, number)


def sizes(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
    """The values of the ranks have different lengths: what looks like the own slot is none."""
    lengths = [n - 1, n, n + 1]
    out = room(kind, (SIZE * n,))
    x = out[group.rank * n :][: lengths[group.rank]] if group.rank < 2 else room(kind, (n + 1,))
    x[:] = 10 * number + group.rank
    work = group.all_gather(x, out=out)

    async def result() -> list[Any]:
        got = await work
        return [got[: n - 1], got[n - 1 : 2 * n - 1], got[2 * n - 1 :]]

    return result(), ranks_of(group, number)


def tree(keys: str) -> Any:
    """The arrays of the own value lie in their slot, each in the place of the other."""

    def call(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
        out = [{key: room(kind, (n,)) for key in keys} for _ in range(SIZE)]
        own = out[group.rank]
        own["b"][:] = 10 * number + group.rank
        own["a"][:] = -7.0
        work = group.all_gather({"a": own["b"], "b": own["a"]}, out=out)

        async def result() -> list[Any]:
            got = await work
            assert all((each["b"] == -7.0).all() for each in got)
            return [each["a"] for each in got]

        return result(), ranks_of(group, number)

    return call


def tied(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
    """An array that is in the tree twice."""
    x = room(kind, (n,))
    x[:] = number if group.rank == 0 else -1
    return group.broadcast([x, x]), [number, number]


def sendrecv(shift: int) -> Any:
    def call(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
        memory = room(kind, (2 * n,))
        x = memory[:n]
        x[:] = 10 * number + group.rank
        right, left = (group.rank + 1) % SIZE, (group.rank - 1) % SIZE
        work = group.sendrecv(x, right, src=left, out=memory[shift:][:n])

        async def result() -> list[Any]:
            return [await work]

        return result(), [10 * number + left]

    return call


def reduced(name: str) -> Any:
    def call(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
        memory = room(kind, (2 * n,))
        x = memory[:n]
        x[:] = 10 * number + group.rank
        work = getattr(group, name)(x, out=memory[n // 2 :][:n])
        count = SIZE if name == "all_reduce" else group.rank + 1

        async def result() -> list[Any]:
            return [await work]

        return result(), [sum(10 * number + rank for rank in range(count))]

    return call


def reduce_scatter(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
    xs = room(kind, (SIZE, n))
    for rank in range(SIZE):
        xs[rank] = 10 * number + rank
    work = group.reduce_scatter([*xs], out=xs[(group.rank + 1) % SIZE])

    async def result() -> list[Any]:
        return [await work]

    return result(), [SIZE * (10 * number + group.rank)]


def swapped(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
    a, b = room(kind, (n,)), room(kind, (n,))
    a[:], b[:] = number, 100 * number
    return group.all_reduce([a, b], out=[b, a]), [SIZE * number, 100 * SIZE * number]


def turned(group: Any, n: int, number: int, kind: str) -> tuple[Any, Any]:
    """What is read is contiguous, and lies in a place that is not."""
    memory = room(kind, (2 * n,))
    x = memory[:n]
    x[:] = number
    work = group.all_reduce(x, out=memory[::2])

    async def result() -> list[Any]:
        return [await work]

    return result(), [SIZE * number]


def whole(out: Any) -> Any:
    return out


def listed(out: Any) -> list[Any]:
    return [*out]


def flat(out: Any) -> Any:
    return out.reshape(-1)


RIGHT: dict[str, Any] = {
    "all_gather own": gathers(lambda out, rank: out[rank], whole),
    "all_gather own listed": gathers(lambda out, rank: out[rank], listed),
    "all_gather own flat": gathers(lambda out, rank: out[rank], flat),
    "all_gather next": gathers(lambda out, rank: out[(rank + 1) % SIZE], whole),
    "all_gather next listed": gathers(lambda out, rank: out[(rank + 1) % SIZE], listed),
    "all_gather next flat": gathers(lambda out, rank: out[(rank + 1) % SIZE], flat),
    "all_gather between": gathers(
        lambda out, rank: flat(out)[out.shape[1] // 2 :][: out.shape[1]], whole
    ),
    "all_gather columns": columns,
    "all_gather row among columns": row_among_columns,
    "all_gather sizes": sizes,
    "all_gather tree": tree("ab"),
    "all_gather tree in another order": tree("ba"),
    "gather": gather,
    "scatter own": scatter(1),
    "scatter other": scatter(2),
    "all_to_all own": all_to_all([0, 1, 2]),
    "all_to_all turned": all_to_all([2, 0, 1]),
    "broadcast tied": tied,
    "sendrecv same": sendrecv(0),
    "sendrecv shifted": sendrecv(3),
    "all_reduce shifted": reduced("all_reduce"),
    "scan shifted": reduced("scan"),
    "all_reduce swapped": swapped,
    "all_reduce turned": turned,
    "reduce_scatter": reduce_scatter,
}


@pytest.mark.parametrize(("kind", "length"), KINDS)
@pytest.mark.parametrize("tag", [None, "t"])
@pytest.mark.sample(5)
def test_what_is_read_may_lie_where_results_go(run, groups, length, kind, tag):
    async def main():
        async with groups(SIZE) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            for name, call in RIGHT.items():
                for number in range(1, 1 + CALLS):
                    calls = [call(Tagged(group, tag), length, number, kind) for group in ranks]
                    results = await asyncio.gather(*[work for work, _ in calls])
                    for result, (_, expected) in zip(results, calls, strict=True):
                        check(result, expected, f"{name}, call {number}")

    run(main())


class Tagged:
    """A group, all operations of which have this tag."""

    def __init__(self, group: Any, tag: str | None) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.tag = tag

    def __getattr__(self, name: str) -> Any:
        tags = {} if self.tag is None else {"tag": self.tag}
        return lambda *args, **options: getattr(self.group, name)(*args, **options, **tags)


def check(result: Any, expected: Any, what: str) -> None:
    if expected is None:
        assert result is None, what
        return
    if not isinstance(result, list):
        rows = len(expected)
        result = [result] if rows == 1 else [*result.reshape(rows, -1)]
    for array, value in zip(result, expected, strict=True):
        assert (array == value).all(), (what, array, expected)


A, B = np.zeros(40), np.zeros(40)
M = np.zeros((4, 5))
T = torch.zeros(40)

# By name: a call with places that share memory.
REFUSED: dict[str, Any] = {
    "all_gather": lambda g: g.all_gather(np.ones(4), out=[A[:4], B[:4], A[3:7]]),
    "all_gather same": lambda g: g.all_gather(np.ones(4), out=[A[:4], B[:4], A[:4]]),
    "all_gather torch": lambda g: g.all_gather(torch.ones(4), out=[T[:4], T[4:8], T[2:6]]),
    "all_gather strided": lambda g: g.all_gather(np.ones(4), out=[M[:, 0], M[:, 1], M[1, :4]]),
    "all_gather trees": lambda g: g.all_gather(
        [np.ones(4)] * 2, out=[[A[:4], B[:4]], [A[4:8], B[4:8]], [A[8:12], B[2:6]]]
    ),
    "gather": lambda g: g.gather(np.ones(4), g.rank, out=[A[:4], B[:4], A[3:7]]),
    "all_to_all": lambda g: g.all_to_all([np.ones(4)] * SIZE, out=[A[:4], B[:4], B[3:7]]),
    "broadcast": lambda g: g.broadcast([A[:4], A[2:6]], (g.rank + 1) % SIZE),
    "scatter": lambda g: g.scatter(None, (g.rank + 1) % SIZE, out=[A[:4], A[2:6]]),
    "all_reduce": lambda g: g.all_reduce([A[:4], A[2:6]]),
    "all_reduce strided": lambda g: g.all_reduce([A[::2], A[::2]]),
    "all_reduce out": lambda g: g.all_reduce([B[:4], B[4:8]], out=[A[:4], A[2:6]]),
    "all_reduce out strided": lambda g: g.all_reduce([B[:4], B[4:8]], out=[A[:8:2], A[2:6]]),
    "reduce_scatter": lambda g: g.reduce_scatter([[B[:4], B[:4]]] * SIZE, out=[A[:4], A[2:6]]),
    "scan": lambda g: g.scan([A[:4], A[2:6]]),
    "windows that slide": lambda g: g.all_reduce(np.ones((2, 4)), out=sliding(A)),
}  # fmt: skip


def sliding(array: Any) -> Any:
    return np.lib.stride_tricks.as_strided(array, (2, 4), (8, 8))


@pytest.mark.parametrize("tag", [None, "t"])
def test_places_that_share_memory_are_refused(run, groups, tag):
    async def main():
        async with groups(SIZE) as ranks:
            for name, call in REFUSED.items():
                for group in ranks:
                    with pytest.raises(ValueError, match="share"):
                        pytest.fail(f"{name}: {call(Tagged(group, tag))}")
            for _ in range(CALLS):
                # Where places of that kind have been fine until then, and were prepared.
                outs = [[np.empty(4) for _ in range(SIZE)] for _ in ranks]
                await asyncio.gather(
                    *[g.all_gather(np.ones(4), out=outs[g.rank], tag=tag) for g in ranks]
                )
                for group in ranks:
                    with pytest.raises(ValueError, match="share"):
                        pytest.fail(f"{REFUSED['all_gather'](Tagged(group, tag))}")
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [SIZE] * SIZE

    run(main())


def test_a_tree_to_receive_into(run, groups):
    async def main():
        async with groups(2) as ranks:
            with pytest.raises(ValueError, match="out: two of its arrays share"):
                ranks[1].recv(out=[A[:4], A[2:6]])
            works = ranks[0].send([np.ones(4), np.ones(4)], 1), ranks[1].recv(out=[A[:4], A[:4]])
            await asyncio.gather(*works)

    run(main())


def test_only_who_gave_it_has_the_error(run, groups):
    """The others hear that the call was refused, and by whom."""

    async def main():
        async with groups(SIZE) as ranks:
            works = []
            for group in ranks:
                out = [np.empty(4) for _ in range(SIZE)]
                if group.rank == 1:
                    with pytest.raises(ValueError, match=r"out\[0\] and out\[2\] share memory"):
                        group.all_gather(np.ones(4), out=[out[0], out[1], out[0]])
                else:
                    works.append(group.all_gather(np.ones(4), out=out))
            for work in works:
                with pytest.raises(CollectiveAbortedError, match="share memory") as caught:
                    await work
                assert caught.value.rank == 1

    run(main())


# -- beside the same with copies ------------------------------------------------------------------


class Drawn:
    """A random call: everything it gives lies in one piece of memory, anywhere."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.op = draw.choice(["all_gather", "gather", "scatter", "all_to_all", "all_reduce"])
        self.length = n = draw.choice([1, 3, 40, 9_001])
        self.memory = draw.randrange(n, 5 * n + 2)
        self.spans = [self._span(draw) for _ in range(2 * SIZE)]
        self.one = draw.random() < 0.3  # one array is the out

    def _span(self, draw: random.Random) -> slice:
        step = draw.choice([1, 1, 1, 2, -1])
        reach = (self.length - 1) * abs(step) + 1
        if reach > self.memory:
            step, reach = 1, self.length
        first = draw.randrange(self.memory - reach + 1)
        stop: int | None = first + reach
        if step < 0:
            first, stop = first + reach - 1, first - 1 if first else None
        return slice(first, stop, step)

    def arrays(self, rank: int, *, apart: bool) -> tuple[list[Any], list[Any]]:
        """What a rank gives, and where its results go. `apart`: copies of all that."""
        memory = np.arange(self.memory) + 1000.0 * rank
        ins = [memory[span] for span in self.spans[:SIZE]]
        outs = [memory[span] for span in self.spans[SIZE:]]
        if apart:
            ins, outs = [x.copy() for x in ins], [x.copy() for x in outs]
        return ins, outs

    def start(self, group: Any, *, apart: bool) -> Any:
        ins, outs = self.arrays(group.rank, apart=apart)
        out: Any = outs
        if self.one:
            out = np.empty(SIZE * self.length)
            if not apart:
                ins[0] = out[: self.length] if self.length > 3 else out[1 : 1 + self.length]
                ins[0][:] = np.arange(self.length) + group.rank
            else:
                ins[0] = np.arange(self.length) + float(group.rank)
        match self.op:
            case "all_gather":
                return group.all_gather(ins[0], out=out)
            case "gather":
                return group.gather(ins[0], 1, out=out if group.rank == 1 else None)
            case "scatter":
                return group.scatter(ins if group.rank == 1 else None, 1, out=outs[0])
            case "all_to_all":
                return group.all_to_all(ins, out=out)
        return group.all_reduce(ins[:2], out=outs[:2])


def test_a_random_call_is_refused_or_right(run, groups):
    async def main():
        refused = right = 0
        async with groups(SIZE) as ranks:
            for seed in range(150):
                drawn = Drawn(seed)
                expected = await asyncio.gather(*[drawn.start(g, apart=True) for g in ranks])
                for _ in range(2):
                    works, errors = [], 0
                    for group in ranks:
                        try:
                            works.append(drawn.start(group, apart=False))
                        except ValueError as error:
                            assert "share memory" in str(error)
                            errors += 1
                    results = await asyncio.gather(*works, return_exceptions=True)
                    if errors:
                        refused += 1
                        aborted = [isinstance(each, CollectiveAbortedError) for each in results]
                        assert all(aborted)
                        continue
                    right += 1
                    for result, due in zip(results, expected, strict=True):
                        for got, want in zip(flatly(result), flatly(due), strict=True):
                            np.testing.assert_array_equal(got, want, err_msg=f"seed {seed}")
        assert refused > 50
        assert right > 50

    run(main())


def flatly(result: Any) -> list[Any]:
    return [] if result is None else result if isinstance(result, list) else [result]
