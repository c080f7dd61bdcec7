"""What a loop may bring of its own; and small helpers around sockets."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiodist.testing.virtual_loop import VirtualLoop
from aiodist.transports import surroundings
from aiodist.transports.surroundings import exact_time, tell_time_exactly


class Made:
    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
def test_what_was_made_is_closed_where_it_comes_to_nothing(error: type[BaseException]) -> None:
    made = Made()
    with pytest.raises(error), surroundings.closed_on_error(made):
        raise error
    assert made.closed == 1


def test_what_was_made_is_kept_where_all_is_well() -> None:
    made = Made()
    with surroundings.closed_on_error(made):
        pass
    assert made.closed == 0


async def test_a_socket_is_waited_for_in_either_direction() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        await surroundings.ready(ours, loop.add_writer, loop.remove_writer)
        waiting = asyncio.create_task(surroundings.ready(ours, loop.add_reader, loop.remove_reader))
        await asyncio.sleep(0)
        assert not waiting.done()
        theirs.close()  # the end is something to be read
        await waiting
        assert not loop.remove_reader(ours.fileno())  # nobody watches it any more


def test_a_loop_may_know_better() -> None:
    own = random.Random(1)
    loop = cast(
        Any,
        SimpleNamespace(
            is_virtual=True, chooser=own, identity=lambda: ("process", "host", 7, "name", "user")
        ),
    )
    assert surroundings.is_virtual(loop)
    assert surroundings.chooser_on(loop) is own
    assert surroundings.identity_on(loop, "p", "h", "u") == ("process", "host", 7, "name", "user")
    plain = cast(Any, SimpleNamespace())
    assert not surroundings.is_virtual(plain)
    assert isinstance(surroundings.chooser_on(plain), random.SystemRandom)
    assert surroundings.identity_on(plain, "p", "h", "u")[:2] == ("p", "h")


async def test_a_loop_tells_the_time_as_it_is() -> None:
    loop = asyncio.get_running_loop()
    tell_time_exactly(loop)
    before = time.monotonic()
    told = loop.time(), exact_time(loop)
    assert before <= told[0] <= told[1] <= time.monotonic()
    woken: asyncio.Future[float] = loop.create_future()
    loop.call_later(0.002, lambda: woken.set_result(loop.time()))  # timers stay right
    assert await woken >= before + 0.001


def test_where_time_is_simulated_it_stays_so() -> None:
    loop = VirtualLoop()
    tell_time_exactly(loop)
    assert loop.time() == exact_time(loop) == VirtualLoop.time(loop)
    loop.close()


@pytest.mark.parametrize("ends", [False, True])
def test_a_name_is_looked_up_even_where_the_loop_is_about_to_end(ends: bool) -> None:
    async def main() -> list[Any]:
        if ends:
            await asyncio.get_running_loop().shutdown_default_executor()
        return await surroundings.look_up("127.0.0.1", 80)

    [(family, kind, *_, where)] = asyncio.run(main())
    assert (family, kind, where) == (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 80))
