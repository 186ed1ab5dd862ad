"""Mistakes in the description of the hardware: an inventory file, the same as a dict, and the shorthand."""

from __future__ import annotations

import pytest

from roost import ConfigError, Topology

FILES = {
    "no nodes key": (
        """\
groups: []
""",
        """\
lab.yml:1:1: an inventory lacks 'nodes'
    groups: []
    ^
""",
    ),
    "an empty list of nodes": (
        """\
nodes: []
""",
        """\
lab.yml:1:8: an inventory needs at least one node
    nodes: []
           ^
""",
    ),
    "nodes as a mapping": (
        """\
nodes:
  accelerators: 8
""",
        """\
lab.yml:2:3: nodes must be a list, not a mapping
    accelerators: 8
    ^
""",
    ),
    "nodes as a shorthand": (
        """\
nodes: 2x8
""",
        """\
lab.yml:1:8: nodes must be a list, not '2x8'
    nodes: 2x8
           ^^^
""",
    ),
    "a node that is a number": (
        """\
nodes:
  - 8
""",
        """\
lab.yml:2:5: a node must be a mapping, not '8'
    - 8
      ^
""",
    ),
    "a node without accelerators": (
        """\
nodes:
  - name: head
""",
        """\
lab.yml:2:5: a node lacks 'accelerators'
    - name: head
      ^
""",
    ),
    "a misspelt key of a node": (
        """\
nodes:
  - accelerators: 8
    adress: 10.0.0.1
""",
        """\
lab.yml:3:5: a node has no key 'adress'
    adress: 10.0.0.1
    ^^^^^^
  hint: did you mean 'address'?
""",
    ),
    "misspelt accelerators": (
        """\
nodes:
  - acelerators: 8
""",
        """\
lab.yml:2:5: a node has no key 'acelerators'
    - acelerators: 8
      ^^^^^^^^^^^
  hint: did you mean 'accelerators'?
""",
    ),
    "a misspelt key at the top": (
        """\
nodes:
  - accelerators: 8
group: []
""",
        """\
lab.yml:3:1: an inventory has no key 'group'
    group: []
    ^^^^^
  hint: did you mean 'groups'?
""",
    ),
    "node_groups instead of groups": (
        """\
nodes:
  - accelerators: 8
node_groups: []
""",
        """\
lab.yml:3:1: an inventory has no key 'node_groups'
    node_groups: []
    ^^^^^^^^^^^
  hint: did you mean 'groups'?
""",
    ),
    "accelerators below zero": (
        """\
nodes:
  - accelerators: -1
""",
        """\
lab.yml:2:19: the number of accelerators is -1, and must be at least 0
    - accelerators: -1
                    ^^
""",
    ),
    "accelerators as a word": (
        """\
nodes:
  - accelerators: eight
""",
        """\
lab.yml:2:19: the number of accelerators must be a whole number, not 'eight'
    - accelerators: eight
                    ^^^^^
""",
    ),
    "accelerators with no value": (
        """\
nodes:
  - accelerators:
""",
        """\
lab.yml:2:18: the number of accelerators has no value
    - accelerators:
                   ^
""",
    ),
    "more accelerators than a node can have": (
        """\
nodes:
  - accelerators: 1025
""",
        """\
lab.yml:2:19: the number of accelerators is 1025, and may be at most 1024
    - accelerators: 1025
                    ^^^^
""",
    ),
    "accelerators without a count": (
        """\
nodes:
  - accelerators: {model: H100}
""",
        """\
lab.yml:2:19: the mapping of accelerators lacks 'count'
    - accelerators: {model: H100}
                    ^
""",
    ),
    "a count that is a word": (
        """\
nodes:
  - accelerators: {count: all}
""",
        """\
lab.yml:2:27: the count of the accelerators must be a whole number, not 'all'
    - accelerators: {count: all}
                            ^^^
""",
    ),
    "a count inside a list": (
        """\
nodes:
  - accelerators: [{count: 2}]
""",
        """\
lab.yml:2:21: an accelerator has no key 'count'
    - accelerators: [{count: 2}]
                      ^^^^^
  hint: it has 'device', 'labels', 'memory', 'model' and 'type'
""",
    ),
    "an accelerator that is a number": (
        """\
nodes:
  - accelerators: [0, 1]
""",
        """\
lab.yml:2:20: an accelerator must be a mapping, not '0'
    - accelerators: [0, 1]
                     ^
lab.yml:2:23: an accelerator must be a mapping, not '1'
    - accelerators: [0, 1]
                        ^
""",
    ),
    "a type that is almost known": (
        """\
nodes:
  - accelerators: {count: 8, type: nvidea}
""",
        """\
lab.yml:2:36: accelerator type 'nvidea' is not known
    - accelerators: {count: 8, type: nvidea}
                                     ^^^^^^
  hint: did you mean 'nvidia'?
""",
    ),
    "the type none": (
        """\
nodes:
  - accelerators: {count: 8, type: none}
""",
        """\
lab.yml:2:36: accelerator type 'none' is not known
    - accelerators: {count: 8, type: none}
                                     ^^^^
  hint: it has 'amd', 'ascend', 'intel' and 'nvidia'
""",
    ),
    "two types on one node": (
        """\
nodes:
  - accelerators: [{type: nvidia}, {type: amd}]
""",
        """\
lab.yml:2:19: a node has accelerators of several types: amd, nvidia
    - accelerators: [{type: nvidia}, {type: amd}]
                    ^
""",
    ),
    "a model that is a list": (
        """\
nodes:
  - accelerators: {count: 8, model: [H100]}
""",
        """\
lab.yml:2:37: the model of the accelerators must be a single value, not a list
    - accelerators: {count: 8, model: [H100]}
                                      ^
""",
    ),
    "memory with a unit that is not known": (
        """\
nodes:
  - accelerators: 8
    memory: 512 gigs
""",
        """\
lab.yml:3:13: the memory of a node is '512 gigs'
    memory: 512 gigs
            ^^^^^^^^
  hint: write bytes, or a unit: 80GiB, 512GB
""",
    ),
    "memory below zero": (
        """\
nodes:
  - accelerators: {count: 8, memory: -80GiB}
""",
        """\
lab.yml:2:38: the memory of the accelerators is '-80GiB'
    - accelerators: {count: 8, memory: -80GiB}
                                       ^^^^^^
  hint: write bytes, or a unit: 80GiB, 512GB
""",
    ),
    "cpus as a word": (
        """\
nodes:
  - accelerators: 8
    cpus: many
""",
        """\
lab.yml:3:11: the cpus of a node must be a whole number, not 'many'
    cpus: many
          ^^^^
""",
    ),
    "cpus below zero": (
        """\
nodes:
  - accelerators: 8
    cpus: -4
""",
        """\
lab.yml:3:11: the cpus of a node is -4, and must be at least 0
    cpus: -4
          ^^
""",
    ),
    "labels as a list": (
        """\
nodes:
  - accelerators: 8
    labels: [rack-7]
""",
        """\
lab.yml:3:13: the labels of a node must be a mapping, not a list
    labels: [rack-7]
            ^
""",
    ),
    "a label with no value": (
        """\
nodes:
  - accelerators: 8
    labels:
      rack:
""",
        """\
lab.yml:4:12: the labels of a node: 'rack' has no value
    rack:
         ^
""",
    ),
    "a name with no value": (
        """\
nodes:
  - accelerators: 8
    name: ~
""",
        """\
lab.yml:3:11: the name of a node has no value
    name: ~
          ^
""",
    ),
    "two nodes of one name": (
        """\
nodes:
  - {accelerators: 8, name: head}
  - {accelerators: 8, name: head}
""",
        """\
lab.yml:3:29: nodes 0 and 1 are both named 'head'
    - {accelerators: 8, name: head}
                              ^^^^
""",
    ),
    "a key named twice": (
        """\
nodes:
  - accelerators: 8
    accelerators: 4
""",
        """\
lab.yml:3:5: a node names 'accelerators' twice, first in line 2
    accelerators: 4
    ^^^^^^^^^^^^
""",
    ),
    "groups as a mapping": (
        """\
nodes:
  - accelerators: 8
groups:
  label: train
""",
        """\
lab.yml:4:3: groups must be a list, not a mapping
    label: train
    ^
""",
    ),
    "a group outside the inventory": (
        """\
nodes:
  - accelerators: 8
  - accelerators: 8
groups:
  - {label: train, node_ranks: 1-2}
""",
        """\
lab.yml:5:32: node group 'train' names node rank 2, but the inventory has 2 nodes, so node ranks are 0-1
    - {label: train, node_ranks: 1-2}
                                 ^^^
  hint: node ranks count from 0, and ranges include both ends
""",
    ),
    "a group outside an inventory of one node": (
        """\
nodes:
  - accelerators: 8
groups:
  - {label: train, node_ranks: 1}
""",
        """\
lab.yml:4:32: node group 'train' names node rank 1, but the inventory has 1 node, so the only node rank is 0
    - {label: train, node_ranks: 1}
                                 ^
  hint: node ranks count from 0, and ranges include both ends
""",
    ),
    "a group declared twice": (
        """\
nodes:
  - accelerators: 8
groups:
  - {label: train, node_ranks: 0}
  - {label: train, node_ranks: 0}
""",
        """\
lab.yml:5:13: node group 'train' is declared twice
    - {label: train, node_ranks: 0}
              ^^^^^
""",
    ),
    "a reserved label": (
        """\
nodes:
  - accelerators: 8
groups:
  - {label: node, node_ranks: 0}
""",
        """\
lab.yml:4:13: the label 'node' is reserved
    - {label: node, node_ranks: 0}
              ^^^^
  hint: 'node' already means all nodes as bare nodes; 'cluster' and 'node' need no declaration
""",
    ),
    "hardware outside its group": (
        """\
nodes:
  - accelerators: 8
  - accelerators: 0
groups:
  - label: lab
    node_ranks: 0
    hardware: {type: Franka, configs: [{node_rank: 1}]}
""",
        """\
lab.yml:7:52: node group 'lab' declares hardware on node rank 1, but has nodes 0
    hardware: {type: Franka, configs: [{node_rank: 1}]}
                                                   ^
""",
    ),
    "a top level that is a list": (
        """\
- accelerators: 8
- accelerators: 8
""",
        """\
lab.yml:1:1: an inventory must be a mapping, not a list
    - accelerators: 8
    ^
""",
    ),
    "a top level that is a word": (
        """\
2x8
""",
        """\
lab.yml:1:1: an inventory must be a mapping, not '2x8'
    2x8
    ^^^
""",
    ),
    "an interpolation of a key that is missing": (
        """\
nodes:
  - accelerators: ${count}
""",
        """\
lab.yml:2:19: '${count}' cannot be resolved: Interpolation key 'count' not found
    - accelerators: ${count}
                    ^^^^^^^^
""",
    ),
    "an unknown alias": (
        """\
nodes:
  - *node
""",
        """\
lab.yml:2:5: not YAML: found undefined alias
    - *node
      ^
  hint: an anchor (&name) must come before the alias (*name) that uses it
""",
    ),
    "an empty file": (
        "",
        """\
lab.yml: the file is empty
""",
    ),
    "a file of comments": (
        """\
# later
""",
        """\
lab.yml: the file has comments but no values
""",
    ),
    "tabs for indentation": (
        """\
nodes:
\t- accelerators: 8
""",
        """\
lab.yml:2:1: not YAML: found character that cannot start any token (while scanning for the next token)
     - accelerators: 8
    ^
  hint: YAML indents with spaces, not with tabs
""",
    ),
    "several mistakes": (
        """\
nodes:
  - accelerators: -1
    cpu: 4
  - accelerators: {count: 8, type: amdd}
    memory: much
groups:
  - {label: train, node_ranks: 0-4}
  - {label: cluster, node_ranks: 0}
""",
        """\
lab.yml:2:19: the number of accelerators is -1, and must be at least 0
    - accelerators: -1
                    ^^
lab.yml:3:5: a node has no key 'cpu'
    cpu: 4
    ^^^
  hint: did you mean 'cpus'?
lab.yml:4:36: accelerator type 'amdd' is not known
    - accelerators: {count: 8, type: amdd}
                                     ^^^^
  hint: did you mean 'amd'?
lab.yml:5:13: the memory of a node is 'much'
    memory: much
            ^^^^
  hint: write bytes, or a unit: 80GiB, 512GB
lab.yml:7:32: node group 'train' names node ranks 2-4, but the inventory has 2 nodes, so node ranks are 0-1
    - {label: train, node_ranks: 0-4}
                                 ^^^
  hint: node ranks count from 0, and ranges include both ends
lab.yml:8:13: the label 'cluster' is reserved
    - {label: cluster, node_ranks: 0}
              ^^^^^^^
  hint: 'cluster' already means all nodes with their accelerators; 'cluster' and 'node' need no declaration
""",
    ),
}
"""The text of an inventory `lab.yml`, and what is said of it."""


