class WeightTransferEngineFactory:
    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None: ...

class WeightTransferTrainerFactory:
    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None: ...
