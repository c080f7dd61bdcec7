"""What verl 0.9.1 documents of its checkpoint engines, for where it is not there: the base class,
and the registry, of verl/checkpoint_engine/base.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

NAMES = ("verl", "verl.checkpoint_engine", "verl.checkpoint_engine.base")
"""This stands for all of them."""


class CheckpointEngineRegistry:
    _registry: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def register(backend: str) -> Callable[[Any], Any]:
        def register(cls: Any) -> Any:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return register

    @classmethod
    def get(cls, backend: str) -> Any:
        return cls._registry[backend]

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls.get(backend)(*args, **kwargs)


class CheckpointEngine(ABC):
    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...
