"""How calls of a process group reach its methods, in any form and for any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor

from aiodist import AiodistError
from aiodist_torch.devices import Mixed, are_plain, awaited, first_tensor
from aiodist_torch.forms import Forms, Long

R = TypeVar("R")


def call(
    *shorter: Callable[..., Long], collective: bool = True
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Accept a method's own form or a shorter one, and pass tensors of other devices to their
    group.

    A call of a `collective` that cannot start still uses up its turn.
    """

    def decorated(method: Callable[..., R]) -> Callable[..., R]:
        name = method.__name__
        forms = Forms(method, shorter)
        last = forms.last

        @wraps(method)
        def called(group: Mixed, /, *args: Any, **kwargs: Any) -> R:
            try:
                # Calls of torch's own code have the long form, so they are not checked further.
                if kwargs or not args or args[-1].__class__ is not last:
                    args = forms.long(args, kwargs)
                if not are_plain(args):
                    args = awaited(args)
                    if isinstance(first_tensor(args), FakeTensor):
                        # It has no values, so nothing is sent, as with torch's own backends. No
                        # turn is used up, because a rank may trace code that others do not run.
                        return cast(R, FakeWork())
                x = first_tensor(args)
                other = group if x is None or x.is_cpu else group.beside(x.device)
                if other is group:
                    return method(group, *args)
            except AiodistError:
                raise  # there is no group any more whose ranks count
            except Exception as error:
                if collective:
                    group.forgo(error, first_tensor((*args, *kwargs.values())))
                raise
            answer: R = getattr(other, name)(*args)
            return answer

        return called

    return decorated
