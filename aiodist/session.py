"""`connect` and `local`, which wire everything together.

`connect` reaches the coordinator, opens listeners, joins the group, and makes a `Group`. Peers
connect to each other later, when they first send a frame.
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
from typing import TYPE_CHECKING, Any, Never, NoReturn, Unpack

from aiodist import environment, timeouts
from aiodist.control.client import ControlClient
from aiodist.control.events import ControlEvent, ShutdownError
from aiodist.coordinator import finding
from aiodist.coordinator.actor import Coordinator
from aiodist.coordinator.exposure import Guard, narrow_hint
from aiodist.errors import (
    CoordinatorLostError,
    GroupClosedError,
    JoinError,
    JoinTimeoutError,
)
from aiodist.group import Group
from aiodist.links.endpoint import Endpoint
from aiodist.links.greeting import Identity
from aiodist.membership.group import REFUSED, Size
from aiodist.phases.base import as_int
from aiodist.rank import flight_recorder, patience, telemetry, tracing, whereabouts
from aiodist.rank.actor import RankActor
from aiodist.rank.context import Context
from aiodist.rank.doings import RankDoings
from aiodist.reach import Reach, endpoint_of, memory_of
from aiodist.schedules.costs import parse, said
from aiodist.transports import registry
from aiodist.transports.base import Listener
from aiodist.transports.certificates import both, contexts_of
from aiodist.types import JoinOptions, unexpected
from aiodist.wire import schema
from aiodist.wire.activity import LONG_WAIT, Stalled
from aiodist.wire.address import parse_address, parse_endpoint, parse_reachable
from aiodist.wire.limits import MAX_MEMBERS
from aiodist.wire.messages import Failed, JoinRequest, MemberInfo, Message, Withdrawn
from aiodist.wire.proof import membership_key, secret_of

log = logging.getLogger("aiodist.session")

MAX_MESSAGE_BYTES = 16 << 30
"""Default of `max_message_bytes`: 16 GiB."""

_PATIENCE = {False: 30.0, True: 300.0}
"""Default of `timeout` in seconds; the key: whether the address comes from the environment."""

_PAUSE = 0.2
"""Seconds before another try, if the coordinator went away or evicted this rank during a join."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of `connect`, completed by the environment.

    `ask`: the request to the coordinator, without what `Reach.introduce` adds. `caller`: the line
    of the program that called `connect`, for the end of a log line.
    """

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
    """The group that its links name, if its peers are of other groups."""

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

    Args:
        address: the coordinator's: ``tcp://host:port``, ``tls://host:port``, ``unix:///path`` or
            ``inproc://name``. None: take address, rank, size and group from the environment. It has
            AIODIST_ADDRESS, …, or MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, or the variables
            of Slurm, Open MPI, MPICH and Kubernetes (docs/launchers.md). Rank 0 then serves the
            coordinator, unless there is one: only at what the address names on its host. With a
            token it listens on all interfaces; for AIODIST_ADDRESS only if that means a loopback
            address on its host. Only ``aiodist coordinator --tls-cert`` serves ``tls://``.
        group: the name of the group (None: "world").
        rank: the rank to ask for (None: one is assigned).
        size: how many ranks make a fixed group complete.
        min_size: the least size of an elastic group. It is complete if no rank has joined for
            `join_window` seconds after that.
        max_size: the greatest size of an elastic group, which is then complete at once.
        join_window: seconds; see `min_size`.
        timeout: seconds until the group must be complete. None: AIODIST_TIMEOUT, else 30; or 300 if
            the address comes from the environment, because launchers may start ranks minutes apart.
        op_timeout: the default timeout of operations, in seconds.
        lease: seconds of silence after which a member counts as lost.
        token: the secret that the coordinator asks for (None: AIODIST_TOKEN, if set). It is not
            sent. It proves that this process may connect, but does not protect later data: an
            attacker between hosts can change tensors.
        ssl: TLS contexts, ``(client side, server side)``. They encrypt all data that leaves this
            host, so all ranks must give them. None with a ``tls://`` address: made from the files
            AIODIST_TLS_CA, AIODIST_TLS_CERT and AIODIST_TLS_KEY. A client-side context alone
            protects the connection to the coordinator. Ranks of different hosts then do not reach
            each other, unless you allow data in the clear by ``(context, None)``.
        transports: the allowed ones of "inproc", "shm", "unix", "tcp", and "cuda_ipc" for tensors
            on a GPU. None: all; the best that reaches a peer is used.
        bind: where to listen for peers over TCP: a host, ``host:port`` or ``:port``. None: this
            host's address towards the coordinator, at a free port.
        advertise: where peers connect to, in the same form. None: the host that the coordinator
            sees, and the listening port. If a NAT maps a port to this host, give the NAT's address;
            the same port is listened at, unless `bind` names another.
        name: a name that other members see.
        metadata: values that other members see.
        max_message_bytes: the largest value accepted from a peer, in bytes.
        allow_pickle: whether other objects may be sent and unpickled. Then every member may run
            code here. Without TLS, so may any attacker between two hosts, even with a token.
        costs: a file with the costs of messages on this network, which choose algorithms between
            hosts (None: AIODIST_COSTS; docs/performance.md). That of the lowest rank counts for
            all.

    Raises:
        JoinTimeoutError: the coordinator was not reached, or the group was not complete, within
            `timeout`.
        RankTakenError, SizeMismatchError, GroupCompleteError: the coordinator refused.
        AuthenticationError: no token, or a wrong one.
        ValueError, TypeError: invalid arguments or environment, including an empty token, and a
            file of costs that cannot be read. `allow_pickle` is refused if other hosts can connect
            without a token or a certificate.
        OSError: the address of `bind` cannot be used; each rank needs a port of its own.

    For example::

        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            aiodist.connect(coordinator.address, size=1) as group,
        ):
            await group.barrier()
    """
    if unknown:
        hints = {"run_id": "use group=", "world_size": "use size="}
        raise unexpected("connect", unknown, hints)
    if as_int(max_message_bytes, "max_message_bytes is an int") < 1:
        raise ValueError(f"max_message_bytes is at least 1, not {max_message_bytes!r}")
    by_environment = address is None
    if address is not None:
        parse_reachable(address)
    address, found, allowed = _looked_up(address, transports)
    if timeout is None:
        timeout = environment.timeout_in(os.environ) or _PATIENCE[by_environment]
    for option, seconds in (("timeout", timeout), ("op_timeout", op_timeout), ("lease", lease)):
        timeouts.check_seconds(option, seconds)
    size_by = "max_size" if size is None else "size"
    if size is None and min_size is None and max_size is None:
        size_by = found.size_by
        if found.size is None and found.min_size is None and found.max_size is None:
            unset = f" {size_by} is not set, either" if by_environment else ""
            raise ValueError(
                f"connect needs size= (a fixed group), or min_size= and max_size=.{unset}"
            )
        size, min_size, max_size = found.size, found.min_size, found.max_size
    rank_by = "rank"
    if rank is None:
        rank_by, rank = found.rank_by, found.rank
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a dict of values by name, not {metadata!r:.200}")
    for option, given in (("group", group), ("bind", bind), ("advertise", advertise)):
        if given == "":
            raise ValueError(f"{option}='' is empty: give a value, or None for the default")
    for where in (bind, advertise):
        parse_endpoint("" if where is None else where)
    secret = secret_of(environment.token_in(os.environ) if token is None else token)
    client, server = contexts_of(ssl, os.environ, address)
    is_tls = client is not None or parse_address(address).scheme == "tls"
    guard = Guard.of(secret, server, allow_pickle=allow_pickle)
    ask = JoinRequest(
        group=group or found.group or "world",
        id="",
        rank=_count(rank_by, rank, 0),
        size=_count(size_by, size, 1),
        min_size=_count("min_size", min_size, 1),
        max_size=_count("max_size", max_size, 1),
        join_window=join_window,
        lease=lease,
        name=name or "",
        metadata=dict(metadata or {}),
        run_id=found.run_id,
        addresses=_profile(costs),
    )
    _check_request(ask, rank_by, size_by)
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
            whereabouts.of_caller(),
        )
    )


