"""`roost.compat.slime` without Ray: what it stands in for, what is slime's own, and what it refuses."""

import sys
from types import SimpleNamespace

import pytest

from roost.compat import slime
from roost.errors import ConfigError
from roost.placement.strategies import NodePlacementStrategy

GROUPS = """
import copy as ray
class RayTrainGroup:
    def _allocate_gpus_for_actor(self, pg, num_gpus_per_actor): ...
    def async_train(self, rollout_id, ref): return "theirs"
"""
PLACES = """
from .actor_group import RayTrainGroup
def _create_placement_group(num_gpus): return "theirs"
def create_placement_groups(args): return _create_placement_group(args.gpus)
def create_rollout_manager(args, pg): return "theirs"
def create_training_models(args, pgs, manager): return RayTrainGroup
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with slime's names; it returns the folder of its modules."""
    folder = tmp_path / "slime" / "ray"
    folder.mkdir(parents=True)
    for path, text in {"../__init__": "", "__init__": "", "actor_group": GROUPS, "placement_group": PLACES}.items():
        (folder / f"{path}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for cached in (slime._placement_group, slime._actor_group):
        cached.cache_clear()
    yield folder
    for cached in (slime._placement_group, slime._actor_group):
        cached.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_what_starts_no_process_is_slimes_own():
    import slime.ray.placement_group as theirs

    assert slime.RayTrainGroup().async_train(0, None) == "theirs"
    assert slime.create_training_models(None, None, None) is slime.RayTrainGroup
    # slime's own modules stay as they are for all who do not go through Roost.
    assert theirs._create_placement_group(1) == "theirs"
    assert theirs.create_training_models(None, None, None) is theirs.RayTrainGroup is not slime.RayTrainGroup


@pytest.mark.usefixtures("package")
def test_no_accelerators_need_no_placement_group():
    assert slime.create_placement_groups(SimpleNamespace(gpus=0)) == (None, [], [])


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("word", ["--rolout-num-gpus", "--rollout-gpus=4", "--rollout_num_gpu"])
def test_a_flag_that_is_nearly_one_that_places_is_an_error(monkeypatch, word):
    args = SimpleNamespace(gpus=0, rollout_num_gpus=None, rollout_batch_size=8, rollout_global_dataset=True)
    monkeypatch.setattr(sys, "argv", ["train.py", "--rollout-num-gpus", "4", "--disable-rollout-global-dataset"])
    slime.create_placement_groups(args)
    sys.argv.append(word)
    with pytest.raises(
        ConfigError, match=f"slime has no flag {word.partition('=')[0]}\n.*did you mean --rollout-num-gpus"
    ):
        slime.create_placement_groups(args)


def test_a_version_without_what_roost_replaces_is_refused_by_name(package):
    (package / "placement_group.py").write_text("def create_placement_groups(args): ...\n")
    with pytest.raises(ConfigError, match="has no '_create_placement_group' and 'create_rollout_manager'"):
        _ = slime.create_placement_groups


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_tensor_transport": True}, "enable_tensor_transport"),
        ({"runtime_env": {"env_vars": {}, "pip": ["x"]}}, r"runtime_env\['pip'\]"),
    ],
    ids=["nixl", "pip"],
)
def test_an_option_of_rays_that_roost_does_not_pass_on_is_refused_by_name(options, named):
    with pytest.raises(ConfigError, match=f"slime starts 'actor' with {named}, which Roost does not pass to Ray"):
        slime._launch(object, (), "actor", NodePlacementStrategy([0]), options)
