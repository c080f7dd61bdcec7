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
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from aiodist import environment
from aiodist.control.client import ControlClient, ControlEvent
from aiodist.coordinator import finding
from aiodist.coordinator.actor import Coordinator
from aiodist.coordinator.exposure import Guard, narrow_hint
from aiodist.errors import CoordinatorLostError, JoinTimeoutError
from aiodist.group import Group
from aiodist.links.endpoint import Endpoint
from aiodist.links.greeting import Identity
from aiodist.rank.actor import Memory, RankActor
from aiodist.rank.context import Context
from aiodist.transports import registry
from aiodist.transports.base import Link, Listener, Receiver
from aiodist.transports.processes import user_id
from aiodist.transports.surroundings import chooser_on, identity_on
from aiodist.transports.tls import TlsContexts
from aiodist.wire.address import is_loopback, parse_address
from aiodist.wire.limits import MAX_MEMBERS
from aiodist.wire.messages import JoinRequest, MemberInfo
from aiodist.wire.proof import membership_key, secret_of

log = logging.getLogger("aiodist.session")

MAX_MESSAGE_BYTES = 16 << 30
"""Default of `max_message_bytes`: 16 GiB."""

_PROCESS = "process:"
"""Marks the process among the addresses of a member, which tells peers that share it."""

_USER = "user:"
"""Marks the user among them, who may share memory with others of the same name on one host."""

_PAUSE = 0.2
"""Seconds before a coordinator that went away during a join is looked for again."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of `connect`, with the environment looked up."""

    coordinator: finding.Wanted
    group: str
    rank: int | None
    size: int | None
    min_size: int | None
    max_size: int | None
    join_window: float
    timeout: float
    op_timeout: float
    lease: float
    contexts: TlsContexts | None
    client: tls.SSLContext | None
    transports: tuple[str, ...]
    reads_devices: bool
    bind: str | None
    advertise: str | None
    name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    max_message_bytes: int = MAX_MESSAGE_BYTES
    allow_pickle: bool = False
    run_id: str = ""


def connect(
    address: str | None = None,
    *,
    group: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    min_size: int | None = None,
    max_size: int | None = None,
    join_window: float = 1.0,
    timeout: float = 30.0,
    op_timeout: float = 300.0,
    lease: float = 15.0,
    token: str | bytes | None = None,
    ssl: tls.SSLContext | tuple[tls.SSLContext, tls.SSLContext] | None = None,
    transports: str | Iterable[str] | None = None,
    bind: str | None = None,
    advertise: str | None = None,
    name: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    allow_pickle: bool = False,
) -> Connecting:
    """Join a group: ``group = await connect(…)``, or ``async with connect(…) as group:``.

    `address`: the coordinator's, ``tcp://host:port``, ``tls://host:port``, ``unix:///path`` or
    ``inproc://name``. None takes address, rank, size, group and token from the environment:
    AIODIST_ADDRESS, …, or MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, or what Slurm, Open MPI
    and MPICH set. Then rank 0 serves the address itself if nobody else does: at what it names on
    its host, and at nothing else; with a token, MASTER_ADDR on all interfaces.

    `group`: the name of the group ("world"). `rank`: the wanted one (None: assigned). `size`: how
    many ranks make it complete; or `min_size` and `max_size`: complete with `max_size`, or with
    `min_size` once nobody has joined for `join_window` seconds.

    `timeout`: seconds until the group must be complete. `op_timeout`: the default deadline of
    operations, in seconds. `lease`: after how many seconds of silence a member counts as lost.
    `token`: the secret that the coordinator asks for (it is not sent). It proves who connects, and
    protects nothing that is sent then: who is on the way between hosts can change tensors. `ssl`:
    contexts for TLS, ``(client side, server side)``: then all that leaves this host is encrypted
    and authenticated, what ranks send each other, too; all ranks have to do the same. A client-side
    context alone is for the connection to the coordinator.

    `transports`: those allowed ("inproc", "shm", "unix", "tcp", and "cuda_ipc" for tensors on a
    GPU; None: all, the best that reaches each peer). `bind`: the host to listen at for peers (None:
    the address of this host towards the coordinator); `advertise`: the host that peers shall dial
    (None: the one the coordinator sees). `name` and `metadata` are shown to the other members.
    `max_message_bytes`: the largest value accepted from a peer. `allow_pickle`: whether other
    objects may travel, and be unpickled: then every member may run code here, and without TLS so
    may everybody on the way between two hosts, whether or not there is a token.

    Raises:
        JoinTimeoutError: the coordinator was not reached, or not all came, within `timeout`.
        RankTakenError, SizeMismatchError, GroupCompleteError: the coordinator refused.
        AuthenticationError: no or wrong token.
        ValueError, TypeError: arguments or environment that make no sense, an empty token included;
            `allow_pickle` where other hosts can connect, and neither a token nor TLS that asks for
            certificates keeps strangers out.
    """
    found = environment.Settings()
    if address is None:
        found = environment.settings_from(os.environ)
        address = found.address
    for label, seconds in (("timeout", timeout), ("op_timeout", op_timeout), ("lease", lease)):
        if not seconds > 0:
            raise ValueError(f"{label} is more than 0 seconds, not {seconds!r}")
    if max_message_bytes < 1:
        raise ValueError(f"max_message_bytes is at least 1, not {max_message_bytes!r}")
    rank = found.rank if rank is None else rank
    elastic = min_size is not None or max_size is not None
    if size is None and not elastic:
        size = found.size
    if size is None and not elastic:
        raise ValueError("connect needs size= (a fixed group), or min_size= and max_size=")
    secret = secret_of(found.token if token is None else token)
    contexts = None
    if isinstance(ssl, tuple):
        contexts = TlsContexts(*ssl)
        ssl = contexts.client
    server = None if contexts is None else contexts.server
    guard = Guard.of(secret, server, allow_pickle=allow_pickle)
    served = found.listen_guarded if guard.keeps_out else found.listen
    name_of_group = group or found.group or "world"
    if transports is None:
        transports = found.transports or os.environ.get("AIODIST_TRANSPORTS") or None
    allowed = registry.names_of(transports)
    return Connecting(
        _Options(
            coordinator=finding.Wanted(
                address,
                serve=served if rank == 0 else "",
                through_agent=found.agent_store,
                key=_meeting_key(secret, found.run_id, name_of_group),
                token=secret,
                ssl=server,
                guard=guard,
                hint=narrow_hint(parse_address(address)) if served != found.listen_guarded else "",
            ),
            group=name_of_group,
            rank=rank,
            size=size,
            min_size=min_size,
            max_size=max_size,
            join_window=join_window,
            timeout=timeout,
            op_timeout=op_timeout,
            lease=lease,
            contexts=contexts,
            client=ssl,
            transports=registry.choose(allowed),
            reads_devices=registry.allows_devices(allowed),
            bind=bind,
            advertise=advertise,
            name=name or "",
            metadata=dict(metadata or {}),
            max_message_bytes=max_message_bytes,
            allow_pickle=allow_pickle,
            run_id=found.run_id,
        )
    )


