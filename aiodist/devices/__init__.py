"""Memory of devices: what a device has to offer, which devices there are, and how ranks of a host
read each other's.

`base` says what is asked of a device, so that another kind is one more module beside `cuda`. What
ranks tell each other of their arrays, and until when they are kept, is in `memory`.
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
