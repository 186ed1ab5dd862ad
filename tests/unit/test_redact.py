"""Secrets and foreign text: what is shown and recorded of them."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost import Accelerator, ConfigError, Node, Topology, make_plan
from roost.machine.processes import one_line
from roost.redact import HIDDEN, hide, hide_in_data, hide_in_text, hide_in_words, is_secret
from roost.render.grid import make_grid
from roost.render.html import draw_html
from roost.render.svg import draw_svg
from roost.runtime.managers.job_info import JobInfo
from roost.runtime.runs.folder import make_run_dir
from roost.runtime.runs.record import read_record
from roost.runtime.runs.recorder import Recorder
from roost.text import printable, printable_lines

SECRETS = """
    WANDB_API_KEY wandb-key --wandb-key apiKey model.api_key OPENAI_KEY HF_TOKEN --token --api-token RAY_AUTH_TOKEN
    --password db.passwd DB_PASS DB_PWD SSH_PASSPHRASE AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY VLLM_Secret_2
    HYDRA_CREDENTIALS REDIS_AUTH AUTHORIZATION GITHUB_PAT key +logger.wandb.key
"""
OPEN = """
    NCCL_DEBUG CUDA_VISIBLE_DEVICES TOKENIZERS_PARALLELISM --tokenizer --max-tokens --max-new-tokens --eos-token
    --eos-token-id --pad-token data.prompt_key --input-key --label-key --reward-key data.reward_fn_key --multimodal-keys
    PWD OLDPWD AUTHOR RAY_AUTH_MODE RAY_AUTH_TOKEN_PATH --ssh-key-file pass_at_k SSH_AUTH_SOCK
"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_a_secret_is_known_by_its_name(name):
    assert is_secret(name, "sekret")
    assert hide(name, "sekret") == HIDDEN


@pytest.mark.parametrize("name", OPEN.split())
def test_what_counts_or_names_something_is_no_secret(name):
    assert hide(name, "prompt") == "prompt"


@pytest.mark.parametrize("value", ["", "true", "None", "0", "$HF_TOKEN", "${oc.env:HF_TOKEN}", HIDDEN])
def test_a_switch_or_a_reference_is_no_secret(value):
    assert hide("--use-auth-token", value) == value


def test_secrets_in_commands_and_settings_are_hidden_and_the_rest_is_not():
    words = ["train.py", "--lr", "1", "--wandb-key=sekret", "--password", "a sekret", "db.password=a sekret", "--token"]
    assert hide_in_words(words) == [
        *("train.py", "--lr", "1", "--wandb-key=***", "--password", "***", "db.password=***", "--token")
    ]
    assert hide_in_words(["--use-token", "--config", '{"api_key": "se\\"kret", "a": 1}']) == [
        *("--use-token", "--config", '{"api_key": ***, "a": 1}')
    ]
    for text, shown in {
        "KEY=sekret python train.py --password 'a sekret' --lr 1": "KEY=*** python train.py --password *** --lr 1",
        "ray://me:sekret@10.0.0.2:1": "ray://***@10.0.0.2:1",
        "curl -H 'Authorization: Bearer sekret'": "curl -H 'Authorization: ***'",
        "/home/monkey:/code": "/home/monkey:/code",
        "--max-tokens 512 --prompt-key prompt": "--max-tokens 512 --prompt-key prompt",
    }.items():
        assert hide_in_text(text) == shown
    assert hide_in_data({"a": [{"token": "sekret", "n": 1}], "pin_secret": 1234}) == {
        "a": [{"token": HIDDEN, "n": 1}], "pin_secret": HIDDEN,
    }  # fmt: skip
    assert one_line(["python", "x.py", "--api-token=sekret"], 100) == "python x.py --api-token=***"


EVIL = "\x1b]0;title\x07\u202e"
JOB = """\
cluster:
  num_nodes: 1
  component_placement:
    actor: {node_group: gpus, placement: 0}
  node_groups:
    - label: gpus
      node_ranks: 0
      env_configs:
        - node_ranks: 0
          env_vars:
            - WANDB_API_KEY: VALUE
            - PROXY: "http://me:VALUE@proxy"
            - TITLE: "\\e]0;title\\a \\u202e <b>"
"""


@pytest.fixture
def job(tmp_path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("VALUE", "sekret"))
    return path


