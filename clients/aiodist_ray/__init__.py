"""aiodist on Ray: groups of async actors, and a backend of `ray.util.collective`.

`connect` joins a group from a coroutine of an actor. The coordinator is an actor, too, which
`coordinator` returns. `register` makes ``"aiodist"`` a backend of `ray.util.collective`. The import
of this package does not do that by itself, because Ray's registry imports torch if it is installed.
"""

from aiodist_ray.coordinator import coordinator
from aiodist_ray.session import connect


def register() -> None:
    """Make ``"aiodist"`` a backend of `ray.util.collective` in this process. Idempotent.

    Call it in the driver and in every actor of a group, because Ray asks for that.
    """
    from aiodist_ray import collective

    collective.register()


__all__ = ["connect", "coordinator", "register"]
