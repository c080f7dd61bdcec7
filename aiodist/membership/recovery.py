"""Going on after a loss, as the coordinator does it: ballots, the next epoch, broken links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from aiodist.membership.ballots import Answer, Ballot, BallotKey
from aiodist.membership.books import JoinWindow, Ruling
from aiodist.membership.group import Group, ranks_text
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
"""After a report of a broken link, how long others may say which of theirs are broken."""

MOST_WATCHING = 64
"""Most watches of one member."""

RecoveryMessage = Vote | GiveUpVote | WatchWaiting | Unreachable


class Recovery:
    """The part of the state machine that keeps no state of its own: that is the groups'."""

    def __init__(self, seating: Seating) -> None:
        self._seating = seating
        self._timers = seating.books.timers
        # Whoever comes or goes may be what a ballot, or a rendezvous, has waited for.
        seating.review, seating.joiners_changed = self.review, self.joiners_changed

    def handle(
        self,
        group: Group,
        conn: int,
        request: int,
        message: RecoveryMessage,
        seen: Mapping[str, str] | None = None,
    ) -> None:
        """A member of `group` says something. `seen`: what members are doing, by id."""
        match message:
            case Vote():
                now = self._seating.now
                self._tell(group.ballots.cast(group.members, conn, request, message, now))
                self.review(group, (message.context, message.number))
            case GiveUpVote(context, number, cause, text):
                key = (context, number)
                self._tell(
                    group.ballots.give_up(group.members, group.absent, conn, key, cause, text, seen)
                )
                # All had voted, and the ballot was waiting for joiners: the end of the join window
                # must not decide it any more.
                if group.gathering is not None and group.gathering.key == key:
                    group.gathering = None
                    self._timers.cancel(JoinWindow(group.key))
            case WatchWaiting():
                watches = group.watchers.setdefault(conn, set())
                if len(watches) < MOST_WATCHING:
                    watches.add(request)
                self._seating.send(conn, request, Waiting(len(group.joiners)))
            case _:
                self._report(group, conn, message)

    # Ballots.

    def review(self, group: Group, key: BallotKey | None = None) -> None:
        """Somebody has voted in the ballot with this `key`; or (None) somebody is back, or gone:
        carry out what is decided now."""
        if group.view is None:
            return
        # In this order. A vote in a view that is over must not count in the present one, though it
        # may be the last that is missing there: it is answered first, and taken out. Then each
        # ballot that is complete is carried out; that may begin the next epoch, which makes void
        # what else is open, so the ballots are looked up one by one (`Ballots.decided`), and not
        # all at the beginning.
        self._answer_late(group, group.view.context, key)
        for ballot in group.ballots.decided(group.members, group.absent, key):
            # Who goes on together must reach each other: what is known of broken links is ruled on
            # first, for a member that is turned out later would cost them one more epoch.
            if ballot.purpose is not Purpose.AGREE and group.broken:
                self.rule(group)  # which reviews the rest
                return
            self._carry_out(group, ballot)

    def learn(self, group: Group, heard: Iterable[Heard]) -> None:
        """What a member was told by the coordinator before."""
        for one in heard:
            if one.outcome is not None:
                self._tell(group.ballots.learn((one.context, one.number), one.outcome))

    def _answer_late(self, group: Group, context: bytes, key: BallotKey | None) -> None:
        """Who votes in a view that is over, and not that of `context`, has not heard of the next
        one, of which it is a member: the coordinator was away when it was told. It is told now."""
        for ballot in group.ballots.of_another_view(context, key):
            if ballot.purpose is not Purpose.AGREE:
                group.ballots.close(ballot, None)
                for conn, (request, _) in ballot.votes.items():
                    self._seating.give_view(group, conn, request)
            elif not group.absent:  # who may know the verdict
                self._void(group, ballot, "the group went on")

    def _carry_out(self, group: Group, ballot: Ballot) -> None:
        if ballot.purpose is Purpose.RENDEZVOUS:
            self._gather(group, ballot)
        elif ballot.purpose is Purpose.SHRINK and not ballot.voters:
            self._go_on(group, ballot, [])
        else:
            assert group.view is not None
            epoch = group.view.epoch
            ids: tuple[str, ...] = ()
            if ballot.purpose is Purpose.SHRINK:
                epoch = self._seating.books.epochs.take(group.name)
                voters = ballot.electorate(group.members)
                ids = tuple([group.members[conn].id for conn in voters])
            self._tell(group.ballots.close(ballot, BallotResult(ballot.flag, ids, epoch)))

    def _go_on(self, group: Group, ballot: Ballot, admitted: Sequence[int]) -> None:
        # All members have voted, or the ballot would not be decided: so nobody is left behind.
        survivors = {conn: ballot.votes[conn][0] for conn in ballot.electorate(group.members)}
        group.ballots.close(ballot, None)
        assert group.view is not None
        over = f"epoch {group.view.epoch} is over: the group went on"
        for other in group.ballots.of_another_view(b""):
            self._void(group, other, over)
        if admitted:  # before the view: who has that sees only those who wait for the next one
            self._tell_waiting(group, len(group.joiners) - len(admitted))
        self._seating.go_on(group, survivors, admitted)

    def _void(self, group: Group, ballot: Ballot, text: str) -> None:
        by = group.members[next(iter(ballot.votes))].id
        self._tell(group.ballots.close(ballot, Void(Cause.CANCELLED, text, by)))

    # Rendezvous.

    def joiners_changed(self, group: Group) -> None:
        """Somebody waits to join, or does not any more."""
        if group.view is None:
            return
        self._tell_waiting(group, len(group.joiners))
        # A rendezvous that all members have called, and for which too few wait, stands open until::
        #
        #     joiners  ──1────2──────3────────────── join window ──────┐
        #              too few       as few as may be: the window       │ nobody came: go on
        #                            opens, with each further one anew  ▼
        #              ──1────2──────3──4──5───────6 as many as may be: go on at once
        #
        # It closes again where one of those who wait goes away and too few are left.
        if (ballot := group.gathering) is None:
            return
        least, most = group.bounds(ballot)
        count = len(group.members) + len(group.joiners)
        if count >= most:
            self._take_in(group, ballot)
        elif count >= least:
            self._timers.set(JoinWindow(group.key), self._seating.now + group.size.window)
        else:
            self._timers.cancel(JoinWindow(group.key))

    def window_over(self, group: Group) -> None:
        """Nobody has joined for the join window."""
        if (ballot := group.gathering) is not None and self._are_enough(group, ballot):
            self._take_in(group, ballot)

    def _gather(self, group: Group, ballot: Ballot) -> None:
        """All members have called rendezvous: take in who waits, or wait for more."""
        if group.gathering is ballot:
            return
        if self._are_enough(group, ballot):
            self._take_in(group, ballot)
        else:
            group.gathering = ballot

    def _are_enough(self, group: Group, ballot: Ballot) -> bool:
        least, _ = group.bounds(ballot)
        return len(group.members) + len(group.joiners) >= least

    def _take_in(self, group: Group, ballot: Ballot) -> None:
        """Go on with those who wait, in order of arrival, as far as there is room."""
        _, most = group.bounds(ballot)
        self._go_on(group, ballot, list(group.joiners)[: max(0, most - len(group.members))])

    def _tell_waiting(self, group: Group, count: int) -> None:
        message = Waiting(count)
        for conn, requests in group.watchers.items():
            for request in sorted(requests):
                self._seating.send(conn, request, message)

    # Broken links.

    def _report(self, group: Group, conn: int, report: Unreachable) -> None:
        own = group.members[conn].id
        rank = group.place_of(report.id)
        if rank is None or report.id == own:
            return
        # What is certain is not weighed: the process that has ended is lost. Of a link that is
        # broken between two who live, one has to go, and which of them is seen from the others'
        # links::
        #
        #     rank 2's host is cut off: 0-2, 1-2, 3-2 are broken  ──> 2 has three, the others one
        #     the link 1-2 alone is broken                        ──> a draw: the higher rank goes
        # Both ends of a link may report it, and one report does not tell which of them is at fault.
        # Half a second later there are the reports of others, too, and most of them name one rank.
        if not report.ended:
            if not group.broken:
                self._timers.set(Ruling(group.key), self._seating.now + RULING_SECONDS)
            group.broken[min(own, report.id), max(own, report.id)] = report.reason
        elif (other := group.members.of_rank(rank)) is not None:
            self._seating.evict(group, {other: report.reason})
        else:
            self._seating.give_up(group, {rank: report.reason})

    def rule(self, group: Group) -> None:
        """Turn out as few as can be, so that the rest can reach each other."""
        if group.absent:  # who may be gone, and may have more to report
            self._timers.set(Ruling(group.key), self._seating.now + RULING_SECONDS)
            return
        self._timers.cancel(Ruling(group.key))
        # Links of those who are gone meanwhile are nobody's concern any more.
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
