"""Random programs of values between processes, with and without the compiled part.

A value is a tree of arrays, numbers and words. Each kind of call is made several times with other
numbers, because the first calls teach the later ones. Some parts have another form each time.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from alike import same

import aiodist
from aiodist import Group
from aiodist.buffers.segment import unsupported_reason
from aiodist.prepared import tapes
from aiodist.prepared.express import _COMPILED

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))

DTYPES = ["float32", "float64", "int32", "int64", "uint8", "bool", "complex64", "float16"]
COUNTS = [0, 1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 34, 63, 64, 65, 200]
"""Items of a container, around the most that parts of the code know."""
WORDS: list[Any] = [None, "x", "y" * 100, b"z", "", 2j]
NUMBERS: list[Any] = [1, 0.5, True, 2**70, -(2**64)]

CHANGING = ["tokens", "text", "rows", "keys", "scalar", "sometimes"]
"""Parts whose form depends on the number."""

Form = tuple[str, Any]
"""What a value is: an array of a dtype and shape, a number, a word, a part whose form changes, or a
container of forms."""


def form(rng: random.Random, depth: int = 0) -> Form:
    """A form, the same on all ranks."""
    kind = rng.random()
    if kind < 0.45 or depth == 6:
        shape = [rng.choice([1, 2, 3]) for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 4, 5, 8]))]
        if shape and rng.random() < 0.05:
            shape[-1] = 0
        return "array", (rng.choice(DTYPES), tuple(shape))
    if kind < 0.6:
        return "number", rng.choice(NUMBERS)
    if kind < 0.65:
        return "word", rng.choice(WORDS)
    if kind < 0.75:
        return rng.choice(CHANGING), rng.choice([1, 2, 3, 70, 300])
    some = [form(rng, depth + 1) for _ in range(3)]
    count = rng.choice(COUNTS[:5] if depth else COUNTS)
    return rng.choice(["list", "tuple", "dict"]), [rng.choice(some) for _ in range(count)]


def made(of: Form, number: int) -> Any:
    """The value of this form that says which one it is by its numbers."""
    kind, what = of
    if kind == "array":
        dtype, shape = what
        count = int(np.prod(shape))
        return (
            ((np.arange(count) + number) % (2 if dtype == "bool" else 97))
            .astype(dtype)
            .reshape(shape)
        )
    if kind == "number":
        return bool(number % 2) if what is True else type(what)(what + number)
    if kind == "word":
        return what
    if kind in CHANGING:
        return changing(kind, number * 7 % what, number)
    items = [made(each, number + at) for at, each in enumerate(what)]
    if kind == "dict":
        return {f"key {at}": item for at, item in enumerate(items)}
    return items if kind == "list" else tuple(items)


def changing(kind: str, count: int, number: int) -> Any:
    match kind:
        case "tokens":
            return [number * 3**at % 2**63 * (-1) ** at for at in range(count)]
        case "text":
            return "ü" * count + str(number)
        case "rows":
            return np.arange(count) + number
        case "keys":
            return {at if at % 2 else (f"{at}", number): float(number) for at in range(count)}
        case "scalar":
            return np.float32(number)
    return [None, 2**64 + number, 1j * number, "\udcff", -number, (number,)][number % 6]


OPS = [
    "all_gather", "broadcast", "places", "gather", "scatter", "all_to_all", "all_reduce",
    "reduce_scatter", "messages",
]  # fmt: skip


async def call(group: Group, op: str, of: Form, root: int, tag: Any, number: int) -> None:
    rank, size = group.rank, group.size
    mine, all_of = made(of, number + rank), [made(of, number + each) for each in range(size)]
    arrays = of[1] if of[0] == "list" and of[1] else [of]
    if op in ("places", "all_reduce") or (op == "reduce_scatter" and of[0] == "list"):
        # These take arrays alone.
        arrays = [("array", ("float64", (at % 4,))) for at, _ in enumerate(arrays)]
    found: Any
    match op:
        case "all_gather":
            found, expected = await group.all_gather(mine, tag=tag), all_of
        case "broadcast":
            given = mine if rank == root else None
            found, expected = await group.broadcast(given, root, tag=tag), all_of[root]
        case "places":
            found = [made(each, number + rank) for each in arrays]
            assert await group.broadcast(found, root, tag=tag) is found
            expected = [made(each, number + root) for each in arrays]
        case "gather":
            found = await group.gather(mine, root, tag=tag)
            expected = all_of if rank == root else None
        case "scatter":
            found = await group.scatter(all_of if rank == root else None, root, tag=tag)
            expected = mine
        case "all_to_all":
            given = [made(of, number + 10 * rank + to) for to in range(size)]
            found = await group.all_to_all(given, tag=tag)
            expected = [made(of, number + 10 * src + rank) for src in range(size)]
        case "all_reduce":
            found = await group.all_reduce([made(each, number + rank) for each in arrays], tag=tag)
            expected = [sum(made(each, number + src) for src in range(size)) for each in arrays]
        case "reduce_scatter":
            slots = [np.full(len(arrays), float(number + rank + to)) for to in range(size)]
            found = await group.reduce_scatter(slots, tag=tag)
            expected = np.full(len(arrays), float(sum(number + src + rank for src in range(size))))
        case _:
            right, left = (rank + 1) % size, (rank - 1) % size
            sent = group.send(mine, right, tag=tag or 0)
            found, expected = await group.recv(src=left, tag=tag or 0), all_of[left]
            await sent
    assert same(found, expected), (op, tag, of, number)


async def program(group: Group, seed: int, without: tuple[int, ...], steps: int) -> int:
    while await group.all_reduce(int(group._context.lane is None)):
        pass  # shared memory is set up beside the first calls
    if group.rank in without:
        tapes.core = None
        ways = group._context.express
        vars(ways).update({name: getattr(type(ways), name).__get__(ways) for name in _COMPILED})
    rng = random.Random(seed)
    forms = [form(rng) for _ in range(12)]
    for step in range(steps):
        op, tag, root = rng.choice(OPS), rng.choice([None, None, "a"]), rng.randrange(group.size)
        of = rng.choice(forms) if rng.random() < 0.5 else form(rng)
        for again in range(rng.choice([1, 3, 6, 20])):
            await call(group, op, of, root, tag, step + again)
    return steps


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("without", [(), (1,)])
@pytest.mark.sample(3)
def test_values_are_alike_with_and_without_the_compiled_part(
    without: tuple[int, ...], nprocs: int, seed: int
) -> None:
    run = partial(program, seed=seed, without=without, steps=250)
    assert aiodist.run(run, nprocs=nprocs) == [250] * nprocs
