"""What Roost's part inside vLLM is built on, as far as it uses it."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

Init = TypeVar("Init")
Update = TypeVar("Update")


class WeightTransferEngine(Generic[Init, Update]):
    update_info_cls: ClassVar[Any]

    def __init__(self, model: Any) -> None:
        self.model, self.model_config = model, None

    def parse_update_info(self, info: dict[str, Any]) -> Update:
        return self.update_info_cls(**info)


class WeightTransferEngineFactory:
    known: ClassVar[dict[str, type]] = {}

    @classmethod
    def register_engine(cls, name: str, engine: type) -> None:
        cls.known[name] = engine