def _profile(costs: str | PathLike[str] | None) -> tuple[str, ...]:
    """What this rank says about its costs; empty if it was given none."""
    path = costs or os.environ.get("AIODIST_COSTS", "").strip()
    if not path:
        return ()
    try:
        return (said(parse(Path(path).read_text())),)
    except (OSError, ValueError) as error:
        raise ValueError(f"the profile of costs {os.fspath(path)!r}: {error}") from error


def _check_request(ask: JoinRequest, rank_by: str, size_by: str) -> None:
    """Check what the coordinator would refuse, but for the id, which is given later.

    The fields have the names of the arguments of `connect`. `rank_by` and `size_by` are the
    arguments or variables that gave the rank and the (greatest) size.
    """
    for name in schema.field_names(JoinRequest):
        if name != "id":
            schema.check_field(JoinRequest, name, getattr(ask, name))
    size = Size.of(ask)
    if isinstance(size, Failed):
        raise ValueError(size.text)
    if ask.rank is not None and ask.rank >= size.most:
        raise ValueError(
            f"{rank_by}={ask.rank} with {size_by}={size.most}: expected a rank from 0 to "
            f"{size.most - 1}"
        )


def _count(name: str, given: int | None, least: int) -> int | None:
    """Check a number of ranks, or a rank, at once and not when there is a coordinator."""
    if given is None:
        return None
    count = as_int(given, f"{name} is an int")
    if not least <= count < least + MAX_MEMBERS:
        raise ValueError(f"{name} is {least} to {least + MAX_MEMBERS - 1}, not {count}")
    return count


