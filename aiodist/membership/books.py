"""What the coordinator knows of its groups, and how that outlives it: as records of a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from aiodist.membership.effects import Send
from aiodist.membership.epochs import Epochs
from aiodist.membership.group import Group, GroupKey, Size
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
from aiodist.wire.messages import MemberInfo, Result, View

REMEMBERED = 4096
"""Groups that ended and are remembered, so that none of their members brings them back."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A member, or joiner, has been silent for too long."""

    conn: int


@dataclass(frozen=True, slots=True)
class Return:
    """An absent member has not come back."""

    group: GroupKey
    rank: int


@dataclass(frozen=True, slots=True)
class JoinWindow:
    """Nobody has joined for a while."""

    group: GroupKey


@dataclass(frozen=True, slots=True)
class Ruling:
    """Members had time to say whom they cannot reach."""

    group: GroupKey


@dataclass(frozen=True, slots=True)
class Answers:
    """Members had time to say what they are doing."""


@dataclass(frozen=True, slots=True)
class Ttl:
    """A key of a store has lived its time: of that of `group`, or of the `shared` one of that name
    and run id."""

    group: GroupKey
    key: str
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RoundDue:
    """An averager has something to decide."""

    averager: GroupKey


class _Shared(NamedTuple):
    """A store that groups have in common, and which they are."""

    store: KeyValueStore
    users: set[GroupKey]


class OnGone(Protocol):
    """Hears that members of a group are lost, or have left. `replays`: long ago."""

    def __call__(self, group: Group, ids: Sequence[str], *, replays: bool) -> None: ...


