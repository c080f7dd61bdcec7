"""Values of known shapes that are posted: those of `lane_values`, between ranks without a lane.

On a lane, the areas in which ranks show values stay in place. A post lies elsewhere in its ring
each time. So the known templates are kept as windows (`templates.Window`), which each call lays
over the posts. What makes the result works on windows, so it is made only once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple, cast

from aiodist.collectives.templates import MovingTemplate
from aiodist.engine.executor import Executor
from aiodist.engine.phase import Phase
from aiodist.links.moved import Moved
from aiodist.phases.memories import Blobs
from aiodist.prepared.express import ExpressGroup
from aiodist.prepared.lane_values import MOST_TAKES, ValueRecipe
from aiodist.prepared.posted import Begin, ByTag, Data, InOneGo, Otherwise, Posted, Shows
from aiodist.prepared.taking import Given, Take, give
from aiodist.prepared.tapes import MOST_LEAVES, is_tape
from aiodist.schedules.plan import OUT, Span
from aiodist.shared_memory.posts import HEAD, Posts, Reader, padded, prefixes
from aiodist.wire.frames import pack_fields

_NOTHING = memoryview(b"")


def _lift(windows: Iterable[MovingTemplate]) -> None:
    """Take the windows away from the memory that they lie on."""
    for window in windows:
        window.lie(_NOTHING, 0)


class Expected(NamedTuple):
    """A post that may come, or that this rank makes.

    `begin` makes all that precedes its first array, from the number of the call. Its data begins
    `before` bytes after the post does. `whole` is its length in the ring.
    """

    begin: Begin
    before: int
    whole: int
    window: MovingTemplate


def expected_of(
    words: bytes, window: MovingTemplate, begins: dict[tuple[int, bytes], Begin]
) -> Expected:
    """Return the post that `window` describes.

    `begins` keeps one function for each kind of beginning, because most ranks show the same.
    """
    key = window.length, window.first
    begin = begins.get(key) or begins.setdefault(key, prefixes(words, *key))
    before = len(begin(0)) - len(window.first)
    return Expected(begin, before, before + padded(window.length), window)


class PostedValues(ValueRecipe, Posted):
    """A recipe of values that are posted."""

    __slots__ = (
        "_found", "_last", "_taken", "_windows", "expected", "heads", "in_one_go", "lengths",
    )  # fmt: skip
    on_lane = False
    moves = frozenset()

    def __init__(self, context: ExpressGroup, *args: Any) -> None:
        super().__init__(context, *args)
        # For each rank, what may lie on its posts.
        self._windows: list[list[MovingTemplate]] = []
        # For each tag, the known posts of each rank.
        self.expected = ByTag(self._expect)
        self.heads = ByTag(self._heads)  # of the posts that the compiled part expects
        self._found: list[MovingTemplate] = []  # what lies on these
        self._last: list[MovingTemplate] = []  # what lay on other posts, the last time
        self._taken: dict[tuple[MovingTemplate, ...], Take | None] = {}
        self.in_one_go: InOneGo | None = None
        self._learnt()

    def _shows(self, args: tuple[Any, ...], words: list[Any]) -> bool:
        with Shows(self._context):
            return super()._shows(args, words)

    def shown(self, given: Given) -> Data:
        return given.own.shown_of(given.flats) if given.shown is None else given.shown

    def prefixes(self, tag: object, number: int) -> Sequence[bytes | None]:
        expected = [each[0] if each else None for each in self.expected[tag]]
        return [each and each.begin(number)[: each.before] for each in expected]

    def _expect(self, tag: object) -> list[list[Expected]]:
        words, begins = pack_fields(tag, self.call), dict[tuple[int, bytes], Begin]()
        return [
            [expected_of(words, window, begins) for window in windows] for windows in self._windows
        ]

    def _heads(self, tag: object) -> tuple[bytes, ...]:
        words, begins = pack_fields(tag, self.call), dict[tuple[int, bytes], Begin]()
        return tuple(expected_of(words, window, begins).begin(0) for window in self._found)

    def _learnt(self) -> None:
        self.release()  # else those that go would keep the memory until the collector comes
        known = [*self._known]
        known[self._context.rank] = [self._own]
        self._windows = [
            [MovingTemplate(template, rank) for template in templates]
            for rank, templates in enumerate(known)
        ]
        self.lengths = [windows[0].length if windows else -1 for windows in self._windows]
        self.expected.clear()
        self._taken.clear()
        self._found, self._last = [], []
        self.teach_shown()

    def teach_shown(self) -> None:
        """Tell the compiled part what this rank shows. It does calls once it is told the rest."""
        tape: Any = self.tapes[0]
        if is_tape(tape):
            own, order = self._windows[self._context.rank][0], self._own.order
            shows = [
                (each.place, number)
                for each, number in zip(own.data, order or count(), strict=False)
            ]
            # The compiled part knows no calls of more leaves.
            tape.shows(self._own, [*own.rest, *shows] if len(shows) <= MOST_LEAVES else [])

    def teach(self, found: list[MovingTemplate], given: Given, take: Take) -> None:
        """Let the compiled part do calls in which the ranks post what these windows lie on.

        This was the case in a call that it could not do. It learns only what it could not do twice
        in a row, because posts may look different each time.
        """
        tape: Any = self.tapes[0]
        if found == self._found or not is_tape(tape) or self._fills_tree(found):
            return
        if found != self._last:
            self._last = found
            return
        moves, *rest = self._compiled(found, given, take)
        if len(self._own.gaps) + len(moves) > MOST_LEAVES:
            return
        self._found = found
        self.heads.clear()
        own = self._context.rank
        expected = [part for window in found if window.rank != own for part in window.rest]
        tape.expects(expected, moves, *rest, tuple(found))

    def release(self) -> None:
        _lift(itertools.chain.from_iterable(self._windows))

    def fits(self, nbytes: int) -> bool:
        return True

    def made(self, x: Any) -> Any:
        return x.pop()

    def result(self, values: Sequence[Data], x: Any, given: Given) -> Any:
        found: list[MovingTemplate] = []
        for value, windows in zip(values, self._windows, strict=True):
            for window in windows:
                if window.length == len(value):
                    window.lie(memoryview(value), 0)
                    if window.is_there():
                        found.append(window)
                        break
            else:
                self.release()
                is_made = self.is_plainly_read(values, given)
                return x.pop() if is_made else self.begun(x, given)
        made = give(self.taking(found), given)
        self.release()  # else windows would keep the values alive, even those that did not fit
        return x.pop() if made else self.begun(x, given)

    def taking(self, found: Sequence[MovingTemplate]) -> Take | None:
        """Return what makes the result from these windows, which lie on the posts of all ranks."""
        key = tuple(found)
        if key not in self._taken:
            if len(self._taken) == MOST_TAKES:
                self._taken.clear()
            self._taken[key] = self._taking(found)
        return self._taken[key]

    def begun(self, x: Any, given: Given) -> Otherwise:
        with Shows(self._context):
            program = self._make(self._context, *given.args).start(False)
            phase = cast(Phase, next(program))
        # Other ranks use what was posted, so keep that. A new description could say that the data
        # travels apart. That happens if all ranks see this array, and the template is of one that
        # they do not see.
        own = Span(OUT, self._context.rank, self._context.rank + 1)
        cast(Blobs, phase.memory).read((own,), memoryview(self.shown(given)).cast("B"))
        done = self._context.size - 1  # all its frames are sent
        return Otherwise(Executor(phase, None, done=done), self._rest(program, phase, given))


def taking_in_one_go(
    recipe: PostedValues,
    posts: Posts,
    wake: Callable[[list[int]], bool],
    comes: Callable[[Reader], bool],
    moved: Moved,
) -> InOneGo:
    """Return a function that does a whole call with values: see `posted.in_one_go`.

    It takes the values of all ranks from their posts, even this rank's own. That is a copy of the
    user's arrays, which may be the place of the result.
    """
    rank, size = posts.rank, len(posts.readers) + 1

    def post(tag: object, number: int, given: Given) -> bool | None:
        ((begin, _, whole, own),) = recipe.expected[tag][rank]
        shown, head = given.shown, begin(number)
        if shown is None:
            shown_flats = given.own.shown_flats(given.flats)
            at = posts.put_parts(head, own.rest_of(shown_flats), whole)
        else:  # joining a few bytes is faster than writing twice
            at = posts.put_parts(head + shown[len(own.first) :], (), whole)
        if at < 0:
            return None
        woken = posts.tell()
        return not woken or wake(woken)

    def run(
        tag: object, number: int, x: Any, given: Given, has_posted: bool = False
    ) -> bool | None:
        if not has_posted:
            goes_on = post(tag, number, given)
            if not goes_on:
                return goes_on
        done = by_windows(tag, number, given)
        if done is not None:
            return done
        own = posts.last(recipe.lengths[rank])
        return plainly(recipe, posts, comes, moved, tag, number, given, own)

    def by_windows(tag: object, number: int, given: Given) -> bool | None:
        """Do a call that has posted.

        False: nothing was read. None: the same, because a post has a form that is not known.
        """
        expected = recipe.expected[tag]
        ((own_begin, _, _, own),) = expected[rank]
        own_at = posts.last_at(own.length)
        own_head = own_begin(number)
        found = [own] * size
        passes: list[tuple[Reader, int, int]] = []
        for reader in posts.readers:
            if reader.words[HEAD] == reader.taken and not comes(reader):
                return False
            at, ring = reader.next_at(), reader.ring
            for begin, before, whole, window in expected[reader.rank]:
                head = own_head if begin is own_begin else begin(number)
                if ring[at : at + len(head)].tobytes() == head and at + whole <= len(ring):
                    window.lie(ring, at + before)
                    if window.goes_on():
                        found[reader.rank] = window
                        passes.append((reader, whole, reader.taken))
                        break
            else:
                return None  # it has another form
        own.lie(posts.ring, own_at)
        done, take = True, recipe.taking(found)
        try:
            done = give(take, given)
        finally:
            # Only from now on may the posts be written over.
            if done:
                for each in passes:
                    each[0].passed_by(*each[1:])
        if done:
            assert take is not None
            recipe.teach(found, given, take)
            moved.sent += own.length
            for window in found:
                moved.received += window.length
            moved.received -= own.length
        return done

    return run


def plainly(
    recipe: PostedValues,
    posts: Posts,
    comes: Callable[[Reader], bool],
    moved: Moved,
    tag: object,
    number: int,
    given: Given,
    own: Data,
) -> bool:
    """Do a call with the plain values that others post. It has posted its `own` data.

    False: nothing was read.
    """
    words, size = pack_fields(tag, recipe.call), len(posts.readers) + 1
    values = [own] * size
    passes: list[tuple[Reader, int]] = []
    for reader in posts.readers:
        if reader.words[HEAD] == reader.taken and not comes(reader):
            return False
        post = reader.post_for(words, number)
        if post is None:
            return False
        values[reader.rank] = post.data
        passes.append((reader, post.whole))
    if not recipe.is_plainly_read(values, given):
        return False
    moved.add(len(own), sum(map(len, values)) - len(own))
    for reader, whole in passes:
        reader.move(whole)
    return True
