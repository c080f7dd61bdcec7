"""Recovery from a loss, in the coordinator: ballots, the next epoch, broken links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from aiodist.membership.ballots import Answer, Ballot, BallotKey
from aiodist.membership.books import JoinWindow, Ruling
from aiodist.membership.group import GroupState, ranks_text
from aiodist.membership.records import EpochGiven
from aiodist.membership.rulings import losers
from aiodist.membership.seating import Seating
from aiodist.wire.recovery import (
    BallotResult,
    Cause,
    GiveUpVote,
    Heard,
    Purpose,
    Unreachable,
    Void,
    Vote,
    Waiting,
    WatchWaiting,
)

RULING_SECONDS = 0.5
"""Seconds that members have to report broken links after the first report."""

UNREACHABLE_SECONDS = 1.0
"""Seconds for an absent member to come back if others have no link to it either. Its lease is for a
member that is busy, and the links of a busy member do not break."""

MOST_WATCHING = 64
"""The number of watches that a member may have."""

RecoveryMessage = Vote | GiveUpVote | WatchWaiting | Unreachable


class RecoveryRules:
    """The recovery part of the state machine. It keeps no state, because the groups do."""

    def __init__(self, seating: Seating) -> None:
        self._seating = seating
        self._timers = seating.books.timers
        # A ballot or a rendezvous may have waited for the process that comes or goes.
        seating.review, seating.joiners_changed = self.review, self.joiners_changed

    def handle(
        self,
        group: GroupState,
        conn: int,
        request: int,
        message: RecoveryMessage,
        seen: Mapping[str, str] | None = None,
    ) -> None:
        """Handle a message of a member of `group`. `seen`: what members are doing, by id."""
        match message:
            case Vote():
                now = self._seating.now
                self._tell(group.ballots.cast(group.members, conn, request, message, now))
                self.review(group, (message.context, message.number))
            case GiveUpVote(context, number, cause, text):
                key = (context, number)
                if (
                    cause is Cause.TIMEOUT
                    and (ballot := group.ballots.gathering)
                    and ballot.key == key
                ):
                    text += self._joined_text(group, ballot)
                self._tell(
                    group.ballots.give_up(group.members, group.absent, conn, key, cause, text, seen)
                )
            case WatchWaiting():
                watches = group.watchers.setdefault(conn, set())
                if len(watches) < MOST_WATCHING:
                    watches.add(request)
                self._seating.send(conn, request, Waiting(len(group.joiners)))
            case _:
                self._report(group, conn, message)

    # Ballots.

    def review(self, group: GroupState, key: BallotKey | None = None) -> None:
        """Carry out what is decided now: after a vote in the ballot with `key`, or (None) after a
        member came back or was lost."""
        if group.view is None:
            return
        # The order matters. First answer votes in older views, because they must not count in the
        # present one. Then carry out complete ballots one at a time, because one may begin the next
        # epoch and make the other open ballots void.
        self._answer_late(group, group.view.context, key)
        for ballot in group.ballots.decided(group.members, group.absent, key):
            # Members that go on together must reach each other. Rule on broken links first, because
            # a later ruling would cost one more epoch.
            if ballot.purpose is not Purpose.AGREE and group.broken:
                self.rule(group)  # which reviews the rest
                return
            self._carry_out(group, ballot)

    def learn(self, group: GroupState, heard: Iterable[Heard]) -> None:
        """Take over outcomes that a member heard from an earlier coordinator."""
        books = self._seating.books
        for one in heard:
            if one.verdict is not None:
                epoch = one.verdict.epoch
                if epoch > books.epochs.last.get(group.name, 0):
                    books.epochs.observe(group.name, epoch)
                    books.write(EpochGiven(group.name, epoch))
            if one.outcome is not None:
                self._tell(group.ballots.learn((one.context, one.number), one.outcome))

    def _answer_late(self, group: GroupState, context: bytes, key: BallotKey | None) -> None:
        """Answer votes in another view than that of `context`.

        Their voters have missed the next view, because the coordinator was away when it was
        announced.
        """
        for ballot in group.ballots.of_another_view(context, key):
            if ballot.purpose is not Purpose.AGREE:
                group.ballots.close(ballot, None)
                for conn, (request, _) in ballot.votes.items():
                    self._seating.give_view(group, conn, request)
            elif not group.absent:  # no absent member may know the verdict
                self._void(group, ballot, "the group went on")

    def _carry_out(self, group: GroupState, ballot: Ballot) -> None:
        if ballot.purpose is Purpose.RENDEZVOUS:
            self._gather(group, ballot)
        elif ballot.purpose is Purpose.SHRINK and not ballot.voters:
            self._go_on(group, ballot, [])
        else:
            assert group.view is not None
            epoch = group.view.epoch
            ids: tuple[str, ...] = ()
            if ballot.purpose is Purpose.SHRINK:
                books = self._seating.books
                epoch = books.epochs.take(group.name)
                books.write(EpochGiven(group.name, epoch))
                voters = ballot.electorate(group.members)
                ids = tuple([group.members[conn].id for conn in voters])
            self._tell(group.ballots.close(ballot, BallotResult(ballot.flag, ids, epoch)))

    def _go_on(self, group: GroupState, ballot: Ballot, admitted: Sequence[int]) -> None:
        # All members have voted, so none is left behind.
        survivors = {conn: ballot.votes[conn][0] for conn in ballot.electorate(group.members)}
        group.ballots.close(ballot, None)
        assert group.view is not None
        over = f"epoch {group.view.epoch} is over: the group went on"
        for other in group.ballots.of_another_view(b""):
            self._void(group, other, over)
        if admitted:  # before the view, because admitted members count only the remaining joiners
            self._tell_waiting(group, len(group.joiners) - len(admitted))
        self._seating.go_on(group, survivors, admitted)

    def _void(self, group: GroupState, ballot: Ballot, text: str) -> None:
        by = group.members[next(iter(ballot.votes))].id
        self._tell(group.ballots.close(ballot, Void(Cause.CANCELLED, text, by)))

    # Rendezvous.

    def joiners_changed(self, group: GroupState) -> None:
        """Note that a process waits to join, or no longer does."""
        if group.view is None:
            return
        self._tell_waiting(group, len(group.joiners))
        # A rendezvous that all members have called waits for joiners as follows::
        #
        #     joiners  ──1────2──────3────────────── join window ──────┐
        #              too few       as few as may be: the window       │ none came: go on
        #                            opens, with each further one anew  ▼
        #              ──1────2──────3──4──5───────6 as many as may be: go on at once
        #
        # The window closes again if a joiner goes and too few are left.
        if (ballot := group.ballots.gathering) is None:
            return
        least, most = group.bounds(ballot)
        count = len(group.members) + len(group.joiners)
        if count >= most:
            self._take_in(group, ballot)
        elif count >= least:
            self._timers.set(JoinWindow(group.key), self._seating.now + group.size.window)
        else:
            self._timers.cancel(JoinWindow(group.key))

    def window_over(self, group: GroupState) -> None:
        """Go on with the joiners that there are, if they are enough."""
        if (ballot := group.ballots.gathering) is not None and self._are_enough(group, ballot):
            self._take_in(group, ballot)

    def _gather(self, group: GroupState, ballot: Ballot) -> None:
        """All members have called rendezvous: take in the joiners, or wait for more."""
        if group.ballots.gathering is ballot:
            return
        if self._are_enough(group, ballot):
            self._take_in(group, ballot)
        else:
            group.ballots.gathering = ballot

    def _are_enough(self, group: GroupState, ballot: Ballot) -> bool:
        least, _ = group.bounds(ballot)
        return len(group.members) + len(group.joiners) >= least

    def _joined_text(self, group: GroupState, ballot: Ballot) -> str:
        """Say how many ranks a rendezvous has that all members have called; else ""."""
        if not ballot.is_complete(group.members, group.absent):
            return ""
        least, _ = group.bounds(ballot)
        here = len(group.members) + len(group.joiners)
        text = f": {here} of at least {least} ranks are here"
        if here < least:
            return f"{text}; start more, or call rendezvous(min_size={here}) or shrink()"
        return f"{text}, and the join window is open; call it again with a longer timeout"

    def _take_in(self, group: GroupState, ballot: Ballot) -> None:
        """Go on with the joiners in order of arrival, as far as there is room."""
        _, most = group.bounds(ballot)
        self._go_on(group, ballot, list(group.joiners)[: max(0, most - len(group.members))])

    def _tell_waiting(self, group: GroupState, count: int) -> None:
        message = Waiting(count)
        for conn, requests in group.watchers.items():
            for request in sorted(requests):
                self._seating.send(conn, request, message)

    # Broken links.

    def _report(self, group: GroupState, conn: int, report: Unreachable) -> None:
        own = group.members[conn].id
        rank = group.place_of(report.id)
        if rank is None or report.id == own:
            return
        # A process that has ended is lost at once. If a link is broken between two living members,
        # one must go, and the other links show which::
        #
        #     rank 2's host is cut off: 0-2, 1-2, 3-2 are broken  ──> 2 has three, the others one
        #     the link 1-2 alone is broken                        ──> a draw: the higher rank goes
        #
        # Both ends of a link may report it, and one report does not tell which end is at fault. So
        # the ruling waits half a second for other reports.
        if not report.ended:
            if not group.broken:
                self._timers.set(Ruling(group.key), self._seating.now + RULING_SECONDS)
            group.broken[min(own, report.id), max(own, report.id)] = report.reason
            if rank in group.absent:
                self._seating.books.hurry(group, rank, UNREACHABLE_SECONDS)
        elif (other := group.members.of_rank(rank)) is not None:
            self._seating.evict(group, {other: report.reason})
        else:
            self._seating.give_up(group, {rank: report.reason})

    def rule(self, group: GroupState) -> None:
        """Remove as few members as possible, so that the others can reach each other."""
        if group.absent:  # absent members may be gone, or have more to report
            self._timers.set(Ruling(group.key), self._seating.now + RULING_SECONDS)
            return
        self._timers.cancel(Ruling(group.key))
        # Ignore links of members that are gone.
        broken, group.broken = group.broken, {}
        here = group.members.of_id
        pairs = [pair for pair in broken if None not in map(here, pair)]
        links: dict[str, dict[int, str]] = {}
        for pair in pairs:
            for one, other in (pair, pair[::-1]):
                links.setdefault(one, {})[group.ranks[other]] = broken[pair]
        reasons: dict[int, str] = {}
        for one in losers(pairs, group.ranks.__getitem__):
            conn = here(one)
            assert conn is not None
            why = next(iter(links[one].values()))
            reasons[conn] = f"no link between it and {ranks_text(links[one])} ({why})"
        if reasons:
            self._seating.evict(group, reasons)
        else:
            self.review(group)

    def _tell(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._seating.send(answer.conn, answer.request, answer.reply)
