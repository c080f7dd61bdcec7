"""The coordinator actor: the membership state machine behind a listening socket.

It carries control messages only, because bulk data goes straight between members. One event loop
owns it, and nothing in here is called from another thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl as tls
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from aiodist import timeouts
from aiodist.coordinator.alarm import Alarm
from aiodist.coordinator.clients import Clients
from aiodist.coordinator.encoding import Encoder
from aiodist.coordinator.journal import Journal
from aiodist.coordinator.state_file import StateFile
from aiodist.environment import token_in
from aiodist.errors import CoordinatorLostError, printable
from aiodist.membership.effects import Drain, Effect, Event, Keep, Note, Tick
from aiodist.membership.machine import Membership
from aiodist.transports.surroundings import closed_on_error
from aiodist.wire.address import Address, parse_address
from aiodist.wire.averaging import averager_of
from aiodist.wire.channels import channel_of, participant_in
from aiodist.wire.proof import secret_of

logger = logging.getLogger("aiodist.coordinator")

NOT_STARTED = "the coordinator does not listen: call start() first"

_BELOW_DEBUG = logging.DEBUG - 5

_LEVELS = {
    "lost": logging.WARNING,
    "silent": logging.WARNING,
    "join refused": logging.WARNING,
    "return refused": logging.WARNING,
    "stalled": logging.WARNING,
    "stall over": logging.WARNING,  # as loud as its beginning
    "aborted": logging.INFO,
    "formed": logging.INFO,
    "restored": logging.INFO,
}


class Coordinator:
    """Keep track of the members of all groups. Use it as an async context manager.

    Args:
        address: where to listen: ``tcp://host:port`` (port 0 picks a free one), ``tls://``,
            ``unix:///path``, ``inproc://name``.
        token: the secret that members have to prove (None: AIODIST_TOKEN if set, as in `connect`).
            It is never sent.
        ssl: a server-side context; makes ``tcp://`` the same as ``tls://``.
        state: a file that keeps groups, epochs and stores over restarts, because everything is on
            disk before a member is told. The file is made if it does not exist, readable for this
            user only. Two coordinators cannot share one. Without it, the next coordinator learns
            of groups from their members, but their stores are lost.
        force: start even if the last acknowledged writes in that file are lost.
        returns: whether members look for another coordinator at the same address when this one goes
            away.
        recovery: seconds after the start in which no group forms, so that members of earlier groups
            can come back first.

    A connection is closed and logged to ``aiodist.coordinator`` if it sends bad bytes or a wrong
    token, or does not read. Other connections do not notice.

    For example::

        async with aiodist.Coordinator("tcp://127.0.0.1:0", token="secret") as coordinator:
            group = await aiodist.connect(coordinator.address, size=1, token="secret")
            await group.close()
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        token: str | bytes | None = None,
        ssl: tls.SSLContext | None = None,
        state: str | os.PathLike[str] | None = None,
        force: bool = False,
        returns: bool = True,
        recovery: float = 0.0,
    ) -> None:
        wanted = parse_address(address)
        if wanted.scheme == "tls" and ssl is None:
            raise ValueError(f"{address} needs ssl=, a server-side ssl.SSLContext")
        if ssl is not None:
            if wanted.scheme not in ("tcp", "tls"):
                raise ValueError(f"ssl= is for tcp:// and tls:// addresses, not for {address}")
            wanted = Address("tls", wanted.host, wanted.port)
        if recovery != 0:
            timeouts.check_seconds("recovery", recovery)
        secret = secret_of(token_in(os.environ) if token is None else token)
        self._clients = Clients(wanted, ssl, secret, returns, self._step)
        self.totals = self._clients.totals  # counts since this object was made
        self._address: Address | None = None  # None: it does not listen
        self._why_not = NOT_STARTED  # why it does not listen
        self._state = None if state is None else Path(state)
        self._force = force
        self._recovery = recovery
        self._journal: Journal | None = None  # writes the state file, if there is one
        # done, with the error, if the state file cannot be written
        self._failure: asyncio.Future[OSError]
        self._stopping = False  # the machine gets no more events
        self._ending: asyncio.Task[None] | None = None  # ends all that `start` made
        # They get each event that may be logged.
        self.observers: list[Callable[[Note], None]] = [self._log, self.totals.note]
        self._machine: Membership  # decides everything; `start` makes this and the next three
        self._loop: asyncio.AbstractEventLoop  # the loop of `start`, on which everything runs
        self._alarm: Alarm  # rings when the machine has something due
        self._changed: asyncio.Event  # set after every event, so that `emptied` looks again
        # Whether the launcher is stopping its ranks: then it expects their loss.
        self.is_run_over = False

    @property
    def address(self) -> str:
        """The listening address, with the port.

        Raises RuntimeError before `start`, and in a forked child.
        """
        if self._address is None:
            raise RuntimeError(self._why_not)
        return str(self._address)

    async def start(self) -> None:
        """Listen.

        Raises OSError (EADDRINUSE; EWOULDBLOCK if another coordinator has the state file), and
        ValueError if the state file is damaged or no state file.
        """
        if self._address is not None:
            raise RuntimeError(f"the coordinator listens already, on {self._address}")
        if self._ending is not None and not self._ending.done():
            raise RuntimeError("the coordinator has not stopped yet: await stop() first")
        self._ending = None
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        self._stopping = False
        self._why_not = NOT_STARTED
        self._alarm = Alarm(self._loop, lambda: self._step(Tick()))
        self._changed = asyncio.Event()
        self._clients.begin()
        now = self._loop.time()
        self._machine = Membership(
            wall_offset=time.time() - now,
            keep=self._state is not None,
            form_after=now + self._recovery,
            returns=self._clients.returns,
        )
        if self._state is not None:
            self._recall(StateFile(self._state, force=self._force), now)
        try:
            self._address = await self._clients.open()
        except BaseException:
            if self._journal is not None:
                await self._journal.close()
            raise
        _listening.add(self)
        self._arm()
        shown = self.address
        logger.info("listening on %s", shown, extra={"event": "listening", "address": shown})

    def _recall(self, file: StateFile, now: float) -> None:
        """Read what an earlier coordinator has written."""
        clients = self._clients
        with closed_on_error(file):
            if file.saved is not None:
                clients.name = file.saved.coordinator
                clients.incarnation = file.saved.incarnation + 1
                self._machine.restore(file.saved.records, now)
            self._journal = Journal(
                file,
                clients.name,
                clients.incarnation,
                records=self._machine.records,
                carry_out=self._carry_out,
                failed=self._cannot_write,
            )

    async def failed(self) -> OSError:
        """Wait until the state cannot be written, and return the error.

        By then this coordinator has closed all connections. Stop it.
        """
        return await asyncio.shield(self._failure)

    async def emptied(self) -> None:
        """Wait until there is no group, or until this coordinator has stopped."""
        # If the state cannot be written, groups do not end here any more.
        while not (self._address is None or self._stopping or self._machine.is_empty):
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, drain: float = 0.0, *, gave_up: bool = False) -> None:
        """Take no more joins, wait at most `drain` seconds for all groups to end, say goodbye, and
        close.

        `gave_up`: tell ranks that wait to join how far their group had come, because the rank that
        serves this coordinator waits no longer. Idempotent. A call without `drain` ends the wait
        of an earlier one. If you cancel a call after its wait, the coordinator stops all the same.
        """
        if gave_up and self._address is not None:
            self._step(Drain(gave_up=True))
        if drain > 0 and self._address is not None and not self._stopping:
            self._step(Drain())
            with suppress(TimeoutError):
                async with asyncio.timeout(drain):
                    await self.emptied()
        if self._address is not None:  # no other call was faster
            address, self._address = self._address, None
            self._why_not = "the coordinator has stopped"
            self._ending = self._loop.create_task(self._end(address), name="aiodist stop")
        ending = self._ending
        if ending is not None:
            # The loop of an earlier call may have ended, and the task with it.
            if not (ending.done() or ending.get_loop().is_closed()):
                await asyncio.wait({ending})
            if ending.done() and not ending.cancelled():
                ending.result()

    async def _end(self, address: Address) -> None:
        # The order matters, so that every member hears what was decided::
        #
        #     no new connection comes in
        #     what waits for the disk is written, and then carried out
        #     all are told Goodbye; their connections end, or are ended after a second
        #     the state file is let go of
        #
        # A coordinator that starts with the same file is refused until the last step (`_locked`),
        # so there are never two that tell members something.
        self._alarm.cancel()
        await self._clients.shut()
        if self._journal is not None:
            await self._journal.idle()
        self._stopping = True
        # A goodbye must not overtake an answer, so effects that wait for the disk came first.
        await self._clients.dismiss()
        if self._journal is not None:
            await self._journal.close()
            self._journal = None
        _listening.discard(self)
        self._changed.set()
        shown = str(address)
        logger.info("stopped listening on %s", shown, extra={"event": "stopped", "address": shown})

    async def __aenter__(self) -> Coordinator:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def status(self) -> dict[str, Any]:
        """Describe groups with their epochs and members, in plain data.

        Keys: "address", "draining"; "groups", a list of dicts with "name", "run_id", "wanted"
        (size), "epoch", "size", "members", "waiting", "lost", "left", "absent", "store", "channel",
        "averager". For "channels", see `aiodist.membership.channels.status`, and for "averagers",
        see `aiodist.membership.averagers.Room.status`.
        """
        return {"address": self.address, **self._machine.status()}

    async def survey(self, *, counts: bool = False) -> dict[str, Any]:
        """Return what `status` does, and what the members are doing.

        Each member has a second to answer. Members have "silent" and "doing", and groups have
        "findings", as in ``aiodist status --json``. `counts`: also ask members for their counts,
        for `totals`, and let them measure their operations from the first such call on. Raises
        CoordinatorLostError if the coordinator stops meanwhile.
        """
        if self._address is None or self._stopping:
            raise CoordinatorLostError(self._why_not)
        return {"address": self.address, **await self._clients.survey(counts=counts)}

    @property
    def state_health(self) -> tuple[float, int] | None:
        """Seconds since the last write of the state file, and how often it could not be made
        shorter.

        None if there is no state file. If the file cannot be written, see `failed`.
        """
        if self._journal is None:
            return None
        return max(0.0, self._loop.time() - self._journal.written_at), self._journal.failures

    def end_in_child(self) -> None:
        """After a fork: let the child's copy do nothing, because groups belong to the parent."""
        self._address = self._ending = None
        self._why_not = "the coordinator was inherited over a fork; start one in the child instead"
        self._stopping = True

    def close_fds_after_fork(self) -> None:
        """In a forked child, close all sockets and files that it inherited.

        Else the port, the connections and the lock of the state file would outlive the parent.
        """
        self._clients.close_fds_after_fork()
        if self._journal is not None:
            self._journal.close_after_fork()

    def _step(self, event: Event) -> None:
        if self._stopping:
            self._changed.set()
            return  # a member that goes now comes back to the next coordinator
        now = self._loop.time()
        # Anew for each step. The records of this step hold times that must be true for the next
        # coordinator, too, and the wall clock may have been set since the start.
        self._machine.set_wall_offset(time.time() - now)
        effects = self._machine.step(event, now)
        if self._journal is None:
            self._carry_out(effects)
        else:
            self._journal.submit(effects)
        self._arm()
        self._changed.set()

    def _cannot_write(self, error: OSError) -> None:
        """Close all connections, because no member may be told what is not on disk."""
        text = "cannot write %s: %s; closing all connections"
        extra = {"event": "state not written", "file": str(self._state), "error": str(error)}
        logger.critical(text, self._state, error, extra=extra)
        self._stopping = True
        self._changed.set()
        self._clients.abort(f"the coordinator cannot write its state: {error}")
        if not self._failure.done():
            self._failure.set_result(error)

    def _carry_out(self, effects: list[Effect]) -> None:
        # The machine's state already contains these effects, so a skipped message would be a member
        # that was not told.
        encoder = Encoder()
        for effect in effects:
            if isinstance(effect, Note):
                for observe in self.observers:
                    observe(effect)
            elif not isinstance(effect, Keep):
                self._clients.carry_out(effect, encoder)

    def _log(self, note: Note) -> None:
        level = _LEVELS.get(note.event, logging.DEBUG)
        name = note.fields.get("group", "")
        if note.event == "lost" and self.is_run_over:
            level = logging.DEBUG
        elif averager_of(name) and level < logging.WARNING:
            level = min(level, logging.DEBUG)  # each member of an averager is a group of one
        elif channel_of(name) and not (participant_in(name) and level >= logging.WARNING):
            # Participants of a channel connect and leave all the time, in small groups of our own.
            # But the loss of one is worth a line.
            level = _BELOW_DEBUG
        if logger.isEnabledFor(level):
            said = printable(", ".join(f"{key}={value}" for key, value in note.fields.items()))
            extra = {"event": note.event, **note.fields}
            logger.log(level, "%s: %s", note.event, said, extra=extra)

    def _arm(self) -> None:
        """Set the timer for the next tick. A tick that comes too early does no harm."""
        when = self._machine.deadline()
        if when is not None and self._address is not None:
            self._alarm.ring_by(when)


_listening: weakref.WeakSet[Coordinator] = weakref.WeakSet()
"""The coordinators of this process that have started and not stopped."""


def _close_in_child() -> None:
    coordinators = list(_listening)
    _listening.clear()
    with ExitStack() as stack:  # it closes all, even if closing one fails
        for coordinator in coordinators:
            stack.callback(coordinator.close_fds_after_fork)
            coordinator.end_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
