"""Prepared collectives of plain values of any form (see `plain`), on a lane and posted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from aiodist.buffers.descriptions import KnownCall
from aiodist.collectives.forms import Form
from aiodist.collectives.templates import Template
from aiodist.engine.phase import Phase
from aiodist.links.moved import Moved
from aiodist.prepared import plain
from aiodist.prepared.exchanged import Exchanged
from aiodist.prepared.express import Flat
from aiodist.prepared.lane_values import ValueRecipe, areas_of
from aiodist.prepared.posted import Data, InOneGo, Otherwise, Posted
from aiodist.prepared.posted_values import PostedValues, plainly
from aiodist.prepared.taking import Given
from aiodist.shared_memory.lane import Lane
from aiodist.shared_memory.posts import Posts, Reader, padded, prefixes
from aiodist.wire.frames import pack_fields

_EMPTY = Template.of(b"", ())
"""The template of a rank that shows nothing."""


class PlainRecipe(ValueRecipe):
    """A recipe of plain values of any form: see `plain`. It has no template."""

    __slots__ = ()

    @staticmethod
    def own_of(exchanged: Exchanged, phase: Phase, rank: int) -> Template:
        return _EMPTY

    def lay_out(
        self, args: tuple[Any, ...], flats: Sequence[Flat] = (), words: Sequence[Any] = ()
    ) -> tuple[Any, Any] | None:
        values = self._offered(args[0])
        shown = None if values is None else plain.shown(values)
        if shown is None:
            return None
        result: list[Any] = []
        place = args[0] if self.op == "broadcast" else None
        return result, Given(args, (), result, self._own, place, shown)

    def _offered(self, value: Any) -> Sequence[Any] | None:
        """Return the values that this rank shows. None: the ordinary way has to look at `value`."""
        count = self._exchanged.counts[self._context.rank]
        if not count:
            return () if value is None else None  # a place may hold arrays
        if self.op not in plain.SLOTS:
            return (value,)
        return value if type(value) in (list, tuple) and len(value) == count else None

    def _bound(self, phase: Phase, lane: Lane, area: int) -> Callable[[Given], int]:
        areas = areas_of(lane, area)
        own = areas[self._context.rank]

        def show(call: Given) -> int:
            shown = cast(bytes, call.shown)
            own[: len(shown)] = shown
            return True

        return self.bound(phase, lane, area, show, partial(self.read_plainly, areas))

    def is_plainly_read(self, blobs: Sequence[bytes | memoryview], call: Given) -> bool:
        return self.read_plainly(blobs, call)

    def form(self, args: tuple[Any, ...]) -> Form | None:
        return None

    def known(self, args: tuple[Any, ...]) -> KnownCall | None:
        return None

    def _learn_from(self, blobs: Sequence[bytes]) -> None:
        """Do nothing, because the next values have another form."""


class PostedPlain(PlainRecipe, PostedValues):
    """A recipe of plain values of any form that are posted."""

    __slots__ = ()

    def for_call(self, number: int, given: Given) -> PlainPost:
        return PlainPost(self, self._context.rank, self._context.size, given)


class PlainPost(Posted):
    """One call of a `PostedPlain`, whose posts have another length each time."""

    __slots__ = ("_recipe", "_shown", "call", "lengths", "nbytes", "op")

    def __init__(self, recipe: PostedPlain, rank: int, size: int, given: Given) -> None:
        self._recipe = recipe
        self._shown = recipe.shown(given)
        self.op, self.call, self.nbytes = recipe.op, recipe.call, recipe.nbytes
        self.lengths = [-1] * size
        self.lengths[rank] = len(self._shown)

    def shown(self, given: Given) -> Data:
        return self._shown

    def prefixes(self, tag: object, number: int) -> Sequence[bytes | None]:
        before = prefixes(pack_fields(tag, self.call), len(self._shown))(number)
        return [None if length < 0 else before for length in self.lengths]

    def fits(self, nbytes: int) -> bool:
        return True

    def result(self, values: Sequence[Data], x: Any, given: Given) -> Any:
        recipe = self._recipe
        return x.pop() if recipe.read_plainly(values, given) else recipe.begun(x, given)

    def begun(self, x: Any, given: Given) -> Otherwise:
        return self._recipe.begun(x, given)

    def keep(self, given: Given) -> Given:
        return self._recipe.keep(given)


def plain_in_one_go(
    recipe: PostedPlain,
    posts: Posts,
    wake: Callable[[list[int]], bool],
    comes: Callable[[Reader], bool],
    moved: Moved,
) -> InOneGo:
    """Return a function that does a whole call with plain values: see `posted.in_one_go`."""

    def run(tag: object, number: int, x: Any, given: Given) -> bool | None:
        shown = recipe.shown(given)
        head = prefixes(pack_fields(tag, recipe.call), len(shown))(number)
        if posts.put_parts(head, (shown,), len(head) + padded(len(shown))) < 0:
            return None
        woken = posts.tell()
        if woken and not wake(woken):
            return False
        return plainly(recipe, posts, comes, moved, tag, number, given, shown)

    return run
