"""Memory of devices: what a device offers, and how ranks of a host read each other's arrays.

`base` says what a device must offer, so that another kind is one more module beside `cuda`. For
tests there is a stand-in over shared memory, whose streams are queues of a thread
(`tests/shared/standin.py`). `work` has what an operation queues. `handles` has what ranks tell each
other about their arrays, once. `memory` decides which ranks may read an array, and how long it is
kept.

Collectives and messages of arrays on devices have the same matching, deadlines and verdicts as all
others. **Reductions** of such arrays have programs of their own (`aiodist.device_programs`). These
begin with a roll call, because ranks with arrays of the host do not know of devices
(`aiodist.engine.roll_call`).

**Values** have one program for all contents. The codec leaves arrays on devices out
(`aiodist.buffers.foreign`), and offers say where they are. Then the ranks agree whether to read
arrays in place or to send them through the host (`aiodist.collectives.device_transfer` says why
that is safe). A **message** with such arrays is always announced, even a small one. Its receiver
reads the arrays on the device first, and then pulls the rest. It has the message when the sender
confirms it.

**Each rank reads** the arrays of the others in place, and writes only its own. If a rank cannot
read the device of another, arrays go through pinned memory of the host (`sections`).

**Events order the streams, and messages order the events.** A rank queues a wait for another rank's
event only after that rank has said that it recorded the event. So no two streams wait for each
other.

**A Work is done when the device is.** The loop polls the device and never blocks on it (`waiting`).
"""

from __future__ import annotations

from typing import Any

from aiodist.devices.base import Device


def device_of(value: Any) -> Device | None:
    """The device that holds an array; None for arrays of the host and for other values.

    Arrays other than CUDA tensors name their device themselves, as ``__aiodist_device__``.
    """
    if getattr(value, "is_cuda", False) is True:
        from aiodist.devices import cuda

        return cuda.of(value)
    device: Device | None = getattr(value, "__aiodist_device__", None)
    return device


def default(kind: str) -> Device | None:
    """This process' default device of a kind, if there is one: torch's current CUDA device."""
    if kind != "cuda":
        return None
    from aiodist.devices import cuda

    return cuda.current()
