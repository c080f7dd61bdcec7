"""One call, made with arrays of the host or with arrays on a device: the same call to the user.

Ranks whose arrays are on devices begin by telling each other where. The frames of that say it, by
what follows the call, so that nobody takes them for what ranks send whose arrays are on the host.

On a board, ranks with arrays on devices say so by a word of their own. A rank that gives arrays of
the host drops marked frames, and answers with its call. A rank that has marked its own *turns* when
it hears a call without the mark (`Operation.turn`): it tells all others, and begins anew without
the mark. That is safe, because nothing was written by then: no exchange of marked operations ends
before all ranks have marked theirs.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from aiodist.errors import ProtocolError

_ON_DEVICE = b" on a device"


class OnHostError(ProtocolError):
    """Others give arrays of the host: what ranks whose arrays are on devices have begun among
    themselves is over. Raised where a program waits, which then goes on as the others do."""


def on_device(call: str) -> str:
    """What ranks call that call `call` with arrays on a device."""
    return call + _ON_DEVICE.decode()


def on_host(call: bytes) -> bytes:
    """What ranks call that call the same with arrays of the host."""
    return call.removesuffix(_ON_DEVICE)


def shown(call: bytes) -> str:
    """What the user called."""
    return on_host(call).decode(errors="replace")


def alike(one: bytes, other: bytes) -> bool:
    """Whether they differ in nothing else."""
    return on_host(one) == on_host(other)


def turned(program: Generator[Any, None, Any], *, fresh: bool) -> Generator[Any, None, Any]:
    """A program, which goes on with an OnHostError where it waits. `fresh`: it has not begun."""
    try:
        if fresh:
            next(program)
        phase = program.throw(OnHostError("other ranks give arrays of the host"))
        while True:
            yield phase
            phase = next(program)
    except StopIteration as stop:
        return stop.value
    finally:
        program.close()


class Over:
    """A phase that is over before its time."""

    def run(self) -> bool:
        return True

    def close(self) -> None:
        pass
