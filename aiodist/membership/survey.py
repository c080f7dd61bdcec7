"""Ask members what they are doing, for the status page, commands and error texts.

A member answers at once unless its event loop is blocked. The lease thread of a blocked member has
already reported what it is blocked in. Of any other silent member, only the time of its last sign
of life is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from aiodist.membership import culprits
from aiodist.membership.awaited import waits_of
from aiodist.membership.books import Answers, Books, LeaseTimer
from aiodist.membership.group import GroupState, ranks_text
from aiodist.wire.activity import (
    Activity,
    Inquire,
    Seen,
    SeenRequest,
    Wait,
    ranks_in,
    shortened,
    unpacked,
)
from aiodist.wire.limits import MAX_WAITS
from aiodist.wire.messages import Message, Status

_INQUIRE = Inquire()

ANSWER_SECONDS = 1.0
"""The most seconds that members may take to answer."""

MOST_ASKERS = 64
"""The number of requests that may wait for answers. If there are more, the oldest gets what is
known by then."""

_MOVED = ("sent", "received", "saved")
"""What is told of members of averagers."""


@dataclass(slots=True)
class _Asker:
    """A request that waits for answers.

    `then` is called once the connections in `waiting` have answered, or at `due`; not if the
    connection that asked is gone.
    """

    conn: int
    waiting: set[int]
    due: float
    then: Callable[[], None]


class _Known(NamedTuple):
    """An operation that a member waits in, with its group and epoch."""

    group: str
    epoch: int
    wait: culprits.PendingOperation


class Survey:
    """The part of the state machine that asks members what they are doing."""

    def __init__(self, send: Callable[[int, int, Message], None], books: Books) -> None:
        self._send = send  # to a connection, in reply to a request
        self._books = books
        self._askers: list[_Asker] = []
        self._said: dict[int, tuple[Activity, float]] = {}
        """The last message of each connection and its time, while a request waits, or while the
        member's loop is blocked."""
        self._before: dict[int, tuple[Activity, float]] = {}
        """A short form of the last answer of each connection and its time, in case the next one
        does not come."""

    def ask_all(self, conn: int, request: int, status: Callable[[], dict[str, Any]]) -> None:
        """Reply with `status`, extended by what each member of each group is doing."""
        members = [one for group in self._books.groups.values() for one in group.members]
        self.ask(
            conn,
            members,
            lambda: self._send(conn, request, Status(self._detailed(status()))),
        )

    def ask_some(self, conn: int, request: int, group: GroupState, message: SeenRequest) -> None:
        """Reply with what some ranks of a group are doing, in words."""
        wanted = tuple(sorted(set(message.ranks)))

        def reply(texts: tuple[str, ...]) -> None:
            self._send(conn, request, Seen(wanted, texts))

        self.ask_ranks(conn, group, wanted, reply, message.seconds)

    def ask_ranks(
        self,
        conn: int,
        group: GroupState,
        ranks: tuple[int, ...],
        then: Callable[[tuple[str, ...]], None],
        seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Ask ranks of a group for `conn`, and call `then` with what each is doing, in words."""
        asked = set(ranks)
        members = [one for one, member in group.members.items() if member.rank in asked]

        def tell() -> None:
            conns = {member.rank: one for one, member in group.members.items()}
            then(tuple([self._words(group, conns.get(rank)) for rank in ranks]))

        self.ask(conn, members, tell, seconds)

    def words(self, group: GroupState) -> dict[str, str]:
        """What each member of a group is doing, in words, by id."""
        return {member.id: self._words(group, conn) for conn, member in group.members.items()}

    def heard(self, conn: int, request: int, activity: Activity) -> None:
        """Take in what a member says that it is doing."""
        self._said[conn] = (activity, self._books.now)
        # The report of a lease thread is no answer: the loop may still answer, with more to say.
        if not activity.busy:
            self._before[conn] = (_gist(activity), self._books.now)
            for asker in self._askers:
                asker.waiting.discard(conn)
            self._finish([asker for asker in self._askers if not asker.waiting])

    def forget(self, conn: int) -> None:
        """A member renewed its lease without saying that its loop is blocked, so it no longer
        is."""
        said = self._said.get(conn)
        if said is not None and said[0].busy:
            del self._said[conn]

    def gone(self, conn: int) -> None:
        """A connection is closed, or no longer of a member."""
        self._said.pop(conn, None)
        self._before.pop(conn, None)
        self._askers = [asker for asker in self._askers if asker.conn != conn]
        for asker in self._askers:
            asker.waiting.discard(conn)
        if not all(asker.waiting for asker in self._askers):
            # Not at once, because the machine is in the middle of a change.
            self._books.timers.set(Answers(), self._books.now)

    def over(self) -> None:
        """Answer the requests whose time is over, or that wait for no member any more."""
        now = self._books.now
        self._finish([one for one in self._askers if one.due <= now or not one.waiting])

    def ask(
        self,
        conn: int,
        members: Iterable[int],
        then: Callable[[], None],
        seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Ask members for `conn`, and call `then` once they have answered, or after `seconds`.

        `ANSWER_SECONDS` is the longest wait.
        """
        # Many may ask at once: a page in a browser, `aiodist status`, ranks after a timeout::
        #
        #     A asks ── Inquire ──> ranks 0, 1, 2     0 and 1 answer
        #     B asks ── none is asked twice           2 answers: A and B are told
        #
        # A member that is asked already is not asked again, and its answer is for all. So a client
        # that asks in a loop costs no more.
        asked = {one for asker in self._askers for one in asker.waiting}
        waiting = set(members)
        for one in sorted(waiting - asked):
            self._send(one, 0, _INQUIRE)
        # Each request costs memory until its time is over, so the oldest is answered first.
        if len(self._askers) >= MOST_ASKERS:
            self._finish(self._askers[:1])
        due = self._books.now + min(seconds, ANSWER_SECONDS)
        self._askers.append(_Asker(conn, waiting, due, then))
        self._finish([asker for asker in self._askers if not asker.waiting])

    def _finish(self, askers: list[_Asker]) -> None:
        for asker in askers:
            self._askers.remove(asker)
            asker.then()
        timers = self._books.timers
        if self._askers:
            timers.set(Answers(), min([asker.due for asker in self._askers]))
        else:
            timers.cancel(Answers())
            self._said = {conn: said for conn, said in self._said.items() if said[0].busy}

    # Answers.

    def _detailed(self, status: dict[str, Any]) -> dict[str, Any]:
        """Extend `status` by "silent", "doing" and "findings".

        For each member, "silent" is the seconds since its last sign of life. "doing" is None if it
        did not answer. Else it has "age" (seconds since it said so), "busy" (seconds for which its
        loop was blocked), "places", "last" and "waits" (for which ranks, and what else is
        "lacking"). Since it joined, it also counts "collectives" and bytes "sent" and "received".
        "saved" counts bytes that codecs kept it from sending. For each group, "findings" is the
        result of `culprits.find`. For each member of an averager, "said" has "sent", "received" and
        "saved", or is None if it did not answer.
        """
        for plain, group in zip(status["groups"], self._books.groups.values(), strict=True):
            doings = {
                member.rank: self._doing(group, conn) for conn, member in group.ranked.items()
            }
            entered = culprits.entered(doings)
            for member, conn in zip(plain["members"], group.ranked, strict=True):
                member["silent"] = self._silent(group, conn)
                member["doing"] = self._plain(group, conn, entered)
            plain["findings"] = [asdict(finding) for finding in culprits.find(doings)]
        # Each member of an averager is a group of one, and has answered as such.
        doing = {one["id"]: one["doing"] for group in status["groups"] for one in group["members"]}
        for averager in status["averagers"]:
            for member in averager["members"]:
                said = doing.get(member["id"])
                member["said"] = said and {name: said[name] for name in _MOVED}
        return status

    def _silent(self, group: GroupState, conn: int) -> float:
        """Seconds since the last sign of life."""
        due = self._books.timers.get(LeaseTimer(conn))
        return 0.0 if due is None else max(0.0, self._books.now - (due - group.leases[conn]))

    def _plain(
        self, group: GroupState, conn: int, entered: Mapping[culprits.Key, int]
    ) -> dict[str, Any] | None:
        said = self._said.get(conn)
        if said is None:
            return None
        activity, when = said
        age = self._books.now - when
        return {
            **asdict(activity),
            "age": age,
            "busy": activity.busy + age if activity.busy else 0.0,
            "places": list(activity.places),
            "waits": [
                {
                    "group": known.group,
                    "epoch": known.epoch,
                    "what": known.wait.what,
                    "seconds": known.wait.seconds,
                    "missing": ranks_text(ranks_in(_missing(known.wait, entered))),
                    "lacking": known.wait.lacking,
                }
                for known in self._known(group, conn, activity)
            ],
        }

    def _doing(self, group: GroupState, conn: int) -> culprits.Doing | None:
        said = self._said.get(conn)
        if said is None:
            return None
        activity, _ = said
        waits = [known.wait for known in self._known(group, conn, activity)]
        return culprits.Doing(tuple(waits), is_stuck=activity.busy > 0)

    def _known(self, group: GroupState, conn: int, activity: Activity) -> list[_Known]:
        """What a member waits in, by its own report and by the coordinator's state; the oldest
        first."""
        known = [
            _Known(
                wait.group,
                wait.epoch,
                culprits.PendingOperation(
                    _key(wait), what(wait), wait.seconds, unpacked(wait.missing)
                ),
            )
            for wait in activity.waits
        ]
        assert group.view is not None  # it has members
        here = waits_of(group, conn, self._books.now)
        known += [_Known(group.name, group.view.epoch, wait) for wait in here]
        return sorted(known, key=lambda one: -one.wait.seconds)[:MAX_WAITS]

    def _words(self, group: GroupState, conn: int | None) -> str:
        """What a member is doing, in a few words; "" if it is gone."""
        if conn is None:
            return ""
        said = self._said.get(conn)
        if said is None:
            silent = self._silent(group, conn)
            text = f"no answer; its last sign of life came {silent:.1f} s ago"
            if conn in self._before:
                before, when = self._before[conn]
                ago = self._books.now - when
                text = f"{text}; {ago:.1f} s ago it was {self._doing_words(group, conn, before)}"
            return shortened(text)
        activity, when = said
        if activity.busy:
            busy = activity.busy + self._books.now - when
            # Its thread looks a few times a lease, so the loop may have been blocked for longer.
            text = f"its event loop has not turned for at least {busy:.1f} s"
            return shortened(f"{text}{_at(activity)}")
        return shortened(self._doing_words(group, conn, activity))

    def _doing_words(self, group: GroupState, conn: int, activity: Activity) -> str:
        """What a member says of itself, in a few words."""
        at = _at(activity)
        for _, _, wait in self._known(group, conn, activity)[:1]:
            lacking = f" ({wait.lacking})" if wait.lacking else ""
            return f"in {wait.what} for {wait.seconds:.1f} s{lacking}{at}"
        return f"in no operation{at} (last: {activity.last})"


def _at(activity: Activity) -> str:
    """The place in its program, if known."""
    return f" at {activity.places[0]}" if activity.places else ""


def _gist(activity: Activity) -> Activity:
    """A short form of an answer."""
    return Activity(places=activity.places[:1], last=activity.last, waits=activity.waits[:1])


def _key(wait: Wait) -> culprits.Key:
    return wait.context, wait.tag, wait.seq


def _missing(wait: culprits.PendingOperation, entered: Mapping[culprits.Key, int]) -> int:
    """The ranks that an operation waits for, without those that say that they have entered it."""
    return wait.missing if wait.key[2] is None else wait.missing & ~entered.get(wait.key, 0)


def what(wait: Wait) -> str:
    """The operation, in words: "all_reduce tag 'loss' #57"."""
    if wait.tag.startswith(("b'", 'b"')):
        return wait.op  # a tag of aiodist's own, which means nothing to the program
    tag = "" if wait.tag == "None" else f" tag {wait.tag}"
    return f"{wait.op}{tag}" if wait.seq is None else f"{wait.op}{tag} #{wait.seq}"
