"""`InFlightWork`: a work that `wait_tensor` of its tensors waits for.

torch keeps a registry of such works. Functional collectives are always in it. Other operations are
in it if a compiled function may get their tensors before they are done:
``torch.distributed._functional_collectives.allow_inflight_collective_as_graph_input_ctx``. The C++
methods of a process group see to that. Ours replace them, so they have to do it, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from torch._C import _distributed_c10d as c10d

from aiodist_torch.untraced import untraced
from aiodist_torch.work import TorchWork

allowed: Callable[[], bool] = getattr(c10d, "_allow_inflight_collective_as_graph_input", bool)
"""Tells whether operations have to be in the registry. Older versions of torch do not ask."""


class _Here(threading.local):
    taken: set[InFlightWork] | None = None  # what this thread takes out of the registry now


_here = _Here()


@untraced
class InFlightWork(TorchWork):
    """A `TorchWork` for the registry. A `wait` takes it out again, as with torch's own works."""

    def register(self) -> None:
        """Have `wait_tensor` of each tensor wait for this work."""
        for x in self.tensors:
            c10d._register_work(x, self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. See `TorchWork.wait`."""
        if _here.taken is not None:
            _here.taken.add(self)
            return True
        super().wait(timeout)
        if allowed():
            for x in self.tensors:
                self._unregister(x)
        return True

    def _unregister(self, x: torch.Tensor) -> None:
        # Python has no call that removes one work. `wait_tensor` removes all that have tensors in
        # the same memory, and waits for them. This work must not wait for others, because they may
        # need what the program does next. So `wait` only notes them here, and they are put back.
        taken: set[InFlightWork] = set()
        _here.taken = taken
        try:
            torch.ops._c10d_functional.wait_tensor(x.detach())
        finally:
            _here.taken = None
            for other in taken - {self}:
                c10d._register_work(x, other)
