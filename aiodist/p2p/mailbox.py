"""What waits at a receiver: messages without a receive, and receives without a message. No I/O.

In here None is a wildcard, and a tuple has several sources. Messages and receives are numbered in
the order in which they came. What is put back goes to the place of its number. A tag without
waiting messages or receives takes no memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from aiodist.p2p.credit import Key, MessageTag, Source


class Addressed(Protocol):
    """A message, as the mailbox needs it."""

    number: int
    source: int
    tag: MessageTag


class Awaiting(Protocol):
    """A receive or a probe, as the mailbox needs it."""

    number: int
    source: Source
    tag: Key


M = TypeVar("M", bound=Addressed)
R = TypeVar("R", bound=Awaiting)
T = TypeVar("T")


class NumberedQueue(OrderedDict[int, T]):
    """Items in ascending order of their numbers."""

    def insert(self, number: int, item: T) -> None:
        """Put `item` at the place of its number, which is nearly always the end."""
        last = next(reversed(self), number)
        self[number] = item
        if number < last:
            for later in sorted(self):
                self.move_to_end(later)

    @property
    def head(self) -> T:
        """The first item. There must be one."""
        return next(iter(self.values()))


def covers(named: Source, source: int) -> bool:
    """Return whether a receive that names `named` takes messages of `source`."""
    return named is None or named == source or (type(named) is tuple and source in named)


class PendingReceives(Generic[R]):
    """Receives, or probes, that wait."""

    __slots__ = ("_several", "_wild", "lines")

    def __init__(self) -> None:
        self.lines: dict[tuple[Source, Key], NumberedQueue[R]] = {}
        self._wild = 0  # how many of the lines have a wildcard
        # The keys that name several sources. They are in order, so that a simulation repeats
        # itself.
        self._several: dict[tuple[Source, Key], None] = {}

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[R]:
        return iter([item for line in self.lines.values() for item in line.values()])

    @property
    def has_several(self) -> bool:
        """Whether more than one waits."""
        lines = self.lines
        return len(lines) > 1 or any(len(line) > 1 for line in lines.values())

    def add(self, item: R) -> None:
        key = (item.source, item.tag)
        line = self.lines.get(key)
        if line is None:
            line = self.lines[key] = NumberedQueue()
            self._wild += None in key
            if type(item.source) is tuple:
                self._several[key] = None
        line.insert(item.number, item)

    def remove(self, item: R) -> None:
        key = (item.source, item.tag)
        line = self.lines[key]
        del line[item.number]
        if not line:
            del self.lines[key]
            self._wild -= None in key
            self._several.pop(key, None)

    def first(self, source: int, tag: MessageTag) -> R | None:
        """Return the oldest one that takes a message of `source` and `tag`."""
        lines = self.lines
        line = lines.get((source, tag))
        found = None if line is None else line.head
        if self._wild:
            for key in ((source, None), (None, tag), (None, None)):
                line = lines.get(key)
                if line is not None and (found is None or line.head.number < found.number):
                    found = line.head
        for named in self._several:
            if covers(named[0], source) and (named[1] is None or named[1] == tag):
                head = lines[named].head
                if found is None or head.number < found.number:
                    found = head
        return found

    def waits(self, source: int, tag: MessageTag) -> bool:
        """Return whether one waits for `tag` by name from `source`."""
        if (source, tag) in self.lines or (None, tag) in self.lines:
            return True
        return any(covers(named, source) and wanted == tag for named, wanted in self._several)

    def tags(self, source: int) -> list[MessageTag]:
        """Return the tags that are waited for by name from `source`."""
        return [tag for named, tag in self.lines if tag is not None and covers(named, source)]

    def concerning(self, source: int) -> list[R]:
        """Return all that wait for `source`."""
        return [item for item in self if covers(item.source, source)]


class _Box(Generic[M]):
    """The messages of one source."""

    __slots__ = ("by_age", "by_tag")

    def __init__(self) -> None:
        self.by_tag: dict[MessageTag, NumberedQueue[M]] = {}
        self.by_age: NumberedQueue[M] = NumberedQueue()


class Mailbox(Generic[M]):
    """Messages that no receive has taken yet."""

    __slots__ = ("_served", "_services", "boxes")

    def __init__(self) -> None:
        self.boxes: dict[int, _Box[M]] = {}
        # By source: the number of the last receive of several sources that took a message from it.
        self._served: dict[int, int] = {}
        self._services = 0  # how many such receives there were

    def __len__(self) -> int:
        return sum(len(box.by_age) for box in self.boxes.values())

    def put(self, message: M) -> None:
        box = self.boxes.get(message.source)
        if box is None:
            box = self.boxes[message.source] = _Box()
        line = box.by_tag.get(message.tag)
        if line is None:
            line = box.by_tag[message.tag] = NumberedQueue()
        line.insert(message.number, message)
        box.by_age.insert(message.number, message)

    def remove(self, message: M) -> None:
        box = self.boxes[message.source]
        line = box.by_tag[message.tag]
        del line[message.number]
        if not line:
            del box.by_tag[message.tag]
        del box.by_age[message.number]
        if not box.by_age:
            del self.boxes[message.source]

    def cut(self, message: M) -> list[M]:
        """Remove and return `message` and the messages behind it, of the same source and tag."""
        line = self.boxes[message.source].by_tag[message.tag]
        removed = [item for number, item in line.items() if number >= message.number]
        for item in removed:
            self.remove(item)
        return removed

    def find(self, source: Source, tag: Key) -> M | None:
        """Return the message that a receive takes: the first of its tag, or the oldest if it takes
        any tag.

        If several sources have a message, it is from the one that was served the longest ago.
        """
        if not self.boxes:
            return None
        if type(source) is int:
            box = self.boxes.get(source)
            return None if box is None else self._in(box, tag)
        ready = [
            (self._served.get(rank, 0), rank, found)
            for rank, box in self.boxes.items()
            if covers(source, rank) and (found := self._in(box, tag)) is not None
        ]
        return min(ready, key=itemgetter(0, 1))[2] if ready else None

    @staticmethod
    def _in(box: _Box[M], tag: Key) -> M | None:
        if tag is None:
            return box.by_age.head
        line = box.by_tag.get(tag)
        return None if line is None else line.head

    def served(self, source: int) -> None:
        """Note that a receive of several sources took a message of `source`, so the others come
        first now."""
        self._services += 1
        self._served[source] = self._services

    def clear(self) -> None:
        self.boxes.clear()
