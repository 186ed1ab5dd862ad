"""Names of RLinf that Roost does not have: they can be imported, and say why when they are used."""

from __future__ import annotations

from typing import Any, NoReturn

from roost.errors import ConfigError

_REASONS = {
    "ComponentManager RolloutScalingScheduler SchedulerWorker get_scheduler_channel get_scheduler_request_queue "
    "get_scheduler_response_queue get_valid_dp_sizes": "the dynamic scheduler (cluster.auto_scheduler) changes "
    "placements while the job runs, and Roost's are fixed",
    "AcceleratorUtil AsyncRouteWork Collective CollectiveGroup CollectiveManager LocalChannel Manager "
    "MultiChannelProcessGroup WeightedItem WorkerManager": "it is a part of RLinf's scheduler, in whose place Roost is",
    "ModelParallelEvalComponentPlacement MultiAgentModelParallelComponentPlacement "
    "MultiAgentModelParallelEvalComponentPlacement": "write out where its components go, for ComponentPlacement",
    "Tracer": "roost watch and roost export show what a run did",
    "build_recv_plan build_send_plan": "Worker.send_to and Worker.recv_from make and follow the plan",
    "decoupled_build_recv_plan split_channel_message": "it is of the decoupled mode of recv_from",
    "load_user_extension_module": "every worker does what it does, with the module that RLINF_EXT_MODULE names",
}
_WHY = {name: why for names, why in _REASONS.items() for name in names.split()}


class _Refused(type):
    """A class that nobody can use."""

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"Roost has no {cls.__name__}: {_WHY[cls.__name__]}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


def refused(name: str, module: str) -> Any:
    """Return what stands for a name of RLinf's that Roost refuses; AttributeError for one that RLinf has not."""
    if name not in _WHY:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return _Refused(name, (), {"__module__": module})
