"""Which lines of the user's program are told, and which are not."""

from __future__ import annotations

import asyncio
import threading

from aiodist.rank import whereabouts


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


async def test_many_places_are_counted() -> None:
    functions: dict[str, object] = {"asyncio": asyncio}
    lines = [f"async def wait{n}():\n    await asyncio.sleep(3600)\n" for n in range(6)]
    exec(compile("".join(lines), "/somewhere/program.py", "exec"), functions)
    tasks = [asyncio.create_task(functions[f"wait{n}"]()) for n in range(6)]  # type: ignore[operator]
    await asyncio.sleep(0)
    places = whereabouts.of_tasks(asyncio.get_running_loop())
    for task in tasks:
        task.cancel()
    assert len(places) == whereabouts.MOST_LINES
    # Six of the program's, and this one.
    assert places[-1] == f"and {7 - whereabouts.MOST_LINES + 1} other places"
