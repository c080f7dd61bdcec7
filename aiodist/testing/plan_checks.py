"""Errors of plans that can be found without running them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations, permutations

from aiodist.schedules.plan import (
    OUT,
    SHARED,
    Await,
    Copy,
    Grant,
    Plan,
    Publish,
    Recv,
    Reduce,
    Send,
    Span,
    Step,
    X,
)
from aiodist.schedules.teams import Teams, team_view


class PlanError(Exception):
    """A plan is wrong. The text tells the rank, the step, and the reason."""


def check(
    plans: Sequence[Plan],
    inputs: Sequence[int],
    outputs: Sequence[int],
    in_place: Collection[int],
    segment: int | None,
    teams: Teams,
) -> None:
    """Raise PlanError unless the plans fit together and every step fits its buffers.

    The arguments are those of `aiodist.testing.plan_simulator.simulate`.
    """
    size = len(plans)
    for rank, plan in enumerate(plans):
        _check_head(plan, rank, plans)
        team = team_view(teams, rank).team
        lengths = (inputs[rank], outputs[rank], plan.scratch, *(p.shared for p in plans))
        limits = dict(enumerate(lengths))
        for at, step in enumerate(plan.steps):
            where = locate(plan, at)
            for span in (*read(step), *written(step)):
                limit = limits.get(span.buffer, 0)
                if span.buffer not in limits or not 0 <= span.start <= span.stop <= limit:
                    raise PlanError(f"{where}: {name_of(span.buffer)} has {limit} units")
                if span.buffer >= SHARED and span.buffer - SHARED not in team:
                    raise PlanError(f"{where}: {name_of(span.buffer)} is on another host")
            for span in written(step):
                if span.buffer == X or (span.buffer >= SHARED and span.buffer != SHARED + rank):
                    raise PlanError(f"{where} writes {name_of(span.buffer)}")
            if any(peer == rank or not 0 <= peer < size for peer in _peers(step)):
                raise PlanError(f"{where}: no such peer of rank {rank} among {size} ranks")
            match step:
                case Copy() | Reduce():
                    _check_memory(where, step, same=rank in in_place)
                case Send() | Recv():
                    _check_frame(where, step, segment)
                case Grant(_, count) if plan.eager or count < 1:
                    raise PlanError(
                        f"{where}: an eager plan grants nothing, others at least one frame"
                    )
                case Await(_, count) if not 1 <= count <= plan.publishes:
                    raise PlanError(f"{where}: each rank publishes {plan.publishes} times")
                case Await(peers) if not set(peers) <= set(team):
                    raise PlanError(f"{where}: not all of them are on its host")
                case _:
                    pass
    sends, recvs = [slots(plan, Send) for plan in plans], [slots(plan, Recv) for plan in plans]
    for a, b in permutations(range(size), 2):
        _check_link(plans[a], plans[b], sends[a].get(b, []), recvs[b].get(a, []))


def _check_head(plan: Plan, rank: int, plans: Sequence[Plan]) -> None:
    """Check what `plan` says of itself, and that all plans say the same."""
    size, first = len(plans), plans[0]
    if (plan.rank, plan.size, plan.eager) != (rank, size, first.eager):
        raise PlanError(
            f"plan {rank} of {size} says rank {plan.rank} of {plan.size}, eager={plan.eager}; "
            f"plan 0 says eager={first.eager}"
        )
    if (plan.shared, plan.publishes) != (first.shared, first.publishes):
        raise PlanError(
            f"plan {rank} has {plan.shared} shared units and publishes {plan.publishes} times; "
            f"plan 0 has {first.shared} and publishes {first.publishes} times"
        )
    published = sum(isinstance(step, Publish) for step in plan.steps)
    if published != plan.publishes:
        raise PlanError(
            f"plan {rank} says that it publishes {plan.publishes} times; it has {published} Publish"
        )


def _check_frame(where: str, step: Send | Recv, segment: int | None) -> None:
    length = _units(step.spans)
    if segment is not None and length > segment:
        raise PlanError(f"{where}: a frame of {length} units, over the segment of {segment}")
    if isinstance(step, Recv) and any(_overlap(a, b) for a, b in combinations(step.spans, 2)):
        raise PlanError(f"{where}: its spans overlap")


def _check_memory(where: str, step: Copy | Reduce, *, same: bool) -> None:
    into = placed(step.into, same=same)
    if not read(step):
        raise PlanError(f"{where} has no operands")
    for span in read(step):
        if span.length != into.length:
            raise PlanError(f"{where}: the lengths differ")
        source = placed(span, same=same)
        if source != into and _overlap(source, into):
            raise PlanError(f"{where} moves units within one memory")


def _check_link(a: Plan, b: Plan, sends: Sequence[int], recvs: Sequence[int]) -> None:
    """Check the frames from rank a to rank b, and the grants for them."""
    link = f"from rank {a.rank} to rank {b.rank}"
    if len(sends) != len(recvs):
        raise PlanError(f"{len(sends)} frames are sent {link}, {len(recvs)} received")
    for slot, (send, recv) in enumerate(zip(sends, recvs, strict=True)):
        sent, received = _units(read(a.steps[send])), _units(written(b.steps[recv]))
        if sent != received:
            raise PlanError(f"slot {slot} {link}: {sent} units are sent, {received} received")
    granted = sum(s.count for s in b.steps if isinstance(s, Grant) and s.peer == a.rank)
    if granted != len(sends) and not b.eager:
        raise PlanError(f"{len(sends)} frames are sent {link}, {granted} granted")


def slots(plan: Plan, kind: type[Send | Recv]) -> dict[int, list[int]]:
    """The indices of the steps of a kind, by peer, in the order of their slots."""
    found: dict[int, list[int]] = {}
    for at, step in enumerate(plan.steps):
        if isinstance(step, kind):
            found.setdefault(step.peer, []).append(at)
    return found


def read(step: Step) -> tuple[Span, ...]:
    """The spans that a step reads."""
    match step:
        case Send():
            return step.spans
        case Reduce():
            return step.operands
        case Copy():
            return (step.source,)
        case _:
            return ()


def written(step: Step) -> tuple[Span, ...]:
    """The spans that a step writes."""
    match step:
        case Recv():
            return step.spans
        case Reduce() | Copy():
            return (step.into,)
        case _:
            return ()


def _peers(step: Step) -> tuple[int, ...]:
    match step:
        case Send() | Recv() | Grant():
            return (step.peer,)
        case Await():
            return step.peers
        case _:
            return ()


def _units(spans: Sequence[Span]) -> int:
    return sum(span.length for span in spans)


def placed(span: Span, *, same: bool) -> Span:
    """`span` in its memory: if X and OUT are the `same` memory, both are called X."""
    return span._replace(buffer=X) if same and span.buffer == OUT else span


def _overlap(a: Span, b: Span) -> bool:
    return a.buffer == b.buffer and max(a.start, b.start) < min(a.stop, b.stop)


def name_of(buffer: int) -> str:
    """The name of a logical buffer, for messages."""
    return ("X", "OUT", "TMP")[buffer] if buffer < SHARED else f"SHARED+{buffer - SHARED}"


def locate(plan: Plan, at: int) -> str:
    """A step as messages write it: ``rank 1 step 4 Send(to 2: X[0:4])``."""
    step = plan.steps[at]
    reads, writes = (
        ", ".join(f"{name_of(s.buffer)}[{s.start}:{s.stop}]" for s in spans)
        for spans in (read(step), written(step))
    )
    match step:
        case Send():
            text = f"Send(to {step.peer}: {reads})"
        case Recv():
            text = f"Recv(from {step.peer}: {writes})"
        case Grant():
            text = f"Grant({step.count} to {step.peer})"
        case Publish():
            text = "Publish()"
        case Await():
            text = f"Await({step.count} of {', '.join(map(str, step.peers))})"
        case _:
            text = f"{type(step).__name__}({writes} = {reads})"
    return f"rank {plan.rank} step {at} {text}"
