"""A shell script read without being run: the words of its commands are those that bash would give them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from roost.config.readers.files import Folder
from roost.config.readers.marks import Script
from roost.config.readers.script import walk_script
from roost.errors import ConfigError

AS_BASH = {
    "plain": "show a b c",
    "a comment after words": "show a # b\n# show c\nshow d#e",
    "continued lines": "show a \\\n  b \\\n  c",
    "quotes": """X='a b'; show "$X" '$X' $X "it's" a"b c"d""",
    "escapes": r"""show a\ b "\$X" "\\" \"q\" """,
    "ansi quotes": "show $'a b' end",
    "empty": 'X=; show "$X" $X end',
    "defaults": 'A=1; show ${A:-2} ${B:-3} ${B-4} "${C:-a b}" ${C:-a b}; : "${D:=9}"; show $D',
    "default within a default": "show ${A:-${B:-deep}}",
    "alternatives": 'A=1; B=; show ${A:+set} ${B:+set} ${B+set} "${A:+a b}"',
    "arithmetic": "A=4; show $((A * 8)) $((A*2+1)) $(( (A-1) % 2 )) $((A<<2)) $((A>3?10:20)) $((2**A)) $(($A/3))",
    "arithmetic that sets": "A=4; ((A+=3)); B=$((A++)); let C=A-1; show $A $B $C",
    "arithmetic in three brackets": "A=512; show $(((A * 400)))",
    "an array": 'A=(a "b c" d); show "${A[@]}"; show ${A[1]} "${A[1]}" ${#A[@]} "${A[*]}"',
    "an array over lines": "A=(\n  --x 1 # comment\n  # --y 2\n  --z=3\n)\nA+=(--w)\nshow ${A[@]}",
    "a slice of an array": 'A=(a b c d); show "${A[@]:1:2}" "${A[@]:2}"',
    "an empty array": 'A=(); show "${A[@]}" end ${#A[@]}',
    "elements": "A=(a b); A[1]=c; A[3]=d; show ${A[0]} ${A[1]} ${A[3]}",
    "named elements": 'declare -A M=([x]=1 [y]="2 3"); K=y; show "${M[$K]}" ${M[x]}',
    "append": "A=x; A+=y; show $A",
    "case of letters": "A=abC; show ${A^^} ${A,,} ${A^}",
    "cut and replace": "A=/x/y.tar.gz; show ${A##*/} ${A%.*} ${A%%.*} ${A#/} ${A/x/z} ${A//\\//-} ${A:1:3} ${#A}",
    "indirect": "A=B; B=2; show ${!A}",
    "if": "A=2; if [ $A -eq 1 ]; then show one; elif [ $A = 2 ]; then show two; else show more; fi",
    "double brackets": 'A=gpu-8; if [[ $A == gpu* && -n "$A" && ! $A == x ]]; then show yes; else show no; fi',
    "and, or": "A=1; [ $A = 1 ] && show yes || show no; [ $A = 2 ] && show yes || show no; false || show c",
    "brackets and or": "A=2; if [ $A = 1 ] || { [ $A = 2 ] && [ -n x ]; }; then show in; fi",
    "a numeric test": "if (( 3 > 2 )); then show yes; fi; if ! (( 0 )); then show zero; fi",
    "case": "A=npu; case $A in gpu | cuda) show g ;; n*) show n ;; *) show other ;; esac",
    "case with quotes": 'A="*"; case "$A" in "x") show x ;; "*") show star ;; *) show other ;; esac',
    "for": "for i in a b 'c d'; do show $i; done; for ((i = 0; i < 3; i++)); do show $i; done",
    "while": "i=0; while [ $i -lt 3 ]; do show $i; i=$((i + 1)); done",
    "break and continue": "for i in 1 2 3 4; do [ $i = 2 ] && continue; [ $i = 4 ] && break; show $i; done",
    "a function": 'f() { local x=$1; shift; show "$x" "$@" $#; }; f a b "c d"; function g { show g; }; g',
    "return": "f() { show a; return; show b; }; f; show c",
    "a subshell": "A=1; (A=2; show $A); show $A; { A=3; }; show $A",
    "a pipe": "A=1; true | { A=2; show in; }; show $A",
    "set the arguments": 'set -- a "b c"; show $# "$@" $1 "$2"',
    "parsed arguments": "set -- --n 4 x; while [[ $# -gt 0 ]]; do case $1 in --n) N=$2; shift 2 ;; *) R=$1; shift ;; "
    "esac; done; show $N $R",
    "a here-document is no command": "cat > /dev/null <<'EOF'\nshow no $((1\nEOF\nshow yes",
    "an indented here-document": "cat > /dev/null <<-'E'\n\tdon't\n\tE\nshow yes",
    "outputs that follow from the text": "show $(echo a b) `echo c` $(basename /x/y.sh .sh) $(dirname /x/y) "
    "$(echo 1,2 | tr , ' ')",
    "counted": "show $(seq 3) $(seq 2 2 6)",
    "eval": 'A="show x y"; eval $A; eval "show \\"a b\\""',
    "a variable as a command": "C='show -x'; $C y; L=(show -q); \"${L[@]}\" z",
    "joined": 'A=4; show x=$A,y="$A"z --n=${A} "n=${A}" pre"$A"post',
    "unset": "A=1; unset A; show ${A:-gone}",
    "redirections": "show a > /dev/null b 2>&1; show c &> /dev/null; show d",
    "exit": "show a; exit 0; show b",
    "until": "i=0; until [ $i -ge 2 ]; do i=$((i+1)); show $i; done",
    "negation": "! false && show yes; if ! [ a = b ]; then show differs; fi",
    "a quoted pattern": 'A=x/y; show "${A%/*}" "${A#*/}"',
    "brackets within an index": "declare -A P=([a]=1); declare -A Q=([1]=z); show ${Q[${P[a]}]}",
}
"""Snippets that call `show`; redirected ones print nothing in bash, and are not compared there."""