@pytest.mark.parametrize("name", FILES)
def test_a_broken_inventory_file_is_explained_with_line_and_column(name, tmp_path, monkeypatch):
    text, message = FILES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Topology.from_file("lab.yml")
    assert f"{caught.value}\n" == message


DICTS = [
    ("nothing", None, "inventory: an inventory must be a mapping, not nothing"),
    ("a list", [], "inventory: an inventory must be a mapping, not a list"),
    ("a text", "2x8", "inventory: an inventory must be a mapping, not '2x8'"),
    ("an empty dict", {}, "inventory: an inventory lacks 'nodes'"),
    (
        "a boolean count",
        {"nodes": [{"accelerators": True}]},
        "inventory.nodes[0].accelerators: the number of accelerators must be a whole number, not True",
    ),
    (
        "a fraction",
        {"nodes": [{"accelerators": 8.0}]},
        "inventory.nodes[0].accelerators: the number of accelerators must be a whole number, not 8.0",
    ),
    (
        "a memory that is a fraction",
        {"nodes": [{"accelerators": 8, "memory": 80.5}]},
        ("inventory.nodes[0].memory: the memory of a node is the number 80.5\n  hint: quote it to keep it as typed"),
    ),
    (
        "a name that YAML made a boolean",
        {"nodes": [{"accelerators": 8, "name": False}]},
        (
            "inventory.nodes[0].name: the name of a node is the boolean False\n"
            "  hint: YAML 1.1 reads an unquoted no, off or false as a boolean: quote it"
        ),
    ),
    (
        "a label that YAML made a fraction",
        {"nodes": [{"accelerators": 8, "labels": {"rack": 7.1}}]},
        (
            "inventory.nodes[0].labels.rack: the labels of a node: 'rack' is the number 7.1\n"
            "  hint: quote it to keep it as typed"
        ),
    ),
    (
        "a key that is a number",
        {"nodes": [{"accelerators": 8, 7: 1}]},
        (
            "inventory.nodes[0].7: a node has no key '7'\n"
            "  hint: it has 'accelerators', 'address', 'cpus', 'labels', 'memory' and 'name'"
        ),
    ),
    ("a set of nodes", {"nodes": {1, 2}}, "inventory.nodes: a value of the type set is not allowed here"),
    (
        "an object for a name",
        {"nodes": [{"accelerators": 8, "name": b"head"}]},
        "inventory.nodes[0].name: a value of the type bytes is not allowed here",
    ),
    (
        "a group outside the nodes",
        {"nodes": [{"accelerators": 8}, {"accelerators": 8}], "groups": [{"label": "train", "node_ranks": [0, 2]}]},
        (
            "inventory.groups[0].node_ranks: node group 'train' names node rank 2, but the inventory has 2 nodes, "
            "so node ranks are 0-1\n"
            "  hint: node ranks count from 0, and ranges include both ends"
        ),
    ),
]


