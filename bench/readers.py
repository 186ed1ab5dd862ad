"""How much of each framework's own examples Roost reads: the table of docs/guides/see-your-job.md.

    python bench/readers.py CHECKOUTS [--framework NAME] [--findings] [--why]

CHECKOUTS holds a checkout of each framework under the name that `SOURCES` gives. Scripts and configs are read and never
run. `--findings` lists what is wrong with them, and `--why` why a file is not read.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from roost.cli.plans import Flags, plan_job, read_job
from roost.config.readers.reading import VariablesMissing, framework
from roost.config.run import read_job_text
from roost.config.topology import Topology
from roost.errors import RoostError
from roost.placement.planner import make_plan


@dataclass(frozen=True)
class Source:
    """Where a framework keeps jobs, and what the text of a job has that other files there do not."""

    folder: str
    patterns: tuple[str, ...]
    tells: str
    without: str = r"(?!)"
    unmarked: str = r"(?!)"
    """What the text of a job is like that needs `--from`, since others look the same."""


_OPENRLHF = r"openrlhf\.cli\.train_(ppo|sft|dpo|rm)"
SOURCES = {
    "verl": Source("verl", ("examples/**/*.sh", "recipe/**/*.sh", "verl/experimental/**/*.sh"),
                   r"main_ppo|main_dapo|sft_trainer|verl\.trainer\.|verl\.experimental\.|actor_rollout_ref\."),
    "slime": Source("slime", ("examples/**/*.sh", "scripts/**/*.sh"), r"train(_async|_multi\w*)?\.py"),
    "miles": Source("miles", ("examples/**/*.sh", "scripts/**/*.sh"), r"train(_async|_multi\w*)?\.py"),
    "openrlhf": Source("OpenRLHF", ("examples/**/*.sh",), _OPENRLHF),
    "nemo-rl": Source("RL", ("examples/configs/**/*.yaml", "examples/nemo_gym/**/*.yaml", "examples/**/*.sh"),
                      r"(?m)^(policy|cluster|defaults):|run_(grpo|sft|dpo|rm|ppo|distillation)\w*\.py"),
    "areal": Source("AReaL", ("examples/**/*.yaml", "examples/**/*.sh"),
                    r"(?m)^(allocation_mode|cluster):|--config \S+\.yaml", r"(?m)^(resources|setup|run):"),
    "skyrl": Source("SkyRL", ("examples/**/*.sh", "skyrl-agent/examples/run_skyrl/*.sh"),
                    r"generator\.inference_engine|trainer\.placement|main_sft|entrypoints\.main"),
    "roll": Source("ROLL", ("examples/**/*.yaml", "examples/**/*.sh"), r"device_mapping|start_\w+_pipeline\.py"),
    "prime-rl": Source("prime-rl", ("examples/**/*.toml", "configs/**/*.toml"),
                       r"(?m)^\[(trainer|orchestrator|inference|deployment|model|vllm)\b", r"(?m)^\[project\]",
                       r"(?ms)\A(?!.*^\[+(trainer|orchestrator|inference|deployment)\b)"),
    "rlinf": Source("RLinf", ("**/*.yaml",), r"component_placement"),
}  # fmt: skip


@dataclass
class Tally:
    """What became of the files of a framework."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def jobs(root: Path, source: Source) -> list[Path]:
    found = sorted({path for pattern in source.patterns for path in (root / source.folder).glob(pattern)})
    texts = [(path, path.read_text(errors="replace")) for path in found if path.is_file()]
    return [path for path, text in texts if re.search(source.tells, text) and not re.search(source.without, text)]


def try_job(name: str, path: Path) -> tuple[str, str, list[str]]:
    """Return how far a file is read, why not, and what is wrong with it."""
    text = path.read_text(errors="replace")
    try:
        if name == "rlinf":
            return try_rlinf(path, text)
        outcome, why = "read", ""
        chosen = name if re.search(SOURCES[name].unmarked, text) else None
        flags = Flags(framework=chosen)
        try:
            found = plan_job(read_job(path, (), flags), flags)
        except VariablesMissing as missing:
            outcome, why = "with variables", "; ".join(item.message for item in missing.problems)
            flags = Flags(framework=chosen, assume=True)
            found = plan_job(read_job(path, (), flags), flags)
        if found.foreign is None or found.foreign.framework.name != name:
            return "not", "it is taken for a job of another program", []
        return outcome, why, [str(item).partition("\n")[0] for item in found.findings if item.level != "info"]
    except VariablesMissing as missing:
        # Not even the framework's own values stand in for what is missing, such as the name of the config.
        return "with variables", "; ".join(item.message for item in missing.problems), []
    except RoostError as error:
        return "not", str(error).partition("\n")[0], []


def try_rlinf(path: Path, text: str) -> tuple[str, str, list[str]]:
    draft = read_job_text(text, name=str(path))
    nodes = draft.job.cluster.num_nodes or 1
    make_plan(draft, draft.job.cluster.hardware or Topology.from_shorthand(f"{nodes}x8"))
    return "read", "", []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--framework", choices=SOURCES)
    parser.add_argument("--findings", action="store_true")
    parser.add_argument("--why", action="store_true")
    given = parser.parse_args()
    rows = []
    for name in [given.framework] if given.framework else SOURCES:
        tally, start = Tally(), time.perf_counter()
        for path in jobs(given.checkouts, SOURCES[name]):
            outcome, why, findings = try_job(name, path)
            tally.counts[outcome] += 1
            shown = path.relative_to(given.checkouts)
            tally.lines += [f"{outcome}: {shown}: {why}"] if why else []
            tally.findings += [f"{shown}: {item}" for item in findings]
        if given.why:
            print("\n".join(tally.lines))
        if given.findings:
            print("\n".join(tally.findings))
        version = "" if name == "rlinf" else framework(name).version
        rows.append((name, version, tally, time.perf_counter() - start))
    print("| framework | version | files tried | read | with variables | not |")
    print("|---|---|---|---|---|---|")
    for name, version, tally, _ in rows:
        counts = tally.counts
        columns = (name, version, counts.total(), counts["read"], counts["with variables"], counts["not"])
        print("| " + " | ".join(map(str, columns)) + " |")


if __name__ == "__main__":
    main()
