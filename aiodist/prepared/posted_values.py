"""Values of known shapes that are posted: those of `lane_values`, between ranks that have no lane.

On a lane the areas in which ranks show their values stay where they are. A post lies elsewhere in
its ring each time. So what is known of the others is kept as windows (`templates.Window`), which
are laid over their posts; and what makes the result is made once, of windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from aiodist.collectives.templates import Window
from aiodist.engine.executor import Executor
from aiodist.engine.phase import Phase
from aiodist.links.moved import Moved
from aiodist.phases.memories import Blobs
from aiodist.prepared.express import ExpressGroup
from aiodist.prepared.lane_values import MOST_TAKES, Given, Take, ValueRecipe, give
from aiodist.prepared.posted import Begin, ByTag, Data, InOneGo, Otherwise, Posted, Shows
from aiodist.schedules.plan import OUT, Span
from aiodist.shared_memory.posts import HEAD, Posts, Reader, padded, prefixes
from aiodist.wire.frames import pack_fields

_NOTHING = memoryview(b"")


def _lift(windows: Iterable[Window]) -> None:
    """They lie on nothing any more."""
    for window in windows:
        window.lie(_NOTHING, 0)


class Expected(NamedTuple):
    """A post that may come, or that this rank makes. Its data is `before` bytes behind where it
    begins; `begin` makes of a number all that comes before the first array in it."""

    begin: Begin
    before: int
    whole: int
    window: Window


def expected_of(words: bytes, window: Window, begins: dict[tuple[int, bytes], Begin]) -> Expected:
    """`begins`: one for each kind of beginning, since most ranks show the same."""
    key = window.length, window.first
    begin = begins.get(key) or begins.setdefault(key, prefixes(words, *key))
    before = len(begin(0)) - len(window.first)
    return Expected(begin, before, before + padded(window.length), window)


class PostedValues(ValueRecipe, Posted):
    """A recipe of values that are posted."""

    __slots__ = ("_taken", "_windows", "expected", "in_one_go", "lengths")
    heads: Mapping[object, bytes] = {}
    on_lane = False
    moves = frozenset()

    def __init__(self, context: ExpressGroup, *args: Any) -> None:
        super().__init__(context, *args)
        # By rank, the posts of a call with a tag that are known.
        self.expected = ByTag(self._expect)
        self._taken: dict[tuple[Window, ...], Take | None] = {}
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

    def _learnt(self) -> None:
        super()._learnt()
        known = [*self._known]
        known[self._context.rank] = [self._own]
        # By rank, the windows of what it may show.
        self._windows = [[Window(template) for template in templates] for templates in known]
        self.lengths = [windows[0].length if windows else -1 for windows in self._windows]
        self.expected.clear()
        self._taken.clear()

    def release(self) -> None:
        _lift(itertools.chain.from_iterable(self._windows))

    def _forget_areas(self) -> None:
        """There are none: what is known of others lies in windows."""

    def fits(self, nbytes: int) -> bool:
        return True

    def made(self, x: Any) -> Any:
        return x.pop()

    def result(self, values: Sequence[Data], x: Any, given: Given) -> Any:
        found: list[Window] = []
        for value, windows in zip(values, self._windows, strict=True):
            for window in windows:
                if window.length == len(value):
                    window.lie(memoryview(value), 0)
                    if window.is_there():
                        found.append(window)
                        break
            else:
                self.release()
                return self.begun(x, given)
        made = give(self.taking(found), given)
        self.release()  # else they would keep the values, those as well that did not fit
        return x.pop() if made else self.begun(x, given)

    def taking(self, found: Sequence[Window]) -> Take | None:
        """What makes the result of these, which lie where ranks show what they say."""
        if self._exchanged.number is not None:
            return self._taking(found)  # it knows where they lie
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
        # The others go by what was posted. Made anew it may say that the data travels apart: of an
        # array that all ranks see, where the template is of one that they do not.
        own = Span(OUT, self._context.rank, self._context.rank + 1)
        cast(Blobs, phase.memory).read((own,), memoryview(self.shown(given)).cast("B"))
        done = self._context.size - 1  # all that it sends
        return Otherwise(Executor(phase, None, done=done), self._rest(program, phase, given))


def taking_in_one_go(
    recipe: PostedValues,
    posts: Posts,
    wake: Callable[[list[int]], bool],
    comes: Callable[[Reader], bool],
    moved: Moved,
) -> InOneGo:
    """What carries out a call with values within it: see `posted.in_one_go`. What all ranks have
    posted is taken from where it lies, this rank's own as well: it was copied there from the user's
    arrays, and the result may go to these."""
    rank, size = posts.rank, len(posts.readers) + 1

    def run(tag: object, number: int, x: Any, given: Given) -> bool | None:
        expected = recipe.expected[tag]
        ((own_begin, before, whole, own),) = expected[rank]
        shown, own_head = given.shown, own_begin(number)
        if shown is None:
            at = posts.put_parts(own_head, own.rest_of(given.flats), whole)
        else:  # a few bytes are joined sooner than they are written twice
            at = posts.put_parts(own_head + shown[len(own.first) :], (), whole)
        if at < 0:
            return None
        woken = posts.tell()
        if woken and not wake(woken):
            return False
        own_at = at + before
        found = [own] * size
        passes: list[tuple[Reader, int]] = []
        for reader in posts.readers:
            if reader.words[HEAD] == reader.taken and not comes(reader):
                return False
            at, ring = reader.next_at(), reader.ring
            for begin, before, whole, window in expected[reader.rank]:
                head = own_head if begin is own_begin else begin(number)
                if ring[at : at + len(head)].tobytes() == head:
                    window.lie(ring, at + before)
                    if window.goes_on():
                        found[reader.rank] = window
                        passes.append((reader, whole))
                        break
            else:
                return False
        own.lie(posts.ring, own_at)
        done = True
        try:
            done = give(recipe.taking(found), given)
        finally:
            # Before this, none of it may be written over.
            if done:
                for reader, whole in passes:
                    reader.move(whole)
        if done:
            moved.sent += own.length
            for window in found:
                moved.received += window.length
            moved.received -= own.length
        return done

    return run