@pytest.mark.parametrize(("data", "message"), [case[1:] for case in DICTS], ids=[case[0] for case in DICTS])
def test_a_broken_inventory_dict_is_explained_with_its_key(data, message):
    with pytest.raises(ConfigError) as caught:
        Topology.from_dict(data)
    assert str(caught.value) == message


WRITE = "\n  hint: write 2x8, or 4x8:H100,2x4:4090,1x0 for several kinds of node"
SHORTHANDS = [
    ("", "cluster '': '' is not nodes x accelerators", WRITE),
    ("  ", "cluster '  ': '' is not nodes x accelerators", WRITE),
    ("x", "cluster 'x': 'x' is not nodes x accelerators", WRITE),
    ("8", "cluster '8': '8' is not nodes x accelerators", WRITE),
    ("2x", "cluster '2x': '2x' is not nodes x accelerators", WRITE),
    ("x8", "cluster 'x8': 'x8' is not nodes x accelerators", WRITE),
    ("2x8x2", "cluster '2x8x2': '2x8x2' is not nodes x accelerators", WRITE),
    ("2*8", "cluster '2*8': '2*8' is not nodes x accelerators", WRITE),
    ("-1x8", "cluster '-1x8': '-1x8' is not nodes x accelerators", WRITE),
    ("2x-8", "cluster '2x-8': '2x-8' is not nodes x accelerators", WRITE),
    ("0x8", "cluster '0x8': '0x8' has no node", "\n  hint: the first number counts nodes"),
    ("2x8,", "cluster '2x8,': '' is not nodes x accelerators", WRITE),
    ("2x8,,1x0", "cluster '2x8,,1x0': '' is not nodes x accelerators", WRITE),
    ("2x8:", "cluster '2x8:': '2x8:' is not nodes x accelerators", WRITE),
    ("2x8:H 100", "cluster '2x8:H 100': '2x8:H 100' is not nodes x accelerators", WRITE),
    ("2x8:a:b", "cluster '2x8:a:b': '2x8:a:b' is not nodes x accelerators", WRITE),
    ("２x８", "cluster '２x８': '２x８' is not nodes x accelerators", WRITE),
    ("two x eight", "cluster 'two x eight': 'two x eight' is not nodes x accelerators", WRITE),
    ("1000001x8", "cluster '1000001x8' is too large: at most 1000000 nodes of 1024 accelerators", ""),
    ("2x1025", "cluster '2x1025' is too large: at most 1000000 nodes of 1024 accelerators", ""),
    ("1000000x8,1x8", "cluster '1000000x8,1x8' is too large: at most 1000000 nodes of 1024 accelerators", ""),
    ("9999999999x8", "cluster '9999999999x8': '9999999999x8' is not nodes x accelerators", WRITE),
    ("2x8.5", "cluster '2x8.5': '2x8.5' is not nodes x accelerators", WRITE),
]


