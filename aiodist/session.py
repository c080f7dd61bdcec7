"""`connect` and `local`: where everything is wired together.

`connect` reaches the coordinator, opens listeners, joins the group, and wires up a `Group`. Peers
connect to each other later, when they first have something to say.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import ssl as tls
from collections.abc import AsyncIterator, Generator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Never, Unpack

from aiodist import environment, timeouts
from aiodist.control.client import ControlClient
from aiodist.control.events import ControlEvent
from aiodist.coordinator import finding
from aiodist.coordinator.actor import Coordinator
from aiodist.coordinator.exposure import Guard, narrow_hint
from aiodist.errors import CoordinatorLostError, JoinTimeoutError, in_words
from aiodist.group import Group
from aiodist.links.endpoint import Endpoint
from aiodist.links.greeting import Identity
from aiodist.phases.base import as_int
from aiodist.rank import flight_recorder, patience, telemetry, tracing, whereabouts
from aiodist.rank.actor import RankActor
from aiodist.rank.context import Context
from aiodist.rank.doings import RankDoings
from aiodist.reach import Reach, endpoint_of, memory_of
from aiodist.schedules.costs import parse, said
from aiodist.transports import registry
from aiodist.transports.base import Listener
from aiodist.transports.certificates import both, contexts_in
from aiodist.types import JoinOptions, unexpected
from aiodist.wire.activity import LONG_WAIT, Stalled
from aiodist.wire.address import parse_address, parse_endpoint
from aiodist.wire.limits import MAX_MEMBERS
from aiodist.wire.messages import JoinRequest, MemberInfo, Message, Withdrawn
from aiodist.wire.proof import membership_key, secret_of

log = logging.getLogger("aiodist.session")

MAX_MESSAGE_BYTES = 16 << 30
"""Default of `max_message_bytes`: 16 GiB."""

_PATIENCE = {False: 30.0, True: 300.0}
"""Default of `timeout`, in seconds, by whether the address comes from the environment."""

_PAUSE = 0.2
"""Seconds before a coordinator that went away during a join is looked for again."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of `connect`, with the environment looked up. `ask`: what is asked of the
    coordinator, but for what `Reach.introduce` adds. `caller`: the line of the program that has
    called `connect`, for logs."""

    coordinator: finding.Wanted
    ask: JoinRequest
    reach: Reach
    timeout: float
    op_timeout: float
    client: tls.SSLContext | None
    reads_devices: bool
    max_message_bytes: int
    allow_pickle: bool
    caller: str
    shows: str = ""
    """What its links show instead of the name of its group, where peers are of other groups."""

    @property
    def most(self) -> int:
        """How many ranks the group can have."""
        return self.ask.size or self.ask.max_size or MAX_MEMBERS


def connect(
    address: str | None = None,
    *,
    group: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    min_size: int | None = None,
    max_size: int | None = None,
    join_window: float = 1.0,
    timeout: float | None = None,
    op_timeout: float = 300.0,
    lease: float = 15.0,
    token: str | bytes | None = None,
    ssl: tls.SSLContext | tuple[tls.SSLContext, tls.SSLContext | None] | None = None,
    transports: str | Iterable[str] | None = None,
    bind: str | None = None,
    advertise: str | None = None,
    name: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    allow_pickle: bool = False,
    costs: str | PathLike[str] | None = None,
    **unknown: Never,
) -> Connecting:
    """Join a group: ``group = await connect(…)``, or ``async with connect(…) as group:``.

    `address`: the coordinator's, ``tcp://host:port``, ``tls://host:port``, ``unix:///path`` or
    ``inproc://name``. None takes address, rank, size and group from the environment:
    AIODIST_ADDRESS, …, or MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, or what Slurm, Open MPI,
    MPICH and Kubernetes set (docs/launchers.md). Then rank 0 serves the address itself if nobody
    else does: at what it names on its host, and at nothing else; with a token on all interfaces,
    but AIODIST_ADDRESS only where its name means a loopback address on that host.

    `group`: the name of the group ("world"). `rank`: the wanted one (None: assigned). `size`: how
    many ranks make it complete; or `min_size` and `max_size`: complete with `max_size`, or with
    `min_size` once nobody has joined for `join_window` seconds.

    `timeout`: seconds until the group must be complete (None: AIODIST_TIMEOUT; else 300 where the
    environment gives the address, as under launchers, whose ranks may come minutes apart, and 30
    elsewhere). `op_timeout`: the default deadline of
    operations, in seconds. `lease`: after how many seconds of silence a member counts as lost.
    `token`: the secret that the coordinator asks for (None: AIODIST_TOKEN, if it is set; it is not
    sent). It proves that this process may connect, and does not protect what is sent afterwards: an
    attacker between hosts can change tensors. `ssl`:
    contexts for TLS, ``(client side, server side)``: then all that leaves this host is encrypted
    and authenticated, what ranks send each other, too; all ranks have to do the same. None, with a
    ``tls://`` address: those that AIODIST_TLS_CA, AIODIST_TLS_CERT, AIODIST_TLS_KEY (files) make.
    A client-side context alone is for the connection to the coordinator: then ranks of different
    hosts do not reach each other, unless they are told to do so in the clear, by a pair of it and
    None.

    `transports`: those allowed ("inproc", "shm", "unix", "tcp", and "cuda_ipc" for tensors on a
    GPU; None: all, the best that reaches each peer). `bind`: where to listen for peers over TCP, a
    host, ``host:port`` or ``:port`` (None: the address of this host towards the coordinator, at a
    free port); `advertise`: where they shall dial, likewise (None: the host that the coordinator
    sees, and the port that is listened at). Where a NAT maps a port to this host, `advertise` is
    that of the NAT, and the same port is listened at unless `bind` names another. `name` and
    `metadata` are shown to the other members. `max_message_bytes`: the largest value accepted from
    a peer. `allow_pickle`: whether other objects may travel, and be unpickled: then every member
    may run code here, and without TLS so may everybody on the way between two hosts, whether or not
    there is a token. `costs`: a file that says what messages cost on this network, by which
    algorithms are chosen between hosts (None: AIODIST_COSTS; docs/performance.md). If several ranks
    give one, that of the lowest rank counts for all.

    Raises:
        JoinTimeoutError: the coordinator was not reached, or not all came, within `timeout`.
        RankTakenError, SizeMismatchError, GroupCompleteError: the coordinator refused.
        AuthenticationError: no or wrong token.
        ValueError, TypeError: arguments or environment that make no sense, an empty token included,
            and a profile of costs that cannot be read;
            `allow_pickle` where other hosts can connect, and neither a token nor TLS that asks for
            certificates keeps strangers out.
        OSError: nothing can listen where `bind` says; a port is for one rank.

    For example::

        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            aiodist.connect(coordinator.address, size=1) as group,
        ):
            await group.barrier()
    """
    if unknown:
        raise unexpected("connect", unknown, run_id="group")
    if max_message_bytes < 1:
        raise ValueError(f"max_message_bytes is at least 1, not {max_message_bytes!r}")
    by_environment = address is None
    address, found, allowed = _looked_up(address, transports)
    if timeout is None:
        timeout = environment.timeout_in(os.environ) or _PATIENCE[by_environment]
    _check_positive(timeout=timeout, op_timeout=op_timeout, lease=lease)
    if size is None and min_size is None and max_size is None:
        if found.size is None and found.min_size is None and found.max_size is None:
            raise ValueError("connect needs size= (a fixed group), or min_size= and max_size=")
        size, min_size, max_size = found.size, found.min_size, found.max_size
    for where in (bind, advertise):
        parse_endpoint(where or "")
    secret = secret_of(environment.token_in(os.environ) if token is None else token)
    client, server = _contexts(ssl, address)
    is_tls = client is not None or parse_address(address).scheme == "tls"
    guard = Guard.of(secret, server, allow_pickle=allow_pickle)
    ask = JoinRequest(
        group=group or found.group or "world",
        id="",
        rank=found.rank if rank is None else _count("rank", rank, 0),
        size=_count("size", size, 1),
        min_size=_count("min_size", min_size, 1),
        max_size=_count("max_size", max_size, 1),
        join_window=join_window,
        lease=lease,
        name=name or "",
        metadata=dict(metadata or {}),
        run_id=found.run_id,
        addresses=_profile(costs),
    )
    return Connecting(
        _Options(
            _wanted(address, found, ask, secret, server, guard),
            ask,
            Reach(
                registry.choose(allowed),
                both(client, server),
                guard,
                bind,
                advertise,
                stays=is_tls and server is None and not isinstance(ssl, tuple),
            ),
            timeout,
            op_timeout,
            client,
            registry.allows_devices(allowed),
            max_message_bytes,
            allow_pickle,
            f"; at {where}" if (where := whereabouts.of_caller()) else "",
        )
    )


def _profile(costs: str | PathLike[str] | None) -> tuple[str, ...]:
    """What this rank says of its profile of costs; nothing where it was given none."""
    path = costs or os.environ.get("AIODIST_COSTS", "").strip()
    if not path:
        return ()
    try:
        return (said(parse(Path(path).read_text())),)
    except (OSError, ValueError) as error:
        raise ValueError(f"the profile of costs {os.fspath(path)!r}: {error}") from error


def _contexts(
    given: tls.SSLContext | tuple[tls.SSLContext, tls.SSLContext | None] | None, address: str
) -> tuple[tls.SSLContext | None, tls.SSLContext | None]:
    """As a client, and as a server."""
    if given is None:
        return contexts_in(os.environ, address)
    return given if isinstance(given, tuple) else (given, None)


def _check_positive(**options: float) -> None:
    for name, seconds in options.items():
        timeouts.check_seconds(name, seconds)


def _count(name: str, given: int | None, least: int) -> int | None:
    """A number of ranks, or of one, as an int: said at once where it is none, not once there is a
    coordinator."""
    if given is None:
        return None
    count = as_int(given, f"{name} is an int")
    if not least <= count < least + MAX_MEMBERS:
        raise ValueError(f"{name} is {least} to {least + MAX_MEMBERS - 1}, not {count}")
    return count


def _looked_up(
    address: str | None, transports: str | Iterable[str] | None
) -> tuple[str, environment.Settings, list[str]]:
    """The coordinator's address, what else the environment says, which is nothing where an address
    is given, and the names of the transports that are allowed."""
    found = environment.Settings()
    if address is None:
        found = environment.settings_from(os.environ)
        address = found.address
    if transports is None:
        transports = found.transports or os.environ.get("AIODIST_TRANSPORTS") or None
    return address, found, registry.names_of(transports)


def _wanted(
    address: str,
    found: environment.Settings,
    ask: JoinRequest,
    secret: bytes | None,
    server: tls.SSLContext | None,
    guard: Guard,
) -> finding.Wanted:
    """The coordinator at `address`, which rank 0 may have to serve: where, the environment says."""
    served = found.listen_guarded if guard.keeps_out else found.listen
    return finding.Wanted(
        address,
        serve=served if ask.rank == 0 else "",
        through_agent=found.agent_store,
        # In a store of others, to whom it does not show the group's name.
        key=f"aiodist/{membership_key(secret, ask.group, (found.run_id,)).hex()[:32]}",
        token=secret,
        ssl=server,
        guard=guard,
        one_host=found.one_host,
        hint=narrow_hint(parse_address(address)) if served != found.listen_guarded else "",
    )


class Connecting:
    """What `connect` returns: await it for the group, or use it as an async context manager: that
    leaves the group at its end, in whatever epoch it is by then."""

    def __init__(self, options: _Options) -> None:
        self._options = options
        self._group: Group | None = None
        self.timeout = options.timeout
        self.join_window = options.ask.join_window
        self.most = options.most

    def without_rank(self) -> Connecting:
        """A copy that asks for no rank in particular."""
        return Connecting(replace(self._options, ask=replace(self._options.ask, rank=None)))

    def with_store(self, name: str) -> Connecting:
        """A copy for a group whose store is that of all groups that name it."""
        return Connecting(replace(self._options, ask=replace(self._options.ask, store=name)))

    def showing(self, name: str) -> Connecting:
        """A copy for a group whose members meet those of other groups, as members of `name`: see
        `RankActor.meet`."""
        return Connecting(replace(self._options, shows=name))

    def __await__(self) -> Generator[Any, None, Group]:
        return _connect(self._options).__await__()

    def __repr__(self) -> str:
        # asyncio.run and create_task want a coroutine, and say what they got instead.
        return "<aiodist.connect(…): to be awaited, or entered by `async with`, in a coroutine>"

    async def __aenter__(self) -> Group:
        self._group = await _connect(self._options)
        return self._group

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._group is not None
        await self._group._newest().__aexit__(kind, error, trace)


async def _connect(options: _Options) -> Group:
    try:
        return await _met(options)
    except JoinTimeoutError as error:
        if hint := await finding.hint(options.coordinator):
            error.add_note(hint)
        raise


async def _met(options: _Options) -> Group:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + options.timeout
    address, coordinator = await finding.find(options.coordinator, options.timeout)
    try:
        while True:
            try:
                actor = await _join(options, address, coordinator, deadline - loop.time())
                break
            except CoordinatorLostError as error:
                # Perhaps that of a run that was just ending, and ours is about to come up.
                if coordinator is not None or loop.time() + _PAUSE >= deadline:
                    raise
                log.debug("looking for the coordinator again: %s", error)
                await asyncio.sleep(_PAUSE)
    except BaseException:
        if coordinator is not None:
            await coordinator.stop()
        raise
    context = Context(
        actor.endpoint,
        id=actor.view.context,
        group=actor.view.group,
        epoch=actor.view.epoch,
        ranks=actor.roots,
        op_timeout=options.op_timeout,
        max_message_bytes=options.max_message_bytes,
        allow_pickle=options.allow_pickle,
        layout=actor.layout(actor.roots),
    )
    actor.context = context
    return Group(actor, context, name=actor.view.group)


async def _join(
    options: _Options, address: str, coordinator: Coordinator | None, timeout: float
) -> RankActor:
    """Become a member, reachable by the others."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    # In this order, since each step needs what the one before has found out::
    #
    #     connect to the coordinator    this end of the connection is a host that peers can dial
    #     listen                        on that host, for each transport that is allowed
    #     say where                     the host as the coordinator sees it: maybe another one
    #     join                          waits for all. Peers that have their view may call already,
    #                                   and wait at the door until this rank has it (`activate`)
    control: ControlClient | None = None
    expected = MAX_MEMBERS if options.shows else options.most
    endpoint = Endpoint(loop, expected=expected, lease=options.ask.lease)
    if options.shows:  # members that have heard of this one may call first
        endpoint.expect(True)
    endpoint.reads_devices = options.reads_devices
    listeners: list[Listener] = []  # those that there are so far, should one fail
    events: list[ControlEvent] = []
    try:
        control = await ControlClient.open(
            address,
            token=options.coordinator.token,
            ssl=options.client,
            timeout=timeout,
            caller=options.caller,
        )
        await options.reach.listen(address, control.local_host, endpoint.accept, listeners)
        ask = options.reach.introduce(options.ask, control.seen_host, control.trip, listeners, loop)
        # What the coordinator tells may come right behind the view, before there is an actor to
        # hear it: it is kept for that.
        control.on_event = events.append
        waiting = loop.call_later(LONG_WAIT, _tell_wait, options, control, coordinator)
        try:
            view = await control.join(ask, deadline - loop.time())
        finally:
            waiting.cancel()
    except BaseException:
        for listener in listeners:
            listener.close()
        await endpoint.finish(0)
        if control is not None:
            control.abort()
        raise
    own = endpoint_of(view.members[view.ranks[ask.id]], options.reach.transports)
    coordinator_host = parse_address(address).host
    people: dict[int, MemberInfo] = {}
    # Only now: before the view there was nobody who could have shown that it is a member.
    endpoint.activate(
        Identity(options.shows or view.group, ask.id, options.coordinator.token),
        lambda root, receiver, patience: options.reach.dial(
            own, people[root], coordinator_host, receiver, patience
        ),
    )
    actor = RankActor(
        people=people,
        memory_of=memory_of,
        address=address,
        view=view,
        control=control,
        endpoint=endpoint,
        listeners=listeners,
        coordinator=coordinator,
        op_timeout=options.op_timeout,
        events=events,
    )
    control.doings = RankDoings(actor)
    flight_recorder.watch(actor)
    tracing.watch(actor)
    patience.watch(actor)
    telemetry.watch(actor)
    return actor


