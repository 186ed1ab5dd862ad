"""`roost.compat.slime` without Ray: what it stands in for, what is slime's own, and what it refuses."""

import argparse
import sys
from types import SimpleNamespace

import pytest

from roost.compat import slime
from roost.compat.slime import arguments
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

ARGUMENTS = """
import argparse
def engines():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--sglang-mem-fraction-static", type=float)
    return parser.parse_known_args()[0]
def megatron(add):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction)
    parser.add_argument("--actor-num-nodes", type=int, default=1)
    parser.add_argument("--rollout-num-gpus", type=int)
    parser.add_argument("--colocate", action="store_true")
    if add:
        add(parser)
    return parser.parse_known_args()[0]
def parse_args(add_custom_arguments=None):
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--debug-train-only", action="store_true")
    if not first.parse_known_args()[0].debug_train_only:
        engines()
    args = megatron(add_custom_arguments)
    slime_validate_args(args)
    return args
def slime_validate_args(args):
    assert args.actor_num_nodes, "no nodes"
    args.checked = True
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


@pytest.fixture
def parse(package, monkeypatch):
    """slime's `parse_args` as Roost has it, over a command line that is given to it."""
    folder = package.parent / "utils"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "arguments.py").write_text(ARGUMENTS)

    def parse(*words, **options):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        arguments._arguments.cache_clear()
        return arguments.parse_args(**options)

    yield parse
    arguments._arguments.cache_clear()


def add_own(parser):
    parser.add_argument("--own", type=int)


def test_flags_that_one_of_slimes_parsers_has_are_slimes(parse):
    args = parse(
        "--actor-num-nodes=2",
        "--sglang-mem-fraction-static",
        "0.7",
        "--no-offload",
        "--lr",
        "-1",
        "--own",
        "3",
        add_custom_arguments=add_own,
    )
    assert (args.actor_num_nodes, args.own, args.checked) == (2, 3, True)
    # SGLang's parser takes the beginning of a name; it does not run where there are no engines.
    assert parse("--sglang-mem", "0.7").checked
    assert parse("--debug-train-only", "--sglang-any", "1", "--router-any", "--prefill-num-servers", "1").checked
    assert parse("--colocate", "--", "--what-follows").checked


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--rolout-num-gpus=4", "did you mean --rollout-num-gpus?"),
        ("--rollout_num_gpus", "did you mean --rollout-num-gpus?"),
        ("--rollout-num", "did you mean --rollout-num-gpus?"),
        ("-colocate", "did you mean --colocate?"),
        ("--sglang-men-fraction-static", "did you mean --sglang-mem-fraction-static?"),
        ("--disable-wandb", "leave it out: slime passes over it"),
    ],
)
def test_a_flag_that_no_parser_has_is_an_error_with_the_nearest_one(parse, capsys, word, hint):
    said = f"slime has no flag {word.partition('=')[0]}, nor have its Megatron and its SGLang\n  hint: {hint}\n"
    # slime itself would only say that one is missing.
    with pytest.raises(SystemExit, match="2"):
        parse("--actor-num-nodes", "0", word)
    assert capsys.readouterr().err == f"roost: {said}"
    with pytest.raises(SystemExit):
        parse("--twice", "--colocate", word)
    assert capsys.readouterr().err.endswith(said)


def test_slimes_own_complaints_stay_and_argparse_is_as_before(parse):
    before = argparse.ArgumentParser.parse_known_args
    with pytest.raises(AssertionError, match="no nodes"):
        parse("--actor-num-nodes", "0")
    with pytest.raises(SystemExit):
        parse("--actor-num-nodes", "two")
    assert argparse.ArgumentParser.parse_known_args is before
    # Its other functions are its own, and ask for nothing of a command line.
    assert arguments.slime_validate_args(argparse.Namespace(actor_num_nodes=1)) is None


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
