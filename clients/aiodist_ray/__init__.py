"""aiodist on Ray: groups of async actors, and a backend of `ray.util.collective`.

`connect` joins a group from a coroutine of an actor; the coordinator is an actor, too, which
`coordinator` gives. `register` makes ``"aiodist"`` a backend of `ray.util.collective`. It is a
function, and not what the import of this package does, for Ray's registry imports torch where that
is installed.
"""

from aiodist_ray.coordinator import coordinator
from aiodist_ray.session import connect


def register() -> None:
    """Make ``"aiodist"`` a backend of `ray.util.collective` in this process. Idempotent.

    Ray wants that in the driver and in every actor that has a part in a group.
    """
    from aiodist_ray import collective

    collective.register()


__all__ = ["connect", "coordinator", "register"]
