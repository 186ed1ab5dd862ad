"""`roost compat`: Roost's modules in the place of a framework's, in every Python that the program starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roost.cli.commands.compat import check_program
from roost.compat import HOOK, check_framework, frameworks, pass_on
from roost.errors import ConfigError

ASKS = "import slime.ray.placement_group as them; print(them.__name__)"


@pytest.fixture
def checkout(tmp_path):
    """A folder with a package that has the names of slime's, as a checkout on the path has."""
    package = tmp_path / "slime" / "ray"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("__version__ = '0.0.7'\n")
    (package / "__init__.py").write_text("")
    (package / "placement_group.py").write_text("mine = 'theirs'\n")
    (package / "utils.py").write_text("from slime.ray import placement_group\n")
    (tmp_path / "ask.py").write_text(ASKS)
    return tmp_path


def run(folder, *words, **variables):
    return subprocess.run(
        [sys.executable, "-m", "roost", "compat", "slime", "--", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    "words",
    [
        [sys.executable, "ask.py"],
        [sys.executable, "-m", "ask"],
        [sys.executable, "-X", "dev", "-Wignore", "-c", ASKS],
        ["sh", "-c", f"{sys.executable} ask.py"],
        [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, 'ask.py'])"],
        [sys.executable, "-c", "from slime.ray import placement_group as them; print(them.__name__)"],
        [sys.executable, "-c", "import slime.ray.utils as them; print(them.placement_group.__name__)"],
    ],
    ids=lambda words: " ".join(words[1:]),
)
def test_a_program_gets_roost_in_the_place_of_the_frameworks_module(checkout, words):
    done = run(checkout, *words)
    assert (done.returncode, done.stdout) == (0, "roost.compat.slime\n"), done.stderr


def test_the_version_and_what_is_in_place_are_said_once(checkout):
    (checkout / "twice.py").write_text(
        f"{ASKS}\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {ASKS!r}])"
    )
    done = run(checkout, sys.executable, "twice.py")
    assert done.stdout == "roost.compat.slime\n" * 2
    assert done.stderr.splitlines() == [
        "roost: stands in for slime.ray.placement_group of slime 0.0.7",
        "roost: it was tried with slime 0.3.1: what slime renamed, added or moved since then is as slime has it, "
        "or missing",
    ]


@pytest.mark.heavy
def test_ranks_of_torchrun_get_it_and_one_of_them_says_so(checkout):
    pytest.importorskip("torch", reason="needs torchrun")
    (checkout / "ranks.py").write_text(
        "import os, slime.ray.placement_group as it; print(it.__name__, os.environ['RANK'])"
    )
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    done = run(checkout, torchrun, "--nproc-per-node", "2", "ranks.py", OMP_NUM_THREADS="1")
    assert sorted(done.stdout.split()) == ["0", "1", "roost.compat.slime", "roost.compat.slime"], done.stderr
    assert done.stderr.count("roost: stands in for slime.ray.placement_group") == 1


def test_a_sitecustomize_of_the_users_is_imported_too(checkout):
    (checkout / "sitecustomize.py").write_text("print('mine')")
    done = run(checkout, sys.executable, "ask.py")
    # By `roost` itself, which is not below it, and by the program.
    assert done.stdout == "mine\nmine\nroost.compat.slime\n"


def test_nothing_of_roost_is_loaded_before_the_framework(checkout):
    done = run(checkout, sys.executable, "-c", "import sys; print([name for name in sys.modules if 'roost' in name])")
    assert done.stdout == "[]\n", done.stderr


def test_the_exit_code_is_the_programs(checkout):
    assert run(checkout, sys.executable, "-c", "raise SystemExit(7)").returncode == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["python", "-I", "train.py"], "python -I does not read"),
        (["python3.12", "-uS", "train.py"], "python3.12 -S does not read"),
        (["/usr/bin/python3", "-E", "-m", "train"], "python3 -E does not read"),
        (["python", "-X", "dev", "-I"], "python -I does not read"),
        (["python", "-W", "ignore", "-I"], "python -I does not read"),
        (["env", "A=1", "python", "-I"], "python -I does not read"),
        (["ls", "-l"], "ls -l: there is no Python in it"),
        (["ray", "job", "submit", "--", "python", "train.py"], "ray job submit starts the program elsewhere"),
        (["uv", "run", "python", "train.py"], "uv run keeps roost compat from the Ray workers"),
    ],
    ids=" ".join,
)
def test_what_cannot_work_is_refused_by_name(words, message):
    with pytest.raises(ConfigError, match=message):
        check_program(words, "slime")


@pytest.mark.parametrize(
    "words",
    [
        ["python", "train.py", "-I"],
        ["python", "-Wignore", "-Xdev", "train.py"],
        ["python3", "-c", "pass", "-E"],
        ["bash", "run.sh"],
        ["timeout", "60", "python3.11", "train.py"],
    ],
    ids=" ".join,
)
def test_what_can_work_is_not_refused(words):
    check_program(words, "slime")


def test_scripts_are_judged_by_what_runs_them(tmp_path):
    def script(name, text):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o700)
        return [str(path)]

    check_program(script("torchrun", "#!/usr/bin/env -S python3 -u\nimport torch\n"), "slime")
    check_program(script("run.sh", "#!/bin/bash\n# ray job submit is not used\npython train.py\n"), "slime")
    with pytest.raises(ConfigError, match="python3 -I"):
        check_program(script("alone", "#!/usr/bin/python3 -I\n"), "slime")
    with pytest.raises(ConfigError, match="ray job submit"):
        check_program(script("submit.sh", "#!/bin/bash\nset -e\nray job submit -- python train.py\n"), "slime")


def test_an_unknown_framework_has_the_nearest_one_as_a_hint():
    with pytest.raises(ConfigError, match=r"no framework 'slim'\n  hint: did you mean 'slime'"):
        check_framework("slim")
    with pytest.raises(ConfigError, match="it knows"):
        check_framework("x")
    assert {"limits", "hook"}.isdisjoint(frameworks())


def test_ray_workers_begin_as_the_driver_did(monkeypatch):
    monkeypatch.setenv("ROOST_COMPAT", "slime")
    monkeypatch.delenv("ROOST_COMPAT_TOLD", raising=False)
    monkeypatch.delenv("ROOST_COMPAT_NEXT_HOOK", raising=False)
    own = {"ROOST_COMPAT": "slime"}
    assert pass_on(None) == {"env_vars": {"PYTHONPATH": f"{HOOK}:${{PYTHONPATH}}", **own}}
    given = {"working_dir": "/there", "env_vars": {"PYTHONPATH": "/theirs", "A": "1"}}
    assert pass_on(given) == {
        "working_dir": "/there",
        "env_vars": {"A": "1", "PYTHONPATH": f"{HOOK}:/theirs", **own},
    }
    monkeypatch.setenv("ROOST_COMPAT_NEXT_HOOK", "copy.copy")
    assert pass_on(given)["working_dir"] == "/there"
