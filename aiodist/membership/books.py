"""What the coordinator knows of its groups, and the records that carry it over a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from aiodist.membership.effects import SendMessage
from aiodist.membership.epochs import Epochs
from aiodist.membership.group import GroupKey, GroupState, Size
from aiodist.membership.records import (
    Answered,
    AveragerDecided,
    AveragerEntered,
    AveragerRecorded,
    Ended,
    EpochGiven,
    Formed,
    Gone,
    Published,
    Record,
    Stored,
)
from aiodist.membership.seats import Seats
from aiodist.membership.silence import RETURN_SECONDS, is_cut_off
from aiodist.membership.store import KeyValueStore
from aiodist.membership.timers import Timers
from aiodist.wire import channels
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import EpochView, MemberInfo, Result

REMEMBERED = 4096
"""The number of ended groups that are remembered, so that no late member brings them back."""


@dataclass(frozen=True, slots=True)
class LeaseTimer:
    """The lease of a member or joiner has ended."""

    conn: int


@dataclass(frozen=True, slots=True)
class Return:
    """An absent member has not come back in time."""

    group: GroupKey
    rank: int


@dataclass(frozen=True, slots=True)
class JoinWindow:
    """The join window has passed without a new joiner."""

    group: GroupKey


@dataclass(frozen=True, slots=True)
class Ruling:
    """Members have had time to report links that are broken."""

    group: GroupKey


@dataclass(frozen=True, slots=True)
class Answers:
    """Members have had time to say what they are doing."""


@dataclass(frozen=True, slots=True)
class Ttl:
    """The ttl of a key has ended, in the store of `group` or in the `shared` store of that name and
    run id."""

    group: GroupKey
    key: str
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RoundDue:
    """An averager has something to decide."""

    averager: GroupKey


class _Shared(NamedTuple):
    """A store that several groups share."""

    store: KeyValueStore
    users: set[GroupKey]


class OnGone(Protocol):
    """Called when members of a group are `lost` or have left. `replays`: this is from the log."""

    def __call__(
        self, group: GroupState, ids: Sequence[str], *, lost: bool, replays: bool
    ) -> None: ...


class Books:
    """Groups, epochs and timers. `now` is the time of the present step.

    `keep` is called with each record for the log (None: there is no log). `wall_offset`: see
    `Membership`.
    """

    def __init__(self, wall_offset: float, keep: Callable[[Record], None] | None) -> None:
        self.now = 0.0
        self.epochs = Epochs()  # the last epoch of each group name
        # Groups that wait for members, and groups that are formed.
        self.groups: dict[GroupKey, GroupState] = {}
        # Shared stores, by their name and the run id of their groups.
        self._shared: dict[GroupKey, _Shared] = {}
        # For each channel, what was published last. This outlives the shared store of the channel.
        self.published: dict[GroupKey, bytes] = {}
        # The last epochs of ended groups; the group that ended first comes first.
        self.ended: dict[GroupKey, int] = {}
        # All deadlines. The kind of a key says what is due.
        self.timers: Timers[
            LeaseTimer | Return | JoinWindow | Ruling | Answers | Ttl | RoundDue
        ] = Timers()
        # Called for members that are gone, and for records of averagers: both by `Averaging`.
        self.on_gone: OnGone = lambda group, ids, *, lost, replays: None
        self.on_record: Callable[[Record], None] = _no_record
        self.wall_offset = wall_offset
        self._keep = keep

    @property
    def wall_time(self) -> float:
        return max(0.0, self.now + self.wall_offset)

    def open(self, key: GroupKey, size: Size, opener: str) -> GroupState:
        """Create a group that begins to form."""
        store = self._new_store(partial(Ttl, key))
        if self._keep is not None:
            store.changed = partial(self._on_stored, key)
            store.answered = partial(self._on_answered, key)
        group = self.groups[key] = GroupState(*key, size, opener, store)
        return group

    def share(self, group: GroupState, name: str) -> None:
        """Let a group use the shared store `name` instead of its own ("": it keeps its own).

        The shared store lives as long as one of its groups.
        """
        # A shared store is not written to the log, except for what was published last. Its contents
        # describe living members, which repeat them to a coordinator that comes back. Each member
        # also repeats which store its group shares.
        if not name or group.shares:
            return
        key = (name, group.run_id)
        if key not in self._shared:
            store = self._new_store(partial(Ttl, key, shared=True))
            store.restore(channels.PUBLISHED, self.published.get(key))
            store.changed = partial(self._on_shared, key)
            self._shared[key] = _Shared(store, set())
        group.shares = name
        group.store, users = self._shared[key]
        users.add(group.key)

    def sharing(self, group: GroupState) -> list[GroupState]:
        """The groups that share a store with `group`, including itself."""
        key = (group.shares, group.run_id)
        return [self.groups[user] for user in self._shared[key].users] if group.shares else [group]

    def expire(self, ttl: Ttl) -> list[SendMessage]:
        """Delete a key whose ttl is over, and return the messages about it."""
        # The last group that used the store may have been lost by the same tick.
        stores = self._shared if ttl.shared else self.groups
        return stores[ttl.group].store.expire(ttl.key) if ttl.group in stores else []

    def formed(self, group: GroupState, view: EpochView) -> None:
        self.epochs.observe(view.group, view.epoch)
        self.write(_formed(group, view))

    def gone(self, group: GroupState, members: Sequence[MemberInfo], reason: str | None) -> None:
        """Record that members of the view are lost for `reason`, or (None) have left."""
        ranks = []
        for member in members:
            group.store.forget(member.id)
            ranks.append(member.rank)
        participant = channels.participant_in(group.name)
        if participant is not None and group.shares:
            # Its last sign of life would be there for a while, and others would ask it in vain.
            group.store.set_ttl(channels.at(participant[1]), 0.0)
        self.write(Gone(*group.key, tuple(ranks), reason))
        ids = [member.id for member in members]
        self.on_gone(group, ids, lost=reason is not None, replays=False)

    def end(self, group: GroupState) -> None:
        """Delete a group and its store."""
        del self.groups[group.key]
        if group.shares:
            self._unshare(group)
        else:
            # The record of the group's end covers its keys, so a record for each key is not needed.
            group.store.changed = lambda key, value: None
            group.store.clear()
        if group.view is not None:
            self._remember_end(group.key, group.view.epoch)
            self.write(Ended(*group.key, group.view.epoch))

    def _unshare(self, group: GroupState) -> None:
        """Remove a group from its shared store. Delete the store with its last group."""
        key = (group.shares, group.run_id)
        store, users = self._shared[key]
        users.discard(group.key)
        if not users:
            store.changed = lambda key, value: None  # what was published last stays
            store.clear()
            del self._shared[key]

    def expect(self, group: GroupState, view: EpochView) -> None:
        """Install `view`, and wait for all of its members to come back."""
        for rank in group.absent:
            self.timers.cancel(Return(group.key, rank))
        # The log makes no process a member: all are absent, and each has one lease to come back,
        # from the first sign of life of the group. Members may not be able to reach this
        # coordinator before. A member that died meanwhile is found out one lease later.
        group.install(view)
        group.lost, group.left = {}, set()
        group.absent = Seats({member.rank: member for member in view.members})
        self.await_word(group)

    def is_cut_off(self, group: GroupState) -> bool:
        """Whether the coordinator hears no member or joiner of a group any more."""
        dues = ((lease, self.timers.get(LeaseTimer(conn))) for conn, lease in group.leases.items())
        return is_cut_off((lease, 0.0 if due is None else due - self.now) for lease, due in dues)

    def time_left(self, conn: int) -> float:
        """The seconds until the lease of a connection is over."""
        due = self.timers.get(LeaseTimer(conn))
        return 0.0 if due is None else due - self.now

    def await_word(self, group: GroupState) -> None:
        """Wait for a group that is not heard at all: its leases to return begin with its first sign
        of life."""
        group.cut_off = True
        for rank in group.absent:
            self.timers.set(Return(group.key, rank), self.now + RETURN_SECONDS)

    def got_word(self, group: GroupState) -> None:
        """Note a sign of life of a group. If the group was silent as a whole, its leases to return
        begin now."""
        if group.cut_off:
            group.cut_off = False
            for rank, member in group.absent.items():
                self.timers.set(Return(group.key, rank), self.now + member.lease)

    def hurry(self, group: GroupState, rank: int, seconds: float) -> None:
        """Wait for an absent member for so many seconds more, at most."""
        key = Return(group.key, rank)
        due = self.timers.get(key)
        if due is not None:
            self.timers.set(key, min(due, self.now + seconds))

    def take_absent(self, group: GroupState, rank: int) -> MemberInfo | None:
        """Stop waiting for an absent member, and return it; None if it was not absent."""
        self.timers.cancel(Return(group.key, rank))
        return group.absent.pop(rank, None)

    # Restarts.

    def records(self) -> Iterator[Record]:
        """Yield all records that describe the present state, lazily."""
        # Each record builds on earlier ones: epochs come before groups, groups before their members
        # and stores. Ttls are written as wall-clock times, because the clock of the event loop
        # starts anew in each process. Joiners, votes and leases are left out, because members
        # repeat them.
        yield EpochGiven("", self.epochs.floor)
        for name, epoch in self.epochs.last.items():
            yield EpochGiven(name, epoch)
        for key, epoch in self.ended.items():
            yield Ended(*key, epoch)
        for key, value in self.published.items():
            yield Published(*key, value)
        for group in self.groups.values():
            if group.view is not None:
                yield from self._records_of(group, group.view)

    def _records_of(self, group: GroupState, view: EpochView) -> Iterator[Record]:
        key = group.key
        yield _formed(group, view)
        for rank, reason in group.lost.items():
            yield Gone(*key, (rank,), reason[:MAX_TEXT])
        if group.left:
            yield Gone(*key, tuple(sorted(group.left)), None)
        if group.shares:
            return
        for name, value in group.store.values.items():
            yield Stored(*key, name, value, self._expiry(key, name))
        for member, answers in group.store.answers.items():
            for request, result in answers.items():
                yield Answered(*key, member, request, result)

    def replay(self, records: Iterable[Record]) -> None:
        """Take in the records of an earlier coordinator. Raises ValueError if they are
        inconsistent."""
        # Records that are read from the log must not be written to it again.
        keep, self._keep = self._keep, None
        try:
            for record in records:
                self._replay(record)
        except KeyError as error:
            raise ValueError(f"a record of an unknown group: {error}") from None
        self._keep = keep
        if keep is not None:
            for key, group in self.groups.items():
                group.store.changed = partial(self._on_stored, key)
                group.store.answered = partial(self._on_answered, key)

    def _replay(self, record: Record) -> None:
        match record:
            case EpochGiven(name, epoch):
                self.epochs.observe(name, epoch)
            case Formed():
                size = Size(record.fixed, record.least, record.most, record.window)
                group = self.groups.get(record.key) or self.open(record.key, size, record.opener)
                group.size = size
                self.formed(group, record.view)
                self.expect(group, record.view)
            case Gone(name, run_id, ranks, reason):
                self._replay_gone(self.groups[name, run_id], ranks, reason)
            case Ended(name, run_id, epoch):
                ended = self.groups.get((name, run_id))
                if ended is not None:
                    if ended.absent:
                        raise ValueError(f"the group {name!r} ended before its members were gone")
                    self.end(ended)
                self._remember_end((name, run_id), epoch)
            case Stored(name, run_id, key, value, expires):
                store = self.groups[name, run_id].store
                store.restore(key, value)
                left = None if expires is None else expires - self.wall_offset - self.now
                store.set_ttl(key, left)
            case Published(store_name, run_id, value):
                self._set_published((store_name, run_id), value)
            case AveragerEntered() | AveragerDecided() | AveragerRecorded():
                self.on_record(record)
            case _:
                store = self.groups[record.group, record.run_id].store
                store.remember(record.member, record.request, record.result)

    def _replay_gone(self, group: GroupState, ranks: Iterable[int], reason: str | None) -> None:
        for rank in ranks:
            member = self.take_absent(group, rank)
            if member is None:
                raise ValueError(f"rank {rank} of the group {group.name!r} is gone twice")
            group.store.forget(member.id)
            if reason is None:
                group.left.add(rank)
            else:
                group.lost[rank] = reason
            self.on_gone(group, [member.id], lost=reason is not None, replays=True)

    def _set_published(self, key: GroupKey, value: bytes | None) -> None:
        self.published.pop(key, None)
        if value is not None:
            self.published[key] = value
            if len(self.published) > REMEMBERED:
                del self.published[next(iter(self.published))]

    def _on_shared(self, shared: GroupKey, key: str, value: bytes | None) -> None:
        before = self.published.get(shared)
        if key == channels.RELEASES and value is not None:
            value = channels.published(before, value)
            self._shared[shared].store.restore(channels.PUBLISHED, value)
        elif key != channels.PUBLISHED:
            return
        if value != before:
            self._set_published(shared, value)
            self.write(Published(*shared, value))

    def write(self, record: Record) -> None:
        """Write `record` to the log, if there is one."""
        if self._keep is not None:
            self._keep(record)

    def _on_stored(self, group: GroupKey, key: str, value: bytes | None) -> None:
        self.write(Stored(*group, key, value, self._expiry(group, key)))

    def _on_answered(self, group: GroupKey, member: str, request: int, result: Result) -> None:
        self.write(Answered(*group, member, request, result))

    def _expiry(self, group: GroupKey, key: str) -> float | None:
        due = self.timers.get(Ttl(group, key))
        return None if due is None else max(0.0, due + self.wall_offset)

    def _new_store(self, ttl: Callable[[str], Ttl]) -> KeyValueStore:
        """`ttl(key)`: the timer of a key."""

        def set_ttl(key: str, seconds: float | None) -> None:
            if seconds is None:
                self.timers.cancel(ttl(key))
            else:
                self.timers.set(ttl(key), self.now + seconds)

        return KeyValueStore(set_ttl, now=lambda: self.now)

    def _remember_end(self, key: GroupKey, epoch: int) -> None:
        self.ended.pop(key, None)
        self.ended[key] = epoch
        if len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]


def _no_record(record: Record) -> None:
    raise ValueError(f"a record of an unknown averager: {record!r:.100}")


def _formed(group: GroupState, view: EpochView) -> Formed:
    size = group.size
    opener = group.opener[:MAX_TEXT]
    return Formed(view, group.run_id, size.fixed, size.least, size.most, size.window, opener)
