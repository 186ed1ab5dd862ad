"""Custom kinds of hardware: a dataclass as schema, checked wherever the config is read."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from roost import ConfigError, JobConfig, register_hardware
from roost.config.kinds import hardware_kind, make_piece, setting_problems
from roost.config.node_groups import DeclaredHardware


@pytest.fixture
def arm() -> type:
    @register_hardware("Arm")
    @dataclass(frozen=True)
    class Arm:
        robot_ip: str
        joints: int = 7
        cameras: list[str] = field(default_factory=list)
        tool: str | None = None
        node_rank: int = -1

    return Arm


def test_a_piece_is_made_as_its_class(arm):
    assert hardware_kind("Arm") is arm
    assert make_piece("Arm", 3, {"robot_ip": "10.0.0.1", "cameras": ["a"]}) == arm(
        "10.0.0.1", cameras=["a"], node_rank=3
    )


@pytest.mark.usefixtures("arm")
def test_every_mistake_in_the_settings_is_reported():
    found = setting_problems("Arm", {"robot_pi": "x", "joints": "many", "cameras": "front"})
    assert "'Arm' has no setting 'robot_pi'; did you mean 'robot_ip'?" in found["robot_pi"]
    assert "'joints' of 'Arm' is 'many'" in found["joints"]
    assert "'cameras'" in found["cameras"]
    assert found["robot_ip"] == "'Arm' lacks the setting 'robot_ip'"
    with pytest.raises(ConfigError, match="robot_ip"):
        make_piece("Arm", 0, {})


@pytest.mark.usefixtures("arm")
def test_a_config_that_does_not_fit_is_pointed_at():
    text = (
        "cluster:\n  component_placement: {env: {node_group: arms, placement: 0}}\n  node_groups:\n"
        "    - label: arms\n      node_ranks: 0\n      hardware:\n        type: Arm\n        configs:\n"
        "          - {node_rank: 0, robot_ip: 10.0.0.1, joints: six}\n"
    )
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_text(text, "job.yaml")
    assert str(caught.value).startswith("job.yaml:9:56: node group 'arms': the setting 'joints' of 'Arm' is 'six'")


@pytest.mark.usefixtures("arm")
def test_a_worker_gets_the_defaults_of_a_registered_kind():
    piece = DeclaredHardware.make("Arm", 2, {"robot_ip": "${oc.env:HOME}", "cameras": ["a"]})
    given = {"robot_ip": "${oc.env:HOME}", "cameras": ["a"]}
    assert piece.complete().settings == {"joints": 7, "tool": None, **given}
    assert (piece.complete().type, piece.complete().node_rank, piece.settings) == ("Arm", 2, given)
    other = DeclaredHardware.make("Camera", 0, {"a": 1})
    assert other.complete() == other, "a kind that is not registered"
    broken = DeclaredHardware.make("Arm", 0, {"joints": "many"})
    assert broken.complete() == broken, "its check says what is wrong"


def test_settings_are_not_interpolated(arm):
    assert make_piece("Arm", 0, {"robot_ip": "${oc.env:HOME}"}) == arm("${oc.env:HOME}", node_rank=0)
    with pytest.raises(ConfigError):
        make_piece("Arm", 0, {"robot_ip": "???"})


def test_a_class_that_refuses_its_settings_is_reported():
    @register_hardware("Picky")
    @dataclass
    class Picky:
        speed: int

        def __post_init__(self) -> None:
            if self.speed > 9:
                raise ValueError("too fast")

    with pytest.raises(ConfigError, match=r"'Picky' does not take .*too fast"):
        make_piece("Picky", 0, {"speed": 10})


def test_a_kind_that_is_not_registered_takes_any_settings():
    assert setting_problems("Whatever", {"a": object()}) == {}


def test_only_the_same_class_can_register_a_kind_again(arm):
    assert register_hardware("Arm")(arm) is arm
    with pytest.raises(ConfigError, match="'Arm' is already registered"):

        @register_hardware("Arm")
        @dataclass
        class Other:
            pass

    with pytest.raises(ConfigError, match="needs a dataclass"):

        @register_hardware("Plain")
        class Plain:
            pass

    with pytest.raises(ConfigError, match="cannot name a kind"):
        register_hardware("a b")
