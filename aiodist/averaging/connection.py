"""A member's group of one, and its connections to the coordinator and to other members."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from aiodist import environment, timeouts
from aiodist.composing import check_home, failure_of
from aiodist.control.averaging import enter
from aiodist.control.events import ControlEvent, CoordinatorBack, CoordinatorGone
from aiodist.errors import (
    AiodistError,
    CoordinatorLostError,
    GroupClosedError,
    JoinTimeoutError,
)
from aiodist.group import Group
from aiodist.rank.context import Context
from aiodist.session import connect
from aiodist.shared_memory.lane import Sharing
from aiodist.transports.surroundings import chooser_on
from aiodist.wire import averaging as wire
from aiodist.wire.frames import pack_fields
from aiodist.wire.messages import MemberInfo, Message

log = logging.getLogger("aiodist.averaging")

T = TypeVar("T")

PATIENCE = 5.0
"""Seconds that the coordinator may take for an answer, and other members for the last messages of a
member that leaves."""

GONE = 1024
"""The most members that are gone of which a coordinator that is back is told."""

_OWN = frozenset(
    {"group", "rank", "size", "min_size", "max_size", "join_window"}
    | {"op_timeout", "max_message_bytes", "allow_pickle"}
)
"""Options of `connect` that the averager sets itself."""


class MemberConnection:
    """A member's connection: begun by `open`, ended by `close`.

    `enter()` returns the message of each entrance, and `entered` is called after it. `told` gets
    what the coordinator says. `failed` is called once, when this member takes part no more. If it
    was ruled lost, `expelled` is called, and it takes part as a new member, with another `id`.
    """

    def __init__(self, averager: str, address: str | None, options: Mapping[str, Any]) -> None:
        if not isinstance(averager, str) or not 0 < len(averager) <= wire.LONGEST:
            raise ValueError(
                f"an averager has a name of 1 to {wire.LONGEST} characters, not {averager!r}"
            )
        if wrong := sorted(_OWN & options.keys()):
            raise TypeError(f"{', '.join(wrong)}: an averager has no such options of `connect`")
        self.averager = averager
        self.enter: Callable[[], wire.AverageEnter]
        self.entered: Callable[[wire.AverageEntered], None]
        self.told: Callable[[wire.AveragingNews], None]
        self.expelled: Callable[[], None]
        self.failed: Callable[[AiodistError], None]
        if address is None:
            address = environment.settings_from(os.environ).address
        self._address = address
        self._options = options
        timeouts.check_timeout(options.get("timeout"))
        self._timeout: float = options.get("timeout") or 30.0  # seconds to be let in
        self._group: Group | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._joining: asyncio.Task[None] | None = None  # again, because it was ruled lost
        self._entering: asyncio.Task[None] | None = None  # again, because the coordinator is back
        self.error: AiodistError | None = None  # why this takes part no more
        self._closed = False
        self._pid = os.getpid()
        self._past = (0, 0)
        # The ids of other members that are gone. They cannot come back, because the links to them
        # have ended.
        self.gone: dict[str, None] = {}

    async def open(self) -> None:
        """Become a member. Raises what `connect` does, JoinError and MismatchError."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._again(self._join_first)
            await self._joined_again()
            if self.error is not None:
                raise self.error
        except BaseException:
            await self.close()
            raise

    async def _joined_again(self) -> None:
        """Wait until this member is in, if it was ruled lost while it joined."""
        end = self._loop.time() + self._timeout
        while self._joining is not None and not self._joining.done():
            left = end - self._loop.time()
            if left <= 0:
                raise JoinTimeoutError(
                    f"while this member joined the averager {self.averager!r}, the coordinator"
                    f" ruled it lost, and did not let it in again within {self._timeout:g} s: use"
                    " a longer `lease`"
                )
            await asyncio.wait({self._joining}, timeout=left)

    async def _join(self) -> None:
        who = f"{chooser_on(self._loop).getrandbits(96):024x}"
        name = self._options.get("name") or f"{environment_name()}-{who[:6]}"
        connecting = connect(
            self._address,
            **{
                **self._options,
                "group": wire.own_group(self.averager, who),
                "rank": 0,
                "size": 1,
                "name": name,
                "op_timeout": PATIENCE,
                "timeout": self._timeout,
            },
        ).showing(wire.shared_group(self.averager))
        group = await connecting
        self._past = self.bytes_moved
        self._group = group
        self.gone.clear()
        actor = group._actor
        self.info: MemberInfo = actor.people[actor.roots[0]]
        self.id = self.info.id
        control = actor.control
        inner = control.on_event

        def on_event(event: ControlEvent) -> None:
            inner(event)
            if self._group is group:
                self._on_event(event)

        control.on_event = on_event
        control.on_average = self._on_told

    async def _join_first(self) -> None:
        await self._join()
        try:
            await self._enter(self._timeout)
        except TimeoutError as error:
            if isinstance(error, AiodistError):
                raise
            raise JoinTimeoutError(
                f"the coordinator did not let this member into the averager {self.averager!r}"
                f" within {self._timeout:g} s"
            ) from None

    async def _enter(self, timeout: float | None = None) -> None:
        # A member that was in before has no deadline, because the coordinator may go away again and
        # stay away for long.
        try:
            self.entered(await enter(self.control, self.enter(), timeout))
        except AiodistError as error:
            error.group = wire.shared_group(self.averager)  # its group of one is not for programs
            raise

    def _on_told(self, news: wire.AveragingNews) -> None:
        if self._closed:  # a task that began now would outlive this member
            return
        if isinstance(news, wire.AverageGone):
            self.gone |= dict.fromkeys(news.ids)
            while len(self.gone) > GONE:
                del self.gone[next(iter(self.gone))]
            self.group._actor.part_from(news.ids, "the coordinator says that it is gone")
        else:
            self.told(news)

    def _on_event(self, event: ControlEvent) -> None:
        if self._closed:
            return
        if isinstance(event, CoordinatorGone) and self._entering is not None:
            self._entering.cancel()  # its request is out of date when the coordinator is back
        if isinstance(event, CoordinatorBack):
            self._entering = self.spawn(self._again(self._enter), "enter again")
        elif isinstance(event, CoordinatorGone) and event.evicted:
            log.warning("averager %r: joining again: %s", self.averager, event.reason)
            self._joining = self.spawn(self._again(self._join_again), "join again")
        elif isinstance(event, CoordinatorGone) and event.final:
            self._fail(CoordinatorLostError(f"the coordinator is gone: {event.reason}"))

    async def _again(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (CoordinatorLostError, GroupClosedError) as error:
            # An eviction, or the next return, begins another attempt.
            if self._group is None or not self._group._actor.is_evicted:
                self._fail(error)
        except AiodistError as error:
            self._fail(error)

    async def _join_again(self) -> None:
        group = self.group
        self.expelled()
        await group._actor.gone()
        while True:
            try:
                await self._join()
                break
            except JoinTimeoutError as error:
                if not group._actor.control.returns:
                    self._fail(CoordinatorLostError(f"the coordinator is gone: {error.message}"))
                    return
                # The coordinator may be away for long.
                log.warning("averager %r: not back yet, tries again: %s", self.averager, error)
        await self._enter()

    def check(self) -> None:
        """Raise the error of this member, if it takes part no more. Raises GroupClosedError in a
        forked child, and RuntimeError in another event loop or thread, and before the entrance."""
        if self.error is not None:
            raise self.error
        self.check_entered()
        check_home(f"the averager {self.averager!r}", self._pid, self._loop)

    def check_entered(self) -> None:
        """Raise RuntimeError before the entrance."""
        if not self.has_joined:
            raise RuntimeError(
                "this member has not entered the averager: use it within `async with"
                " aiodist.averager(…) as avg:`"
            )

    @property
    def has_joined(self) -> bool:
        """Whether this member was let in, maybe some time ago."""
        return self._group is not None

    @property
    def group(self) -> Group:
        """This member's group of one."""
        assert self._group is not None
        return self._group

    @property
    def control(self) -> Any:
        """The way to the coordinator."""
        return self.group._actor.control

    def say(self, message: Message) -> None:
        """Tell the coordinator something, now or when it is back."""
        self.control.tell(message)

    def ask(self, message: Message) -> asyncio.Future[Message]:
        """Ask the coordinator something, now or when it is back. The answer fails if this member is
        lost."""
        try:
            answer: asyncio.Future[Message] = self.control.begin(message)
        except AiodistError as error:
            answer = self._loop.create_future()
            answer.set_exception(error)
        return answer

    def meet(self, members: Sequence[MemberInfo], *words: str | int | bytes) -> Group:
        """Make a group of some members, in that order, in which all of them meet by the same words.

        It needs no message: frames that arrive early wait for it. `part` closes it.
        """
        actor = self.group._actor
        roots = actor.meet(members)
        ids = [member.id for member in members]
        digest = hashlib.blake2b(pack_fields(self.averager, *words, *ids), digest_size=8)
        base = self.group._context
        context = Context(
            actor.endpoint,
            id=digest.digest(),
            group=wire.shared_group(self.averager),
            epoch=1,
            ranks=roots,
            op_timeout=PATIENCE,
            max_message_bytes=base.max_message_bytes,
            allow_pickle=False,
            layout=actor.layout(roots)._replace(sharing=Sharing.NONE),
        )
        return Group(actor, context, name=context.group)

    def part(self, group: Group) -> None:
        """Close a group of `meet`."""
        text = "it has served its purpose"
        group._context.close(GroupClosedError(text, group=group.name))

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Bytes of payload that this member has sent to others, and received from them."""
        if self._group is None:
            return self._past
        sent, received = self._group.bytes_moved
        return self._past[0] + sent, self._past[1] + received

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task that ends with this member. If it fails, so does the member."""
        task = self._loop.create_task(work, name=f"aiodist averager {self.averager}: {name}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        error = failure_of(task, "the averager")
        if error is not None:
            self._fail(error)

    def _fail(self, error: AiodistError) -> None:
        if self.error is None:
            self.error = error
            self.failed(error)

    async def close(self) -> None:
        """Leave. Idempotent."""
        if os.getpid() != self._pid:  # a forked child has nothing to leave
            return
        self._closed = True
        self._fail(GroupClosedError(f"the averager {self.averager!r} was closed here"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._group is not None and not self._group.closed:
            with suppress(AiodistError):
                await self._group.close()


def environment_name() -> str:
    """The default name of a member: its host and process."""
    return f"{os.uname().nodename if hasattr(os, 'uname') else 'host'}-{os.getpid()}"
