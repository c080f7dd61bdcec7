"""The rounds of one part, as a member takes part in them: its call, the transfer, the results."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from aiodist.averaging.transfer import PartResiduals, Transfer
from aiodist.averaging.values import TreeForm
from aiodist.buffers.arrays import Flat
from aiodist.codecs.base import Codec
from aiodist.errors import MismatchError, StaleError, in_words
from aiodist.group import Group
from aiodist.wire import averaging as wire
from aiodist.wire.messages import MemberInfo, Message

log = logging.getLogger("aiodist.averaging")

REPORT_SECONDS = 0.02
"""Seconds in which reports of what has come are collected; the last one goes at once."""


RETOLD = 32
"""The most results of a part that a member names to a coordinator that is back."""


@dataclass(slots=True)
class AverageCall:
    """A call of `average`. `vectors`: what it contributes, with `included`, the contributions that
    were carried over to it. `after`: the result before the round that it is for (None: unknown).
    `withdrawal`: the coordinator's answer, if the call was given up."""

    number: int
    form: TreeForm
    vectors: list[Flat]
    weight: float
    done: asyncio.Future[SettledCall | None]
    included: Sequence[list[Flat]] = ()
    after: wire.Reached | None = None
    withdrawal: asyncio.Future[Message] | None = None
    is_withdrawn: bool = False

    def expire(self) -> None:
        """Its time is over."""
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class SettledCall:
    """How a call ends: with the result of a round. `late`: the call did not contribute to it.
    `before`: the result before, if the call was not the first."""

    outcome: wire.Outcome
    vectors: list[Flat]
    late: bool
    before: wire.Reached | None = None


@dataclass(slots=True)
class RunningRound:
    """A round that moves. `form`: that of its values."""

    decision: wire.AverageDecision
    group: Group
    transfer: Transfer
    form: TreeForm
    timer: asyncio.TimerHandle | None = None
    here: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def is_of(self, decision: wire.AverageDecision) -> bool:
        """Whether this is the round of `decision`, maybe with other members left out."""
        mine = self.decision
        # A restarted coordinator may count the attempts from 1 again.
        return (mine.round, mine.begun) == (decision.round, decision.begun)


def contributors(decision: wire.AverageDecision) -> tuple[str, ...]:
    """The ids of the members whose contributions count in a round."""
    return tuple(
        decision.members[one].id for one in decision.remaining if decision.weights[one] > 0
    )


class Ways(Protocol):
    """What a part needs of its member."""

    id: str

    def say(self, message: Message) -> None: ...

    def ask(self, message: Message) -> asyncio.Future[Message]: ...

    def meet(self, members: Sequence[MemberInfo], *words: str | int | bytes) -> Group: ...

    def part(self, group: Group) -> None: ...


@dataclass(slots=True)
class AverageSettings:
    """How a member averages. `keep`: how many results it keeps for others."""

    codec: Codec | None
    sums: bool
    carry: bool
    keep: int


