"""Options of communication between accelerators."""

from __future__ import annotations

from dataclasses import dataclass, fields

from roost.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroupOptions:
    """How NCCL communicates: how many blocks of a device it takes, and on which stream. None leaves it to NCCL."""

    accel_max_ctas: int | None = None
    accel_min_ctas: int | None = None
    accel_cluster_size: int | None = None
    is_high_priority_stream: bool = False
    use_ring_broadcast: bool = False

    def __post_init__(self) -> None:
        for name in ("accel_max_ctas", "accel_min_ctas", "accel_cluster_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}: it is a positive number, or None")
        if self.accel_min_ctas and self.accel_max_ctas and self.accel_min_ctas > self.accel_max_ctas:
            raise ConfigError(f"accel_min_ctas is {self.accel_min_ctas}, over accel_max_ctas {self.accel_max_ctas}")
        for name in ("is_high_priority_stream", "use_ring_broadcast"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: it is True or False")


def check_options(options: CollectiveGroupOptions | None) -> None:
    """Raise ConfigError unless these are options."""
    if options is not None and not isinstance(options, CollectiveGroupOptions):
        names = ", ".join(field.name for field in fields(CollectiveGroupOptions))
        raise ConfigError(f"options is {options!r}", hint=f"write CollectiveGroupOptions(…) with some of {names}")
