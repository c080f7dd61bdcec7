"""Which lines of the user's program are told, and which are not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import aiodist
from aiodist.rank import whereabouts
from aiodist.rank.doings import RankDoings


def test_a_thread_is_where_its_innermost_lines_of_the_user_are() -> None:
    ready, over = threading.Event(), threading.Event()

    def inner() -> None:
        ready.set()
        over.wait()

    thread = threading.Thread(target=inner)
    thread.start()
    ready.wait()
    try:
        places = whereabouts.of_thread(thread.ident or 0)
    finally:
        over.set()
        thread.join()
    assert any("test_whereabouts.py" in place and "inner" in place for place in places)
    assert len(places) <= whereabouts.MOST_LINES
    assert whereabouts.of_thread(0) == ()


async def test_a_task_is_told_by_the_innermost_line_of_the_user() -> None:
    async def waits() -> None:
        await asyncio.sleep(3600)

    async def outer() -> None:
        await waits()

    task = asyncio.create_task(outer())
    await asyncio.sleep(0)
    places = whereabouts.of_tasks(asyncio.get_running_loop())
    task.cancel()
    (place,) = [one for one in places if "outer" in one or "waits" in one]
    assert place.endswith("waits")


async def test_a_caller_by_way_of_contextlib_is_the_program() -> None:
    @contextlib.contextmanager
    def entered() -> Any:
        yield whereabouts.of_caller()

    functions: dict[str, Any] = {"contextlib": contextlib}
    text = "def enter(it):\n    with contextlib.ExitStack() as stack:\n"
    text += "        return stack.enter_context(it)\n"
    exec(compile(text, "/somewhere/program.py", "exec"), functions)
    # As if `entered` were aiodist's own.
    own = entered.__wrapped__.__code__  # type: ignore[attr-defined]
    entered.__wrapped__.__code__ = own.replace(co_filename=whereabouts.__file__)  # type: ignore[attr-defined]
    assert functions["enter"](entered()) == "; at somewhere/program.py:3 in enter"


async def test_many_places_are_counted() -> None:
    functions: dict[str, object] = {"asyncio": asyncio}
    lines = [f"async def wait{n}():\n    await asyncio.sleep(3600)\n" for n in range(6)]
    exec(compile("".join(lines), "/somewhere/program.py", "exec"), functions)
    tasks = [asyncio.create_task(functions[f"wait{n}"]()) for n in range(6)]
    await asyncio.sleep(0)
    places = whereabouts.of_tasks(asyncio.get_running_loop())
    for task in tasks:
        task.cancel()
    assert len(places) == whereabouts.MOST_LINES
    # Six of the program's, and this one.
    assert places[-1] == f"and {7 - whereabouts.MOST_LINES + 1} other places"


def program(**functions: str) -> dict[str, Any]:
    """Functions of somebody's file program.py, each awaiting what is given."""
    names: dict[str, Any] = {"asyncio": asyncio}
    for line, (name, awaits) in enumerate(functions.items()):
        text = "\n" * 2 * line + f"async def {name}(group):\n    await {awaits}\n"
        exec(compile(text, "/somewhere/program.py", "exec"), names)
    return names


async def test_who_awaits_an_operation_comes_before_the_main_loop_of_a_server() -> None:
    made = program(
        serve="asyncio.sleep(3600)",
        key="group.store.wait('key')",
        handler="group.recv(src=1)",
        both="asyncio.gather(group.recv(src=1, tag='a'), asyncio.sleep(3600))",
        shielded="asyncio.shield(group.recv(src=1, tag='b'))",
    )
    async with aiodist.local(2) as groups:
        names = ("serve", "key", "handler", "both", "shielded")
        tasks = [asyncio.create_task(made[name](groups[0])) for name in names]
        for _ in tasks:
            await asyncio.sleep(0)
        places = RankDoings(groups[0]._actor).now().places
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert [place.split("program.py:")[-1] for place in places] == [
        "6 in handler",
        "8 in both",
        "10 in shielded",
        "and 3 other places",
    ]


async def test_a_future_of_the_program_may_have_children_of_its_own() -> None:
    class Parent(asyncio.Future[None]):
        _children = None

    async def wait(parent: Parent) -> None:
        await parent

    task = asyncio.create_task(wait(Parent()))
    await asyncio.sleep(0)
    places = whereabouts.of_tasks(asyncio.get_running_loop())
    task.cancel()
    assert any(place.endswith("in " + wait.__qualname__) for place in places)


async def test_who_waits_for_anything_of_aiodist_comes_before_the_others() -> None:
    made = program(serve="asyncio.sleep(3600)", key="group.store.wait('key')")
    async with aiodist.local(1) as (group,):
        tasks = [asyncio.create_task(made[name](group)) for name in ("serve", "key")]
        for _ in range(3):
            await asyncio.sleep(0)
        places = whereabouts.of_tasks(asyncio.get_running_loop())
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert [place.split("/")[-1] for place in places if "program.py" in place] == [
        "program.py:4 in key",
        "program.py:2 in serve",
    ]
