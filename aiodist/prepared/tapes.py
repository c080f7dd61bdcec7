"""Tapes: plans of one phase that the compiled part carries out within a call.

A tape is made from the steps of a plan, one to one, for one area of a lane. It does what
`aiodist.engine.executor` does with them and leaves the same bytes in shared memory, so ranks with
and without the compiled part can share a group. If a step would have to wait for long, the tape
returns how many steps are done, and an `Executor` goes on with the next step.

`Tape` itself is in the compiled part (`_core.c`). This module describes plans to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from aiodist.buffers.kernels import Kernel
from aiodist.buffers.vector import Vector
from aiodist.compiled import core
from aiodist.engine.phase import Phase
from aiodist.links.moved import Moved
from aiodist.phases.memories import Reductions
from aiodist.schedules.plan import Await, Copy, Publish, Reduce
from aiodist.shared_memory.board import STEP, round_of
from aiodist.shared_memory.lane import Lane
from aiodist.shared_memory.posts import Posts
from aiodist.transports import polling

_COPY, _REDUCE, _PUBLISH, _AWAIT, _SHOW, _TAKE = range(6)
MOST_STEPS = 64
"""The most steps of a plan that becomes a tape. Longer plans have arrays so large that a tape would
not make them faster."""

ALL_SHOWN = 3
"""Steps of a call with values that are done when it has all blobs."""

Does = Callable[[Any], int]
"""What a call with values does before it publishes, or after all ranks have."""
Run = Callable[[Any], int]
"""Runs a phase in an area, and returns how many steps are done: see `executor.all_at_once`."""


MOST_LEAVES: int = 0 if core is None else core.LEAVES
"""The most arrays and numbers of a call, its places among them, that the compiled part knows."""
MOST_RANKS = 16
"""The most ranks whose arrays the compiled part reduces in one step."""


class Taped(Protocol):
    """A call that a tape does: see `aiodist.prepared.express.Recipe`."""

    op: str
    call: bytes
    digest: int
    nbytes: int
    finish: Callable[[Any], Any] | None


class TapedPost(Taped, Protocol):
    """A posted call that a tape does."""

    vector: Vector
    lengths: list[int]
    returns: bool

    @property
    def heads(self) -> Mapping[object, Sequence[bytes]]:
        """By tag, what the post of each rank begins with, if 0 is the number of the call."""
        ...

    def made(self, x: Any, /) -> Any:
        """See `aiodist.prepared.posted.Posted.made`."""
        ...


class ReducedParts(NamedTuple):
    """Which parts of arrays a posted reduction uses, if it does not use whole arrays.

    `length` is how many elements are reduced. All else counts bytes: `shown` is where the part that
    this rank shows begins in its array. `begins` is by rank where the part to reduce begins in what
    that rank posts, or for this rank in its array.
    """

    length: int
    shown: int
    begins: list[int]


def is_tape(run: Run) -> bool:
    """Say whether the compiled part runs it."""
    return core is not None and type(run) is core.Tape


def tape_of(
    what: Taped, phase: Phase, lane: Lane, area: int, run: Run, *, goes_round: bool
) -> Run | None:
    """Return the tape of `phase` in `area` of `lane`, or None if the compiled part cannot do it.

    `run` does the same in Python. The tape calls it for arrays that are not numpy's, or that the
    tape was not made for.
    """
    plan = phase.prepared.plan
    memory: Any = phase.memory
    board = lane.board
    if core is None or type(memory) is not Reductions or type(board.own) is not memoryview:
        return None
    if plan.size > MOST_RANKS:
        return None
    (x, out, *_), kernel = memory.vectors, memory.kernel
    if not isinstance(kernel, Kernel) or kernel.compiled is None or len(plan.steps) > MOST_STEPS:
        return None
    steps: list[tuple[int, int, Any, list[Any]]] = []
    for step in plan.steps:
        if isinstance(step, Copy):
            buffer, start, stop = step.into
            steps.append((_COPY, stop - start, (buffer, start), [step.source[:2]]))
        elif isinstance(step, Reduce) and len(step.operands) > 1:
            buffer, start, stop = step.into
            operands = [operand[:2] for operand in step.operands]
            steps.append((_REDUCE, stop - start, (buffer, start), operands))
        elif isinstance(step, Publish):
            steps.append((_PUBLISH, 0, None, []))
        elif isinstance(step, Await) and len(step.peers) == len(lane.others):
            steps.append((_AWAIT, step.count, None, []))
        else:
            return None
    lengths = x.length, -1 if out is x else out.length
    areas = [board.area(rank, area) for rank in range(plan.size)]
    steps_apart, places = round_of(phase.shared or 0) if goes_round else (0, 1)
    return _made(
        what, phase, lane, area, steps, areas,
        fallback=run, dtype=x.dtype, lengths=lengths, kernel=kernel.compiled, size=memory.size,
        unended=len(steps), apart=steps_apart * STEP, places=places,
        may_be_in_place=phase.direct is not None,
    )  # fmt: skip


def tape_of_values(
    what: Taped, phase: Phase, lane: Lane, area: int, run: Run, show: Does, collect: Does
) -> Run:
    """Return a function that does `show`, waits until all ranks have shown, and does `collect`.

    The compiled part publishes and waits in between. It also shows and collects by itself if the
    call is known by its form (`shows` and `expects` of the tape). If there is no compiled part,
    this is `run`. Both functions get what the call works with. They return True, or how many steps
    are done if the call cannot go on.
    """
    if core is None or type(lane.board.own) is not memoryview:
        return run
    steps: list[tuple[int, int, Any, list[Any]]] = [
        (_SHOW, 0, show, []),
        (_PUBLISH, 0, None, []),
        (_AWAIT, 1, None, []),
        (_TAKE, 0, collect, []),
    ]
    return _made(
        what, phase, lane, area, steps, [],
        fallback=run, dtype=None, lengths=(0, -1), kernel=-1, size=0, unended=ALL_SHOWN,
    )  # fmt: skip


def tape_of_posts(
    what: TapedPost,
    posts: Posts,
    express: object,
    run: Callable[..., bool | None],
    kernel: int | None,
    progress: polling.Progress,
    moved: Moved,
    *,
    polls: bool,
    crowded: bool,
    parts: ReducedParts | None = None,
) -> object:
    """Return a tape that posts, waits for all other posts, and uses them. None: there is none.

    `kernel` is the number of the compiled kernel that reduces. If it is None, the tape does calls
    with values that it was told of (`shows` and `expects`). `run` does all others, and the compiled
    part does only what surrounds it. `express` wakes ranks: see `PostExpress.wake`. `polls`,
    `crowded`: see `Lane`. `parts`: None: whole arrays, in place.
    """
    pages = posts.pages
    if core is None or type(pages[0]) is not memoryview or len(pages) > MOST_RANKS:
        return None
    rings = [memoryview(b"")] * len(pages)
    rings[posts.rank] = posts.ring
    posters = []
    for reader in posts.readers:
        rings[reader.rank] = reader.ring
        posters.append((reader.cursor, reader))
    nbytes = 0 if kernel is None else what.lengths[posts.rank]
    return core.Tape(
        lane=posts,
        progress=progress,
        naps=posts,
        neighbours=polling.neighbours,
        moved=moved,
        free=[0],
        fallback=run,
        dtype=what.vector.dtype,
        shown=nbytes,
        taken=nbytes * len(posts.readers),
        words=pages,
        ranks=[posts.rank, *(reader.rank for reader in posts.readers)],
        areas=rings,
        steps=[],
        lengths=(what.vector.length, -1 if parts is None else parts.length),
        kernel=-1 if kernel is None else kernel,
        size=len(pages),
        area=0,
        polls=polls,
        crowded=crowded,
        last=False,
        op=what.op,
        call=what.call,
        digest=what.digest,
        nbytes=what.nbytes,
        finish=what.finish if kernel is not None else what.made,
        unended=0,
        posters=posters,
        heads=what.heads,
        express=express,
        reduces=what.returns,
        parts=parts and parts[1:],
    )


def _made(
    what: Taped,
    phase: Phase,
    lane: Lane,
    area: int,
    steps: list[tuple[int, int, Any, list[Any]]],
    areas: list[memoryview],
    **more: Any,
) -> Run:
    assert core is not None
    board, waiting = lane.board, lane.waiting
    _, _, shown, taken, _ = phase.prepared
    made: Run = core.Tape(
        lane=lane,
        progress=waiting.progress,
        naps=board,
        neighbours=polling.neighbours,
        moved=lane.moved,
        free=lane.areas.free,
        shown=shown * phase.itemsize,
        taken=taken * phase.itemsize,
        words=board.pages,
        ranks=[board.rank, *board.words],
        areas=areas,
        steps=steps,
        area=area,
        polls=waiting.polls,
        crowded=waiting.crowded,
        last=lane.is_shared_by_all(area),
        op=what.op,
        call=what.call,
        digest=what.digest,
        nbytes=what.nbytes,
        finish=what.finish,
        **more,
    )
    return made
