"""What the schema refuses, Roost refuses too: tried on legal files with one change."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from roost import RoostError
from roost.config.inventory import read_inventory, read_inventory_file
from roost.config.job import read_job_draft
from roost.config.profile import read_profile
from roost.config.run import read_run_config
from roost.config.schema import inventory_schema, job_schema, profile_schema
from roost.config.yaml_file import parse_text

GROUPS: list[dict[str, Any]] = [
    {
        "label": "train",
        "node_ranks": "0-1",
        "env_configs": [
            {"node_ranks": [0], "env_vars": [{"A": "1"}, {"B": 2}], "python_interpreter_path": "/usr/bin/python3"},
            {"node_ranks": 1, "env_vars": {"C": "text"}},
        ],
    },
    {"label": 4090, "node_ranks": [2, "3-4"], "ignore_hardware": True},
    {
        "label": "arms",
        "node_ranks": 0,
        "hardware": {"type": "Franka", "configs": [{"node_rank": 0, "ip": "10.0.0.1"}, {"node_rank": "0", "ip": None}]},
    },
]
JOB = {
    "cluster": {
        "num_nodes": 5,
        "component_placement": {
            "actor,critic": "0-3:0-7",
            "rollout": {"node_group": "train", "placement": ["8", 9, "10-11:2-3"]},
            "env": {"node_group": ["arms"], "placement": "all"},
            "reward": 0,
        },
        "node_groups": GROUPS,
    },
    "workers": {
        "actor,critic": {
            "class": "job.Actor",
            "args": [1, None],
            "kwargs": {"lr": 0.1, "deep": {"x": [1]}},
            "env_vars": {"A": 1, "B": "b"},
            "max_concurrency": 4,
            "restarts": 0,
            "share": 0.5,
        },
        "rollout, env": "job:Rollout",
        "reward": {"class": "a.b.C"},
    },
    "entry": "job.main",
    "flow": {
        "step": ["rollout.go -> actor.train", "reward.score -> actor.train"],
        "weights": "actor -> rollout",
        "staleness": 1,
    },
    "seed": 1,
}
PROFILE = {
    "version": 1,
    "calls": {
        "rollout.go": {"seconds": {"8": 120.0, "16": {"p50": 61, "p90": "70.5"}}, "devices_per_worker": 4},
        "actor.train": {"seconds": {"8": [80, 81.5], "16": "42"}, "memory": "60GiB"},
        "reward.score": {"seconds": {"0": 3}},
    },
    "switch": {"rollout": {"wake": 2.0, "sleep": 1}, "actor": {}},
    "weights": {"seconds": 1.5},
    "runs": [
        {
            "placement": {"rollout": "0-3", "actor": [4, "5-7"]},
            "kinds": {"rollout": "H100", "actor": 4090},
            "step": 2.5,
            "calls": {"rollout.go": {"begins": 0, "ends": "1.5"}},
        }
    ],
}
INVENTORY = {
    "nodes": [
        {"accelerators": 8, "name": "n0", "address": "10.0.0.1", "cpus": 64, "memory": "512 GB", "labels": {"a": "b"}},
        {"accelerators": {"count": 4, "type": "amd", "model": 4090, "memory": 1.5}},
        {"accelerators": [{"device": "GPU-1a", "memory": "80GiB"}, {"device": 3, "model": "H100", "type": "nvidia"}]},
        {"accelerators": "0"},
        {"accelerators": 1, "memory": 1024, "cpus": "8"},
    ],
    "groups": GROUPS,
}

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([10**7, -(10**20), 0.5, 1.0, 2.5, -0.5, 1e300]),
    st.sampled_from(["", " ", "0-3", " 1 - 2 ", "3:0", "all", "all:0-3", "0-3,5", "0,0", "a", "a b", "a/b", "${x}"]),
    st.sampled_from(["yes", "OFF", "True", "null", "train", "4090", "node", " cluster ", "nvidia", "RANK", "A-B", "1"]),
    st.sampled_from(
        ["a.b", "a:b", "a.b()", "80 GiB", "1.5TB", "-1", "1e3", "0x10", "1_0", "é", "🚀", "a\u0301", "\t7"]
    ),
    st.text(max_size=6),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(
        st.one_of(st.text(max_size=4), st.sampled_from(["placement", "node_rank", "A"])), SCALARS, max_size=2
    ),
)
KEYS = st.sampled_from(["label", "node_rank", "placement", "class", "count", "x", "a b", "", "RANK", "actor", "é", "1"])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, document: dict[str, Any]) -> Any:
    """Change the document in one place: replace, remove or rename a value, or add a key."""
    found = copy.deepcopy(document)
    *path, last = draw(st.sampled_from(places(document)[1:]))
    holder: Any = found
    for key in path:
        holder = holder[key]
    how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "add"]))
    if how == "replace":
        holder[last] = draw(VALUES)
    elif how == "remove":
        del holder[last]
    elif isinstance(holder, dict):
        holder[draw(KEYS)] = holder.pop(last) if how == "rename" else draw(VALUES)
    else:
        holder.append(draw(VALUES))
    return found


def check(validator: Draft7Validator, document: Any, *readers: Any) -> None:
    if validator.is_valid(document):
        return
    for read in readers:
        with pytest.raises(RoostError):
            read(document)


def run_file(document: Any) -> None:
    read_run_config(read_job_draft(parse_text(json.dumps(document), name="job.yaml")))


def run_dict(document: Any) -> None:
    read_run_config(read_job_draft(document))


JOBS, INVENTORIES = Draft7Validator(job_schema()), Draft7Validator(inventory_schema())
PROFILES = Draft7Validator(profile_schema())


def profile_file(document: Any) -> None:
    read_profile(parse_text(json.dumps(document), name="profile.yaml"))


def test_the_documents_are_legal_before_they_are_changed():
    run_file(JOB)
    run_dict(JOB)
    assert JOBS.is_valid(JOB)
    assert INVENTORIES.is_valid(INVENTORY)
    profile_file(PROFILE)
    read_profile(PROFILE)
    assert PROFILES.is_valid(PROFILE)


@given(changed(JOB))
@settings(max_examples=300)
def test_a_job_that_the_schema_refuses_is_refused(document):
    check(JOBS, document, run_file, run_dict)


@given(changed(INVENTORY))
@settings(max_examples=200)
def test_an_inventory_that_the_schema_refuses_is_refused(tmp_path_factory, document):
    path = tmp_path_factory.getbasetemp() / "inventory.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    check(INVENTORIES, document, read_inventory, lambda _: read_inventory_file(path))


@given(changed(PROFILE))
@settings(max_examples=300)
def test_a_profile_that_the_schema_refuses_is_refused(document):
    check(PROFILES, document, profile_file, read_profile)
