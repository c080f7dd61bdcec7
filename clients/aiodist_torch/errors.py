"""aiodist's errors as programs for torch expect them: they are RuntimeErrors, too.

Each keeps its type, fields and text; beside that it is a `torch.distributed.DistBackendError`.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from aiodist import AiodistError, CollectiveTimeoutError

_twins: dict[type[AiodistError], type[AiodistError]] = {}


def _both(cls: type[AiodistError]) -> type[AiodistError]:
    if cls not in _twins:
        # The name stays that of aiodist's class: it is what a traceback shows.
        _twins[cls] = type(cls.__name__, (cls, DistBackendError), {"__module__": cls.__module__})
    return _twins[cls]


def as_torch(error: BaseException) -> BaseException:
    """`error`, as an instance of `DistBackendError` as well if it is aiodist's; else itself."""
    if not isinstance(error, AiodistError) or isinstance(error, DistBackendError):
        return error
    twin = _both(type(error))
    made = twin.__new__(twin)
    Exception.__init__(made, *error.args)
    made.__dict__.update(error.__dict__)
    if isinstance(made, CollectiveTimeoutError):
        # Programs (and torch's own tests) know a timeout by this word of Gloo's texts.
        made.message = f"the timeout is over: {made.message}"
    made.__cause__, made.__traceback__ = error.__cause__, error.__traceback__
    return made
