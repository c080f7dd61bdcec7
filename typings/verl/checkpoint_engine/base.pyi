from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=type[CheckpointEngine])

class CheckpointEngineRegistry:
    @staticmethod
    def register(backend: str) -> Callable[[T], T]: ...

class CheckpointEngine(ABC):
    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...
    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]: ...
    @abstractmethod
    def init_process_group(self, *args: Any, **kwargs: Any) -> None: ...
    @abstractmethod
    def finalize(self) -> None: ...
    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None: ...
    @abstractmethod
    def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]: ...