def _looked_up(
    address: str | None, transports: str | Iterable[str] | None
) -> tuple[str, environment.Settings, list[str]]:
    """The coordinator's address, the other settings of the environment, and the allowed transports.

    If an address is given, the other settings are empty.
    """
    found = environment.Settings()
    if address is None:
        found = environment.settings_from(os.environ)
        address = found.address
    if transports is None:
        transports = environment.transports_in(os.environ)
    return address, found, registry.names_of(transports)


def _wanted(
    address: str,
    found: environment.Settings,
    ask: JoinRequest,
    secret: bytes | None,
    server: tls.SSLContext | None,
    guard: Guard,
) -> finding.Wanted:
    """How to find the coordinator at `address`, and where rank 0 may serve it."""
    served = found.listen_guarded if guard.keeps_out else found.listen
    return finding.Wanted(
        address,
        serve=served if ask.rank == 0 else "",
        through_agent=found.agent_store,
        # Hashed, because the store belongs to others and must not show the group's name.
        key=f"aiodist/{membership_key(secret, ask.group, (found.run_id,)).hex()[:32]}",
        token=secret,
        ssl=server,
        guard=guard,
        one_host=found.one_host,
        hint=narrow_hint(parse_address(address)) if served != found.listen_guarded else "",
    )


class Connecting:
    """The result of `connect`: await it for the group, or use it as an async context manager.

    The context manager leaves the group at its end, in its newest epoch.
    """

    def __init__(self, options: _Options) -> None:
        self._options = options
        self._group: Group | None = None
        self._is_entering = False
        self.timeout = options.timeout
        self.op_timeout = options.op_timeout
        self.join_window = options.ask.join_window
        self.most = options.most

    def without_rank(self) -> Connecting:
        """Return a copy that asks for no particular rank."""
        return Connecting(replace(self._options, ask=replace(self._options.ask, rank=None)))

    def called_at(self, caller: str) -> Connecting:
        """Return a copy that names `caller` in logs, which `whereabouts.of_caller` gave."""
        return Connecting(replace(self._options, caller=caller))

    def with_store(self, name: str) -> Connecting:
        """Return a copy for a group that shares the store `name` with other groups."""
        return Connecting(replace(self._options, ask=replace(self._options.ask, store=name)))

    def showing(self, name: str) -> Connecting:
        """Return a copy for a group whose members meet those of other groups, as members of `name`.

        See `RankActor.meet`.
        """
        return Connecting(replace(self._options, shows=name))

    def __await__(self) -> Generator[Any, None, Group]:
        return _connect(self._options).__await__()

    def __repr__(self) -> str:
        # asyncio.run and create_task want a coroutine, and show this in their error.
        return "<aiodist.connect(…): to be awaited, or entered by `async with`, in a coroutine>"

    async def __aenter__(self) -> Group:
        group = self._group
        if self._is_entering or (group is not None and not group._newest().closed):
            raise RuntimeError("this connect() was entered, and not left yet: call connect() again")
        self._is_entering = True
        try:
            self._group = await _connect(self._options)
        finally:
            self._is_entering = False
        return self._group

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._group is not None
        await self._group.__aexit__(kind, error, trace)

    if not TYPE_CHECKING:  # type checkers have errors of their own for these

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"what connect() returns is no group, and has no {name!r}: use what"
                " `await connect()` or `async with connect() as group` gives you"
            )

        def __enter__(self) -> NoReturn:
            raise TypeError("connect() is entered by `async with`, not by `with`; or await it")

        def __exit__(self, *raised: object) -> None:
            """Never called, but Python looks for it before it calls `__enter__`."""


