"""What vLLM 0.33.0 (commit 4ba787ec9) documents of its weight transfer, for where it is not there:
the base classes, and the registries. See docs.vllm.ai, "Base Class and Custom Engines".
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

Init = TypeVar("Init")
U = TypeVar("U")

NAMES = (
    "vllm",
    "vllm.distributed",
    "vllm.distributed.weight_transfer",
    "vllm.distributed.weight_transfer.base",
    "vllm.distributed.weight_transfer.factory",
)
"""This stands for all of them."""


class VLLMWeightSyncClient:
    pass


class WeightSource(ABC):
    @property
    @abstractmethod
    def metadata(self) -> list[Any]: ...

    def implements_iter_full(self) -> bool:
        return hasattr(self, "iter_full")


class WeightTransferInitInfo:
    pass


class WeightTransferUpdateInfo:
    pass


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightTransferEngine(ABC, Generic[Init, U]):
    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config = config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model

    def parse_init_info(self, said: dict[str, Any]) -> Any:
        return _parsed(self.init_info_cls, said)

    def parse_update_info(self, said: dict[str, Any]) -> Any:
        return _parsed(self.update_info_cls, said)

    def update_weights(self, said: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(said))

    @abstractmethod
    def init_transfer_engine(self, init_info: Init) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: U) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


def _parsed(cls: Any, said: dict[str, Any]) -> Any:
    try:
        return cls(**said)
    except TypeError as error:
        raise ValueError(str(error)) from error


class TrainerWeightTransferEngine(ABC, Generic[Init]):
    def __init__(
        self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0
    ) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: Init, *, client: Any, source: Any = None) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...

    def shutdown(self) -> None:
        pass


class _Registry:
    _registry: ClassVar[dict[str, Any]]

    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"{name} is registered already")
        cls._registry[name] = lambda: getattr(importlib.import_module(module), class_name)


class WeightTransferEngineFactory(_Registry):
    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        return cls._registry[config.backend]()(config, vllm_config, device, model)


class WeightTransferTrainerFactory(_Registry):
    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        found = cls._registry[init_info.backend]()
        return found.trainer_init(init_info=init_info, client=client, source=source)
