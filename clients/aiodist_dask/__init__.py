"""aiodist on Dask: the workers of a cluster as the ranks of a group, on their own event loops.

`groups` makes a group of a client's workers and runs coroutines on them. `get_group` returns that
group inside functions that `Client.run` and tasks run on a worker. The coordinator is a plugin of
the scheduler. Each worker has a plugin that keeps its groups.
"""

from aiodist_dask.groups import Groups, groups
from aiodist_dask.worker import get_group

__all__ = ["Groups", "get_group", "groups"]