class Books:
    """Groups, epochs and timers; `now` is the time of the present step. `keep` is called with what
    has to be written down (None: nothing has). `wall_offset`: see `Membership`."""

    def __init__(self, wall_offset: float, keep: Callable[[Record], None] | None) -> None:
        self.now = 0.0
        self.epochs = Epochs()  # the last epoch of each name of a group
        # Those that wait for members, and those that are formed.
        self.groups: dict[GroupKey, Group] = {}
        # Stores that groups have in common, by their name and the run id of those groups.
        self._shared: dict[GroupKey, _Shared] = {}
        # Of each of these that is a channel's, also while it is empty: what was published last.
        self.published: dict[GroupKey, bytes] = {}
        # The last epoch of groups that have ended, the longest ended first.
        self.ended: dict[GroupKey, int] = {}
        # What is due when; each kind says of whom.
        self.timers: Timers[Lease | Return | JoinWindow | Ruling | Answers | Ttl | RoundDue] = (
            Timers()
        )
        # What averagers do of members that are gone, and of their own records: `Averaging`.
        self.on_gone: OnGone = lambda group, ids, *, replays: None
        self.on_record: Callable[[Record], None] = _no_record
        self._wall_offset = wall_offset
        self._keep = keep

    @property
    def wall_time(self) -> float:
        """Seconds since the Unix epoch."""
        return max(0.0, self.now + self._wall_offset)

    def open(self, key: GroupKey, size: Size, opener: str) -> Group:
        """A new group, that forms."""
        store = self._new_store(partial(Ttl, key))
        if self._keep is not None:
            store.changed = partial(self._on_stored, key)
            store.answered = partial(self._on_answered, key)
        group = self.groups[key] = Group(*key, size, opener, store)
        return group

    def share(self, group: Group, name: str) -> None:
        """From now on the group has the store `name` in common with all that ask for it, instead of
        one of its own ("": it keeps what it has). It lives as long as one of them does."""
        # It is not written down, but for what was published last: what is in it tells of members
        # that live, who say it again to a coordinator that comes back, and who may be others by
        # then. Which store a group shares is not written down, either: each of its members says it
        # when it comes back.
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

    def sharing(self, group: Group) -> list[Group]:
        """All that have their store in common with a group, itself included."""
        key = (group.shares, group.run_id)
        return [self.groups[user] for user in self._shared[key].users] if group.shares else [group]

    def expire(self, ttl: Ttl) -> list[Send]:
        """A key has lived its time: who is told."""
        # The last that had the store may have been lost by the same tick of the clock.
        stores = self._shared if ttl.shared else self.groups
        return stores[ttl.group].store.expire(ttl.key) if ttl.group in stores else []

    def formed(self, group: Group, view: View) -> None:
        """The group has a view that it did not have before."""
        self.epochs.observe(view.group, view.epoch)
        self.write(_formed(group, view))

    def gone(self, group: Group, members: Sequence[MemberInfo], reason: str | None) -> None:
        """Members of the view are lost for `reason`, or (None) have left."""
        ranks = []
        for member in members:
            group.store.forget(member.id)
            ranks.append(member.rank)
        self.write(Gone(*group.key, tuple(ranks), reason))
        self.on_gone(group, [member.id for member in members], replays=False)

    def end(self, group: Group) -> None:
        """Delete a group, and its store."""
        del self.groups[group.key]
        if group.shares:
            self._unshare(group)
        else:
            # That the group ended says that its keys are gone: a record of each would say it again.
            group.store.changed = lambda key, value: None
            group.store.clear()
        if group.view is not None:
            self._remember_end(group.key, group.view.epoch)
            self.write(Ended(*group.key, group.view.epoch))

    def _unshare(self, group: Group) -> None:
        """The group has ended. Who was the last to have a store in common leaves nothing of it."""
        key = (group.shares, group.run_id)
        store, users = self._shared[key]
        users.discard(group.key)
        if not users:
            store.changed = lambda key, value: None  # what was published last stays
            store.clear()
            del self._shared[key]

    def expect(self, group: Group, view: View) -> None:
        """`view` is that of the group, and its members are to come back."""
        for rank in group.absent:
            self.timers.cancel(Return(group.key, rank))
        # Nobody is a member by what is written down: all are absent, each with a lease to show that
        # it lives. So a coordinator that comes back rules nobody lost for what happened while it
        # was away, and whoever died meanwhile is found out one lease later.
        group.install(view)
        group.lost, group.left, group.cut_off = {}, set(), False
        group.absent = Seats({member.rank: member for member in view.members})
        for member in view.members:
            self.timers.set(Return(group.key, member.rank), self.now + member.lease)

    def is_cut_off(self, group: Group) -> bool:
        """Whether nobody of a group is heard any more, members or joiners."""
        dues = ((lease, self.timers.get(Lease(conn))) for conn, lease in group.leases.items())
        return is_cut_off((lease, 0.0 if due is None else due - self.now) for lease, due in dues)

    def time_left(self, conn: int) -> float:
        """Seconds until the lease of a connection is over."""
        due = self.timers.get(Lease(conn))
        return 0.0 if due is None else due - self.now

    def await_word(self, group: Group) -> None:
        """Nobody of a group is heard: the leases in which its members have to come back begin with
        the first sign of life."""
        group.cut_off = True
        for rank in group.absent:
            self.timers.set(Return(group.key, rank), self.now + RETURN_SECONDS)

    def got_word(self, group: Group) -> None:
        """Somebody of a group is heard, or wants to be of it: if nobody was before, its members
        have a lease to come back from now on."""
        if group.cut_off:
            group.cut_off = False
            for rank, member in group.absent.items():
                self.timers.set(Return(group.key, rank), self.now + member.lease)

    def take_absent(self, group: Group, rank: int) -> MemberInfo | None:
        """A member is not waited for any more: it came back, or is gone. None: it was not."""
        self.timers.cancel(Return(group.key, rank))
        return group.absent.pop(rank, None)

    # Over restarts.

    def records(self) -> Iterator[Record]:
        """All that there is to know, as it is while this is iterated."""
        # Replayed from the top, each record finds what it builds on: epochs before the groups that
        # take them, groups before what happened to their members and stores. Ttls go as times of
        # the wall clock, for the clock of the loop begins anew with each process. Joiners, votes
        # and leases are not here: joiners ask again, voters vote again, and everybody has a new
        # lease to come back.
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

    def _records_of(self, group: Group, view: View) -> Iterator[Record]:
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
        """Take in what another coordinator has written down. Raises ValueError where it makes no
        sense."""
        # What is read from the log must not be written to it again.
        keep, self._keep = self._keep, None
        try:
            for record in records:
                self._replay(record)
        except KeyError as error:
            raise ValueError(f"a record of a group that there is not: {error}") from None
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
                left = None if expires is None else expires - self._wall_offset - self.now
                store.set_ttl(key, left)
            case Published(store_name, run_id, value):
                self._set_published((store_name, run_id), value)
            case AveragerEntered() | AveragerDecided() | AveragerRecorded():
                self.on_record(record)
            case _:
                store = self.groups[record.group, record.run_id].store
                store.remember(record.member, record.request, record.result)

    def _replay_gone(self, group: Group, ranks: Iterable[int], reason: str | None) -> None:
        for rank in ranks:
            member = self.take_absent(group, rank)
            if member is None:
                raise ValueError(f"rank {rank} of the group {group.name!r} is gone twice")
            group.store.forget(member.id)
            if reason is None:
                group.left.add(rank)
            else:
                group.lost[rank] = reason
            self.on_gone(group, [member.id], replays=True)

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
        """Have `record` written down, if anything is."""
        if self._keep is not None:
            self._keep(record)

    def _on_stored(self, group: GroupKey, key: str, value: bytes | None) -> None:
        self.write(Stored(*group, key, value, self._expiry(group, key)))

    def _on_answered(self, group: GroupKey, member: str, request: int, result: Result) -> None:
        self.write(Answered(*group, member, request, result))

    def _expiry(self, group: GroupKey, key: str) -> float | None:
        due = self.timers.get(Ttl(group, key))
        return None if due is None else max(0.0, due + self._wall_offset)

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
    raise ValueError(f"a record of an averager where there is none: {record!r:.100}")


def _formed(group: Group, view: View) -> Formed:
    size = group.size
    opener = group.opener[:MAX_TEXT]
    return Formed(view, group.run_id, size.fixed, size.least, size.most, size.window, opener)
