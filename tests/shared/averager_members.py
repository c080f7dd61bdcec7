"""Members of an averager at a coordinator without I/O, for tests of `aiodist.membership`."""

from __future__ import annotations

from typing import Any

from aiodist.membership.effects import Received
from aiodist.membership.records import decode_records, encode_record
from aiodist.wire import averaging as a
from aiodist.wire.messages import EpochView, JoinRequest, Message
from aiodist.wire.returning import Rejoin, Rejoined

RULES = a.Rules(2, 1.0, "AVG", "")
LEASE = 6.0


class Members:
    """Members of one averager by number; `told(n)` is what member n was told since."""

    def __init__(self, world: Any, rules: a.Rules = RULES) -> None:
        self.world = world
        self.rules = rules
        self.views: dict[int, EpochView] = {}
        self._reached = {0: a.Reached(0, b"")}  # by round: what members have heard of it

    def ask(self, number: int) -> JoinRequest:
        group = a.own_group("outer", f"{number:024x}")
        name, lease = f"m{number}", LEASE
        return JoinRequest(group=group, id=f"id{number}", rank=0, size=1, name=name, lease=lease)

    def join(self, number: int) -> None:
        self.views[number] = self.world.say(number, self.ask(number))

    def enter(self, *numbers: int, **fields: Any) -> Any:
        answer = None
        for number in numbers:
            if number not in self.views:
                self.join(number)
            answer = self.world.say(number, self.entrance(**fields))
        return answer

    def entrance(self, **fields: Any) -> a.AverageEnter:
        fields = {"rules": self.rules, "parts": ("",), "keep": 1, **fields}
        newest = {one.part: one.reached for one in fields.get("outcomes", ())}
        fields.setdefault("reached", tuple(map(newest.get, fields["parts"])))
        return a.AverageEnter(**fields)

    def offer(self, number: int, call: int = 1, after: int | None = None, **fields: Any) -> Any:
        fields = {"part": "", "weight": 1.0, "form": b"f", "text": "float32[3]", **fields}
        reached = None if after is None else self.reached(after)
        return self.told(number, a.AverageOffer(call=call, after=reached, **fields))

    def reached(self, round: int) -> a.Reached:
        return self._reached.get(round, a.Reached(round, digest(round)))

    def say(self, number: int, message: Message) -> None:
        self.world.step(Received(number, 7, message))

    def told(self, number: int, message: Message | None = None) -> list[Message]:
        if message is not None:
            self.say(number, message)
        told = [one for _, one in self.world.mail.pop(number, [])]
        for one in told:
            if isinstance(one, a.AverageDone):
                self._reached[one.outcome.round] = one.outcome.reached
        return told

    def close(self, *numbers: int, call: int = 1, after: int | None = None) -> a.AverageDecision:
        """These are all, and contribute."""
        for number in numbers:
            self.say(number, self.offered(call, after))
        decisions = [self.told(number)[-1] for number in numbers]
        assert all(one == decisions[0] for one in decisions)
        [decision] = decisions[:1]
        assert isinstance(decision, a.AverageDecision)
        return decision

    def offered(self, call: int, after: int | None) -> a.AverageOffer:
        reached = None if after is None else self.reached(after)
        return a.AverageOffer("", call, reached, 1.0, b"f", "float32[3]")

    def asked(self, round: int) -> a.AverageElect:
        return a.AverageElect((self.reached(round),))

    def kept(self, round: int) -> a.AverageStateKept:
        return a.AverageStateKept((self.reached(round),))

    def hold(self, decision: a.AverageDecision, *numbers: int) -> None:
        every = decision.remaining
        done = a.AverageProgress("", decision.round, decision.attempt, every, every)
        for number in numbers:
            self.say(number, done)


def digest(round: int) -> bytes:
    return b"%d" % round if round else b""


def outcome(round: int, *numbers: int) -> a.Outcome:
    """A round of which the coordinator has not heard."""
    ids = tuple(f"id{one}" for one in numbers)
    names = tuple(f"m{one}" for one in numbers)
    weights = (1.0,) * len(numbers)
    return a.Outcome("", round, digest(round - 1), digest(round), ids, names, weights)


def restarted(members: Members, *, file: bool, snapshot: bool = False) -> None:
    """Another coordinator takes over: with what was written down (`snapshot`: anew), or without."""
    world = members.world
    after = type(world)(wall_offset=1000.0 + world.now, keep=True)
    if file:
        records = list(world.machine.records())
        if snapshot:
            world.kept = b"".join(map(encode_record, records))
        after.machine.restore(decode_records(world.kept), 0.0)
        assert sorted(map(repr, after.machine.records())) == sorted(map(repr, records))
        after.kept = b"".join(map(encode_record, records))
    members.world = after


def back(members: Members, number: int, **fields: Any) -> list[Message]:
    """A member comes back to it, over the connection of the same number."""
    view = members.views[number]
    claim = Rejoin(members.ask(number), 0, view.epoch, view.digest, (), (), view)
    assert isinstance(members.world.say(number, claim), Rejoined)
    return members.told(number, members.entrance(**fields))