@pytest.mark.parametrize(("text", "message", "hint"), SHORTHANDS, ids=[repr(case[0]) for case in SHORTHANDS])
def test_a_broken_shorthand_is_explained(text, message, hint):
    with pytest.raises(ConfigError) as caught:
        Topology.from_shorthand(text)
    assert str(caught.value) == message + hint


@pytest.mark.parametrize("text", [None, 28, b"2x8", ["2x8"]], ids=repr)
def test_a_shorthand_that_is_not_text_is_a_config_error(text):
    with pytest.raises(ConfigError, match="2x8"):
        Topology.from_shorthand(text)


def test_a_very_long_shorthand_does_not_make_a_very_long_message():
    with pytest.raises(ConfigError) as caught:
        Topology.from_shorthand("1x8," * 5000)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(range(128, 256)), "not a text file: byte 0 is not UTF-8"),
        (b"nodes:\n  - accelerators: 8\0\n", "not a text file: byte 26 is zero"),
        (
            "nodes: []".encode("utf-16"),
            "not a text file: byte 0 is not UTF-8\n  hint: this looks like UTF-16: save it as UTF-8",
        ),
    ],
    ids=["bytes above 127", "a zero byte", "UTF-16"],
)
def test_an_inventory_that_is_not_text_is_refused(data, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yml").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        Topology.from_file("lab.yml")
    assert str(caught.value) == f"lab.yml: {reason}"


def test_an_inventory_that_is_missing_or_a_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError) as missing:
        Topology.from_file("nowhere.yml")
    with pytest.raises(ConfigError) as folder:
        Topology.from_file("folder")
    assert str(missing.value) == "nowhere.yml: No such file or directory"
    assert str(folder.value) == "folder: Is a directory\n  hint: give the file, not its folder"


def test_a_list_of_more_accelerators_than_a_node_can_have_is_refused():
    with pytest.raises(ConfigError, match="has 1025 accelerators, and may have at most 1024"):
        Topology.from_dict({"nodes": [{"accelerators": [{"model": "H100"}] * 1025}]})