async def _connect(options: _Options) -> Group:
    try:
        return await _met(options)
    except JoinTimeoutError as error:
        # A refused process has reached the coordinator, so the address is not the reason.
        if REFUSED not in error.message and (hint := await finding.hint(options.coordinator)):
            error.add_note(hint)
        raise


async def _met(options: _Options) -> Group:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + options.timeout
    found = await finding.find(options.coordinator, options.timeout)
    try:
        actor = await finding.at_newest(
            found, lambda at: _joined(options, at, deadline), deadline - loop.time()
        )
    except BaseException as error:
        if found.coordinator is not None:
            await found.coordinator.stop(gave_up=isinstance(error, JoinTimeoutError))
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


async def _joined(options: _Options, found: finding.Located, deadline: float) -> RankActor:
    """Join at the coordinator that was found, and try again if it goes away meanwhile."""
    loop = asyncio.get_running_loop()
    if found.run_id:
        options = replace(options, ask=replace(options.ask, run_id=found.run_id))
    while True:
        try:
            actor = await _join(options, found.address, found.coordinator, deadline)
            if actor.ended is None:
                return actor
            await actor.gone()
            raise actor.ended
        except (CoordinatorLostError, GroupClosedError, ShutdownError) as error:
            # That coordinator may belong to a run that was just ending, and ours comes up soon.
            # Or it ruled this rank lost, because this process was stopped for a while.
            over = loop.time() + _PAUSE >= deadline
            if over or found.coordinator is not None:
                if isinstance(error, GroupClosedError):
                    raise JoinError(error.message, group=error.group) from error
                if over:
                    text = f"gave up joining after {options.timeout:g} s: {error.message}"
                    raise JoinTimeoutError(text, group=error.group) from error
                raise
            log.debug("joining again: %s", error)
            await asyncio.sleep(_PAUSE)