def read(text: str, name: str = "run.sh", arguments: tuple[str, ...] = (), **given: str) -> Script:
    from roost.config.readers.marks import ScriptFile

    return walk_script(text, Folder.of(name), given, arguments, argument_file=ScriptFile("command line", ""))


def shown(script: Script) -> list[list[str]]:
    """Return the arguments of the commands that are certain to be started."""
    certain = [item.words for item in script.commands if item.words[0].text == "show" and not item.maybe]
    return [[script.shown(word.text) for word in words[1:]] for words in certain]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to compare with")
@pytest.mark.parametrize("name", AS_BASH)
def test_words_are_those_that_bash_makes(name):
    program = (
        "show() { for word in \"$@\"; do printf '%s\\0' \"$word\"; done; printf '\\1'; } ; exec 9>&1\n" + AS_BASH[name]
    )
    ran = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    assert not ran.stderr
    calls = [part.split("\0")[:-1] for part in ran.stdout.split("\1")[:-1]]
    found = shown(read(AS_BASH[name]))
    if name == "redirections":
        assert (calls, found) == ([["d"]], [["a", "b"], ["c"], ["d"]])
    else:
        assert found == calls


@pytest.mark.parametrize(
    "text",
    [
        "pkill -9 python; touch {made}; show x",
        "rm -rf {made}.d; curl http://localhost/x | sh; A=$(touch {made}); show x",
        "eval 'touch {made}'; show x",
        "bash -c 'touch {made}'; `touch {made}`; show x",
        "cat <<EOF | bash\ntouch {made}\nEOF\nshow x",
        "exec 3<> {made}; echo > {made}; show x",
        'A=<(touch {made}); [ -n "$(touch {made})" ]; (( $(touch {made}) )); show x',
    ],
)
def test_nothing_is_run_and_nothing_is_written(text, tmp_path):
    made = tmp_path / "made"
    (tmp_path / "made.d").mkdir()
    assert shown(read(text.format(made=made))) == [["x"]]
    assert [path.name for path in tmp_path.iterdir()] == ["made.d"]


