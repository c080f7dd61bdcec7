"""aiodist's errors as programs for torch expect them: they are RuntimeErrors, too.

Each keeps its type, fields and text; beside that it is a `torch.distributed.DistBackendError`.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed import DistBackendError, group

from aiodist import AiodistError, CollectiveTimeoutError, Group

_TIMEOUT = "the timeout is over: "
"""Programs, and torch's own tests, know a timeout by this word in its text."""

failures: weakref.WeakKeyDictionary[Group, AiodistError] = weakref.WeakKeyDictionary()
"""The latest error of each group, without frames, which might keep the group alive."""

_twins: dict[type[AiodistError], type[AiodistError]] = {}


def as_torch(error: BaseException) -> BaseException:
    """`error`, as an instance of `DistBackendError` as well if it is aiodist's; else itself."""
    if not isinstance(error, AiodistError) or isinstance(error, DistBackendError):
        return error
    # Programs catch either: those of torch `DistBackendError` or RuntimeError, those who know
    # aiodist its classes. One class that is both serves both, and `except aiodist.PeerLostError`
    # goes on working where a program is moved from one to the other.
    made = _copy(error, _twin(type(error)))
    if isinstance(made, CollectiveTimeoutError):
        made.message = _TIMEOUT + made.message.removeprefix(_TIMEOUT)
    made.__cause__, made.__traceback__ = error.__cause__, error.__traceback__
    return made


def without_frames(error: AiodistError) -> AiodistError:
    """A copy of `error` to be kept, without traceback and cause: whoever raises the original adds
    frames to it, and they hold all that they refer to."""
    return _copy(error, type(error))


def last_error(process_group: Any = None) -> AiodistError | None:
    """What went wrong last in a process group (None: the default one), or None if nothing did.

    For code that hears of it through torch: where a future fails, as in the backward pass of
    DistributedDataParallel, torch raises a RuntimeError with the text alone. This is the error,
    of its own class and with its fields; ask before the group is destroyed.

    Raises ValueError for a group of another backend, and where there is none.
    """
    asked = group.WORLD if process_group is None else process_group
    own = getattr(asked, "group", None)
    if not isinstance(own, Group):
        raise ValueError(f"last_error() is for process groups of aiodist, got {asked!r}")
    return failures.get(own)


def _twin(cls: type[AiodistError]) -> type[AiodistError]:
    if cls not in _twins:
        # The name stays that of aiodist's class: it is what a traceback shows.
        names = {"__module__": cls.__module__, "__reduce__": _reduce}
        _twins[cls] = type(cls.__name__, (cls, DistBackendError), names)
    return _twins[cls]


def _copy(error: AiodistError, cls: type[AiodistError]) -> AiodistError:
    made = cls.__new__(cls)
    Exception.__init__(made, *error.args)
    made.__dict__.update(error.__dict__)
    return made


def _reduce(error: AiodistError) -> tuple[Any, ...]:
    # The class is made here and has no name of its own: what travels is aiodist's error.
    return as_torch, (_copy(error, type(error).__mro__[1]),)
