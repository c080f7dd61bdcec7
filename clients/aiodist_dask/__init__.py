"""aiodist on Dask: the workers of a cluster as the ranks of a group, on their own event loops.

`groups` makes a group of a client's workers and runs coroutines on them; `get_group` is that group
in what `Client.run` and tasks run there. The coordinator is a plugin of the scheduler, and each
worker has a plugin that keeps its groups.
"""

from aiodist_dask.groups import Groups, groups
from aiodist_dask.worker import get_group

__all__ = ["Groups", "get_group", "groups"]
