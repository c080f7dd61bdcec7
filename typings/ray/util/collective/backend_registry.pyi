from ray.util.collective.collective_group.base_collective_group import BaseGroup

class BackendRegistry:
    def is_registered(self, name: str) -> bool: ...

_global_registry: BackendRegistry

def register_collective_backend(name: str, group_cls: type[BaseGroup]) -> None: ...
