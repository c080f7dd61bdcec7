"""aiodist's errors as programs for torch expect them: they are RuntimeErrors, too.

Each keeps its type, fields and text; beside that it is a `torch.distributed.DistBackendError`.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import DistBackendError

from aiodist import AiodistError, CollectiveTimeoutError

_TIMEOUT = "the timeout is over: "
"""Programs, and torch's own tests, know a timeout by this word in its text."""

_twins: dict[type[AiodistError], type[AiodistError]] = {}


def as_torch(error: BaseException) -> BaseException:
    """`error`, as an instance of `DistBackendError` as well if it is aiodist's; else itself."""
    if not isinstance(error, AiodistError) or isinstance(error, DistBackendError):
        return error
    made = _copy(error, _twin(type(error)))
    if isinstance(made, CollectiveTimeoutError):
        made.message = _TIMEOUT + made.message.removeprefix(_TIMEOUT)
    made.__cause__, made.__traceback__ = error.__cause__, error.__traceback__
    return made


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
