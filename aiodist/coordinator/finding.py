"""Finding the coordinator, or serving it: how rank 0 uses an address of the environment."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import ssl as tls
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from aiodist.coordinator.actor import Coordinator
from aiodist.coordinator.agent_store import AgentStore, Notice
from aiodist.coordinator.exposure import Guard, elsewhere_hint
from aiodist.coordinator.listening import own_address
from aiodist.errors import AiodistError, JoinError, JoinTimeoutError
from aiodist.wire.activity import LONG_WAIT
from aiodist.wire.address import Address, parse_address

log = logging.getLogger("aiodist.session")

T = TypeVar("T")

_NOT_OURS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
"""The errors of binding if the address belongs to another process or host."""

_PAUSE = 0.2
"""Seconds before an unknown name is looked up again, because the name of a new container may become
known a moment later."""
REFUSED_SECONDS = 30.0
"""Seconds for rank 0 to publish another coordinator after the one that was published has refused
this rank. torchrun starts all workers again at about the same time."""
_LOOK_UP = 2.0
"""Seconds for looking up a name if only the text of an error depends on it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How to find the coordinator.

    `address`: where it is. `serve`: where to listen for it if this rank may serve it ("": it may
    not). `through_agent`: torchrun's own store is at `address`, and has the coordinator's address
    under `key`. `ssl`: the server-side context if this rank serves. `guard`: what keeps strangers
    out. `one_host`: all ranks are on this host. `hint`: what to check if the ranks do not meet.
    """

    address: str
    serve: str = ""
    through_agent: bool = False
    key: str = ""
    token: bytes | None = field(default=None, repr=False)
    ssl: tls.SSLContext | None = None
    guard: Guard = field(default_factory=lambda: Guard(keeps_out=False))
    one_host: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Located:
    """Where the coordinator is.

    `run_id`: what to join with instead of the run id of the environment ("": no other one).
    `coordinator`: the coordinator, if this rank serves it. `store`: torchrun's store if it was
    found there. Rank 0 may then publish another one later.
    """

    address: str
    run_id: str = ""
    coordinator: Coordinator | None = None
    store: AgentStore | None = None


async def find(wanted: Wanted, timeout: float) -> Located:
    """Find the coordinator, or serve it.

    A rank that can bind the address serves it, without asking first whether there is a coordinator.
    Raises JoinError, JoinTimeoutError, OSError; ValueError if pickles are allowed and strangers
    could send some.
    """
    if wanted.through_agent:
        return await _through_agent(wanted, timeout)
    if not wanted.serve:
        return Located(wanted.address)
    coordinator = await _serve(wanted.serve, wanted, timeout)
    if coordinator is None:
        return Located(wanted.address)
    return Located(_reached_at(wanted.address, coordinator), coordinator=coordinator)


async def at_newest(found: Located, join: Callable[[Located], Awaitable[T]], timeout: float) -> T:
    """Call `join` with what was found. If rank 0 publishes another coordinator, cancel that call,
    and call `join` for that one.

    torchrun's store may have the coordinator of workers that torchrun has ended since, or is about
    to end. It may be gone, refuse this rank, or let it wait for ever. So an error of aiodist counts
    only if rank 0 publishes nothing else within `REFUSED_SECONDS`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while found.store is not None:
        joining = asyncio.timeout(None)
        newer = loop.create_task(_newer(found, found.store, deadline - loop.time(), joining))
        try:
            async with joining:
                try:
                    return await join(found)
                except AiodistError as error:
                    left = min(REFUSED_SECONDS, deadline - loop.time())
                    with _told(f"{error}; {found.store} has no other coordinator", left):
                        await asyncio.wait({newer}, timeout=left)
                    raise
        except (AiodistError, TimeoutError):
            if not newer.done() or (another := newer.result()) is None:
                raise
            log.info("rank 0 has published another coordinator, at %s", another.address)
            found = another
        finally:
            newer.cancel()
    return await join(found)


async def _newer(
    found: Located, store: AgentStore, timeout: float, joining: asyncio.Timeout
) -> Located | None:
    """Wait for what rank 0 publishes after `found`, and end `joining` then.

    Returns None if nothing comes, or the store fails.
    """
    try:
        published = await store.read(timeout, but=Notice(found.address, found.run_id))
    except JoinError:
        return None
    joining.reschedule(0.0)
    return Located(*published, store=store)


