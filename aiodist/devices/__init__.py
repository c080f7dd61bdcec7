"""Memory of devices: what a device has to offer, which devices there are, and how ranks of a host
read each other's.

`base` says what is asked of a device, so that another kind is one more module beside `cuda`. Beside
that there is a stand-in for tests, over shared memory, whose streams are queues that a thread works
off (`tests/shared/standin.py`). What an operation queues is in `work`; what ranks tell each other
of their arrays, once, in `handles`; who may read what, and until when it is kept, in `memory`.

Collectives and messages of arrays on devices are like all others: they have the same matching,
deadlines and verdicts. **Reductions** of arrays on devices have programs of their own
(`aiodist.device_programs`), which begin with a roll call, since ranks that give arrays of the host
never know of devices (`aiodist.engine.roll_call`). **Values** have one program, whatever is in
them: the codec leaves arrays on devices out (`aiodist.buffers.foreign`), and offers say where they
lie. Both then agree in one way whether arrays are read where they lie, or go through the host
(`aiodist.collectives.device_transfer`, which says why that is safe). A **message** with such arrays
is announced, however small it is: its receiver reads what is on the device before it pulls the
rest, and has the message when the sender says that all was right.

**Each rank reads** the arrays of the others where they lie, and writes its own alone. Where one
rank cannot read the device of another, arrays go through pinned memory of the host (`sections`).

**Events order the streams, words order the events.** A wait for the event of another rank is queued
when that rank has said that it recorded the event. So no stream waits for a stream that waits for
it.

**A Work is done when the device is.** The loop looks whether it is, and never waits for it
(`waiting`).
"""

from __future__ import annotations

from typing import Any

from aiodist.devices.base import Device


def device_of(value: Any) -> Device | None:
    """The device that holds an array; None for arrays of the host, and for what is no array.

    Arrays other than CUDA tensors name their device themselves, as ``__aiodist_device__``.
    """
    if getattr(value, "is_cuda", False) is True:
        from aiodist.devices import cuda

        return cuda.of(value)
    device: Device | None = getattr(value, "__aiodist_device__", None)
    return device


def default(kind: str) -> Device | None:
    """This process' device of that kind, where there is one that needs no naming: torch's current
    CUDA device."""
    if kind != "cuda":
        return None
    from aiodist.devices import cuda

    return cuda.current()
