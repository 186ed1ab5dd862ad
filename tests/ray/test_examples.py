"""The examples that need Ray, as a user runs them."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import warm

pytestmark = pytest.mark.shown
ROOT = Path(__file__).resolve().parents[2]


def run(name: str) -> list[str]:
    command = ["warm-python", f"examples/{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=warm.environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.wants("torch")
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_torch_distributed_over_two_nodes():
    assert run("torch_distributed.py") == ["nodes: [0, 0, 1, 1]", "average: [11.5, 11.5, 11.5, 11.5]"]


@pytest.mark.wants("torch")
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_weights_of_fsdp_go_into_engines_that_are_split_otherwise():
    *_, plan, first, second, third, versions = [line for line in run("weights.py") if not line.startswith("  ")]
    assert plan.startswith("3 tensors, 192 KiB from 4 workers to 4")
    for line in (first, second, third):
        # bfloat16 has three digits.
        assert float(line.rpartition(" ")[2]) < 0.02
    assert versions == "versions: {'rollout:0': 3, 'rollout:1': 3, 'rollout:2': 3, 'rollout:3': 3}"


def test_robots():
    assert run("robots.py") == [
        "env 0 on node 1 moves the arm at 127.0.0.1",
        "env 1 on node 1 moves the arm at 127.0.0.1",
        "env 2 on node 1 moves the arm at 127.0.0.2",
        "env 3 on node 1 moves the arm at 127.0.0.2",
    ]


def test_the_walk_through_the_cluster():
    assert run("cluster.py") == [
        "node 0: 4 accelerators, 8 CPUs, hardware ranks 0 1 2 3",
        "node 1: 4 accelerators, 8 CPUs, hardware ranks 4 5 6 7",
        "accelerators on each node: [4, 4]",
        "rank 0 sees accelerator 0, lr 0.1",
        "rank 1 sees accelerator 2, lr 0.1",
        "rank 2 sees accelerator 0, lr 0.1",
        "rank 3 sees accelerator 2, lr 0.1",
        "workers: trainer:0 trainer:1 trainer:2 trainer:3",
        "a worker attached to 'roost': 8 accelerators",
        "another process attached to 'roost': 2 nodes",
    ]


def test_a_policy_is_trained_while_engines_serve_in_both_modes():
    lines = run("train_rollout.py")
    risen = [line for line in lines if "mean reward" in line and "->" in line]
    assert len(risen) == 2, "colocate and dis-agg"
    for line in risen:
        before, after = map(float, re.search(r"([0-9.]+) -> ([0-9.]+)", line).groups())
        assert after > before + 0.2, line


def test_hello():
    assert run("hello.py") == [
        f"rank {rank} of 4 sits on node {node} and sees ('{device}',)"
        for rank, (node, device) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)])
    ]


def test_producers_and_a_consumer():
    assert run("producer_consumer.py") == ["the sum of the squares of the numbers below 1000 is 332833500"]
