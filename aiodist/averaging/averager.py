"""`aiodist.averager`: the mean of arrays of members that come and go."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import numpy as np

from aiodist import timeouts
from aiodist.averaging.connection import PATIENCE, MemberConnection, log
from aiodist.averaging.kept import AveragerState, Kept, check_travels, copy_of, unpacked
from aiodist.averaging.parts import AverageCall, AverageSettings, MemberPart
from aiodist.averaging.values import TreeForm, added, all_finite, checked_weight
from aiodist.codecs.base import Codec, codec_of
from aiodist.composing import started
from aiodist.control import averaging as control
from aiodist.control.client import WITHDRAW_SECONDS
from aiodist.errors import (
    AiodistError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupClosedError,
    QuorumLostError,
    in_words,
)
from aiodist.types import ChannelOptions, ReduceOp
from aiodist.wire import averaging as wire
from aiodist.wire.limits import MAX_MEMBERS, MAX_NAME, MAX_SECONDS
from aiodist.work import Unseen

MAX_FLOAT32 = float(np.finfo(np.float32).max)

NOTHING = wire.Reached(0, b"")
"""What a part has reached that has had no result."""

OPS = {"AVG": ReduceOp.AVG, "SUM": ReduceOp.SUM}
"""What can be asked for, by name."""


def averager(
    averager: str,
    /,
    *,
    address: str | None = None,
    quorum: int = 1,
    grace: float | Literal["auto"] = "auto",
    codec: Codec | None = None,
    op: ReduceOp = ReduceOp.AVG,
    parts: Iterable[str] = ("",),
    carry: bool = False,
    max_stale: int = 1,
    allow_nonfinite: bool = False,
    op_timeout: float = 300.0,
    **options: Unpack[AveragerOptions],
) -> Averager:
    """Average arrays with members that come and go: ``async with aiodist.averager("outer",
    address=…, quorum=3) as avg: mean = await avg.average(delta)``.

    There is no group, no rank and no size. A round closes when at least `quorum` members have
    contributed, and either all members that are present have, or another `grace` seconds have
    passed. So one slow member costs the others `grace` seconds a round, and a dead one nothing.

    Args:
        averager: which one: a name of 1 to 128 characters. All members give the same.
        address: that of a coordinator, as for `aiodist.connect` (None: from the environment).
        quorum: the fewest members that must contribute to a round. All members give the same.
        grace: seconds that a round waits for more members after that. "auto": a quarter of the
            median length of the last eight rounds, 1 s at first. All members give the same.
        codec: how float32, float16 and bfloat16 arrays travel in fewer bytes (`aiodist.codecs`);
            float64 arrays travel as they are. All members give the same.
        op: `aiodist.ReduceOp.AVG`, the mean by weight, or ``SUM``, the sum of values times weights.
        parts: the parts that this member takes part in. Each has rounds of its own, and waits only
            for members that take part in it.
        carry: add a contribution whose call returned `late` to the next one of a weight above 0.
            Only for differences, because parameters would count twice.
        max_stale: how many rounds this member may miss and still get their results.
        allow_nonfinite: take NaN and infinities, which make the mean the same for all.
        op_timeout: seconds that `average` and `state` wait if they are given no timeout.
        options: those of `aiodist.connect`, such as `name`, `token`, `ssl`, `lease` and
            `transports`. No two members that are alive may have the same `name`.

    Entering raises what `aiodist.connect` does; MismatchError if other members gave another quorum,
    grace, op or codec; JoinError if a member of the same name is alive.

    For example::

        async with aiodist.averager("outer", address=group.address, quorum=2) as avg:
            mean = await avg.average(np.full(3, float(group.rank)), weight=1.0)
            print(mean.value, mean.contributors)
    """
    if type(quorum) is not int or not 1 <= quorum <= MAX_MEMBERS:
        raise ValueError(f"quorum is an int from 1 to {MAX_MEMBERS}, not {quorum!r}")
    if grace != "auto" and not (timeouts.is_number(grace) and 0 <= grace <= MAX_SECONDS):
        raise ValueError(f"grace is seconds from 0 to {MAX_SECONDS:g}, or 'auto', not {grace!r}")
    if type(max_stale) is not int or not 0 <= max_stale <= wire.MAX_KEEP:
        raise ValueError(f"max_stale is an int from 0 to {wire.MAX_KEEP}, not {max_stale!r}")
    wanted = next((known for known, one in OPS.items() if one is op), None)
    if wanted is None:
        raise ValueError(f"op is ReduceOp.AVG or ReduceOp.SUM, not {op!r}")
    if codec is not None:
        codec = codec_of(codec)
    named = _checked_parts(parts)
    timeouts.check_seconds("op_timeout", op_timeout)
    seconds = None if grace == "auto" else float(grace)
    said = "" if codec is None else codec.name
    rules = wire.Rules(quorum, seconds, wanted, said)
    settings = AverageSettings(codec, wanted == "SUM", carry, max_stale)
    connection = MemberConnection(averager, address, options)
    return Averager(connection, rules, named, settings, max_stale, allow_nonfinite, op_timeout)


def _checked_parts(parts: Iterable[str]) -> tuple[str, ...]:
    if isinstance(parts, str):
        raise TypeError(f"parts are several names, such as ({parts!r},)")
    named = tuple(dict.fromkeys(parts))
    if not 0 < len(named) <= wire.MAX_PARTS:
        raise ValueError(f"there are 1 to {wire.MAX_PARTS} parts, not {len(named)}")
    for part in named:
        if type(part) is not str or len(part) > MAX_NAME:
            raise ValueError(f"a part has a name of at most {MAX_NAME} characters, not {part!r}")
    return named


class AveragerOptions(ChannelOptions, total=False):
    """Options of `aiodist.averager`, which are those of `aiodist.connect`."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """What a round gave.

    Attributes:
        value: the tree, with new arrays of the dtypes that were given.
        round: the number of the round, from 1 on, in its part.
        contributors: the names of the members that are in it, in the order in which they came.
        weights: their weights.
        late: whether the call did not contribute, because the round was decided before.

    For example::

        async with aiodist.averager("outer", address=group.address) as avg:
            found = await avg.average(np.ones(3), weight=2.0)
            assert found.weights[found.contributors.index(avg.name)] == 2.0
    """

    value: Any
    round: int
    contributors: tuple[str, ...]
    weights: tuple[float, ...]
    late: bool


class Averager:
    """A member of an averager. Made by `aiodist.averager`, for use by ``async with``."""

    def __init__(
        self,
        connection: MemberConnection,
        rules: wire.Rules,
        parts: tuple[str, ...],
        settings: AverageSettings,
        max_stale: int,
        allow_nonfinite: bool,
        op_timeout: float,
    ) -> None:
        self._connection = connection
        self._rules = rules
        self._settings = settings
        self._max_stale = max_stale
        self._allow_nonfinite = allow_nonfinite
        self._op_timeout = op_timeout
        self._ids: set[str] = set()
        self._numbers = itertools.count(1)
        self._parts: dict[str, MemberPart] = {
            part: MemberPart(part, connection, settings, self._ids) for part in parts
        }
        self._kept: Kept | None = None  # what this member gives to others
        self._fetches: dict[str | None, asyncio.Task[None]] = {}  # the newest of each part
        self._serves: dict[asyncio.Task[None], None] = {}
        self._unseen = Unseen()
        # Calls that wait for a state, of another member or of this one.
        self._states: set[asyncio.Future[Kept]] = set()
        connection.enter = self._enter
        connection.entered = self._entered
        connection.told = self._told
        connection.expelled = self._expelled
        connection.failed = self._failed

    async def __aenter__(self) -> Averager:
        await self._connection.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is not None:  # a program that leaves by an exception is not warned
            self._unseen.mute()
        await self._connection.close()

    # What it is.

    @property
    def name(self) -> str:
        """The name of this member, as `contributors` shows it. Raises RuntimeError before the
        entrance."""
        self._connection.check_entered()
        return self._connection.info.name

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that this member takes part in, in the order in which it named them."""
        return tuple(self._parts)

    @property
    def rounds(self) -> dict[str, int]:
        """The round of the last result of each part, of those that have had one."""
        return {part: one.round for part, one in self._reached.items() if one.round}

    @property
    def _reached(self) -> dict[str, wire.Reached]:
        return {name: part.reached or NOTHING for name, part in self._parts.items()}

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Bytes that this member has sent to others, and received from them."""
        return self._connection.bytes_moved

    # Averaging.

    @started
    async def average(
        self, tree: Any, *, weight: float = 1.0, part: str = "", timeout: float | None = None
    ) -> Averaged:
        """Contribute `tree` to the next round, and get what the round gives.

        The call belongs to the round after this member's last result. If that is decided, it gets
        the result at once, with `late` set, and its own contribution is not in it. The contribution
        is copied within the call, so you may change the arrays afterwards. Sums are made in float32
        (of float64 arrays in float64), in the order of members, and rounded once. All members get
        the same bits.

        A call that is cancelled, or whose time is over, is withdrawn. If its round is decided, the
        next call gets that result, with `late` set, and `contributors` says whether it counted.

        Args:
            tree: dicts, lists and tuples of float arrays (numpy, torch), of any shape.
            weight: how much it counts, from 0 on. A member of weight 0 only receives, and does not
                count for the quorum.
            part: which part, of those that were named at the entrance.
            timeout: seconds; None: `op_timeout`; `math.inf`: no limit. A coordinator that says
                nothing adds 2 s.

        Raises:
            TypeError: a leaf is no float array.
            ValueError: a weight below 0, values that are not finite, or an unknown part. Also a
                weight over the range of float32, if `op` is ``SUM`` and arrays are not float64.
            RuntimeError: another call for this part is under way, or there was no ``async with``.
            MismatchError: keys, containers, shapes or dtypes are not those of the other members,
                or of earlier rounds of this part, because a part always has the same.
            StaleError: more than `max_stale` rounds were missed, or the last ones were decided
                again without this member. Each call raises it until this member has taken a
                state (`state`), or has left and entered the averager again.
            QuorumLostError: there were fewer members than the quorum until `timeout`.
            CollectiveTimeoutError: no round closed until `timeout`; `missing` names the members
                that have not contributed meanwhile.
            Exception: what `codec` raised, if it is one of yours. The others go on without this
                call.

        For example::

            async with aiodist.averager("outer", address=group.address) as avg:
                mean = await avg.average({"w": np.ones(3, np.float32)}, weight=128)
                print(mean.value["w"], mean.round, mean.late)
        """
        weight = checked_weight(weight)
        timeouts.check_timeout(timeout)
        seconds = self._op_timeout if timeout is None else timeout
        self._connection.check()
        found = self._parts.get(part)
        if found is None:
            known = ", ".join(map(repr, self._parts))
            raise ValueError(
                f"this member does not take part in {part!r}, but in {known}: name all parts at"
                " the entrance (`parts=`)"
            )
        if found.call is not None and found.call.done.done():
            found.give_up(found.call)  # it was cancelled in this turn of the loop
        if found.call is not None:
            raise RuntimeError(
                f"another call for part {part!r} is under way: await it first, or use other parts"
            )
        form = TreeForm(tree, coded=self._settings.codec is not None)
        found.check(form)
        if self._settings.sums and weight > MAX_FLOAT32 and form.names != ["float64"]:
            raise ValueError(
                f"weight is at most {MAX_FLOAT32:g} for sums, which are made in float32, not"
                f" {weight:g}: give float64 arrays, or scale the values"
            )
        vectors = form.copy()
        if not self._allow_nonfinite and not all_finite(vectors, form.names):
            raise ValueError(
                "value: it has NaN or infinities, which would reach all members: leave this"
                " contribution out, or allow them by `allow_nonfinite=True`"
            )
        # What only receives adds nothing, so it must not use up what is carried over.
        included = found.left_over() if weight > 0 else []
        for one in included:
            vectors = added(vectors, one, form.names)
        if included and not self._allow_nonfinite and not all_finite(vectors, form.names):
            raise ValueError(
                "value: with the earlier contributions that `carry` adds to it, it has infinities,"
                " which would reach all members: give smaller values, or others than float16"
            )
        loop = asyncio.get_running_loop()
        call = AverageCall(
            next(self._numbers), form, vectors, weight, loop.create_future(), included
        )
        found.begin(call)
        timer = None if seconds == math.inf else loop.call_later(seconds, call.expire)
        try:
            settled = await call.done
        except asyncio.CancelledError:
            if call.done.cancelled():
                found.give_up(call)
            elif not call.done.exception():
                settled = call.done.result()
                if settled is None:  # its time was over in the same turn of the loop
                    found.give_up(call)
                else:
                    found.give_back(settled)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if settled is None:
            raise await self._too_late(found, call, seconds)
        found.taken()
        outcome = settled.outcome
        return Averaged(
            form.tree(settled.vectors),
            outcome.round,
            outcome.names,
            outcome.weights,
            settled.late,
        )

    async def _too_late(self, part: MemberPart, call: AverageCall, seconds: float) -> AiodistError:
        where: dict[str, Any] = {"group": self._connection.averager, "op": "average"}
        text = f"no round of part {part.name!r} ended within {seconds:g} s"
        answered = part.give_up(call)
        await asyncio.wait({answered}, timeout=WITHDRAW_SECONDS)
        if not answered.done():
            why = self._connection.control.absence or "the coordinator is silent"
            return CollectiveTimeoutError(f"{text}: {why}", **where)
        try:
            answer = answered.result()
        except AiodistError as error:
            if self._connection.error is not None:
                return error
            # This member was ruled lost, and so is its call. It joins again.
            return CollectiveTimeoutError(f"{text}: {error.message}", **where)
        assert isinstance(answer, wire.AverageWithdrawn)
        if not call.is_withdrawn:
            return CollectiveTimeoutError(
                f"{text}, but one is decided, and this contribution may be in it: call again for "
                "its result, whose `contributors` say so",
                missing=answer.missing,
                **where,
            )
        quorum = self._rules.quorum
        if answer.present < quorum:
            count = answer.present
            there = "there is 1 member" if count == 1 else f"there are {count} members"
            return QuorumLostError(
                f"{text}: {there}, and the quorum is {quorum}: start more, or wait longer",
                present=count,
                quorum=quorum,
                **where,
            )
        if answer.missing:
            have = "has" if len(answer.missing) == 1 else "have"
            why = f"{', '.join(answer.missing)} {have} not contributed, and the quorum is {quorum}"
        else:
            why = (
                f"all other members have called, and the quorum is {quorum}, for which calls of"
                " weight 0 do not count, nor calls that have ended: give weights above 0, or wait"
                " longer"
            )
        return CollectiveTimeoutError(f"{text}: {why}", missing=answer.missing, **where)

    # State.

    async def publish_state(self, tree: Any | Callable[[], Any]) -> bool:
        """Keep `tree` for new members, with the rounds of the parts as they are now.

        Every member may call this after each round. One member is elected, and keeps a copy; the
        calls of the others do nothing. If that one is lost, or more than a round behind, the next
        call of another one takes its place. A call does nothing either if the coordinator is away
        for 5 s, or has ruled this member lost. Returns whether this member has a state for others.
        Do not change the tree before this returns, because an elected member copies it only then.

        Give a function that returns the tree if the tree stays as it is until the next call. Then
        nothing is copied before a member needs it, and every member can give it at any time. Use it
        if members may be so few that a round needs a new member.

        The tree may have arrays, numbers, str, bytes and None, in dicts, lists and tuples. Raises
        TypeError, naming the path, for anything else. A tree that a function returns is checked
        when a member needs it: the function then counts as failed, which is logged.

        For example::

            async with aiodist.averager("outer", address=group.address) as avg:
                await avg.publish_state({"w": np.ones(3)})
        """
        self._connection.check()
        kept = self._reached
        reached = tuple(kept.values())
        if callable(tree):
            self._keep(Kept(tree, kept))
            self._say_state()
            return True
        check_travels(tree)
        try:
            elected = await control.elect(self._connection.control, reached, PATIENCE)
            self._keep(Kept(copy_of(tree), kept) if elected else None)
        except (TimeoutError, CoordinatorLostError, GroupClosedError):
            # The coordinator is away, or this member joins again. Training goes on meanwhile.
            self._connection.check()
            return False
        finally:
            # Also if this call ends without an answer: this member may be elected then, and others
            # must not wait for a state that it does not have.
            self._say_state()
        return elected

    def _keep(self, kept: Kept | None) -> None:
        self._kept = kept
        for done in self._states:  # calls of `state` that began before
            if kept is not None and not done.done():
                done.set_result(kept)

    @started
    async def state(self, *, timeout: float | None = None) -> AveragerState:
        """Get the tree that another member has published, and the rounds of its parts at that time.

        The calls of this member belong to the rounds after these. It waits until a member has
        published a state. Raises CollectiveTimeoutError after `timeout` seconds (None:
        `op_timeout`), and RuntimeError while a call of `average` is under way.

        For example::

            async with aiodist.averager("outer", address=group.address) as avg:
                await avg.publish_state({"w": np.ones(3)})
                tree, rounds = await avg.state()
                await group.barrier()  # the member that has the state stays until all have it
        """
        timeouts.check_timeout(timeout)
        seconds = self._op_timeout if timeout is None else timeout
        self._connection.check()
        if any(part.call is not None for part in self._parts.values()):
            raise RuntimeError("a call of `average` is under way: await it before `state`")
        if self._kept is not None:
            if self._kept.reached == self._reached:
                return AveragerState(self._kept.copied(), self._kept.rounds)
            self._drop_state()
        done: asyncio.Future[Kept] = asyncio.get_running_loop().create_future()
        self._states.add(done)
        self._connection.say(wire.AverageWantState())
        try:
            await asyncio.wait({done}, timeout=None if seconds == math.inf else seconds)
        finally:
            self._states.discard(done)
            if not self._states and self._connection.error is None:
                self._connection.say(wire.AverageWantState(wanted=False))
        if not done.done():
            why = self._connection.control.absence or (
                "no member has published one, its function failed (see the log of that member), or"
                " the coordinator is silent"
            )
            raise CollectiveTimeoutError(
                f"no state came within {seconds:g} s: {why}. Call publish_state on a member that is"
                " up to date, or go on without a state",
                group=self._connection.averager,
                op="state",
            )
        found = done.result()
        if found.is_own:  # this member may be further already, if it has averaged meanwhile
            return AveragerState(found.copied(), found.rounds)
        # In parts that the other member does not take part in, this one goes on where it was.
        for name in self._parts.keys() & found.reached.keys():
            self._parts[name].start_at(found.reached[name])
        return AveragerState(found.tree, found.rounds)

    # What the coordinator tells.

    def _enter(self) -> wire.AverageEnter:
        self._ids.add(self._connection.id)
        # The coordinator will name a source anew to each member that still waits.
        for task in self._serves:
            task.cancel()
        known = [part.known() for part in self._parts.values()]
        return wire.AverageEnter(
            self._rules,
            tuple(self._parts),
            self._max_stale,
            tuple(part.reached for part in self._parts.values()),
            self._kept_of,
            decisions=tuple(decision for _, decisions in known for decision in decisions),
            gone=tuple(self._connection.gone),
        ).telling(outcomes for outcomes, _ in known)

    def _entered(self, entered: wire.AverageEntered) -> None:
        self._settings.keep = entered.keep
        for part in self._parts.values():
            part.again()
        if self._states:
            self._connection.say(wire.AverageWantState())

    def _told(self, news: wire.AveragingNews) -> None:
        match news:
            case wire.AverageDecision():
                self._parts[news.part].decided(news)
            case wire.AverageDone(outcome, keep):
                self._settings.keep = keep
                self._parts[outcome.part].done(outcome)
            case wire.AverageReopened(part, number):
                self._parts[part].reopened(number)
            case wire.AverageRefused():
                if news.stale is not None:
                    self._kept = None  # it is too old
                self._parts[news.part].refused(news)
            case wire.AverageFetch():
                if (older := self._fetches.get(news.part)) is not None:
                    older.cancel()  # its source has not heard of it
                self._fetches[news.part] = self._connection.spawn(self._fetch(news), "fetch")
            case wire.AverageServe():
                task = self._connection.spawn(self._serve(news), "serve")
                self._serves[task] = None
                task.add_done_callback(self._served)
            case _:
                raise AssertionError(news)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serves.pop(task, None)

    async def _fetch(self, fetch: wire.AverageFetch) -> None:
        """Take what another member has."""
        connection = self._connection
        pair = connection.meet((fetch.source, connection.info), "loan", fetch.ticket)
        try:
            found = await pair.recv(src=0, timeout=math.inf)
        except AiodistError:
            connection.say(wire.AverageFetched(fetch.ticket, failed=True))
            return
        finally:
            connection.part(pair)
        connection.say(wire.AverageFetched(fetch.ticket, failed=found is None))
        if found is None:
            return
        if fetch.part is None:
            kept = unpacked(found)
            for done in self._states:
                if not done.done():
                    done.set_result(kept)
        elif fetch.outcome is not None:
            vectors = [np.asarray(one) for one in found]
            self._parts[fetch.part].fetched(fetch.outcome, vectors)

    async def _serve(self, serve: wire.AverageServe) -> None:
        """Give another member what it asked for."""
        connection = self._connection
        pair = connection.meet((connection.info, serve.target), "loan", serve.ticket)
        try:
            # None: it is gone meanwhile. The other member waits, so it has to hear that.
            found: Any = None
            if serve.part is None:
                found = self._given()
            elif (known := self._parts[serve.part].results.get(serve.round)) is not None:
                found = known[1]
            await pair.send(found, 1, timeout=math.inf)
        except AiodistError as error:
            log.debug("a member was not served: %s", in_words(error))
            if connection.error is None:
                connection.say(wire.AverageFetched(serve.ticket, failed=True))
        finally:
            connection.part(pair)

    def _given(self) -> Any:
        """The state for another member; None: there is none."""
        if self._kept is None:
            return None
        try:
            return self._kept.packed()
        except Exception:  # of a function of the program, or because its tree does not travel
            log.exception(
                "averager %r: the state cannot be given to a new member, because making it by the"
                " function that `publish_state` was given raised this",
                self._connection.averager,
            )
            self._drop_state()
            return None

    def _drop_state(self) -> None:
        """This member has no state for others any more."""
        self._kept = None
        self._say_state()

    def _say_state(self) -> None:
        """Say which state this member has for others."""
        self._connection.say(wire.AverageStateKept(self._kept_of))

    @property
    def _kept_of(self) -> tuple[wire.Reached, ...] | None:
        """The results that this member's state for others is of; None: it has no state."""
        return None if self._kept is None else tuple(self._kept.reached.values())

    def _expelled(self) -> None:
        for part in self._parts.values():
            part.expelled()

    def _failed(self, error: AiodistError) -> None:
        for part in self._parts.values():
            part.stop()
            part.fail(error)
        for done in self._states:
            if not done.done():
                done.set_exception(error)
