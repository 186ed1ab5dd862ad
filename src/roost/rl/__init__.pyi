"""The public names of `roost.rl`, each listed once, for `lazy_loader` and for type checkers."""

from .engine import EngineSpec as EngineSpec
from .engine import RolloutEngine as RolloutEngine
from .flags import Mode as Mode
from .flags import TrainRolloutFlags as TrainRolloutFlags
from .flags import config_to_flags as config_to_flags
from .flags import flags_to_config as flags_to_config
from .flags import make_flags_plan as make_flags_plan
from .flags import read_flags as read_flags
from .manager import RolloutManager as RolloutManager
from .placement_groups import InfoActor as InfoActor
from .placement_groups import PlacementGroups as PlacementGroups
from .placement_groups import create_placement_groups as create_placement_groups
from .placement_groups import sort_key as sort_key
from .rollout_engines import RolloutEngines as RolloutEngines
from .rollout_engines import create_rollout_engines as create_rollout_engines
from .router import Router as Router
from .router import RouterOptions as RouterOptions
from .train_group import RayTrainGroup as RayTrainGroup
from .web import ServerLimits as ServerLimits