@dataclass(slots=True)
class MemberPart:
    """`reached`: the last result that a call had; None: there was none. `floor`: the result before
    the last round in which a call failed, so that the next call misses no round. `begun`: the
    rounds after `reached` that were decided with a call of this member, the number of that call,
    and the digest of the round before. `call`: the one that waits. `offers`: calls whose
    contributions may count, by number. `ids`: those that this member has had. `is_owed`: the task
    of a call has not taken its result yet, and may turn out to be cancelled. `results`: the last
    rounds, by number, for members that ask for them. `form`: that of all results, once there is
    one. `carried`: contributions that are in no result, for later calls."""

    name: str
    ways: Ways
    settings: AverageSettings
    ids: set[str]
    reached: wire.Reached | None = None
    begun: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    call: AverageCall | None = None
    offers: dict[int, AverageCall] = field(default_factory=dict)
    running: RunningRound | None = None
    results: dict[int, tuple[wire.Outcome, list[Flat]]] = field(default_factory=dict)
    form: TreeForm | None = None
    carried: list[list[Flat]] = field(default_factory=list)
    floor: wire.Reached | None = None
    ready: deque[SettledCall] = field(default_factory=deque)  # results that no call has had yet
    is_owed: bool = False
    residuals: PartResiduals | None = None

    # Calls.

    def check(self, form: TreeForm) -> None:
        """Raise MismatchError if a call has another form than the results.

        The coordinator compares the forms of calls that it is offered. This one may get a result
        that is here already, or may include what an earlier call gave.
        """
        if self.form is not None and form.digest != self.form.digest:
            raise MismatchError(
                f"the values of part {self.name!r} are {self.form.text}, but this call gives"
                f" {form.text}. A part has the same keys, containers, shapes and dtypes in all"
                " rounds: give these, or use a part or an averager of another name",
                calls={},
            )

    def begin(self, call: AverageCall) -> None:
        """A call has been made."""
        self.call = call
        if self.is_owed:
            return  # until the earlier call takes its result, or gives it back for this one
        if self.ready:
            settled = self.ready.popleft()
            self._drop(call)
            self._end(SettledCall(settled.outcome, settled.vectors, late=True))
            return
        self.offers[call.number] = call
        self.offer(call, self.after)

    @property
    def after(self) -> wire.Reached | None:
        """The result after which a call is made. A first call that was decided on may be in the
        next round, and so must not be in a later one."""
        if self.reached is not None:
            return self.reached
        if not self.begun:
            return self.floor
        round = max(self.begun)
        return wire.Reached(round - 1, self.begun[round][1])

    def start_at(self, reached: wire.Reached) -> None:
        """Go on from the state of another member, whose last result was this one."""
        self.reached, self.floor = reached, None
        self.begun.clear()
        self.ready.clear()

    def left_over(self) -> list[list[Flat]]:
        """What the next call has to include. A call that was given up may still count, so what that
        one includes is not for the next one."""
        taken = {id(one) for call in self.offers.values() for one in call.included}
        return [one for one in self.carried if id(one) not in taken]

    def offer(self, call: AverageCall, after: wire.Reached | None) -> None:
        """Offer the contribution of a call to the round after `after`."""
        call.after = after
        form = call.form
        self.ways.say(
            wire.AverageOffer(self.name, call.number, after, call.weight, form.digest, form.text)
        )

    def give_up(self, call: AverageCall) -> asyncio.Future[Message]:
        """Withdraw a call, because no task waits for it any more. Return the answer. Idempotent.

        Its contribution counts in its round or in none.
        """
        if self.call is call:
            self.call = None
        if call.withdrawal is None:
            call.withdrawal = self.ways.ask(wire.AverageWithdraw(self.name, call.number))
            call.withdrawal.add_done_callback(partial(self._answered, call))
        return call.withdrawal

    def _answered(self, call: AverageCall, answer: asyncio.Future[Message]) -> None:
        if answer.cancelled() or answer.exception():
            return  # this member is lost, and so is its call
        reply = answer.result()
        assert isinstance(reply, wire.AverageWithdrawn)
        # The coordinator may not know of a decision, because the round is recorded by now, or
        # because the coordinator was restarted.
        begun = [number for number, _ in self.begun.values()]
        if call.number in self.offers and call.number not in begun and not reply.decided:
            self._withdrawn(call)

    def _withdrawn(self, call: AverageCall) -> None:
        """The contribution of a call that was given up counts in no round, and is not carried
        over."""
        del self.offers[call.number]
        call.is_withdrawn = True

    def _drop(self, call: AverageCall) -> None:
        """The contribution of a call does not count."""
        self.offers.pop(call.number, None)
        if self.settings.carry and call.weight > 0:
            self._used(call)
            self.carried.append(call.vectors)

    def _counted(self, number: int) -> None:
        """The contribution of a call is in a result."""
        call = self.offers.pop(number, None)
        if call is not None:
            self._used(call)

    def _used(self, call: AverageCall) -> None:
        """What a call includes is not carried any more."""
        included = {id(one) for one in call.included}
        self.carried = [one for one in self.carried if id(one) not in included]

    def _end(self, settled: SettledCall) -> None:
        call, self.call = self.call, None
        assert call is not None
        call.done.set_result(replace(settled, before=self.reached))
        self.reached = settled.outcome.reached
        self.is_owed = True

    def taken(self) -> None:
        """A call has its result, so the next one may begin."""
        self.is_owed = False
        if self.call is not None and not self.call.done.done():
            self.begin(self.call)

    def give_back(self, settled: SettledCall) -> None:
        """A call was cancelled when its result was there already: the next one gets it."""
        self.ready.appendleft(replace(settled, late=True))
        self.reached = settled.before
        self.taken()

    def fail(self, error: BaseException) -> None:
        """The call fails."""
        call, self.call = self.call, None
        if call is not None:
            self.offers.pop(call.number, None)
            if not call.done.done():
                call.done.set_exception(error)

    # What the coordinator tells.

    def decided(self, decision: wire.AverageDecision) -> None:
        ids = [info.id for info in decision.members]
        if self.ways.id not in ids:
            return
        me = ids.index(self.ways.id)
        running = self.running
        call = self.offers.get(decision.calls[me])
        if call is not None:
            call.after = decision.before
        if me not in decision.remaining:
            self.stop()
            # Its call may still count if too few others remain, so that the round opens again.
            self.begun.pop(decision.round, None)
            if call is None and self.call is not None and not self.call.done.done():
                self.offer(self.call, self.after)  # the decision was about an earlier one
            return
        if running is not None and running.decision == decision:
            self._report(running)  # to a coordinator that is back
            return
        if running is not None and not running.is_of(decision):
            self.stop()
            running = None
        if running is None:
            if call is None:
                held = 0 if self.reached is None else self.reached.round
                if decision.round > max(held, *self.results, 0):
                    # It was given up, and the decision was not known then.
                    said = wire.AverageLacks(self.name, decision.round, decision.attempt)
                    self.ways.say(said)
                return
            running = self.running = self._started(decision, call)
            self.begun[decision.round] = (call.number, decision.parent)
        running.decision = decision
        try:
            running.transfer.begin(decision.attempt - decision.begun, decision.remaining)
        except BaseException as error:  # a codec may raise anything
            self._on_failed(error)

    def _started(self, decision: wire.AverageDecision, call: AverageCall) -> RunningRound:
        words = ("round", self.name, decision.round, decision.begun)
        group = self.ways.meet(decision.members, *words)
        codec = self.settings.codec
        form = call.form
        # Before a round is recorded, a part may take another form.
        is_fit = self.residuals is not None and self.residuals.form == form.digest
        if codec is not None and codec.error_feedback and not is_fit:
            sizes = [one.size for one in call.vectors]
            self.residuals = PartResiduals.none(form.digest, form.names, sizes)
        transfer = Transfer(
            group,
            decision.weights,
            call.vectors,
            form.names,
            codec=codec,
            residuals=self.residuals,
            sums=self.settings.sums,
            report=self._on_report,
            failed=self._on_failed,
        )
        return RunningRound(decision, group, transfer, form)

    def _on_failed(self, error: BaseException) -> None:
        """The codec has raised an error. The call fails, and the others go on without it."""
        running = self.running
        assert running is not None
        self.stop()
        decision = running.decision
        self.begun.pop(decision.round, None)
        self.floor = decision.before
        call = self.offers.pop(self._call_in(decision), None)
        if call is not None and call is self.call:
            self.fail(error)
        else:  # no task waits for it
            log.error("a call that was given up has failed: %s", in_words(error), exc_info=error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise error
        self.ways.say(wire.AverageLacks(self.name, decision.round, decision.attempt))

    def _call_in(self, decision: wire.AverageDecision) -> int:
        """The number of this member's call that is in a round."""
        ids = [info.id for info in decision.members]
        return decision.calls[ids.index(self.ways.id)]

    def _on_report(self, contributions: tuple[int, ...], means: tuple[int, ...]) -> None:
        running = self.running
        if running is None:  # within its first `begin`
            return
        running.here = (contributions, means)
        if running.transfer.is_held:
            self._report(running)
        elif running.timer is None:
            loop = asyncio.get_running_loop()
            running.timer = loop.call_later(REPORT_SECONDS, self._report, running)

    def _report(self, running: RunningRound) -> None:
        if running.timer is not None:
            running.timer.cancel()
            running.timer = None
        if running is self.running:
            said = running.decision
            self.ways.say(wire.AverageProgress(self.name, said.round, said.attempt, *running.here))

    def done(self, outcome: wire.Outcome) -> None:
        """A round is recorded."""
        running = self.running
        if running is None or running.decision.round != outcome.round:
            return
        if not (running.transfer.is_held and contributors(running.decision) == outcome.ids):
            self.stop()  # the others went on without this member
            if self.call is not None and not self.call.done.done():
                self.offer(self.call, outcome.before)
            return
        self.running = None
        results = running.transfer.results
        if self.residuals is not None:
            self.residuals = running.transfer.lost()
        self._close(running)
        number = self._call_in(running.decision)
        self._counted(number)
        self.take(outcome, results, number, running.form)

    def take(
        self, outcome: wire.Outcome, vectors: list[Flat], number: int | None, form: TreeForm
    ) -> None:
        """The result of a round is here. `number`: the call whose contribution is in it."""
        self.form = self.form or form
        self.results[outcome.round] = (outcome, vectors)
        self.begun = {round: one for round, one in self.begun.items() if round > outcome.round}
        self.trim()
        call = self.call
        for other in [one for one in self.offers.values() if one is not call]:
            self._withdrawn(other)  # it was given up, and each call belongs to one round
        if call is not None:
            try:
                self.check(call.form)
            except MismatchError as error:  # it came before the coordinator has refused the call
                self.fail(error)
                call = None
        if call is None or call.done.done():  # it was cancelled
            newest = self.ready[-1].outcome.reached if self.ready else self.reached
            if newest is None or newest.digest == outcome.parent:
                self.ready.append(SettledCall(outcome, vectors, late=True))
            return
        late = call.number != number
        if late:
            self._drop(call)
        self._end(SettledCall(outcome, vectors, late))

    def trim(self) -> None:
        """Keep no more results than others may ask for."""
        while len(self.results) > max(1, self.settings.keep):
            del self.results[next(iter(self.results))]

    def fetched(self, outcome: wire.Outcome, vectors: list[Flat]) -> None:
        """A result has come from another member."""
        if self.running is not None and self.running.decision.round <= outcome.round:
            self.stop()
        call, reached = self.call, self.reached or self.floor
        if call is None or call.done.done():
            return
        if call.after != outcome.before:
            # The result was owed to an earlier call, and the coordinator may have this one in a
            # later round. Or the result is of another history. So offer it for this round: the
            # coordinator takes it out of later ones, or says what is wrong.
            if reached is None or outcome.round == reached.round + 1:
                self.offer(call, self.after or outcome.before)
            return
        number = None
        if outcome.round in self.begun and self.ids & {*outcome.ids}:
            number, _ = self.begun[outcome.round]
            self._counted(number)  # under an id that this member has lost
        self.take(outcome, vectors, number, call.form)

    def reopened(self, round: int) -> None:
        """The decision about a round holds no longer. Offer the contribution again, because it is
        in no round."""
        self.begun.pop(round, None)
        if self.running is not None:
            if self.running.decision.round != round:
                return
            self.stop()
        if self.call is not None and not self.call.done.done():
            self.offer(self.call, self.after)

    def refused(self, refused: wire.AverageRefused) -> None:
        if refused.stale is not None:
            self.results.clear()  # they are too old for others, or of another history
        call = self.call
        if call is None or (refused.call and refused.call != call.number):
            self.offers.pop(refused.call, None)
            return
        self.fail(
            StaleError(refused.text, round=refused.stale)
            if refused.stale is not None
            else MismatchError(refused.text, calls={})
        )

    def stop(self) -> None:
        """Give up a transfer that is under way."""
        running, self.running = self.running, None
        if running is not None:
            self._close(running)

    def _close(self, running: RunningRound) -> None:
        if running.timer is not None:
            running.timer.cancel()
        running.transfer.close()
        self.ways.part(running.group)

    # Coming back.

    def expelled(self) -> None:
        """This member was ruled lost. What it had contributed may count or not. Only the call that
        waits will be told, so the others are forgotten, with what they include, because nothing may
        count twice."""
        self.stop()
        for call in list(self.offers.values()):
            if call is not self.call:
                self._counted(call.number)

    def known(self) -> tuple[list[wire.Outcome], list[wire.AverageDecision]]:
        """What a coordinator that lost its memory has to know."""
        outcomes = [outcome for outcome, _ in list(self.results.values())[-RETOLD:]]
        return outcomes, [] if self.running is None else [self.running.decision]

    def again(self) -> None:
        """Say once more what a coordinator that is back may not have heard."""
        running = self.running
        moving: set[int] = set()
        if running is not None:
            moving.add(self._call_in(running.decision))
            self._report(running)
        for call in list(self.offers.values()):
            if call is self.call and call.number not in moving:
                self.offer(call, self.after)
