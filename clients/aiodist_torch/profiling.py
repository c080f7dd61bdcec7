"""Operations in the traces of torch's profilers, with names like those of torch's own backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._profiler import _RecordFunctionFast

from aiodist_torch.work import TorchWork

_NAMES = {"receive": "recv", "together": "coalesced"}
"""Operations for which torch's backends have another name than the function here."""


def recording(
    submit: Callable[..., None], work: TorchWork, waits: bool, start: Any, args: tuple[Any, ...]
) -> Callable[..., None]:
    """Wrap `submit`, so that an active profiler sees what it starts.

    The range is the time that the caller spends in the call. With `waits` it lasts until the
    operation is done, because the caller waits for that anyway. Shapes are those of the tensors in
    `args`.
    """

    def recorded(*launch: Any, **how: Any) -> None:
        with _RecordFunctionFast(_title(start), tuple(_tensors(args))):
            submit(*launch, **how)
            if waits:
                work.until_done()

    return recorded


def _title(start: Any) -> str:
    """Return the name for traces. ``torch.distributed.record_comm`` can give another one."""
    given: str = getattr(c10d, "_get_comm_profiling_name", str)()
    if given:
        return given
    while isinstance(start, partial):
        start = start.args[0]
    return f"aiodist:{_NAMES.get(start.__name__, start.__name__)}"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
