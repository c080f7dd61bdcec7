from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch

class WeightSource(ABC):
    def implements_iter_full(self) -> bool: ...
    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]: ...

@dataclass
class WeightTransferInitInfo(ABC): ...

@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int
    @property
    def is_sender(self) -> bool: ...

@dataclass
class WeightTransferUpdateInfo(ABC): ...

TInitInfo = TypeVar("TInitInfo", bound=WeightTransferInitInfo)
TUpdateInfo = TypeVar("TUpdateInfo", bound=WeightTransferUpdateInfo)
TTrainerInitInfo = TypeVar("TTrainerInitInfo", bound=TrainerInitInfo)

class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    init_info_cls: type[TInitInfo]
    update_info_cls: type[TUpdateInfo]
    device: torch.device
    model: Any
    model_config: Any
    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None: ...
    @abstractmethod
    def init_transfer_engine(self, init_info: TInitInfo) -> None: ...
    @abstractmethod
    def start_weight_update(self) -> None: ...
    @abstractmethod
    def finish_weight_update(self) -> None: ...
    @abstractmethod
    def receive_weights(self, update_info: TUpdateInfo) -> None: ...
    @abstractmethod
    def shutdown(self) -> None: ...

class VLLMWeightSyncClient(Protocol):
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

class TrainerWeightTransferEngine(ABC, Generic[TTrainerInitInfo]):
    init_info_cls: type[TTrainerInitInfo]
    is_sender: bool
    client: VLLMWeightSyncClient
    source: WeightSource | None
    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
        is_sender: bool = True,
        rank: int = 0,
    ) -> None: ...
    @classmethod
    @abstractmethod
    def trainer_init(
        cls,
        init_info: TTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self: ...
    @abstractmethod
    def send_weights(self) -> None: ...
    def shutdown(self) -> None: ...
