"""A coordinator and a group of two ranks over TCP, in a process of their own, to be attacked.

It says where it listens, as JSON, on its first line. Each line on stdin is a command, `{"do": …}`:

======== =======================================================================================
check    check that the group works, in good time: the memory in MiB, now and at most since the
         last answer, and what went wrong that may not, whoever attacks ("bugs")
suffer   begin two ranks of `group`, whose other ranks (of `size`) are the attacker's: {}
dial     begin to connect to a coordinator at `address`, which is the attacker's: {}
over     the attack is over: what became of the ranks that have begun
======== =======================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

import aiodist

TOKEN = "the token of the target"

ENDS = (aiodist.GroupRevokedError, aiodist.GroupClosedError, aiodist.CoordinatorLostError)
"""After these a rank has nothing more to do."""


class Bugs(logging.Handler):
    """What no attacker may bring about: errors that aiodist does not expect itself."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))

    def unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        logging.getLogger("unhandled").error(context["message"], exc_info=error)


class Victims:
    """The ranks that were begun for the attack under way."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[str]] = []

    def suffer(self, group: str, size: int) -> None:
        for rank in range(2):
            self._begin(self._rank(group, rank, size))

    def dial(self, address: str, token: str | None) -> None:
        self._begin(self._dialler(address, token))

    def _begin(self, what: Coroutine[Any, Any, str]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(what))

    async def end(self) -> list[str]:
        self._over.set()
        tasks, self._tasks = self._tasks, []
        ends = await asyncio.gather(*tasks)
        self._over.clear()
        return ends

    async def _dialler(self, address: str, token: str | None) -> str:
        try:
            group = await aiodist.connect(address, rank=0, size=2, token=token, timeout=1.0)
        except aiodist.AiodistError as error:
            return type(error).__name__
        group.abort("the attack is over")
        await group.close()
        return "joined"

    async def _rank(self, name: str, rank: int, size: int) -> str:
        try:
            group = await aiodist.connect(
                self._address, group=name, rank=rank, size=size, token=TOKEN,
                transports=("tcp",), op_timeout=5.0,
            )  # fmt: skip
        except aiodist.AiodistError as error:
            return type(error).__name__
        programs = [reductions, values, tagged, groups, messages, votes]
        at_work = [asyncio.ensure_future(repeat(program, group)) for program in programs]
        await self._over.wait()
        for one in at_work:
            one.cancel()
        failed = [one for one in await asyncio.gather(*at_work, return_exceptions=True) if one]
        for error in failed:
            if not isinstance(error, asyncio.CancelledError):
                logging.getLogger("victim").error("rank %d", rank, exc_info=error)
        try:
            rest = await survivors(group)
            assert await rest.all_reduce(1, timeout=20) == rest.size
            await rest.close()
            return f"{rest.size} left"
        except (aiodist.CollectiveTimeoutError, aiodist.ProtocolError) as error:
            logging.getLogger("victim").error(
                "rank %d: the attack has an end", rank, exc_info=error
            )
            return type(error).__name__
        except aiodist.AiodistError as error:
            return type(error).__name__
        finally:
            await group.close()


async def survivors(group: aiodist.Group) -> aiodist.Group:
    """Those who are left. Ballots that the others have spoilt are passed over."""
    while True:
        with contextlib.suppress(aiodist.MismatchError, aiodist.CollectiveAbortedError):
            return await group.shrink(timeout=20)


async def repeat(program: Callable[[aiodist.Group], Any], group: aiodist.Group) -> None:
    """Run a program again and again: it fails as operations may, and in no other way."""
    while True:
        try:
            await program(group)
        except ENDS:
            return
        except aiodist.AiodistError:
            await asyncio.sleep(0.005)


def begun(group: aiodist.Group, name: str, *args: Any, **options: Any) -> aiodist.Work[Any]:
    """Call a method of `group`. Whatever others do, the call itself raises nothing but what has
    ended the group: what an operation fails with is its Work's to say."""
    try:
        work: aiodist.Work[Any] = getattr(group, name)(*args, timeout=0.1, **options)
    except Exception as error:
        ended = group._context.ended  # of which copies are raised
        if ended is None or (type(error), str(error)) != (type(ended), str(ended)):
            logging.getLogger("victim").exception("the call of %s raised", name)
        raise
    return work


async def reductions(group: aiodist.Group) -> None:
    await begun(group, "all_reduce", np.ones(4, np.float32))
    await begun(group, "all_reduce", np.ones(100_000, np.float32))


async def values(group: aiodist.Group) -> None:
    await begun(group, "all_gather", {"rank": group.rank}, tag="values")
    await begun(group, "broadcast", src=2, tag="values")


async def tagged(group: aiodist.Group) -> None:
    await begun(group, "barrier", tag="a")


async def groups(group: aiodist.Group) -> None:
    try:
        made = await group.dup(timeout=0.1)
    except aiodist.ProtocolError:
        logging.getLogger("victim").exception("no rank was lost for garbage")
        raise
    await made.close()


async def messages(group: aiodist.Group) -> None:
    works: list[aiodist.Work[Any]] = []
    try:
        works.append(begun(group, "send", np.ones(1, np.int64), 2, tag="a"))
        works.append(begun(group, "send", np.ones(50_000, np.int64), 2, tag="a"))
        works.append(begun(group, "recv"))
        works.append(begun(group, "recv", src=2, tag="a"))
    finally:  # where a call raises, since the group ended in the one before, look at those as well
        # With the errors returned: raised ones take the place of a cancellation that comes between
        # the end of the first and the turn in which `gather` hears of it.
        ends = await asyncio.gather(*works, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end


async def votes(group: aiodist.Group) -> None:
    await group.store.add("n")
    await group.store.wait("nobody sets it", timeout=0.1)


def memory() -> dict[str, float]:
    """MiB of this process: present and peak; the peak begins anew."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}
    Path("/proc/self/clear_refs").write_text("5")
    return found


async def main() -> None:
    bugs = Bugs()
    for name in ("aiodist", "victim", "unhandled", "asyncio"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        logger.addHandler(bugs)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(bugs.unhandled)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with aiodist.Coordinator(token=TOKEN) as coordinator:
        joining = [asyncio.ensure_future(join(coordinator.address, rank)) for rank in range(2)]
        groups = await asyncio.gather(*joining)
        doors = [coordinator.address]
        for group in groups:
            own = group._actor.view.members[group.rank]
            doors += [one for one in own.addresses if one.startswith("tcp://")]
        print(json.dumps(doors), flush=True)
        victims = Victims(coordinator.address)
        while line := await lines.readline():
            found: Any = {}
            match json.loads(line):
                case {"do": "check"}:
                    async with asyncio.timeout(30):
                        sums = [group.all_reduce(1) for group in groups]
                        assert await asyncio.gather(*sums) == [2, 2]
                        assert await groups[0].store.add("n") > 0
                    found = {**memory(), "bugs": bugs.found}
                case {"do": "suffer", "group": name, "size": size}:
                    victims.suffer(name, size)
                case {"do": "dial", "address": address, "token": token}:
                    victims.dial(address, token)
                case {"do": "over"}:
                    async with asyncio.timeout(60):
                        found = await victims.end()
            print(json.dumps(found), flush=True)
        await asyncio.gather(*(group.close() for group in groups))


async def join(address: str, rank: int) -> aiodist.Group:
    return await aiodist.connect(
        address, group="hidden", rank=rank, size=2, token=TOKEN, transports=("tcp",)
    )


asyncio.run(main())