class Connecting:
    """What `connect` returns: await it for the group, or use it as an async context manager: that
    leaves the group at its end, in whatever epoch it is by then."""

    def __init__(self, options: _Options) -> None:
        self._options = options
        self._group: Group | None = None

    def __await__(self) -> Generator[Any, None, Group]:
        return _connect(self._options).__await__()

    def __repr__(self) -> str:
        # asyncio.run and create_task want a coroutine, and say what they got instead.
        return "<aiodist.connect(…): to be awaited, or entered by `async with`, in a coroutine>"

    async def __aenter__(self) -> Group:
        self._group = await _connect(self._options)
        return self._group

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._group is not None
        await self._group._newest().__aexit__(kind, error, traceback)


async def _connect(options: _Options) -> Group:
    try:
        return await _met(options)
    except JoinTimeoutError as error:
        if options.coordinator.hint:
            error.add_note(options.coordinator.hint)
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
    control: ControlClient | None = None
    expected = options.size or options.max_size or MAX_MEMBERS
    endpoint = Endpoint(loop, expected=expected, lease=options.lease)
    endpoint.reads_devices = options.reads_devices
    listeners: list[Listener] = []  # those that there are so far, should one fail
    events: list[ControlEvent] = []
    try:
        control = await ControlClient.open(
            address, token=options.coordinator.token, ssl=options.client, timeout=timeout
        )
        await _listen(options, endpoint, control, listeners)
        request = _request(options, control, listeners, loop)
        control.on_event = events.append
        view = await control.join(request, deadline - loop.time())
    except BaseException:
        for listener in listeners:
            listener.close()
        await endpoint.finish(0)
        if control is not None:
            control.abort()
        raise
    own = _reach(view.members[view.rank_of(request.id)], options.transports)
    coordinator_host = parse_address(address).host
    people: dict[int, MemberInfo] = {}
    endpoint.activate(
        Identity(view.group, request.id, options.coordinator.token),
        lambda root, receiver, patience: _dial(
            own,
            people[root],
            coordinator_host,
            receiver,
            options.contexts,
            options.coordinator.guard,
            patience,
        ),
    )
    return RankActor(
        people=people,
        memory_of=_memory,
        address=address,
        view=view,
        control=control,
        endpoint=endpoint,
        listeners=listeners,
        coordinator=coordinator,
        op_timeout=options.op_timeout,
        events=events,
    )


async def _listen(
    options: _Options, endpoint: Endpoint, control: ControlClient, listeners: list[Listener]
) -> None:
    """Open the listeners that this rank has for its peers. Raises OSError, and ValueError where
    strangers could send pickles."""
    guard = options.coordinator.guard
    host = options.bind or control.local_host or "127.0.0.1"
    beyond = is_loopback(host) and not parse_address(control.address).is_loopback
    if beyond and not options.bind and guard.keeps_out:
        # The coordinator runs on this host, but others come to it from elsewhere: see `_dial`.
        host = "::" if ":" in host else "0.0.0.0"
    for kind in options.transports:
        transport = registry.make(kind, options.contexts)
        listeners.append(await transport.listen(endpoint.accept, host=host))
        if kind == "tcp":
            guard.check(listeners[-1].address)