@pytest.mark.parametrize(
    "form", ["plan --format svg", "plan --format html", "where", "where --format json", "diff", "diff --format json"]
)
def test_a_variable_that_is_a_secret_is_not_shown(job, roost, form):
    other = job.with_name("other.yaml")
    other.write_text(JOB.replace("VALUE", "another"))
    name, *options = form.split()
    more = {"where": ["actor:0"], "diff": [str(other)]}.get(name, [])
    code, out, err = roost(name, str(job), *more, "--cluster", "1x1", *options)
    assert (code, err) == (1 if name == "diff" else 0, "")
    assert "WANDB_API_KEY" in out
    evil = ["sekret", "another", "\x1b", "\x07", "\u202e", *(["<b>"] if name == "plan" else [])]
    assert not [word for word in evil if word in out]
    assert "]0;title" in out


def test_a_plan_keeps_the_values_that_its_workers_need(job, roost):
    assert "sekret" in roost("plan", str(job), "--cluster", "1x1", "--format", "json")[1]


@given(st.text(st.characters(exclude_characters="\0"), max_size=40))
def test_pictures_are_well_formed_whatever_the_text_in_them_is(text):
    topology = Topology.from_dict({"nodes": [{"accelerators": 1, "name": "a"}]})
    plan = make_plan({"cluster": {"component_placement": {"a": "0"}}}, topology)
    svg = draw_svg(plan, make_grid(plan, title=text))
    ElementTree.fromstring(svg)  # noqa: S314 - made here
    for drawn in (svg, draw_html(plan, make_grid(plan, title=text))):
        assert drawn.replace("\n", "").isprintable() or "\t" in text


def test_a_control_character_in_a_value_leaves_the_svg_well_formed(job, roost):
    svg = roost("plan", str(job), "--cluster", "1x1", "--format", "svg")[1]
    root = ElementTree.fromstring(svg)  # noqa: S314 - made here
    titles = "".join(item.text or "" for item in root.iter("{http://www.w3.org/2000/svg}title"))
    assert "TITLE=\\x1b]0;title\\x07 \\u202e <b>" in titles


@given(st.text(max_size=60))
def test_text_that_is_cleaned_upsets_no_terminal(text):
    assert printable(text).replace("\t", "").isprintable()
    assert printable_lines(text).replace("\t", "").replace("\n", "").isprintable()
    assert str(ConfigError(text)).replace("\t", "").replace("\n", "").isprintable()


def test_a_saved_plan_of_another_person_is_shown_without_escapes(tmp_path, roost):
    config = {"cluster": {"component_placement": {"a": "0"}}}
    for name in ("plain", EVIL):
        node = Node(accelerators=(Accelerator(model=EVIL),), name=name)
        (tmp_path / f"{name[:5]}.json").write_text(make_plan(config, Topology(nodes=(node,))).to_json())
    plain, evil = sorted(map(str, tmp_path.iterdir()), reverse=True)
    for words in (["plan", evil], ["plan", evil, "--format", "svg"], ["where", evil, "a:0"], ["diff", plain, evil]):
        _, out, err = roost(*words)
        assert "]0;title" in out
        assert not [c for c in "\x1b\x07\u202e" if c in out + err], words


def test_the_record_of_a_run_has_no_secret_of_its_command_and_rerun_says_so(tmp_path, roost, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--wandb-key=sekret", "--password", "sekret"])
    recorder = Recorder()
    topology = Topology.from_shorthand("1x1")
    made = make_run_dir(tmp_path / "run")
    recorder.begin(JobInfo.of_this_process("10.0.0.2:6379", "roost", made, keeps_events=False), [], topology)
    recorder.end()
    assert read_record(tmp_path / "run").command == ("python", "train.py", "--wandb-key=***", "--password", "***")
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and "sekret" in path.read_text()]
    code, _, err = roost("rerun", str(tmp_path / "run"))
    assert code == 2
    assert "the command of run run had a secret, which is not kept: train.py '--wandb-key=***' --password '***'" in err
    assert "run it by hand in" in err


def test_a_secret_behind_another_name_is_hidden():
    for text in ("ValueError: api_key=sekret", "Error: api_key: sekret", "a=password=sekret", "note: 'token=sekret'"):
        assert "sekret" not in hide_in_text(text), text


def test_a_long_word_is_read_once():
    # Read from each of its letters, it would take hours.
    assert hide_in_text("x" * 10**6 + " api_key=abc") == "x" * 10**6 + " api_key=***"


@pytest.mark.parametrize("piece", ["://", "http://me:", "a=", "key=", "key='", 'token: "', "--key "])
def test_a_text_of_beginnings_is_read_once(piece):
    # Read to its end from each of them, it would take minutes.
    shown = hide_in_text(piece * 10**4 + " http://me:sekret@host")
    assert shown.endswith("http://***@host") or "sekret" not in shown
