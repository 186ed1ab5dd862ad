"""The help of every command: complete, in 80 columns, described in the docs, and there without loading the others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from roost.cli.main import app, load_command, main

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
COMMANDS = list(typer.main.get_command(app).commands)


@pytest.fixture
def help_of(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["roost", *words, "--help"])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        told = capsys.readouterr()
        assert told.err == ""
        return told.out

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_reads_well(name, help_of):
    command = load_command(name)
    text = help_of(name)
    assert f"roost {name}" in text
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"<bool>|<list|\{\w+", text), "a flag has no type, and an argument a name"
    summary = (command.help or "").strip()
    assert re.fullmatch(r"[A-Z][^\n]*\.", summary), summary
    with command.make_context(name, [], resilient_parsing=True) as context:
        for param in command.get_params(context):
            told = getattr(param, "help", "") or ""
            assert re.fullmatch(r".*[^ ]\.", told), f"{name} {param.opts}: {told!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_docs_have_a_section_and_a_row_for_a_command(name):
    sections = re.findall(r"^## (.*)$", PAGE, re.M)
    assert any(re.search(rf"\broost {name}\b", section) for section in sections), f"no section for roost {name}"
    assert re.search(rf"^\| \[.*`roost {name}`.*\]\(#.*\) \|", PAGE, re.M), f"no row for roost {name}"


def test_the_help_of_all_commands_lists_each_with_one_line(help_of):
    text = help_of()
    assert max(map(len, text.splitlines())) <= 80
    for name in COMMANDS:
        assert re.search(rf"^│ {name} +\w", text, re.M), name
    assert text.index("Start here") < text.index("Plan, with no cluster")


def test_an_example_of_the_help_names_its_own_command_and_real_options(help_of):
    for name in COMMANDS:
        text = help_of(name)
        found = re.search(r"For example: roost (\S+)(.*)", text)
        if found:
            assert found[1] == name
            for option in re.findall(r"--[\w-]+", found[2]):
                assert option in text[: found.start()]


def test_every_file_of_a_command_is_in_the_table():
    files = (ROOT / "src" / "roost" / "cli" / "commands").glob("[!_]*.py")
    assert sorted(COMMANDS) == sorted(path.stem for path in files)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lint", "check JOB.yaml"),
        ("check-proof", "search --check PROOF.json"),
        ("who", "where JOB.yaml HARDWARE"),
        ("channels", "status --channels"),
        ("trace", "show RUN --trace"),
    ],
)
def test_the_old_name_of_a_command_says_where_it_went(old, new, roost):
    for words in ([old], [old, "job.yaml", "--cluster", "2x8"], ["help", old]):
        assert roost(*words) == (2, "", f"`roost {old}` is now `roost {new}`\n")


@pytest.mark.parametrize(("words", "loaded"), [([], []), (["plan"], ["plan"]), (["run"], ["plan", "run"])])
def test_help_loads_only_the_command_that_is_asked_for_and_no_ray(words, loaded):
    code = (
        "import sys; from roost.cli.main import main\n"
        "try: main()\n"
        "finally:\n"
        "    found = [name for name in sys.modules if name.startswith(('roost.cli.commands.', 'ray'))]\n"
        "    print(*found, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.split()) == [f"roost.cli.commands.{name}" for name in loaded]


def test_a_mistyped_command_gets_a_suggestion(roost):
    code, _, err = roost("plam")
    assert (code, "No such command 'plam'. Did you mean 'plan'" in err) == (2, True)
