"""A process that obeys the orders of `aiodist bench`."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist_cli import bench_rank, bench_worker
from aiodist_cli.bench_worker import OPS, check, differences, layout
from benchmarks import links, orders, wire


class Alone:
    """The only rank of a library that never has to talk."""

    rank, size, name, computes = 0, 1, "nothing", True

    def __init__(self, result: float = 1.0) -> None:
        self.result = result
        self.log: list[str] = []

    def empty(self, elements: int) -> Any:
        self.log.append(f"empty {elements}")
        return np.empty(elements, np.float32)

    def view(self, array: Any) -> Any:
        return array

    def operation(self, op: str, x: Any, out: Any) -> Any:
        if op == "broadcast":
            raise NotImplementedError("no broadcast here")
        return lambda: (out if out is not None else x).fill(self.result)

    def barrier(self) -> None:
        self.log.append("barrier")

    def close(self) -> None:
        self.log.append("close")


def answers(library: Alone, *orders: dict[str, Any]) -> list[dict[str, Any]]:
    told: list[bytes] = []
    bench_worker.obey(library, (json.dumps(order).encode() for order in orders), told.append)
    return [json.loads(line) for line in told]


def run(op: str = "all_reduce", nbytes: int = 8, **more: Any) -> dict[str, Any]:
    order = {
        "do": "run",
        "op": op,
        "nbytes": nbytes,
        "iterations": 3,
        "memory": "plain",
        "fill": False,
    }
    return order | {"check": True} | more


def test_a_worker_says_hello_obeys_and_quits() -> None:
    library = Alone()
    hello, first, second, *rest = answers(library, run(), run(), {"do": "quit"}, run())
    assert (hello["rank"], hello["library"], hello["features"]) == (0, "nothing", [])
    for answer in (first, second):
        assert len(answer["ns"]) == 3
        assert all(isinstance(ns, int) and ns >= 0 for ns in answer["ns"])
    assert not rest
    assert library.log == ["empty 2", "barrier", "barrier", "close"]


def test_the_input_is_written_before_each_operation_where_that_is_asked_for() -> None:
    """The fake operation leaves 7 in its array, which is its input, too."""
    found: list[float] = []

    class Looks(Alone):
        def operation(self, op: str, x: Any, out: Any) -> Any:
            done = super().operation(op, x, out)

            def look() -> None:
                found.append(float(x[0]))
                done()

            return look

    _, again, filled = answers(Looks(7.0), run(check=False), run(check=False, fill=True))
    assert found == [1.0, 7.0, 7.0, 1.0, 1.0, 1.0]
    assert len(again["ns"]) == len(filled["ns"]) == 3


async def test_aiodist_fills_the_input_as_the_others_do() -> None:
    async with aiodist.local(2) as groups:
        ranks = [bench_rank.Rank(group) for group in groups]
        orders = [
            rank.obey(
                "run",
                op="all_reduce",
                nbytes=8,
                iterations=4,
                memory="plain",
                fill=True,
                check=False,
            )
            for rank in ranks
        ]
        first, other = await asyncio.gather(*orders)
        assert (len(first["ns"]), other.keys()) == (4, {"cpu"})
        # Left as it is, the sum of the ranks would double with each iteration.
        assert [rank._prepared["plain"].x.tolist() for rank in ranks] == [[3.0, 3.0]] * 2


def test_memory_is_taken_anew_for_another_case() -> None:
    library = Alone()
    answers(library, run(), run(nbytes=16), run("all_gather", 16), run("all_gather", 16))
    taken = [line for line in library.log if line != "barrier"]
    assert taken == ["empty 2", "empty 4", "empty 4", "empty 4"]


def test_a_wrong_result_is_told() -> None:
    _, answer, unchecked = answers(Alone(result=7.0), run(), run(check=False))
    assert answer == {
        "error": "ValueError: all_reduce computed [7. 7.], all elements should be 1.0"
    }
    assert "ns" in unchecked


def test_an_error_is_told_and_work_goes_on() -> None:
    _, failed, after = answers(Alone(), run("broadcast"), run())
    assert failed == {"error": "NotImplementedError: no broadcast here"}
    assert "ns" in after


def test_each_part_of_a_result_is_checked() -> None:
    check("all_gather", np.array([1, 1, 2, 2]), (1.0, 2.0))
    with pytest.raises(ValueError, match=r"computed \[2 1\], all elements should be 2.0"):
        check("all_gather", np.array([1, 1, 2, 1]), (1.0, 2.0))
    check("ping_pong", np.array([5.0]), ())


def test_differences() -> None:
    assert differences([5, 7, 17]) == [2, 10]


def test_no_layout_for_what_does_not_exist() -> None:
    with pytest.raises(ValueError, match="there is no operation 'x': expected one of all_reduce"):
        layout("x", 8, 0, 2)


@pytest.mark.parametrize("nbytes", [12, 1536])
@pytest.mark.parametrize("op", OPS)
async def test_aiodist_does_what_is_measured(op: str, nbytes: int) -> None:
    """Each operation, on 3 ranks of one process, gives the result that the check expects."""
    order = {
        "op": op,
        "nbytes": nbytes,
        "iterations": 2,
        "memory": "plain",
        "fill": False,
        "check": False,
    }
    async with aiodist.local(3) as groups:
        ranks = [bench_rank.Rank(group) for group in groups]
        for more in ({"check": True, "iterations": 1}, {}):
            found = await asyncio.gather(
                *(rank.obey(**{"do": "run"} | order | more) for rank in ranks)
            )
            assert len(found[0].pop("ns")) == (1 if more else 2)
            assert [answer.keys() for answer in found] == [{"cpu"}] * 3
            assert all(answer["cpu"] >= 0 for answer in found)


async def test_aiodist_tells_errors() -> None:
    async with aiodist.local(1) as (group,):
        rank = bench_rank.Rank(group)
        assert rank.hello["library"].startswith(f"aiodist {aiodist.__version__}, ")
        answer = await rank.obey(**run(op="x"))
        assert answer["error"].startswith("ValueError: there is no operation 'x'")
        # 1 rank: each recv is from itself.
        share = await rank.obey("benchmarks.orders:idle", seconds=0.0)
        assert share["share"] >= 0
        memory = await rank.obey("benchmarks.orders:memory", nbytes=1 << 20)
        assert memory["growth"] >= 0


async def test_late_ticks_count_each_by_its_own_due_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall of 5 periods makes 5 late ticks, not one."""
    now = [0]
    stop = asyncio.Event()
    ticks = 0

    async def sleep(seconds: float) -> None:
        nonlocal ticks
        ticks += 1
        now[0] += round(seconds * 1e9)
        if ticks == 2:
            now[0] += 5_000_000
        if ticks == 8:
            stop.set()

    monkeypatch.setattr(orders.time, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(orders.asyncio, "sleep", sleep)
    late = await orders.ticker(0.001, stop)
    assert [ns // 1_000_000 for ns in late] == [0, 5, 4, 3, 2, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "op"),
    [(wire.Wire, "all_reduce"), (wire.Turns, "all_reduce"), (wire.Turns, "broadcast"),
     (wire.Turns, "ping_pong")],
)  # fmt: skip
def test_the_wire_carries_what_has_to_go(
    monkeypatch: pytest.MonkeyPatch, kind: type[wire.Wire], op: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setattr(wire.Wire, "PORT", port)
    moved: list[list[int]] = []

    def end(rank: int) -> None:
        library = kind(rank, 2, "127.0.0.1", "")
        prepared = bench_worker.prepare(library, op, 3 << 20)
        moved.append(bench_worker.run(library, prepared, 2).ns)
        library.close()

    threads = [threading.Thread(target=end, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [len(times) for times in moved] == [2, 2]


@pytest.mark.parametrize("kind", [links.Tcp, links.Unix])
def test_links_carry_there_and_back_and_both_ways(kind: type[links.Ends], tmp_path: Path) -> None:
    came: dict[tuple[str, int], float] = {}
    # A link receives all into one block. A rank that has sent its last frame polls once more, and
    # would find the first frame of what the other one does next, a barrier, written over what is
    # looked at here: so neither goes on before both have looked.
    looked = threading.Barrier(2)

    def end(rank: int) -> None:
        library = kind(rank, 2, "127.0.0.1", str(tmp_path / "meeting"))
        for op, nbytes in (("ping_pong", 8), ("all_reduce", 1 << 20)):
            prepared = bench_worker.prepare(library, op, nbytes)
            assert len(bench_worker.run(library, prepared, 3).ns) == 3
            came[op, rank] = float(np.frombuffer(library._counter.block[:4], np.float32)[0])
            looked.wait(30)
        library.close()

    threads = [threading.Thread(target=end, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # Each rank sends its number + 1; the second half of a ping-pong is memory that nobody filled.
    assert came == {
        ("ping_pong", 0): 0.0,
        ("ping_pong", 1): 1.0,
        ("all_reduce", 0): 2.0,
        ("all_reduce", 1): 1.0,
    }


def test_an_order_may_name_a_function() -> None:
    _, found, missing = answers(
        Alone(),
        {"do": f"{__name__}:shout", "words": "hear"},
        {"do": f"{__name__}:none", "words": "hear"},
    )
    assert found == {"said": "nothing: HEAR"}
    assert missing["error"].startswith("AttributeError: ")


def shout(library: Alone, words: str) -> dict[str, str]:
    return {"said": f"{library.name}: {words.upper()}"}
