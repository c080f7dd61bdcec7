"""Faults of the design, one at a time: a rule of a protocol that is left out.

A line of code with a typo is one thing; a protocol that forgets a rule is another, because its code
looks right. Each fault here takes one rule away, by replacing a text that stands once in one file,
and names the proofs that should find it, the quickest first. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS = "random programs"
"""The proof that is no test: random programs of simulated ranks."""


@dataclass(frozen=True)
class DesignFault:
    """A rule that is left out: `what`. `before` stands once in `file`, and becomes `after`.

    `proofs`: arguments for pytest, or PROGRAMS.
    """

    what: str
    file: str
    before: str
    after: str
    proofs: tuple[str, ...]

    def apply(self, source: str) -> str:
        """Raises ValueError if the text does not stand there once."""
        count = source.count(self.before)
        if count != 1:
            raise ValueError(f"{self.what}: the text stands {count} times in {self.file}")
        return source.replace(self.before, self.after)


def _unit(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/{name}" for name in names)


def _membership(*names: str) -> tuple[str, ...]:
    """These modules first, then all of the room."""
    return (*[f"tests/unit/membership/test_{name}.py" for name in names], "tests/unit/membership")


ROUNDS = ("tests/unit/membership/test_rounds.py", "tests/simulation/test_averaging.py")
HISTORIES = (
    "tests/unit/membership/test_averaging_histories.py",
    "tests/simulation/test_averaging_followers.py",
)
AVERAGING = ("tests/unit/membership/test_averaging.py", "tests/simulation/test_averaging.py")

FAULTS = (
    # Which ranks live, and which ranks hear of a loss.
    DesignFault(
        "a sign of life does not renew the lease",
        "aiodist/membership/machine.py",
        "        self._seating.renew(conn)\n        handler(conn, request, message)",
        "        handler(conn, request, message)",
        (*_membership("machine_leaving"), PROGRAMS),
    ),
    DesignFault(
        "the coordinator keeps a lease ten times as long as the member asked for",
        "aiodist/membership/seating.py",
        "self.now + group.leases[conn])",
        "self.now + 10 * group.leases[conn])",
        (*_membership("machine_leaving"), PROGRAMS),
    ),
    DesignFault(
        "a loss is not told to the other members",
        "aiodist/membership/seating.py",
        "        for other in group.members:\n            self.send(other, 0, message)\n"
        "        self.settle(group)",
        "        self.settle(group)",
        (*_membership("machine_leaving"), PROGRAMS),
    ),
    DesignFault(
        "a member that is ruled lost is not turned away (no fence)",
        "aiodist/membership/seating.py",
        "            self.turn_away(conn, reason)\n            if conn in group.joiners:",
        "            if conn in group.joiners:",
        (*_membership("machine_leaving"), PROGRAMS),
    ),
    DesignFault(
        "a member that was ruled lost may come back",
        "aiodist/membership/returning.py",
        "    if claim.rank in group.lost:",
        "    if False:",
        _membership("returning"),
    ),
    DesignFault(
        "a member of a group that has ended brings it back to life",
        "aiodist/membership/returning.py",
        "        if ended is not None and claim.epoch <= ended:",
        "        if False:",
        _membership("returning"),
    ),
    DesignFault(
        "two views of one epoch are not compared",
        "aiodist/membership/returning.py",
        "    if claim.digest != view.digest or not _is(view, claim):",
        "    if not _is(view, claim):",
        _membership("returning"),
    ),
    DesignFault(
        "a member of an older epoch is let in, though the group went on without it",
        "aiodist/membership/returning.py",
        "    if claim.epoch < view.epoch:\n        return Refused(",
        "    if claim.epoch < view.epoch - 1000:\n        return Refused(",
        _membership("returning"),
    ),
    DesignFault(
        "the end of a connection that was replaced counts as the death of its member",
        "aiodist/membership/seating.py",
        "            member = group.members.pop(before)\n            self._replace(before, group)",
        "            member = group.members.pop(before)",
        _membership("rejoining"),
    ),
    DesignFault(
        "a coordinator that lost its memory forms groups before members can come back",
        "aiodist/membership/seating.py",
        "        if group.is_full and self.now >= self._form_after:",
        "        if group.is_full:",
        _membership("machine_restarts"),
    ),
    DesignFault(
        "what a returning member knows of losses is not taken over",
        "aiodist/membership/rejoining.py",
        "            self._learn(group, conn, claim)\n",
        "",
        _membership("rejoining"),
    ),
    DesignFault(
        "a member hears of the same loss twice, from the coordinator and its successor",
        "aiodist/control/standing.py",
        "        news = {*ranks} - self._lost - self._left",
        "        news = {*ranks}",
        _unit("control"),
    ),
    DesignFault(
        "a member follows a coordinator that is older than the one before",
        "aiodist/control/standing.py",
        "        if welcome.incarnation >= before.incarnation:",
        "        if True:",
        _unit("control"),
    ),
    # Votes.
    DesignFault(
        "a vote is decided while a voter may still come back",
        "aiodist/membership/ballots.py",
        "            return len(self.votes) == len(members) and not absent",
        "            return len(self.votes) == len(members)",
        _membership("ballots"),
    ),
    DesignFault(
        "the outcome of a vote is not remembered for a voter that asks again",
        "aiodist/membership/ballots.py",
        (
            "        self._remember(ballot.key, ballot.voters, ballot.call, outcome)\n"
            "        return [Answer"
        ),
        "        return [Answer",
        _membership("ballots"),
    ),
    DesignFault(
        "outcomes that returning members have heard are not learned",
        "aiodist/membership/rejoining.py",
        "        self._recovery.learn(group, claim.heard)\n",
        "",
        _membership("recovery_restarts"),
    ),
    DesignFault(
        "one vote for yes is enough",
        "aiodist/membership/ballots.py",
        "        return all(vote.flag for _, vote in self.votes.values())",
        "        return any(vote.flag for _, vote in self.votes.values())",
        (*_membership("ballots"), PROGRAMS),
    ),
    DesignFault(
        "votes for different things are counted together",
        "aiodist/membership/ballots.py",
        "        if differs or vote.call != ballot.call:",
        "        if differs:",
        _membership("ballots"),
    ),
    # The store.
    DesignFault(
        "a write whose answer was lost is carried out twice",
        "aiodist/membership/store.py",
        "        if known is not None:\n            return known\n",
        "",
        _membership("store"),
    ),
    DesignFault(
        "a watch that goes on after a restart does not hear what it missed",
        "aiodist/membership/store.py",
        "                if again:",
        "                if False:",
        _membership("store"),
    ),
    # Collectives.
    DesignFault(
        "a rank that gives up does not tell the others",
        "aiodist/engine/ends.py",
        "                partial(self.relay.tell, (op.tag, op.seq), verdict),\n",
        "",
        (*_unit("engine"), PROGRAMS),
    ),
    DesignFault(
        "a verdict is not passed on to ranks that its sender cannot reach",
        "aiodist/engine/verdict_relay.py",
        "        self._tell(key, verdict, [peer for peer in untold if peer != src])\n",
        "",
        _unit("engine/test_verdict_relay.py"),
    ),
    DesignFault(
        "the verdicts of a rank that dies are not told for it",
        "aiodist/engine/verdict_relay.py",
        "        for key, verdict in self._heard.pop(src, ()):\n"
        "            self._tell(key, verdict, range(self._party.size))",
        "        self._heard.pop(src, ())",
        _unit("engine/test_verdict_relay.py"),
    ),
    DesignFault(
        "a verdict on a collective that was not called yet is forgotten",
        "aiodist/engine/arrivals.py",
        "                self.verdicts[key] = verdict\n"
        "                self._verdict_bytes += _size(key, verdict)\n",
        "                pass\n",
        (*_unit("engine"), PROGRAMS),
    ),
    DesignFault(
        "what ranks have called is not compared",
        "aiodist/engine/arrivals.py",
        "        if unmarked(call) != op.call:\n            self._calls.ends.differ",
        "        if False:\n            self._calls.ends.differ",
        (*_unit("engine"), PROGRAMS),
    ),
    DesignFault(
        "a rank says that it has entered a collective that it has not called",
        "aiodist/engine/arrivals.py",
        "        entered = calls.find(key) is not None or calls.tags.has_entered(*key)",
        "        entered = True",
        (*_unit("engine"), PROGRAMS),
    ),
    DesignFault(
        "the proof of a caller is not checked",
        "aiodist/links/greeting.py",
        "        return check_proof(mac,",
        "        return True or check_proof(mac,",
        _unit("links/test_greeting.py"),
    ),
    DesignFault(
        "a rank that was removed names the peer that refuses it",
        "aiodist/links/caller.py",
        "                    if answer.why.startswith(LOST_CALLER):",
        "                    if False:",
        ("tests/simulation/test_who_is_lost.py",),
    ),
    DesignFault(
        "a connection takes over though frames were lost between the two",
        "aiodist/links/peer.py",
        " and old.can_go_on(theirs.came)",
        "",
        ("tests/simulation/test_broken_links.py", *_unit("links"), PROGRAMS),
    ),
    # Averaging.
    DesignFault(
        "a round is recorded when one member holds the result, and not all",
        "aiodist/membership/rounds.py",
        "        return all(\n            one in self.got and full",
        "        return any(\n            one in self.got and full",
        ROUNDS,
    ),
    DesignFault(
        "reports on an attempt that is over count for the new one",
        "aiodist/membership/rounds.py",
        "        if moving is None or (moving.round, moving.attempt) != (round, attempt):",
        "        if moving is None or moving.round != round:",
        ROUNDS,
    ),
    DesignFault(
        "a member that has nothing of its call does not say so",
        "aiodist/averaging/parts.py",
        "                    self.ways.say(said)\n",
        "                    pass\n",
        ("tests/simulation/test_averaging_away.py",),
    ),
    DesignFault(
        "a second decision does not ask for the quorum",
        "aiodist/membership/rounds.py",
        "            if len(moving.sources) < self.quorum:",
        "            if False:",
        ROUNDS,
    ),
    DesignFault(
        "the second decision of a round is not written down",
        "aiodist/membership/averaging.py",
        "                self._books.write(record)\n                for who in outcome.offers:",
        "                if outcome.attempt == outcome.begun:\n"
        "                    self._books.write(record)\n                for who in outcome.offers:",
        AVERAGING,
    ),
    DesignFault(
        "a late contribution counts in the next round as well",
        "aiodist/membership/rounds.py",
        "after.round < self.round:\n            self._forget(member)",
        "after.round < self.round - 1:\n            self._forget(member)",
        ROUNDS,
    ),
    DesignFault(
        "a member of another history is taken for one of this",
        "aiodist/membership/rounds.py",
        "        return reached.round > self.round or known != reached.digest",
        "        return False",
        (*ROUNDS, *HISTORIES),
    ),
    DesignFault(
        "a part does not go back if all that had its last result are lost",
        "aiodist/membership/histories.py",
        "        if room.is_known(name):\n            if rounds.orphaned",
        "        if True:\n            if rounds.orphaned",
        HISTORIES,
    ),
    DesignFault(
        "a call that was decided on may be withdrawn",
        "aiodist/membership/rounds.py",
        "in moving.remaining and moving.offers[member].call == call",
        "in moving.remaining and False",
        (*ROUNDS, *AVERAGING),
    ),
    DesignFault(
        "the numbers of attempts begin anew after a restart",
        "aiodist/membership/rounds.py",
        "        self.attempts = max(self.attempts, attempts)",
        "        pass",
        (*ROUNDS, *AVERAGING),
    ),
    # Channels.
    DesignFault(
        "the base of a difference is not compared with what the subscriber has",
        "aiodist/channels/changes.py",
        "        return found[::-1] if at == base and sum(",
        "        return found[::-1] if sum(",
        _unit("channels/test_changes.py"),
    ),
    DesignFault(
        "a version number may be published again with other bytes",
        "aiodist/channels/directory.py",
        "    if taken and version <= max(taken):",
        "    if taken and version < max(taken):",
        _unit("channels/test_directory.py"),
    ),
)
