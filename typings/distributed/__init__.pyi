"""What aiodist_dask uses of Dask's distributed, which is no part of the development environment."""

from collections.abc import Mapping
from typing import Any

class WorkerPlugin: ...
class SchedulerPlugin: ...

class Scheduler:
    address: str
    plugins: Mapping[str, Any]
    security: Any

class Worker:
    address: str
    name: str | int
    plugins: Mapping[str, Any]
    security: Any

class Client:
    id: str
    scheduler: Any
    def sync(self, func: Any, *args: Any, **kwargs: Any) -> Any: ...
    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any: ...
    def run_on_scheduler(self, function: Any, *args: Any, **kwargs: Any) -> Any: ...
    def register_plugin(self, plugin: WorkerPlugin | SchedulerPlugin) -> Any: ...

def get_worker() -> Worker: ...