def test_what_only_the_environment_knows_is_named():
    script = read("show nodes=$NNODES gpus=$((NNODES * 8)) out=$(nvidia-smi -L)")
    words = [word.text for word in script.commands[0].words]
    assert [script.names_in(word) for word in words] == [(), ("NNODES",), ("NNODES",), ()]
    assert "nvidia-smi -L" in script.unknowns_in(words[3])[0].why


def test_a_given_variable_is_the_environment_and_fills_what_is_unknown():
    script = read("A=$(nproc)\nB=${B:-1}\nC=3\nshow $A $B $C $D", A="64", B="2", C="9", D="4")
    assert shown(script) == [["64", "2", "3", "4"]]
    assert script.ignored == {"C": "3"}


def test_an_unknown_computed_value_is_asked_for_by_the_variable_that_ends_up_with_it():
    script = read('FOUND=$(nvidia-smi -L | wc -l)\nN=${N:-$FOUND}\nif [ "$N" -le 0 ]; then N=8; fi\nshow $N')
    assert script.names_in(script.commands[-1].words[1].text) == ("N",)


def test_after_an_unknown_condition_only_what_differs_depends_on_it():
    script = read("case $DEVICE in gpu) A=1; B=8 ;; npu) A=1; B=16 ;; esac\nshow $A $B")
    words = script.commands[-1].words
    assert [script.names_in(word.text) for word in words[1:]] == [("DEVICE",), ("DEVICE",)]
    script = read("if [ $DEVICE = gpu ]; then A=1; B=8; else A=1; B=16; fi\nshow $A $B")
    words = script.commands[-1].words
    assert [word.text for word in words[1:2]] == ["1"]
    assert script.names_in(words[2].text) == ("DEVICE",)
    assert script.literals == {"DEVICE": ["gpu"]}


def test_words_that_a_condition_adds_say_what_decides_them():
    script = read('E=(a)\nif [ "$X" = 1 ]; then E+=(b=2); fi\nshow "${E[@]}"')
    assert [(word.text, word.maybe) for word in script.commands[-1].words[1:]] == [("a", ()), ("b=2", ("X",))]


def test_a_variable_without_which_the_script_ends_is_asked_for_and_others_may_be_empty():
    text = 'A=${A:-}\nB=${B:-}\nif [ -z "$A" ]; then echo missing; exit 1; fi\nshow a=$A b=$B'
    script = read(text)
    words = [word.text for word in script.commands[-1].words]
    assert script.names_in(words[1]) == ("A",)
    assert words[2] == "b="
    assert shown(read(text, A="7")) == [["a=7", "b="]]


def test_a_variable_that_the_script_sets_where_nobody_did_has_that_value():
    assert shown(read('if [ -z "$N" ]; then N=1; fi\nshow $N')) == [["1"]]
    assert shown(read('if [ -z "$N" ]; then N=1; fi\nshow $N', N="5")) == [["5"]]


def test_arguments_are_those_of_the_command_line():
    assert shown(read('show "$@" $# ${2:-none}', arguments=("a b", "c"))) == [["a b", "c", "2", "c"]]
    assert shown(read('show "$@" end')) == [["end"]]
    script = read('if [ "$#" -lt 1 ]; then echo usage; exit 1; fi\nN=$1; shift\nshow n=$N "$@"')
    assert script.names_in(script.commands[-1].words[1].text) == ("1",)


def test_a_sourced_file_and_a_started_script_are_read_from_the_project(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "models").mkdir()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "models/a.sh").write_text("M=(--layers 4)\n")
    (tmp_path / "jobs/inner.sh").write_text('show inner $E ${H:-unset} "$@"\n')
    (tmp_path.parent / "outside.sh").write_text("M=(--stolen)\n")
    text = (
        'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
        'source "$D/../models/a.sh"\nshow "${M[@]}"\nexport E=1; H=2\nbash jobs/inner.sh x\n'
        "source ../outside.sh; source /etc/passwd\nshow last\n"
    )
    monkeypatch.chdir(tmp_path)
    script = read(text, name="jobs/run.sh")
    assert shown(script) == [["--layers", "4"], ["inner", "1", "unset", "x"], ["last"]]