async def _through_agent(wanted: Wanted, timeout: float) -> Located:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    at = parse_address(wanted.address)
    store = AgentStore(at, wanted.key)
    if not wanted.serve:
        with _told(f"rank 0 has published no coordinator in {store}", timeout):
            return Located(*await store.read(timeout), store=store)
    # The agent's store occupies MASTER_PORT. So the coordinator takes a free port, and other ranks
    # read it from the store.
    host = parse_address(wanted.serve).host
    coordinator = await _serve(str(Address("tcp", host, 0)), wanted, timeout)
    if coordinator is None:
        raise JoinError(f"rank 0 cannot listen at {host}: is MASTER_ADDR another host's?")
    # Ranks of another round, or of another job, may read this later. With this run id they join no
    # group of theirs.
    published = Notice(_reached_at(wanted.address, coordinator), secrets.token_hex(8))
    try:
        await store.publish(published, deadline - loop.time())
    except BaseException:
        await coordinator.stop()
        raise
    return Located(*published, coordinator=coordinator)


def _reached_at(address: str, coordinator: Coordinator) -> str:
    wanted, served = parse_address(address), parse_address(coordinator.address)
    if served.scheme not in ("tcp", "tls"):
        return coordinator.address
    return str(Address(served.scheme, wanted.host, served.port))


async def _serve(address: str, wanted: Wanted, timeout: float) -> Coordinator | None:
    """Serve a coordinator at `address`; None if the address is another's."""
    # A question whether there is a coordinator would be outdated at once: a daemon or the rank 0 of
    # another job may begin to listen. The system gives an address to one socket only, so binding it
    # decides.
    named = parse_address(address)
    here = named
    if named.scheme in ("tcp", "tls"):
        found = await _own(named, timeout)
        if found is None:
            log.info("not serving %s, which is no address of this host", address)
            return None
        here = found
        if here.is_loopback and not (named.is_loopback or wanted.one_host):
            here = _for_others(named, here, wanted.guard)
    wanted.guard.check(str(here))
    # It ends with this process, so members must not look for another one.
    coordinator = Coordinator(str(here), token=wanted.token, ssl=wanted.ssl, returns=False)
    try:
        await coordinator.start()
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        log.debug("not serving %s (%s): looking for its coordinator", address, error)
        return None
    wanted.guard.warn(coordinator.address)
    return coordinator


def _for_others(named: Address, here: Address, guard: Guard) -> Address:
    """Where to serve `named` if that name means the loopback address `here` on its own host.

    Debian's /etc/hosts has such names. Other hosts resolve them to a real address.
    """
    if guard.keeps_out:
        return Address(here.scheme, "::" if ":" in here.host else "0.0.0.0", here.port)
    log.warning(
        "rank 0 serves the coordinator at %s, which is what %s means on its host: other hosts do "
        "not reach it. Give all ranks the same AIODIST_TOKEN, so that rank 0 listens on all "
        "interfaces, or name it by an address that other hosts reach; or by 127.0.0.1, if all "
        "ranks are on this host",
        here,
        named.host,
    )
    return here


async def hint(wanted: Wanted) -> str:
    """What to check if the ranks did not meet."""
    named = parse_address(wanted.address)
    if wanted.serve and named.scheme == "tcp" and not wanted.through_agent:
        with contextlib.suppress(OSError):  # the name is not known, or not in time
            async with asyncio.timeout(_LOOK_UP):
                if await own_address(named) is None:
                    return elsewhere_hint(named)
    return wanted.hint


async def _own(named: Address, timeout: float) -> Address | None:
    """Call `own_address`, and wait at most `timeout` seconds for the name to be known.

    Raises JoinTimeoutError.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    with _told(f"rank 0 is to serve {named}, and does not know that host", timeout):
        while True:
            try:
                return await own_address(named)
            except OSError as error:
                if loop.time() + _PAUSE >= deadline:
                    raise JoinTimeoutError(
                        f"rank 0 was to serve {named}, but that host was not known to it for "
                        f"{timeout:g} s: {error.strerror or error}"
                    ) from error
                await asyncio.sleep(_PAUSE)


@contextlib.contextmanager
def _told(what: str, timeout: float) -> Iterator[None]:
    """Log `what` this rank waits for, if that takes long."""
    loop = asyncio.get_running_loop()
    text = "%s for %g s. Trying until %g s are over"
    timer = loop.call_later(LONG_WAIT, log.warning, text, what, LONG_WAIT, timeout)
    try:
        yield
    finally:
        timer.cancel()
