"""Random programs of messages between processes, with and without the compiled part."""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import ANY_SOURCE, ANY_TAG, Group
from aiodist.p2p.credit import EAGER

try:
    import torch
except ModuleNotFoundError:
    torch = None  # type: ignore[assignment]

SIZES = [1, 2, 100, 1000, 4096, 5000, 32_768, 70_000, EAGER - 40, EAGER, EAGER + 40, 1 << 20]
"""Bytes, around every border at which messages take another way."""
TAGS = [0, 1, -1, "a", "b", 2**40]
DTYPES = ["uint8", "float32", "int64", "complex128"]


def drawn(rng: random.Random, number: int) -> Any:
    """An array whose elements, or a value whose numbers, say which message it is."""
    if rng.random() < 0.2:
        return rng.choice([number, {"task": number, "loss": number / 7}, ("of", "x" * number)])
    if rng.random() < 0.3:
        length = rng.choice([0, 1, 30, 1000, 4080, 4100])
        return {"x": np.arange(length) + number, "of": [number / 7, torch.full((3, 2), number)]}
    dtype = np.dtype(rng.choice(DTYPES))
    length = max(1, rng.choice(SIZES) // dtype.itemsize)
    x = ((np.arange(length) + number) % 251).astype(dtype)
    return x.reshape(2, -1) if length % 2 == 0 and rng.random() < 0.3 else x


def alike(a: Any, b: Any) -> bool:
    """Whether two values, neither of which is an array, are the same."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, (np.ndarray, torch.Tensor)):
        return type(a) is type(b) and a.dtype == b.dtype and a.tolist() == b.tolist()
    return type(a) is type(b) and bool(a == b)


def like(x: Any, kind: str) -> Any:
    """A place for `x`: a numpy array or a tensor, or None."""
    if kind == "none" or not isinstance(x, np.ndarray):
        return None
    return torch.from_numpy(np.zeros_like(x)) if kind == "torch" else np.zeros_like(x)


def busy(rng: random.Random) -> None:
    """Compute, so that one side is late."""
    sum(range(rng.choice([0, 0, 10, 1000, 20_000])))


async def exchange(group: Group, rng: random.Random, step: int, late: random.Random) -> None:
    """Some messages one way, received by tag or in order."""
    sender = rng.randrange(2)
    messages = [
        (rng.choice([*TAGS, f"step {step}"]), drawn(rng, step + at), rng.random() < 0.3)
        for at in range(rng.choice([1, 1, 1, 2, 5, 12]))
    ]
    if rng.random() < 0.5:  # one kind again and again, as in a loop
        messages = messages[:1] * len(messages)
    in_order, ahead = rng.random() < 0.5, rng.random() < 0.3
    places = [rng.choice(["numpy", "torch", "none"]) for _ in messages]
    anyone = rng.random() < 0.2
    if group.rank == sender:
        works = []
        for tag, x, is_tensor in messages:
            busy(late)
            given = torch.from_numpy(x) if is_tensor and isinstance(x, np.ndarray) else x
            works.append(group.isend(given, 1 - sender, tag=tag))
        for work in works:
            await work
        return
    order = list(range(len(messages)))
    if not in_order:  # in order within each tag
        order.sort(key=lambda at: str(messages[at][0]))
    source: Any = ANY_SOURCE if anyone else sender
    receives = []
    for at in order:
        tag, x, _ = messages[at]
        busy(late)
        out = like(x, places[at])
        work = group.irecv(src=source, tag=ANY_TAG if in_order else tag, out=out)
        receives.append((at, out, work))
        if not ahead:
            await work
    for at, out, work in receives:
        tag, x, is_tensor = messages[at]
        found = await work
        assert out is None or found is out
        assert (work.source, work.tag, work.op) == (sender, tag, "recv")
        if not isinstance(x, np.ndarray):
            assert alike(x, found), (x, found)
            continue
        assert isinstance(found, torch.Tensor) == (
            is_tensor if out is None else places[at] == "torch"
        )
        assert found.shape == x.shape
        assert np.asarray(found).tobytes() == x.tobytes(), (step, at)


async def program(group: Group, seed: int, without: tuple[int, ...], steps: int) -> Any:
    """Run a program, without the compiled part on some ranks."""
    express = group._context.p2p_express
    if group.rank in without:
        for name in ("send", "recv"):
            vars(express).pop(name, None)
    rng, late = random.Random(seed), random.Random(seed * 2 + group.rank)
    mine = [np.arange(size, dtype=np.uint8) + group.rank for size in (64, 70_000, 300_000)]
    await group.barrier()  # sets up shared memory, which takes some messages
    for step in range(steps):
        await exchange(group, rng, step, late)
        x = rng.choice(mine)
        out = np.zeros_like(x)
        for turn in range(rng.choice([0, 0, 20])):
            # Now and then one rank sends first, so that it needs leave for what is pushed.
            if turn % 4:
                await group.sendrecv(x, 1 - group.rank, src=1 - group.rank, out=out)
            elif group.rank == 0:
                await group.send(x, 1)
                await group.recv(src=1, out=out)
            else:
                await group.recv(src=0, out=out)
                await group.send(x, 0)
            assert (out == x + 1 - 2 * group.rank).all()
            out[:] = 0
    for _ in range(2):
        await group.barrier()  # nothing is on its way any more
    return group.bytes_moved


CASES = list(product(["shm", "tcp"], [(), (0,), (1,), (0, 1)]))
"""The transport, and the ranks without the compiled part."""


async def programs(_: Group, cases: list[tuple[str, tuple[int, ...]]]) -> list[Any]:
    """The results of a program for each case, in a group of its own."""
    found = []
    for case in cases:
        transport, without = case
        name = f"case {CASES.index(case)}"
        async with aiodist.connect(group=name, transports=(transport,)) as group:
            found.append(await program(group, len(without), without, steps=60))
    return found


@pytest.mark.timeout(240)
@pytest.mark.skipif(torch is None, reason="needs torch")
@pytest.mark.parametrize(
    "cases",
    [CASES[::3], pytest.param(CASES, marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_messages_are_alike_with_and_without_the_compiled_part(
    cases: list[tuple[str, tuple[int, ...]]],
) -> None:
    """All cases in the same two processes, because these take seconds to import torch."""
    first, second = aiodist.run(partial(programs, cases=cases), nprocs=2)
    assert len(first) == len(cases)
    assert second == [(received, sent) for sent, received in first]
