"""How collectives of callbacks are matched.

A callback of a future runs when its operation ends, in a thread of its own, or at once if the
operation has ended already. So its collectives have no place in the order of the program, because
that place would differ from rank to rank. They have a tag instead, made of what all ranks know:
which collective the future belongs to, and the number of the callback among those of that future.
A future that `then` returns belongs to its callback in the same way, and so do works that a
callback starts. Only members of the group of that collective know all this. So a collective of a
group with other members has no tag, and is called in the order of the program.

torch makes the futures that `then` returns in C++, and only such a future shows an error to C++. A
subclass is not possible for that reason, so `then` and `add_done_callback` of all futures are
replaced. Some futures have no name, such as those of `torch.futures.collect_all`. Their callbacks
belong to the program or the callback that attached them, and call collectives in its order.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch

from aiodist import Group
from aiodist_torch.untraced import untraced

Callback = Callable[[Any], Any]
Members = frozenset[str]


class Caller:
    """Calls collectives in an order that is the same on all ranks: the program, or a callback.

    `tag` is that of all its collectives. The program has none. `known_to`: the ids of the members
    that know the tag.
    """

    def __init__(self, tag: str | None = None, known_to: Members = frozenset()) -> None:
        self.tag = tag
        self.known_to = known_to
        # By group, because a rank need not be in all groups.
        self._turns: defaultdict[Group, itertools.count[int]] = defaultdict(itertools.count)

    def turn(self, group: Group) -> Turn:
        """Return the turn of a collective of `group` that is called now."""
        return self, next(self._turns[group])


Turn = tuple[Caller, int]
"""A caller, and the number of the collective among those that it has called in the group."""


def turn_of(group: Group, program: Caller) -> Turn:
    """Return the turn of a collective of `group` that this thread calls now."""
    caller = here.caller
    is_known = caller is not None and _members(group) <= caller.known_to
    return (caller if caller is not None and is_known else program).turn(group)


def _members(group: Group) -> Members:
    return frozenset([member.id for member in group.members])


class _Here(threading.local):
    caller: Caller | None = None  # the callback that this thread runs; None: it is the program


here = _Here()


class _Futures:
    """The callbacks of one future that has a name. `known_to`: see `Caller`."""

    def __init__(self, name: str, known_to: Members) -> None:
        self._name = name
        self._known_to = known_to
        # By method, because one rank may attach a callback that only logs.
        self._numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)

    def another(self, method: str) -> Caller:
        """Return the caller for the callback that is attached now by this method."""
        # A digest, because callbacks of callbacks would have longer and longer tags.
        text = f"{self._name} {method} {next(self._numbers[method])}"
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        return Caller(f"callback {digest}", self._known_to)


_named: WeakKeyDictionary[Any, _Futures] = WeakKeyDictionary()


def name_future(future: Any, group: Group, turn: Turn) -> None:
    """Give `future` the name of its collective of `group`."""
    caller, number = turn
    known_to = _members(group)
    if caller.tag is not None:
        known_to &= caller.known_to
    # Groups of other coordinators may have the same names, but not the same members.
    members, context = group.members[0].id, group._context.id.hex()
    _named[future] = _Futures(f"{caller.tag} {members} {context} {number}", known_to)


def tagged(group: Group, tag: str | None) -> Any:
    """Return `group`, whose collectives have `tag` if they are given no other."""
    return group if tag is None else _Tagged(group, tag)


class _Tagged:
    def __init__(self, group: Group, tag: str) -> None:
        self._group = group
        self._tag = tag

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        return partial(found, tag=self._tag) if callable(found) else found


_core: Any = torch._C
_then, _add_done_callback = _core.Future.then, _core.Future.add_done_callback


@untraced
class _Replaced:
    def then(self: Any, callback: Callback) -> Any:
        caller = _caller_of(self, "then")
        future = _then(self, _running(caller, callback))
        if self in _named and caller is not None:
            _named[future] = _Futures(f"{caller.tag}", caller.known_to)
        return future

    def add_done_callback(self: Any, callback: Callback) -> None:
        caller = _caller_of(self, "add_done_callback")
        _add_done_callback(self, _running(caller, callback))


def _caller_of(future: Any, method: str) -> Caller | None:
    """Return what calls the collectives of the callback that is attached to `future` now."""
    named = _named.get(future)
    return here.caller if named is None else named.another(method)


def _running(caller: Caller | None, callback: Callback) -> Callback:
    if not callable(callback):
        return callback  # torch refuses it

    def run(future: Any) -> Any:
        before, here.caller = here.caller, caller
        try:
            return callback(future)
        finally:
            here.caller = before

    return run


_core.Future.then, _core.Future.add_done_callback = _Replaced.then, _Replaced.add_done_callback
