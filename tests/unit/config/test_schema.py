"""The schemas for editors: what is legal passes, what has the wrong shape does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

import yaml12
from docs.blocks import PAGES, blocks_of
from roost.config.schema import cluster_schema, inventory_schema, job_schema, profile_schema

ROOT = Path(__file__).resolve().parents[3]
CASES = ROOT / "tests" / "errors" / "cases"
VECTORS = ROOT / "tests" / "conformance" / "vectors"
SCHEMAS = {
    "job": job_schema(),
    "cluster": cluster_schema(),
    "inventory": inventory_schema(),
    "profile": profile_schema(),
}
# Interpolations and the sizes of a model-parallel job can be anything; circular aliases do not make a tree.
NOT_SHAPE = re.compile(r"interpolation|-size-|recompute|itself|alias|holds")
SHAPE = re.compile(r" has no key | lacks '|must be a (mapping|list|single value)|has no value|must be true or false")


def mistakes(value: object, kind: str = "job") -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft7Validator(SCHEMAS[kind]).iter_errors(value)]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_schema_is_valid_and_is_json(kind):
    Draft7Validator.check_schema(SCHEMAS[kind])
    assert json.loads(json.dumps(SCHEMAS[kind])) == SCHEMAS[kind]


def walk(schema: object):
    if isinstance(schema, dict):
        yield schema
        for item in schema.values():
            yield from walk(item)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_key_has_a_description(kind):
    for schema in walk(SCHEMAS[kind]):
        for name, described in schema.get("properties", {}).items():
            inner = isinstance(described, dict) and "properties" in described
            assert "description" in described or inner, name


@pytest.mark.parametrize("kind", SCHEMAS)
def test_an_example_is_legal_in_its_place(kind):
    for schema in walk(SCHEMAS[kind]):
        for example in schema.get("examples", []) if isinstance(schema.get("examples"), list) else []:
            assert Draft7Validator(schema).is_valid(example), (schema, example)


def test_every_legal_file_of_the_docs_and_examples_passes():
    texts = {
        f"{page.name}, line {block.line}": block.text
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "yaml" and not {"wrong", "shown", "part"} & set(block.notes)
    }
    for path in (ROOT / "examples").rglob("*.yaml"):
        if path.name != "broken.yaml":
            texts[path.name] = path.read_text(encoding="utf-8")
    tried = {"job": 0, "inventory": 0, "profile": 0}
    for name, text in texts.items():
        value = yaml12.read(text)
        kind = "inventory" if "nodes" in value else "profile" if "calls" in value else "job"
        assert mistakes(value, kind) == [], name
        if kind == "job":
            assert mistakes(value["cluster"], "cluster") == [], name
        tried[kind] += 1
    assert tried["job"] > 40
    assert tried["inventory"] > 2
    assert tried["profile"] > 0


@pytest.mark.parametrize("name", ["placement", "model_parallel"])
def test_every_legal_job_of_the_conformance_cases_passes(name):
    cases = [json.loads(line) for line in (VECTORS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    tried = 0
    for case in cases:
        assert mistakes(case["topology"], "inventory") == [], case["id"]
        if "error" in case["expect"] or case["kind"] not in ("component", "model_parallel"):
            continue
        config = case["args"].get("config") or {"cluster": case["args"]}
        assert mistakes(config) == [], case["id"]
        tried += 1
    assert tried > 10


def test_mistakes_of_shape_are_refused():
    tried = 0
    for path in sorted(CASES.glob("*.yaml")):
        said = path.with_suffix(".txt").read_text(encoding="utf-8")
        if NOT_SHAPE.search(path.name) or not SHAPE.search(said) or "not YAML" in said:
            continue
        try:
            value = yaml12.read(path.read_text(encoding="utf-8"))
        except yaml.YAMLError:
            continue
        if path.name != "component-name-is-null.yaml":
            # An editor reads that key as the text "None".
            assert mistakes(value), path.name
            tried += 1
    assert tried > 30


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("cluster: {component_placement: {actor: 0-3: 0-7}}", "$.cluster.component_placement.actor"),
        ("cluster: {component_placement: {actor: {node_groop: a, placement: 0}}}", "$.cluster.component_placement"),
        ("cluster: {component_placement: {actor: 0}}\nworkers: {actor: {class: a.B, restart: 1}}", "$.workers.actor"),
        ("cluster: {component_placement: {actor: 0}}\nworkers: {actor: Actor}", "$.workers.actor"),
        ("cluster: {component_placement: {actor: 0}}\nworkers: {actor: {class: a.B, share: 2}}", "$.workers.actor"),
        (
            "cluster: {component_placement: {actor: 0}}\nworkers: {actor: {class: a.B, share: 0.00005}}",
            "$.workers.actor",
        ),
        (
            "cluster: {component_placement: {actor: 0}}\nworkers: {actor: {class: a.B, env_vars: {RANK: 1}}}",
            "$.workers.actor.env_vars",
        ),
        ("cluster: {component_placement: {actor: 0}}\nentry: main", "$.entry"),
    ],
)
def test_a_mistake_is_shown_in_its_place(text, where):
    text = text.replace("0-3: 0-7", "{0-3: 0-7}")
    assert [found for found in mistakes(yaml12.read(text)) if found.startswith(where)]


@pytest.mark.parametrize(
    "text",
    [
        "cluster: {component_placement: '${places}'}",
        "cluster: '${oc.env:CLUSTER}'",
        "cluster: {num_nodes: '${nodes}', component_placement: {actor: '0-${last}'}, node_groups: '${groups}'}",
        "cluster: {component_placement: {actor: [0-3, 5, '8:9']}}",
        "cluster: {component_placement: {'actor, rollout': all, 4090: 0, 机器人: 1}}",
        "a: &a {placement: 0}\ncluster: {component_placement: {actor: {<<: *a, node_group: [a, 4090]}}}",
        "cluster: {component_placement: {actor: 0}}\nworkers: {actor: 'my.job:Actor'}\nentry: my.job.main\nlr: 0.1",
        "cluster: {component_placement: {actor: 0}}\nactor: {model: llama}\nrollout: 7\nalgorithm: [ppo]",
    ],
)
def test_every_form_passes(text):
    assert mistakes(yaml12.read(text)) == []