def _tell_wait(options: _Options, control: ControlClient, coordinator: Coordinator | None) -> None:
    """This rank has waited for long to join: say how far the group has come, here and to the
    coordinator."""

    def tell(text: str) -> None:
        if coordinator is not None:
            text += (
                f". This rank serves the coordinator itself, at {coordinator.address}: do the "
                "others look for it there?"
            )
        log.warning(
            "group %r: waiting to join for %g s: %s%s",
            options.ask.group,
            LONG_WAIT,
            text,
            options.caller,
        )

    def told(reply: asyncio.Future[Message]) -> None:
        answer = None if reply.cancelled() or reply.exception() else reply.result()
        if isinstance(answer, Withdrawn):
            tell(answer.text)

    if control.is_away:
        tell(f"the coordinator at {control.address} is away")
    elif control.is_open:
        control.begin(Stalled(LONG_WAIT)).add_done_callback(told)


@asynccontextmanager
async def local(size: int, **options: Unpack[JoinOptions]) -> AsyncIterator[list[Group]]:
    """``async with local(4) as groups:`` the ranks of a group of `size`, all in this event loop.

    For tests, notebooks and simulation. `options` are those of `connect`. Leaving the block closes
    all ranks, leaving it by an exception aborts them.

    For example::

        async with aiodist.local(3) as groups:
            print(await asyncio.gather(*(one.all_reduce(1) for one in groups)))  # [3, 3, 3]
    """
    name = f"inproc://local-{secrets.token_hex(8)}"
    async with Coordinator(name, token=options.get("token"), returns=False):
        options.setdefault("transports", ("inproc", registry.DEVICES))
        # Tasks of their own and no TaskGroup: if one rank cannot join, those that have are members,
        # and have to leave with a reason, or the next group of that name would meet them.
        joining = [
            asyncio.ensure_future(connect(name, rank=rank, size=size, **options))  # pyright: ignore[reportArgumentType]
            for rank in range(size)
        ]
        try:
            groups = list(await asyncio.gather(*joining))
        except BaseException:
            for task in joining:
                task.cancel()
            for outcome in await asyncio.gather(*joining, return_exceptions=True):
                if isinstance(outcome, Group):
                    await _aborted(outcome, "another rank did not join")
            raise
        try:
            yield groups
        except BaseException as error:
            await asyncio.gather(*(_aborted(group, in_words(error)) for group in groups))
            raise
        await asyncio.gather(*(group._newest().close() for group in groups))


async def _aborted(group: Group, reason: str) -> None:
    group._newest().abort(reason)
    await group._actor.gone()