async def _join(
    options: _Options, address: str, coordinator: Coordinator | None, deadline: float
) -> RankActor:
    """Become a member that others can reach."""
    loop = asyncio.get_running_loop()
    # The order matters, because each step needs the result of the one before::
    #
    #     connect to the coordinator    this end of the connection is a host that peers can dial
    #     listen                        on that host, for each transport that is allowed
    #     say where                     the host as the coordinator sees it: maybe another one
    #     join                          waits for all. Peers that have their view may call already,
    #                                   and wait at the door until this rank has it (`activate`)
    control: ControlClient | None = None
    expected = MAX_MEMBERS if options.shows else options.most
    endpoint = Endpoint(loop, expected=expected, lease=options.ask.lease)
    if options.shows:  # members that have heard of this one may connect first
        endpoint.expect(True)
    endpoint.reads_devices = options.reads_devices
    listeners: list[Listener] = []  # the open listeners, in case of an error
    events: list[ControlEvent] = []
    try:
        control = await ControlClient.open(
            address,
            token=options.coordinator.token,
            ssl=options.client,
            timeout=deadline - loop.time(),
            caller=options.caller,
        )
        await options.reach.listen(address, control.local_host, endpoint.accept, listeners)
        ask = options.reach.introduce(options.ask, control.seen_host, control.trip, listeners, loop)
        # Events may follow the view at once, before there is an actor, so keep them.
        control.on_event = events.append
        waiting = loop.call_later(LONG_WAIT, _tell_wait, options, control, coordinator)
        try:
            view = await control.join(ask, deadline - loop.time(), options.timeout)
        finally:
            waiting.cancel()
    except BaseException:
        for listener in listeners:
            listener.close()
        if control is not None:
            control.abort()  # first, because a cancellation may end this wait
        await endpoint.finish(0)
        raise
    own = endpoint_of(view.members[view.ranks[ask.id]], options.reach.transports)
    coordinator_host = parse_address(address).host
    people: dict[int, MemberInfo] = {}
    # Before the view, no peer could prove that it is a member.
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
    """Log how far the group has come, here and at the coordinator, because this rank waits for
    long."""

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

    if absence := control.absence:
        tell(absence)
    elif control.is_open:
        control.begin(Stalled(LONG_WAIT)).add_done_callback(told)


@asynccontextmanager
async def local(size: int, **options: Unpack[JoinOptions]) -> AsyncIterator[list[Group]]:
    """Run all ranks of a group in this event loop: ``async with local(4) as groups:``.

    For tests, notebooks and simulation. `options` are those of `connect`. The end of the block
    closes all ranks, and an exception aborts them.

    For example::

        async with aiodist.local(3) as groups:
            print(await asyncio.gather(*(one.all_reduce(1) for one in groups)))  # [3, 3, 3]
    """
    _count("size", size, 1)
    name = f"inproc://local-{secrets.token_hex(8)}"
    async with Coordinator(name, token=options.get("token"), returns=False):
        options.setdefault("transports", ("inproc", registry.DEVICES))
        # Tasks of their own, not a TaskGroup: if one rank cannot join, the others are members by
        # then. They have to leave with a reason, or the next group of that name would meet them.
        joining = [
            asyncio.ensure_future(connect(name, rank=rank, size=size, **options))  # pyright: ignore[reportArgumentType]
            for rank in range(size)
        ]
        try:
            groups = list(await asyncio.gather(*joining))
        except BaseException as error:
            for task in joining:
                task.cancel()
            for outcome in await asyncio.gather(*joining, return_exceptions=True):
                if isinstance(outcome, Group):
                    await outcome.__aexit__(None, error, None)
            raise
        pid, ended = os.getpid(), None
        try:
            yield groups
        except BaseException as error:
            ended = error
            raise
        finally:
            if os.getpid() == pid:  # a forked child has nothing to leave
                # All of them, even if one could not deliver what it had sent.
                leaving = (group.__aexit__(None, ended, None) for group in groups)
                for failure in await asyncio.gather(*leaving, return_exceptions=True):
                    if isinstance(failure, BaseException):
                        raise failure
