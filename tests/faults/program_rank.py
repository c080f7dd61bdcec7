"""What a rank of a random program does: see `programs`.

All that ranks must agree on is drawn from the seed of the program, by each of them: the acts, the
steps of each act, their operations, sizes, tags, roots, and which rank does what is wrong. All else
is drawn by each rank for itself: where its arrays lie, how late it is, and the order in which it
starts steps whose tags allow any.

Arrays of `Group.empty` and of `Group.share` are kept for some batches, until all ranks have mapped
them. Then they are used again, or dropped. In the second case another array is made at once, while
the system may give it the address of the dropped one.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import mmap
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

import aiodist
from aiodist import ReduceOp

BORDERS = [8, 64 << 10, 192 << 10, 1 << 20, 1152 << 10, 3136 << 10]
"""Bytes at which another way begins to be taken."""
DTYPES = ["int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex128", ">f8"]
OPS = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}
KINDS = (
    "all_reduce", "all_reduce", "all_reduce list", "all_reduce scalar", "reduce", "broadcast",
    "broadcast", "broadcast tree", "all_gather", "all_gather", "all_gather tree", "gather",
    "scatter", "reduce_scatter", "all_to_all", "scan", "exscan", "barrier", "ring", "to one",
    "share",
)  # fmt: skip
MESSAGES = ("ring", "to one")
TROUBLES = ("cancel", "type", "shape", "root")
MOST_KEPT = 4
"""Arrays of `Group.empty`, and as many of `Group.share`, that are kept for one group."""
MODULUS = 13
"""Of all elements: a sum over 8 ranks is right in every dtype."""


@dataclass(frozen=True)
class Step:
    """One operation, on all ranks. `seen`: their arrays lie in memory that was kept, or where such
    memory was until now. `culprit` does what `trouble` says."""

    kind: str
    dtype: str
    nbytes: int
    op: str
    root: int
    tag: str | int | None
    uneven: bool
    seen: bool
    culprit: int
    trouble: str

    def size(self, rank: int) -> int:
        """Elements that a rank gives, where ranks may give unlike ones."""
        return self.nbytes // np.dtype(self.dtype).itemsize + (rank if self.uneven else 0)


def sizes(chooser: random.Random) -> int:
    """Bytes."""
    kind = chooser.random()
    if kind < 0.45:
        return max(0, chooser.choice(BORDERS) + chooser.choice([-16, -8, -1, 0, 1, 8, 16]))
    if kind < 0.97:
        return chooser.choice([0, 8, 24, 1000, 8000, 40_000, 300_000])
    return chooser.choice([5_000_000, 9_000_000])


def draw(chooser: random.Random, size: int, troubles: float) -> Step:
    kind = chooser.choice(KINDS)
    dtype = chooser.choice(DTYPES)
    op = chooser.choice([*OPS])
    if dtype == "complex128" and kind not in ("broadcast", "all_gather", "gather", "all_to_all"):
        op = "sum"
    many = kind in ("all_to_all", "reduce_scatter", "scatter", "all_reduce list", "all_gather tree")
    return Step(
        kind, dtype, min(sizes(chooser), 1 << 21) if many else sizes(chooser), op,
        chooser.randrange(size), None, chooser.random() < 0.2, chooser.random() < 0.4,
        chooser.randrange(size),
        # Of a message that is never sent nobody hears.
        chooser.choice(TROUBLES) if chooser.random() < troubles and kind not in MESSAGES else "",
    )  # fmt: skip


class Wrong(Exception):
    """A result is not what it must be."""


class Ways:
    """What this rank draws for itself, and what it has counted."""

    def __init__(self, seed: str, torch: Any) -> None:
        self.chooser = random.Random(seed)
        self.torch = torch
        self.counts: Counter[str] = Counter()
        # By group, memory of `Group.empty`, by bytes: what no operation uses, and what one may.
        self._kept: dict[aiodist.Group, list[Any]] = defaultdict(list)
        self._lent: dict[aiodist.Group, list[Any]] = defaultdict(list)
        self._shared: list[Any] = []  # results of `Group.share`

    # -- memory that is kept ----------------------------------------------------------------------

    def share(self, x: Any) -> None:
        """Keep a result of `Group.share` for a while. What is dropped is drawn by each rank."""
        self._shared.append(x)
        if len(self._shared) > MOST_KEPT:
            del self._shared[self.chooser.randrange(MOST_KEPT)]

    def give_back(self, group: aiodist.Group) -> None:
        """No operation of the group is under way: keep the memory that they had."""
        kept = self._kept[group]
        kept += self._lent.pop(group, [])
        while len(kept) > MOST_KEPT:
            del kept[self.chooser.randrange(len(kept))]

    def forget(self, group: aiodist.Group | None = None) -> None:
        """Drop what was kept, for that group or for all."""
        if group is not None:
            self._kept.pop(group, None)
            self._lent.pop(group, None)
            return
        self._kept.clear()
        self._lent.clear()
        self._shared.clear()

    def _seen(self, group: aiodist.Group, values: Any) -> Any:
        """An array of these in kept memory, or where such memory was until now."""
        kept = self._kept[group]
        fit = [at for at, memory in enumerate(kept) if len(memory) >= values.nbytes]
        ways = ["again", "again", "remade", "plain remade", "mapped remade"]
        way = self.chooser.choice([*ways, "tensor remade"] if self.torch else ways)
        self.counts[way if fit else "first"] += 1
        nbytes = max(values.nbytes, self.chooser.choice([1 << 16, 1 << 18, 1 << 20]))
        if fit:
            memory = kept.pop(self.chooser.choice(fit))
            if way != "again":
                nbytes = len(memory)
                del memory  # from here on the loop does not turn
        if not fit or way == "remade":
            memory = group.empty(nbytes, np.uint8)
        elif way == "plain remade":
            return self._in(np.empty(nbytes, np.uint8), values)
        elif way == "mapped remade":
            return self._in(np.frombuffer(mmap.mmap(-1, nbytes), np.uint8), values)
        elif way == "tensor remade":
            x = self._in(self.torch.empty(nbytes, dtype=self.torch.uint8).numpy(), values)
            return self.torch.from_numpy(x) if values.dtype.isnative else x
        self._lent[group].append(memory)
        return self._in(memory, values)

    def _in(self, memory: Any, values: Any) -> Any:
        x = memory[: values.nbytes].view(values.dtype)
        x[:] = values
        return x

    # -- all memory -------------------------------------------------------------------------------

    def put(self, group: aiodist.Group, values: Any, writable: bool, seen: bool) -> Any:
        """An array of these, somewhere."""
        if seen and self.chooser.random() < 0.8:
            return self._seen(group, values)
        ways = ["plain", "plain", "empty", "empty", "strided", "part", "reversed"]
        ways += [] if writable else ["read-only"]
        native = values.dtype.isnative
        ways += ["tensor", "empty tensor"] if self.torch and native else []
        way = self.chooser.choice(ways)
        self.counts[way] += 1
        n = len(values)
        match way:
            case "empty" if native:
                x = group.empty(n, values.dtype)
            case "strided":
                x = np.zeros(2 * n, values.dtype)[::2]
            case "part":
                x = np.zeros(n + 3, values.dtype)[1 : n + 1]
            case "reversed":
                x = np.zeros(n, values.dtype)[::-1]
            case "tensor":
                return self.torch.from_numpy(values.copy())
            case "empty tensor":
                x = group.empty(n, self.torch.from_numpy(values[:0].copy()).dtype)
                x[:] = self.torch.from_numpy(values.copy())
                return x
            case _:
                x = np.zeros(n, values.dtype)
        x[:] = values
        if way == "read-only":
            x.flags.writeable = False
        return x

    def be_busy(self) -> None:
        """Now and then, with a loop that does not turn."""
        if self.chooser.random() < 0.3:
            time.sleep(self.late())

    def late(self) -> float:
        """Seconds for which it is busy."""
        return self.chooser.choice([0.0] * 6 + [0.0003, 0.001, 0.004, 0.02])


def values(step: Step, number: int, rank: int, slot: int = 0, n: int | None = None) -> Any:
    n = step.size(rank) if n is None else n
    first = (7 * rank + 5 * slot + 3 * number) % MODULUS
    return np.resize((np.arange(MODULUS) + first) % MODULUS, n).astype(step.dtype)


def reduced(step: Step, number: int, ranks: Sequence[int], slot: int = 0, n: int = -1) -> Any:
    given = [values(step, number, rank, slot, step.size(0) if n < 0 else n) for rank in ranks]
    total = given[0].copy()
    for x in given[1:]:
        match step.op:
            case "sum":
                total += x
            case "max":
                np.maximum(total, x, out=total)
            case "min":
                np.minimum(total, x, out=total)
    return total


def same(found: Any, expected: Any, what: object) -> None:
    if isinstance(expected, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(expected):
            raise Wrong(f"{what}: {found!r:.200} instead of a list of {len(expected)}")
        for x, y in zip(found, expected, strict=True):
            same(x, y, what)
    elif isinstance(expected, dict):
        if not isinstance(found, dict) or [*found] != [*expected]:
            raise Wrong(f"{what}: {found!r:.200} instead of a dict")
        for key in expected:
            same(found[key], expected[key], what)
    elif isinstance(expected, np.ndarray):
        x = np.asarray(found)
        if x.shape != expected.shape or x.dtype.newbyteorder("=") != expected.dtype.newbyteorder(
            "="
        ):
            raise Wrong(f"{what}: {x.dtype} of {x.shape}, not {expected.dtype} of {expected.shape}")
        if not np.array_equal(x, expected):
            (unlike,) = np.nonzero(x != expected)
            raise Wrong(
                f"{what}: {len(unlike)} of {len(x)} elements are wrong, the first at {unlike[0]}: "
                f"{x[unlike[0]]}, not {expected[unlike[0]]}"
            )
    elif found != expected:
        raise Wrong(f"{what}: {found!r:.200}, not {expected!r:.200}")


Check = Callable[[Any], None]


def begin(group: aiodist.Group, step: Step, number: int, ways: Ways) -> tuple[Any, Check]:
    """Start it: what to await, and what checks its result."""
    rank, size, root, tag = group.rank, group.size, step.root, step.tag
    everyone, op = range(size), OPS[step.op]
    trouble = step.trouble if rank == step.culprit else ""
    if trouble == "root":
        root = (root + 1) % size
    as_ever = step.size(0)

    def own(writable: bool, *, even: bool = True, slot: int = 0) -> Any:
        n = as_ever if even else None
        given = values(step, number, rank, slot, n)
        if trouble == "shape":
            given = np.append(given, given[:1] if len(given) else np.zeros(1, given.dtype))
        return object() if trouble == "type" else ways.put(group, given, writable, step.seen)

    def check(expected: Any) -> Check:
        def it(found: Any) -> None:
            same(found, expected, (step, number))

        return it

    kind = step.kind
    into = ways.chooser.random() < 0.3 and not trouble
    zeros = np.zeros(as_ever, step.dtype)
    match kind:
        case "all_reduce":
            if into:
                out = ways.put(group, zeros, True, step.seen)
                x = own(False)
                if type(out) is not type(x):
                    out = None if isinstance(x, np.ndarray) and x.flags.writeable else zeros
                    x = x if out is None else values(step, number, rank, 0, as_ever)
                work = group.all_reduce(x, op, out=out, tag=tag)
            else:
                work = group.all_reduce(own(True), op, tag=tag)
            return work, check(reduced(step, number, everyone))
        case "all_reduce list":
            xs = [own(True, slot=slot) for slot in range(3)]
            expected = [reduced(step, number, everyone, slot, as_ever) for slot in range(3)]
            return group.all_reduce(xs, op, tag=tag), check(expected)
        case "all_reduce scalar":
            total = [5 * each + number for each in everyone]
            found = {"sum": sum(total), "max": max(total), "min": min(total)}[step.op]
            x = "one" if trouble else total[rank]
            return group.all_reduce(x, op, tag=tag), check(found)
        case "reduce":
            reduction = reduced(step, number, everyone) if rank == step.root else None
            return group.reduce(own(True), root, op, tag=tag), check(reduction)
        case "broadcast":
            mine = rank == root
            given = own(not mine) if mine or into or trouble else None
            expected = values(step, number, step.root, 0, as_ever)
            return group.broadcast(given, root, tag=tag), check(expected)
        case "broadcast tree" | "all_gather tree":

            def tree(of: int, put: Callable[[Any], Any]) -> Any:
                n = step.size(of)
                return {
                    "a": put(values(step, number, of, 0, n)),
                    "b": [of, "é", None, 2.5],
                    "c": [put(values(step, number, of, 1, n // 3))],
                }

            def plain(x: Any) -> Any:
                return x

            x = tree(rank, lambda it: ways.put(group, it, False, step.seen))
            if trouble:
                x["d"] = object()
            if kind == "broadcast tree":
                work = group.broadcast(x if rank == root or trouble else None, root, tag=tag)
                return work, check(tree(step.root, plain))
            return group.all_gather(x, tag=tag), check([tree(one, plain) for one in everyone])
        case "all_gather":
            expected = [values(step, number, one) for one in everyone]
            return group.all_gather(own(False, even=False), tag=tag), check(expected)
        case "gather":
            expected = [values(step, number, one) for one in everyone]
            work = group.gather(own(False, even=False), root, tag=tag)
            return work, check(expected if rank == step.root else None)
        case "scatter":
            slots = [own(False, slot=slot) for slot in everyone]
            work = group.scatter(slots if rank == root else None, root, tag=tag)
            return work, check(values(step, number, step.root, rank, as_ever))
        case "reduce_scatter":
            xs = [own(False, slot=slot) for slot in everyone]
            work = group.reduce_scatter(xs, op, tag=tag)
            return work, check(reduced(step, number, everyone, rank, as_ever))
        case "all_to_all":
            xs = [own(False, slot=slot) for slot in everyone]
            expected = [values(step, number, one, rank, as_ever) for one in everyone]
            return group.all_to_all(xs, tag=tag), check(expected)
        case "scan":
            return group.scan(own(True), op, tag=tag), check(reduced(step, number, range(rank + 1)))
        case "exscan":
            expected = reduced(step, number, range(rank or 1))
            return group.exscan(own(True), op, tag=tag), check(expected)
        case "share":
            expected = values(step, number, step.root, 0, as_ever)

            def keep(found: Any) -> None:
                same(found, expected, (step, number))
                ways.share(found)

            given = own(False) if rank == root or trouble else None
            return group.share(given, root, tag=tag), keep
        case "barrier":
            return group.barrier(tag=tag), check(None)
        case "ring":
            before = (rank - 1) % size
            message = ways.put(group, values(step, number, rank), False, step.seen)
            sent = group.isend(message, (rank + 1) % size, tag=f"ring {number}")
            came = group.irecv(src=before, tag=f"ring {number}")
            return asyncio.gather(came, sent), check([values(step, number, before), None])
        case _:  # to one
            name = f"to one {number}"
            message = ways.put(group, values(step, number, rank), False, step.seen)
            works: list[Any] = (
                [group.isend(message, step.root, tag=name)] if rank != step.root else []
            )
            if rank == step.root:
                works = [group.irecv(tag=name) for _ in range(size - 1)]

            def look(found: list[Any]) -> None:
                if rank == step.root:
                    left = {one: values(step, number, one) for one in everyone if one != rank}
                    sources = [work.source for work in works]
                    if sorted(sources) != sorted(left):
                        raise Wrong(f"{(step, number)}: from {sources}")
                    for source, x in zip(sources, found, strict=True):
                        same(x, left[source], (step, number))

            return asyncio.gather(*works), look


FAILS = (aiodist.CollectiveAbortedError, aiodist.MismatchError, TypeError, ValueError)


async def outcome(work: Any, check: Check, step: Step, ways: Ways) -> None:
    """It completes with the right result; where a rank does something wrong it may also fail."""
    try:
        found = await work
    except FAILS:
        if not step.trouble:
            raise
        ways.counts["failed"] += 1
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if step.trouble != "cancel" or (task and task.cancelling()):
            raise
        ways.counts["cancelled"] += 1
    else:
        if step.trouble not in ("shape", "root"):  # there it may fit as it is
            check(found)
        ways.counts["completed"] += 1


async def batch(
    group: aiodist.Group, steps: Sequence[Step], repeats: int, first: int, ways: Ways
) -> None:
    """Start them all, wait for them all, and so again. Steps with a tag of their own are started in
    any order, the others in the order in which they stand."""
    for number in range(first, first + repeats):
        untagged = [step for step in steps if step.tag is None]
        order = list(steps)
        ways.chooser.shuffle(order)
        in_order = iter(untagged)
        order = [next(in_order) if step.tag is None else step for step in order]
        waiting = []
        for step in order:
            ways.be_busy()
            if ways.chooser.random() < 0.15:
                await asyncio.sleep(ways.chooser.choice([0, 0, 0.001]))
            try:
                work, check = begin(group, step, 100 * number + steps.index(step), ways)
            except (TypeError, ValueError):
                if not step.trouble:
                    raise
                ways.counts["refused"] += 1
                continue
            if step.trouble == "cancel" and step.culprit == group.rank:
                asyncio.get_running_loop().call_later(ways.late(), work.cancel)
            if ways.chooser.random() < 0.4 and len(steps) == 1:
                await outcome(work, check, step, ways)
            else:
                waiting.append(asyncio.create_task(outcome(work, check, step, ways)))
        done = await asyncio.gather(*waiting, return_exceptions=True)
        for error in done:
            if isinstance(error, BaseException):
                raise error
        ways.give_back(group)
        ways.counts["steps"] += len(steps)


async def batches(
    group: aiodist.Group, seed: str, many: int, troubles: float, ways: Ways, depth: int = 0
) -> None:
    """`many` batches, drawn from the seed, and now and then some in a group made of this one."""
    chooser = random.Random(seed)
    for turn in range(many):
        at_once = chooser.choice([1, 1, 1, 2, 3, 6, 12])
        tagged = chooser.choice(["all", "none", "some"])
        steps = []
        for place in range(at_once):
            step = draw(chooser, group.size, troubles)
            with_tag = tagged == "all" or (tagged == "some" and chooser.random() < 0.5)
            tag = chooser.choice([f"tag {place}", place, f"{seed} {turn} {place}"])
            if at_once > 3 and step.nbytes > 1 << 20:
                step = Step(**{**step.__dict__, "nbytes": step.nbytes >> 4})
            steps.append(Step(**{**step.__dict__, "tag": tag if with_tag else None}))
        ways.counts["batches"] += 1
        await batch(group, steps, chooser.choice([1, 2, 4, 9]), 1000 * turn, ways)
        if not depth and chooser.random() < 0.08:
            way = chooser.choice(["dup", "split", "window"])
            await apart(group, way, f"{seed} {turn}", troubles, ways, chooser)


async def apart(
    group: aiodist.Group, way: str, seed: str, troubles: float, ways: Ways, chooser: random.Random
) -> None:
    """In a group of its own, or through windows."""
    ways.counts[way] += 1
    colors = [chooser.randrange(2) for _ in range(group.size)]
    if way == "window":
        mine = np.zeros(group.size, np.int64)
        window = await group.expose(mine)
        for rank in range(group.size):
            await window.put(rank, group.rank, 10 * rank + group.rank)
        await window.fence()
        same(mine, np.arange(group.size) + 10 * group.rank, "window")
        await window.close()
        return
    if way == "dup":
        other = await group.dup()
    else:
        part = await group.split(colors[group.rank], key=-group.rank)
        assert part is not None
        other = part
    both = [
        batches(
            other,
            f"{seed} {way} {colors[group.rank] if way == 'split' else ''}",
            3,
            troubles,
            ways,
            1,
        )
    ]
    if way == "dup" and group.size > 1:
        both.append(batches(group, f"{seed} beside", 3, troubles, ways, 1))
    await asyncio.gather(*both)
    ways.forget(other)
    await other.close()


def files() -> dict[str, str]:
    found = {}
    for one in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found[one] = os.readlink(f"/proc/self/fd/{one}")
    return found


def memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mapped() -> list[str]:
    with open("/proc/self/maps") as file:
        return [line for line in file if "aiodist" in line and "/memfd:" in line]


async def main(plan: dict[str, Any], address: str, rank: int) -> dict[str, Any]:
    """Run a rank of the program `plan`. Returns what it did, and what it left."""
    torch = importlib.import_module("torch") if plan["torch"] else None
    seed, size = plan["seed"], plan["size"]
    before = files()
    ways = Ways(f"{seed} {rank}", torch)
    group = await aiodist.connect(
        address, group="program", rank=rank, size=size, op_timeout=plan["patience"], lease=20,
        transports=plan["transports"], token="secret",
    )  # fmt: skip
    for act, victim in enumerate(plan["victims"]):
        many = plan["batches"] // len(plan["victims"])
        if victim is None:
            await batches(group, f"{seed} {act}", many, plan["troubles"], ways)
            continue
        if group.rank == victim:
            when = ways.chooser.random() * 0.5
            asyncio.get_running_loop().call_later(when, os.kill, os.getpid(), signal.SIGKILL)
        try:
            while True:
                await batches(group, f"{seed} {act}", many, 0, ways, 1)
        except aiodist.GroupBrokenError:
            ways.counts["losses"] += 1
        ways.forget(group)
        await asyncio.sleep(ways.late())
        group = await group.shrink()
    ways.forget()
    await group.close()
    del group
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.sleep(0.05)
    gc.collect()
    left = [name for number, name in files().items() if number not in before]
    return {
        "counts": ways.counts,
        "tasks": [*map(str, tasks)],
        "mapped": mapped(),
        "files": left,
        "memory": memory(),
    }
