"""aiodist's errors as programs for torch expect them: they are RuntimeErrors, too.

Each keeps its type, fields and text, and is a `torch.distributed.DistBackendError` as well. A
timeout of a store is also a `torch.distributed.DistStoreError`.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed import DistBackendError, DistStoreError, group

from aiodist import AiodistError, CollectiveTimeoutError, Group

_TIMEOUT = "the timeout is over: "
"""Programs, and torch's own tests, recognise a timeout by this word in its text."""

failures: weakref.WeakKeyDictionary[Group, AiodistError] = weakref.WeakKeyDictionary()
"""The latest error of each group, without frames, because these might keep the group alive."""


class StoreTimeoutError(DistStoreError, DistBackendError):
    """What a timeout of a store is for torch."""


Kind = type[DistBackendError]

_twins: dict[tuple[type[AiodistError], Kind], type[AiodistError]] = {}


def as_torch(error: BaseException, kind: Kind = DistBackendError) -> BaseException:
    """Return `error` as an instance of `kind` as well, if it is aiodist's; else itself."""
    if not isinstance(error, AiodistError) or isinstance(error, kind):
        return error
    # Programs for torch catch `DistBackendError` or RuntimeError, and programs for aiodist its
    # classes. One class that is both serves both, so that `except aiodist.PeerLostError` goes on
    # working in a program that moves to torch.
    made = _copy(error, _twin(type(error), kind))
    if isinstance(made, CollectiveTimeoutError):
        made.message = _TIMEOUT + made.message.removeprefix(_TIMEOUT)
    made.__cause__, made.__traceback__ = error.__cause__, error.__traceback__
    return made


def without_frames(error: AiodistError) -> AiodistError:
    """Return a copy of `error` to keep, without traceback and cause.

    Raising the original adds frames to it, which hold all that they refer to.
    """
    return _copy(error, type(error))


def last_error(process_group: Any = None) -> AiodistError | None:
    """Return the last error of a process group (None: the default one), or None if there was none.

    Use it if you hear of the error through torch. If a future fails, as in the backward pass of
    DistributedDataParallel, torch raises a RuntimeError with only the text. This returns the error
    itself, with its class and fields. Call it before the group is destroyed.

    Raises ValueError for a group of another backend, and if there is no default group.
    """
    asked = group.WORLD if process_group is None else process_group
    own = getattr(asked, "group", None)
    if not isinstance(own, Group):
        raise ValueError(f"last_error() is for process groups of aiodist, got {asked!r}")
    return failures.get(own)


def _twin(cls: type[AiodistError], kind: Kind) -> type[AiodistError]:
    if (cls, kind) not in _twins:
        # The name stays that of aiodist's class, because tracebacks show it.
        names = {"__module__": cls.__module__, "__reduce__": _reduce}
        _twins[cls, kind] = type(cls.__name__, (cls, kind), names)
    return _twins[cls, kind]


def _copy(error: AiodistError, cls: type[AiodistError]) -> AiodistError:
    made = cls.__new__(cls)
    Exception.__init__(made, *error.args)
    made.__dict__.update(error.__dict__)
    return made


def _reduce(error: AiodistError) -> tuple[Any, ...]:
    # The class is made here and has no importable name, so aiodist's own error travels.
    cls, kind = type(error).__bases__
    return as_torch, (_copy(error, cls), kind)
