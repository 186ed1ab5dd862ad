"""slime's own `train.py` and `train_async.py`: the same trace on Roost as on slime's own layer."""

from __future__ import annotations

import ast
import json
import os
import shutil
from pathlib import Path

import pytest

from roost.config.readers.slime import PLACING, SLIME
from roost.testing import local_cluster

PARTS = Path(__file__).parent / "slime_parts"
RANKS, ENGINES, STEPS = 2, 2, 3
FLAGS = [
    *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", str(RANKS), "--num-gpus-per-node", "8"),
    *("--num-rollout", str(STEPS), "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
    *(
        "--global-batch-size",
        "8",
        "--rollout-function-path",
        "prompts.generate",
        "--data-source-path",
        "prompts.Prompts",
    ),
    *("--sglang-router-ip", "127.0.0.1", "--sglang-router-port", "1", "--save-interval", "2"),
]
SEPARATE = ["--rollout-num-gpus", str(ENGINES)]
CRITIC = ["--advantage-estimator", "ppo"]


@pytest.fixture(scope="module")
def slime(checkout):
    pytest.importorskip("torch", reason="needs torch: make test-programs")
    return checkout("SLIME", "slime (github.com/THUDM/slime)", "train_async.py")


@pytest.fixture
def traced(slime, program, tmp_path):
    """Runs one of slime's programs with stand-ins for Megatron and SGLang: what each of its processes noted."""
    # slime preloads a library of this package where training offloads.
    saver = tmp_path / "saver"
    (saver / "torch_memory_saver").mkdir(parents=True)
    (saver / "torch_memory_saver" / "__init__.py").write_text("")
    some = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libm.so" in line)
    shutil.copy(some, saver / "torch_memory_saver_hook_mode_preload.abi3.so")

    def run(name, flags, compat):
        folder = tmp_path / (compat or "own")
        folder.mkdir()
        path = os.pathsep.join(map(str, [PARTS, slime, saver]))
        env = {"PYTHONPATH": path, "SLIME_TRACE": str(folder), "OMP_NUM_THREADS": "1"}
        with pytest.MonkeyPatch.context() as patch:
            for key, value in env.items():
                patch.setenv(key, value)
            with local_cluster("1x8") as cluster:
                words = [str(slime / name), *FLAGS, "--save", str(tmp_path / "saved"), *flags]
                done = program(*words, compat=compat, env=cluster.environment)
        traces = {path.name: path.read_text().splitlines() for path in folder.glob("*.jsonl")}
        return {name: [json.loads(line) for line in lines] for name, lines in traces.items()}, done

    return run


def test_roost_knows_every_flag_of_slimes_that_says_how_much_hardware_a_role_has(slime):
    names = set()
    for path in ("slime/utils/arguments.py", "slime/backends/sglang_utils/arguments.py"):
        for node in ast.walk(ast.parse((slime / path).read_text(encoding="utf-8"))):
            names |= {node.value[2:]} if isinstance(node, ast.Constant) and str(node.value).startswith("--") else set()
    assert len(names) > 200
    placing = {name for name in names if PLACING.match(name)}
    assert {"actor-num-nodes", "rollout-num-gpus-per-engine", "prefill-num-servers"} <= placing
    assert placing <= SLIME.defaults.keys()


def test_roosts_own_flags_are_read_from_what_slime_parsed(slime, program):
    code = "from slime.utils.arguments import parse_args; from roost.rl import read_flags; "
    code += "flags = read_flags(parse_args()); print(flags.num_gpus, flags.rollout_offset, flags.use_critic)"
    env = {"PYTHONPATH": os.pathsep.join([str(PARTS), str(slime)])}
    own = [*FLAGS, "--save", "."]
    assert program("-c", code, *own, *SEPARATE, *CRITIC, env=env).stdout.split() == ["4", "2", "True"]
    # slime itself only says that the flag that was meant is missing.
    wrong = ["--rollout-num-gpu", "2", "--disable-wandb", "--num-layer", "4"]
    with pytest.raises(AssertionError) as caught:
        program("-c", code, *own, *wrong, compat="slime", env=env)
    for flag, hint in [(wrong[0], "did you mean --rollout-num-gpus?"), (wrong[2], ""), (wrong[3], "--num-layers?")]:
        assert f"slime has no flag {flag}, nor have its Megatron and its SGLang" in str(caught.value)
        assert hint in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", *SEPARATE],
        ["train.py", "--colocate"],
        ["train.py", "--colocate", "--rollout-num-gpus", "4"],
        ["train.py", *SEPARATE, *CRITIC],
        ["train.py", "--colocate", *CRITIC],
        ["train_async.py", *SEPARATE],
        ["train_async.py", *SEPARATE, *CRITIC],
    ],
    ids=" ".join,
)
def test_slime_does_the_same_on_roost_as_on_its_own_layer(traced, words):
    name, *flags = words
    own, _ = traced(name, flags, None)
    ours, done = traced(name, flags, "slime")
    assert ours == own
    assert "roost: stands in for slime.ray.placement_group" in done.stderr
    # What is compared is a whole run: every rank took every step, with weights that moved.
    roles = ["actor", "critic"] if CRITIC[1] in flags else ["actor"]
    engines = 4 if "4" in flags else ENGINES
    assert {f"{role}-{rank}.jsonl" for role in roles for rank in range(RANKS)} <= own.keys()
    assert {f"engine-{rank}.jsonl" for rank in range(engines)} <= own.keys()
    for rank in range(RANKS):
        steps = [event for event in own[f"actor-{rank}.jsonl"] if event["what"] == "train"]
        assert [step["rollout"] for step in steps] == list(range(STEPS))
        assert len({tuple(step["weights"]) for step in steps}) == STEPS