def test_words_know_the_line_they_are_written_in():
    text = 'ARGS=(\n  --nodes 2\n)\nmain \\\n  "${ARGS[@]}" \\\n  trainer.x=3\n'
    words = read(text).commands[0].words
    places = {word.text: word.where() for word in words}
    assert (places["--nodes"].line, places["--nodes"].offset) == (2, 2)
    assert (places["trainer.x=3"].line, places["trainer.x=3"].text) == (6, "  trainer.x=3")


def test_commands_in_the_text_of_another_are_read():
    text = 'N=4\nsrun --nodes=1 bash -c "cd /x && python -m train.main \\\n  --nodes $N" &\n'
    (command,) = read(text).commands
    assert [word.text for word in command.words] == ["python", "-m", "train.main", "--nodes", "4"]
    assert command.words[-2].where().line == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo 'abc", "a ' is not closed"),
        ('echo "abc', "is not closed"),
        ("if true; then echo", "'fi' is missing"),
        ("A=$(", "is not closed"),
        ("$(" * 3000 + ")" * 3000, "nested deeper"),
        ("f() { f; }; f", "calls itself without end"),
        ("A=xxxxxxxxxxxxxxxx\n" + "A=$A$A$A$A\n" * 40, "expand without end"),
        ("for a in 1 2 3 4 5 6 7 8 9; do " * 8 + "true; " + "done; " * 8, "do not end"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused_in_words(text, said):
    with pytest.raises(ConfigError, match=said):
        read(text)


def test_endless_arithmetic_is_unknown():
    script = read("A=B; B=A; show $((A)) $((9**99)) $((1/0)) $((1 +)) $(( 99999999999999999999999 ))")
    assert shown(script) == [["?"] * 5]


def test_a_file_that_sources_itself_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.sh").write_text("source ./a.sh\n")
    with pytest.raises(ConfigError, match="within itself"):
        read("source ./a.sh", name="run.sh")


def test_line_ends_of_windows_are_those_of_the_shell():
    assert shown(read("show a \\\r\n  b\r\nshow c\r\n")) == [["a", "b"], ["c"]]


def test_marks_in_a_file_are_no_marks():
    script = read("show \ue0000\ue001 \ue002X\ue003")
    assert script.commands[0].words[1].text == "?0?"


@pytest.mark.parametrize("text", ["", "\n", "#!/bin/bash", "\\", ";;", "}", "<<X", "$", "&&", "| |", "# only"])
def test_a_text_that_is_hardly_a_script_starts_nothing(text):
    assert not shown(read(text))


@pytest.mark.parametrize("text", ["a=(", "(((", "case x in", "[[ a", "((1", "for", "${", "`"])
def test_a_text_that_ends_too_early_is_refused_with_its_line(text):
    with pytest.raises(ConfigError, match=r"run.sh:1: not a shell script"):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        "read GPUS <<E\n8\nE\nshow $GPUS",
        'read -r GPUS <<E\n  8 \nE\nshow "$GPUS"',
        "read -r -d '' A <<'E'\n1\n2\nE\nshow \"$A\"",
        "IFS= read -rd '' A <<'E'\n 1\nE\nshow \"${A%?}\"",
    ],
)
def test_a_document_is_read_into_one_name_as_bash_does(text):
    bash = f'show() {{ printf "<%s>" "$@"; }}\n{text}'
    printed = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True).stdout
    (command,) = read(text.replace("${A%?}", "$A")).commands
    assert "".join(f"<{word.text}>" for word in command.words[1:]) == printed


@pytest.mark.parametrize(
    ("line", "document"),
    [("read A B", "4 8"), ("read B", "8\n9"), ("read -n 1 B", "88"), ("IFS=, read B", "8,"), ("read B", "8\\a")],
)
def test_what_a_read_divides_or_takes_a_part_of_is_unknown(line, document):
    script = read(f"A=1; B=2\n{line} <<'E'\n{document}\nE\nshow $A $B")
    (command,) = script.commands
    assert script.unknowns_in(command.words[-1].text)
    assert bool(script.unknowns_in(command.words[1].text)) is ("A" in line)
