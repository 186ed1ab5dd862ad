"""Completion, requested as the scripts of the shells do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from roost.cli.completion import join_split_words
from roost.cli.main import main

JOB = """
cluster:
  num_nodes: 2
  component_placement:
    actor: 0-3:0-1
    rollout: 8-11
    env: {node_group: node, placement: "0-1:0-2"}
"""


@pytest.fixture(scope="module")
def place():
    """A folder with a job, and a run with logs; with a name short enough for this user's runs below it."""
    folder = Path(tempfile.mkdtemp(prefix="roost-tab-"))
    (folder / "job.yaml").write_text(JOB)
    (folder / "broken.yaml").write_text("cluster: [")
    for log in ("actor/0.log", "actor/1.log", "rollout/10.log"):
        path = folder / "run" / "logs" / log
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("hello\n")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def ask(place, monkeypatch, capsys):
    """Ask as the scripts of the shells do, with variables; return what is offered, and nothing else may be printed."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(tempfile, "tempdir", str(place))

    def run(shell: str, **variables: str) -> str:
        for name, value in {"_ROOST_COMPLETE": f"complete_{shell}", **variables}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["roost"])
        with pytest.raises(SystemExit) as end:
            main()
        told = capsys.readouterr()
        assert (end.value.code, told.err) == (0, "")
        return told.out

    return run


@pytest.fixture
def bash(ask):
    """Return what bash is offered for these words."""
    return lambda *words: ask("bash", COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1)).split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["wh"], ["where"]),
        (["plan", "job.yaml", "--pl"], ["--placement"]),
        (["plan", "job.yaml", "--format", ""], ["map", "table", "json", "svg", "html", "job"]),
        (["plan", "job.yaml", "--component", ""], ["actor", "rollout", "env"]),
        # Nothing is offered where a file is meant, and the shell then offers files.
        (["plan", "jo"], []),
        (["plan", "job.yaml", "--inventory", ""], []),
        (["where", "job.yaml", "a"], ["actor:0", "actor:1"]),
        (["where", "job.yaml", "rollout:2"], ["rollout:2"]),
        # Bash splits these at the colon, and wants only what comes after it.
        (["where", "job.yaml", "env", ":"], ["0", "1", "2"]),
        (["where", "job.yaml", "env", ":", "1"], ["1"]),
        (["where", "job.yaml", "--cluster", "2x8", ":", "H100", "act"], ["actor:0", "actor:1"]),
        (["where", "job.yaml", "--cluster", "=", "2x8", ":", "H100", "act"], ["actor:0", "actor:1"]),
        (["plan", "job.yaml", "--format", "="], ["map", "table", "json", "svg", "html", "job"]),
        (["plan", "job.yaml", "--format", "=", "js"], ["json"]),
        # On hardware that does not fit: another flag may still correct it.
        (["where", "job.yaml", "--cluster", "1x1", "r"], ["rollout:0", "rollout:1", "rollout:2", "rollout:3"]),
        (["where", "nothing.yaml", ""], []),
        (["where", "broken.yaml", ""], []),
        (["where", "-", ""], []),
        (["where", ".", ""], []),
        (["logs", "--run", "./run", ""], ["actor", "rollout", "actor:0", "actor:1", "rollout:10"]),
        (["logs", "--run", "./run", "actor", ":"], ["0", "1"]),
        (["logs", ""], []),
        (["show", ""], []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bash_is_offered(bash, line, offered):
    assert bash("roost", *line) == offered


def test_zsh_and_fish_are_offered_the_same(ask):
    zsh = ask("zsh", _TYPER_COMPLETE_ARGS="roost where job.yaml env:")
    assert [rf'"env\\:{rank}"' in zsh for rank in range(4)] == [True, True, True, False]
    assert ask("zsh", _TYPER_COMPLETE_ARGS="roost plan ").strip() == "_files"
    line = "roost where job.yaml env:"
    offered = ask("fish", _TYPER_COMPLETE_FISH_ACTION="get-args", _TYPER_COMPLETE_ARGS=line)
    assert offered.split() == ["env:0", "env:1", "env:2"]


@pytest.mark.parametrize("line", ["", "r", "where job.yaml a", "logs --run ./run a", "show 2"])
def test_completion_loads_neither_ray_nor_torch(place, tmp_path, line):
    for name in ("ray", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    words = ["roost", *(line.split() or [""])]
    asked = {
        "_ROOST_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "TMPDIR": str(place),
    }
    code = "import sys; sys.argv = ['roost']; from roost.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, env=os.environ | asked, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_script_for_bash_works_in_bash(place):
    script = """
        eval "$(env _ROOST_COMPLETE=source_bash roost)"
        COMP_WORDS=(roost where job.yaml rollout : ""); COMP_CWORD=5
        _roost_completion roost
        printf '%s\\n' "${COMPREPLY[@]}"
        complete -p roost
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=place,
        env={**os.environ, "PATH": path, "TMPDIR": str(place)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0", "1", "2", "3", "complete -o default -F _roost_completion roost"]


@pytest.mark.parametrize(
    ("words", "current", "joined"),
    [
        ("roost logs", 1, (["roost", "logs"], 1, "")),
        ("roost logs a : 1", 4, (["roost", "logs", "a:1"], 2, "a:")),
        ("roost logs a :", 3, (["roost", "logs", "a:"], 2, "a:")),
        ("roost logs a : b : 1", 6, (["roost", "logs", "a:b:1"], 2, "a:b:")),
        ("roost up 2x8 : H100 --cp", 5, (["roost", "up", "2x8:H100", "--cp"], 3, "")),
        ("roost logs a : --run x", 5, (["roost", "logs", "a:", "--run", "x"], 4, "")),
        ("roost logs a : 1", 2, (["roost", "logs", "a:1"], 2, "")),
        ("roost plan j --format = js", 5, (["roost", "plan", "j", "--format=js"], 3, "--format=")),
        ("roost logs a : 1", 9, (["roost", "logs", "a:1"], 3, "")),
    ],
)
def test_words_that_bash_split_are_joined(words, current, joined):
    assert join_split_words(words.split(), current) == joined
