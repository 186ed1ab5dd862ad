"""What RLinf has and Roost has not: a name that can be imported, and says why when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

from roost.errors import ConfigError

_DYNAMIC = "the dynamic scheduler (cluster.auto_scheduler) changes placements while the job runs, and Roost's are fixed"
_INSIDE = "it is a part of RLinf's scheduler, in whose place Roost is"
_LAYOUT = "write the placement of its components out, for ComponentPlacement"
_REASONS = {
    **dict.fromkeys(("ComponentManager", "RolloutScalingScheduler", "SchedulerWorker"), _DYNAMIC),
    **dict.fromkeys(("get_scheduler_channel", "get_scheduler_request_queue"), _DYNAMIC),
    **dict.fromkeys(("get_scheduler_response_queue", "get_valid_dp_sizes"), _DYNAMIC),
    **dict.fromkeys(("AcceleratorUtil", "Collective", "CollectiveGroup", "CollectiveManager", "LocalChannel"), _INSIDE),
    **dict.fromkeys(
        ("AsyncRouteWork", "Manager", "MultiChannelProcessGroup", "WeightedItem", "WorkerManager"), _INSIDE
    ),
    **dict.fromkeys(("ModelParallelEvalComponentPlacement", "MultiAgentModelParallelComponentPlacement"), _LAYOUT),
    **dict.fromkeys(("MultiAgentModelParallelEvalComponentPlacement",), _LAYOUT),
    "Tracer": "roost watch and roost export show what a run did",
    "build_recv_plan": "Worker.recv_from makes and follows the plan",
    "build_send_plan": "Worker.send_to makes and follows the plan",
    **dict.fromkeys(("decoupled_build_recv_plan", "split_channel_message"), "it is of the decoupled mode of recv_from"),
    "load_user_extension_module": "every worker does what it does, with the module that RLINF_EXT_MODULE names",
}


class _Refused(type):
    """A class that nobody can use."""

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"Roost has no {cls.__name__}: {_REASONS[cls.__name__]}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


def refused(name: str, module: str) -> Any:
    """Return what stands for a name of RLinf's that Roost refuses; AttributeError for one that RLinf has not."""
    if name not in _REASONS:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return _Refused(name, (), {"__module__": module})
