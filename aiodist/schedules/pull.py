"""What pull plans share: plans of ranks that see each other's memory.

Each rank writes only its own shared memory, and takes what it needs from that of others. Large
arrays go in rounds through a few buffers that stay in cache. `pipeline` has the order in which
these are filled, read, and filled again.

The steps of pull plans publish and await instead of sending and receiving. The simulator proves the
same of them as of other plans: there is no data race, whatever the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from aiodist.schedules.plan import SHARED, Await, Copy, Plan, Publish, Reduce, Step
from aiodist.schedules.script import Script, ahead

Part = Callable[[int], list[Step]]
"""The steps of one part of a round, given the round."""


def others(rank: int, size: int) -> tuple[int, ...]:
    """The other ranks, from the next one on, so that not all ranks begin with the same one."""
    return (*range(rank + 1, size), *range(rank))


def joined(steps: Iterable[Step]) -> tuple[Step, ...]:
    """`steps` without those of no units, with adjacent copies joined into one."""
    result: list[Step] = []
    for step in steps:
        if type(step) is Copy or type(step) is Reduce:
            _, start, stop = step.into
            if start == stop:
                continue
        if type(step) is Copy and result and type(last := result[-1]) is Copy:
            ends = list(zip(last, step, strict=True))
            if all(a.buffer == b.buffer and a.stop == b.start for a, b in ends):
                step = Copy(*(a._replace(stop=b.stop) for a, b in ends))
                result.pop()
        result.append(step)
    return tuple(result)


def moved(plan: Plan) -> tuple[int, int]:
    """Units that a rank shows to the others, and units that it takes from them."""
    own = SHARED + plan.rank
    shown = taken = 0
    for step, times in ahead(plan.steps):
        if isinstance(step, Copy | Reduce):
            buffer, start, stop = step.into
            if buffer == own:
                shown += times * (stop - start)
            for buffer, start, stop in step.operands if isinstance(step, Reduce) else step[1:]:
                if buffer >= SHARED and buffer != own:
                    taken += times * (stop - start)
    return shown, taken


def pipeline(
    name: str,
    rank: int,
    size: int,
    rounds: int,
    buffer: int,
    depth: int,
    *,
    stage: Part,
    use: Part,
    collect: Part | None = None,
    edges: Iterable[int] = (),
    then: Sequence[Step] = (),
) -> Plan:
    """A plan of `rounds`; round k works on buffer ``k % depth`` of every rank's memory.

    ``stage(k)`` writes what others use into the own buffer; ``use(k)`` reads what all have staged.
    ``collect(k)`` reads what all have written into their buffers in ``use(k)``. If `collect` is
    None, `use` writes nothing there. What `use` writes has a place of its own in the buffer, the
    same in all rounds. At `edges` the rounds change, see `Script.repeat`. `then` comes last.

    With ``lag = depth // 2``, a rank in its round n uses block n, stages block n + lag and collects
    block n - lag. It waits before that until all have published their rounds up to n - lag, so all
    that it reads has been written. Others last read the place that it writes in their round n + lag
    - depth.

    If `depth` is even, that is round n - lag, which they have published. If it is odd, that is the
    round before, so there a rank publishes before it reads. Then others wait less, and the Publish
    of the next round tells that the rank has read. A larger depth lets ranks be further apart.
    """
    if depth < 2:
        raise ValueError(f"a pipeline has at least two buffers, not {depth}")
    lag = depth // 2
    peers = others(rank, size)
    # Without `collect` no rank awaits the last rounds.
    publishes = max(1, rounds + 1 - (0 if collect else lag))

    def turn(k: int) -> list[Step]:
        steps: list[Step] = []
        staged = stage(k + lag) if k + lag < rounds else []
        used = use(k) if k < rounds else []
        if collect:
            made, read = used + staged, collect(k - lag) if k >= lag else []
        else:
            made, read = staged, used
        if k >= lag and (k < rounds or joined(read)):
            steps.append(Await(peers, k + 2 - lag))
        steps += made
        published = [Publish()] if k + 2 <= publishes else []
        return [*steps, *published, *read] if depth % 2 else [*steps, *read, *published]

    script = Script(step for k in range(min(lag, rounds)) for step in stage(k))
    script += [Publish(), Await(peers, 1)]
    script.repeat(rounds + lag, turn, (*edges, rounds), lag + 2, depth)
    if collect and rounds and not joined(collect(rounds - 1)):
        # A rank that is done may leave the group. A rank that then still waited for another would
        # fail, so all wait for all.
        script.append(Await(peers, publishes))
    script += then
    shared = min(depth, rounds) * buffer
    steps = script.steps(joined)
    return Plan(name, rank, size, steps, eager=False, shared=shared, publishes=publishes)