def _request(
    options: _Options,
    control: ControlClient,
    listeners: Iterable[Listener],
    loop: asyncio.AbstractEventLoop,
) -> JoinRequest:
    host = options.advertise or control.seen_host or "127.0.0.1"
    addresses = [_advertised(listener.address, host) for listener in listeners]
    who = identity_on(loop, registry.process_id(loop), registry.host_id(), user_id())
    return JoinRequest(
        group=options.group,
        id=chooser_on(loop).randbytes(16).hex(),
        rank=options.rank,
        size=options.size,
        min_size=options.min_size,
        max_size=options.max_size,
        join_window=options.join_window,
        lease=options.lease,
        pid=who.pid,
        host=host,
        host_id=who.host,
        name=options.name or who.name,
        metadata=dict(options.metadata),
        addresses=(_PROCESS + who.process, _USER + who.user, *addresses),
        run_id=options.run_id,
    )


def _advertised(address: str, host: str) -> str:
    """A listener's address as peers reach it."""
    scheme, _, rest = address.partition("://")
    if scheme not in ("tcp", "tls"):
        return address
    port = rest.rpartition(":")[2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _reach(member: MemberInfo, allowed: tuple[str, ...]) -> registry.Endpoint:
    addresses = {_kind(address): address for address in member.addresses}
    return registry.Endpoint(
        process=addresses.pop("process", "").removeprefix(_PROCESS),
        host=member.host_id,
        user=addresses.pop("user", "").removeprefix(_USER),
        addresses=addresses,
        allowed=allowed,
    )


def _kind(address: str) -> str:
    scheme = address.partition(":")[0]
    return {"unix-abstract": "unix", "tls": "tcp"}.get(scheme, scheme)


def _memory(member: MemberInfo) -> Memory:
    """Which memory `member` can share."""
    reach = _reach(member, ())
    process = reach.process.rpartition("-")[0]  # without the loop
    host = f"{reach.host} {reach.user}" if "shm" in reach.addresses else ""
    return Memory(process, "inproc" in reach.addresses, host)


async def _dial(
    own: registry.Endpoint,
    member: MemberInfo,
    coordinator_host: str,
    receiver: Receiver,
    contexts: TlsContexts | None,
    guard: Guard,
    patience: float,
) -> Link:
    """A link to `member` over the best transport that gets through. `patience`: see
    `registry.make`. Raises OSError, and ValueError where a stranger elsewhere could send
    pickles."""
    peer = _reach(member, tuple(_kind(address) for address in member.addresses))
    tried: list[str] = []
    apart = "" if own.user == peer.user else "; where users differ, that takes 'tcp'"
    hint = "check firewalls, and bind= and advertise="
    last: OSError | None = None
    for kind, address in registry.candidates(own, peer):
        if kind == "tcp" and own.host != peer.host and is_loopback(member.host):
            # The coordinator sees it come from its own host, which we know by another name.
            address = _advertised(address, coordinator_host)
            if not guard.keeps_out:
                hint = (
                    "it came to the coordinator by a loopback address, and listens there alone, as "
                    "there is no token: give all ranks the same one, or it bind= and advertise="
                )
        if kind == "tcp":
            # The coordinator may let others in, though this rank reaches it on its own host.
            guard.check(address)
        try:
            return await registry.make(kind, contexts, patience).dial(address, receiver)
        except OSError as error:
            tried.append(f"{address} ({error})")
            last = error
    raise OSError(
        f"tried {', '.join(tried)}; {hint}"
        if tried
        else f"no transport of {', '.join(own.allowed)} is common to both ranks{apart}"
    ) from last


def _meeting_key(token: bytes | None, run_id: str, group: str) -> str:
    """Where in a store of others the address of the coordinator is found: it does not show the
    group's name."""
    return f"aiodist/{membership_key(token, group, (run_id,)).hex()[:32]}"


@asynccontextmanager
async def local(size: int, **options: Any) -> AsyncIterator[list[Group]]:
    """``async with local(4) as groups:`` the ranks of a group of `size`, all in this event loop.

    For tests, notebooks and simulation. `options` are those of `connect`. Leaving the block closes
    all ranks, leaving it by an exception aborts them.
    """
    name = f"inproc://local-{secrets.token_hex(8)}"
    async with Coordinator(name, token=options.get("token"), returns=False):
        options.setdefault("transports", ("inproc", registry.DEVICES))
        joining = [
            asyncio.ensure_future(_joined(connect(name, rank=rank, size=size, **options)))
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
            await asyncio.gather(
                *(_aborted(group, f"{type(error).__name__}: {error}") for group in groups)
            )
            raise
        await asyncio.gather(*(group._newest().close() for group in groups))


async def _joined(connecting: Connecting) -> Group:
    return await connecting


async def _aborted(group: Group, reason: str) -> None:
    group._newest().abort(reason)
    await group._actor.gone()
