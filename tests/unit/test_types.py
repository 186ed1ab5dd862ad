"""What a type checker knows about groups: the methods of their class, their arguments and what they return."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from roost import Cluster, Worker

class Actor(Worker):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()

    def train(self, batch: list[float], *, steps: int = 1) -> float:
        return sum(batch) * steps

    async def save(self, path: str) -> bool:
        return bool(path)

def main(cluster: Cluster) -> None:
    actor = Actor.create_group().launch(cluster)
    reveal_type(actor)
    reveal_type(actor[0:2])
    reveal_type(actor.call(Actor.train, [1.0], steps=2).wait())
    actor.call(Actor.train, "no")
    reveal_type(actor.train([1.0], steps=2).wait())
    reveal_type(actor[0].train([1.0]).one())
    reveal_type(actor.save("here").wait())
    actor.train("no")
    actor.train([1.0], step=2)
    actor.trian([1.0])
    actor.close(3.0)
"""


CONFIG = """
[mypy]
plugins = roost.mypy_plugin
follow_imports = silent

[mypy-ray.*,numpy.*,torch.*,rich.*,omegaconf.*,psutil.*,packaging.*,yaml.*]
follow_imports = skip
"""


@pytest.mark.heavy
def test_the_methods_of_a_group_are_checked(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(CODE)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    words = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    out, problems, _ = api.run([*words, "--python-executable", sys.executable, str(tmp_path / "job.py")])
    assert not problems, problems
    said = {}
    for line, text in re.findall(r"job\.py:(\d+): (?:note|error): (.*?)(?:  \[[\w-]+\])?$", out, re.M):
        said.setdefault(CODE.splitlines()[int(line) - 1].strip(), text.replace("builtins.", ""))
    group = 'Revealed type is "roost.runtime.groups.group.WorkerGroup[job.Actor]"'
    assert said["reveal_type(actor)"] == said["reveal_type(actor[0:2])"] == group
    assert said["reveal_type(actor.call(Actor.train, [1.0], steps=2).wait())"] == 'Revealed type is "list[float]"'
    assert 'actor.call(Actor.train, "no")' in said
    assert said["reveal_type(actor.train([1.0], steps=2).wait())"] == 'Revealed type is "list[float]"'
    assert said["reveal_type(actor[0].train([1.0]).one())"] == 'Revealed type is "float"'
    assert said['reveal_type(actor.save("here").wait())'] == 'Revealed type is "list[bool]"'
    assert 'incompatible type "str"; expected "list[float]"' in said['actor.train("no")']
    assert 'Unexpected keyword argument "step"' in said["actor.train([1.0], step=2)"]
    assert said["actor.trian([1.0])"] == '"Actor" has no method "trian"'
    assert "actor.close(3.0)" not in said
