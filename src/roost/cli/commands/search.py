"""`roost search`: the best placement of a job, found from measured times and proven."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml
from rich.text import Text

from roost.cli.options import Cluster, Inventory, Out
from roost.cli.out import as_json, tell, write_text
from roost.cli.plans import find_hardware
from roost.cli.terminal import aligned, draw_map, print_text
from roost.config.profile import read_profile
from roost.config.run import read_job_text
from roost.config.topology import Topology
from roost.config.yaml_file import JOB_FILE_LIMIT, PLAN_FILE_LIMIT, load_text, parse_text
from roost.errors import ConfigError
from roost.placement.ledger import make_ledger
from roost.placement.plan import Plan
from roost.placement.planner import make_plan
from roost.render.bars import Bar, draw_bars, draw_bars_svg
from roost.render.flow import flow_html
from roost.render.grid import PALETTE, make_grid
from roost.render.html import draw_html
from roost.render.svg import escape
from roost.search.answer import Answer, Option
from roost.search.answer import search as find
from roost.search.check import check_proof
from roost.search.find import Found
from roost.search.predict import check_runs
from roost.search.problem import seconds
from roost.search.proof import make_proof
from roost.search.sensitivity import MOST_ROLES, deciding
from roost.search.setup import Setup, make_setup
from roost.search.simulate import Simulated, has_spread, simulate
from roost.text import at_most, join_words, plural, shorten

_MOST_DOUBTS = 6


def search(
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB.yaml]", help="The job's config, with a flow; not with --check.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", "-p", metavar="FILE", help="Measured times of the calls.")
    ] = None,
    cluster: Cluster = None,
    inventory: Inventory = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=1, max=100, help="Show so many placements, the best first.")
    ] = 5,
    interpolate: Annotated[
        bool, typer.Option("--interpolate", help="Also use device counts between the measured ones.")
    ] = False,
    apply: Annotated[
        Path | None, typer.Option("--apply", metavar="FILE", help="Write the job with the best placement to this file.")
    ] = None,
    prove: Annotated[
        Path | None, typer.Option("--prove", metavar="FILE", help="Write a proof, which --check checks.")
    ] = None,
    proof: Annotated[
        Path | None,
        typer.Option("--check", metavar="PROOF.json", help="Check a proof, with code of its own, and search nothing."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The seed of the simulation.")] = 0,
    form: Annotated[
        Literal["text", "json", "svg", "html"],
        typer.Option("--format", metavar="FORMAT", help="Output format: text, json, svg or html."),
    ] = "text",
    out: Out = None,
) -> None:
    if proof is not None:
        if job is not None or profile is not None or form not in ("text", "json"):
            raise ConfigError("--check takes nothing but the proof", hint="and --format json")
        _check_proof(proof, form, out)
        return
    if job is None or profile is None:
        missing = "JOB.yaml, the job's config" if job is None else "--profile, the measured times"
        raise ConfigError(f"roost search: missing {missing}", hint="see roost search --help")
    job = Path("/dev/stdin") if str(job) == "-" else job
    text = load_text(job, limit=JOB_FILE_LIMIT)
    draft = read_job_text(text, name=str(job))
    draft.notes.raise_if_any()
    if draft.flow is None:
        hint = "say what feeds what: flow: {step: rollout.generate -> actor.train}"
        raise ConfigError("the job has no section 'flow'", hint=hint, where=draft.job.document.where())
    outside = [name for name in draft.names if name not in draft.flow.roles]
    if outside:
        verb = "is" if len(outside) == 1 else "are"
        tell(f"note: {join_words(outside)} {verb} not in the flow; what runs there is not searched")
    if cluster is not None and inventory is not None:
        raise ConfigError("--cluster and --inventory both describe the hardware", hint="give one of them")
    topology, assumed = find_hardware(draft.job.cluster, cluster, inventory, "--cluster or --inventory")
    times = read_profile(profile)
    setup = make_setup(draft.flow, times, topology, interpolate=interpolate, memory=draft.memory)
    predicted = check_runs(draft.flow, times)
    left_out = 0

    def fits(option: Option) -> bool:
        """Tell whether the nodes have memory enough: the search itself knows that of the devices."""
        nonlocal left_out
        over = draft.memory and option.ranks and make_ledger(_plan(option, topology), draft.memory).overflows
        left_out += bool(over)
        return not over

    answer = find(setup, top, fits if draft.memory else None)
    best = answer.best
    if draft.rules is not None:
        tell("note: mesh, keep and spread are not searched: plan the answer to have them checked")
    if left_out:
        tell(f"note: left out {plural(left_out, 'placement')} on which the nodes lack memory")
    if draft.memory and best.ranks:
        for line in make_ledger(_plan(best, topology), draft.memory).unknown:
            tell(f"note: memory: not known: {line}")
    if prove is not None and left_out:
        hint = "it can prove what devices have memory for, and leaves the nodes' memory out"
        raise ConfigError("there is no proof for a placement that the memory of nodes decides", hint=hint)
    if prove is not None:
        proven = make_proof(setup.problem, best.family, best.ranks)
        write_text(json.dumps(proven, separators=(",", ":")) + "\n", prove)
    if apply is not None:
        write_text(with_placement(text, str(job), best.component_placement), apply)
    if form == "json":
        runs = [
            {"step_seconds": seconds(one.run.step.median), "predicted_seconds": seconds(one.step)} for one in predicted
        ]
        write_text(as_json(answer.to_dict() | ({"runs": runs} if runs else {})), out)
    elif form in ("svg", "html"):
        rests_on = f" (interpolated: {', '.join(best.interpolated)})" if best.interpolated else ""
        bars = draw_bars_svg(_bars(best), f"{job.name}: {best.critical_cycle} sets the pace{rests_on}")
        if form == "svg":
            write_text(bars, out)
            return
        if not best.ranks:
            raise ConfigError("no role of the flow takes devices, so there is no map", hint="leave out --format html")
        below = ["<h2>A step</h2>", bars, "<h2>Alternatives</h2><ul>"]
        for other in answer.others:
            said, placed = _said(other), escape(_placed(other))
            below.append(f"<li>{said}: {escape(answer.loss(other))} <code>{placed}</code></li>")
        plan = _plan(best, topology)
        grid = make_grid(plan, title=job.name, assumed=assumed)
        write_text(draw_html(plan, grid, [*below, "</ul>", *flow_html(draft.flow)]), out)
    else:
        simulated = []
        if has_spread(setup.timings):
            simulated = [
                simulate(setup.problem, one.family, setup.timings, seed=seed) for one in (best, *answer.others)
            ]
        width = 120 if out is not None else shutil.get_terminal_size().columns
        told = _answer_text(answer, simulated, width)
        if predicted:
            told.append("\n\n").append("\n".join(map(str, predicted)))
        told.append("\n\n").append_text(_doubts_text(setup, best))
        if out is None and best.ranks:
            draw_map(make_grid(_plan(best, topology), title=job.name, assumed=assumed))
            print_text(Text(""))
        print_text(told, out)


def _check_proof(path: Path, form: str, out: Path | None) -> None:
    try:
        data = json.loads(load_text(path, limit=PLAN_FILE_LIMIT))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {shorten(str(error), 200)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a proof is a mapping, as roost search --prove writes it")
    try:
        refuted = check_proof(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    step = seconds(Fraction(*data["step_time"]))
    if form == "json":
        write_text(as_json({"holds": True, "step_seconds": step, "refuted": refuted}), out)
        return
    branches = plural(refuted, "branch", "branches")
    print_text(Text(f"the proof holds: no placement takes less than {step:.4g} s a step ({branches} refuted)"), out)


def _plan(option: Option, topology: Topology) -> Plan:
    cluster = {"num_nodes": topology.num_nodes, "component_placement": option.component_placement}
    return make_plan({"cluster": cluster}, topology, placement="hybrid")


def _bars(option: Option) -> list[Bar]:
    """Return what each role does in a step, in the colours of the map."""
    return [
        Bar(
            name=name,
            colour=PALETTE[index % len(PALETTE)],
            parts=(min(1.0, share.busy), share.switching, share.idle),
            note=plural(share.devices, "device"),
        )
        for index, (name, share) in enumerate(option.shares().items())
    ]


def _said(option: Option) -> str:
    return f"{seconds(option.step_time):.4g} s" + (" (interpolated)" if option.interpolated else "")


def _placed(option: Option) -> str:
    return ", ".join(f"{name}: {ranks}" for name, ranks in option.component_placement.items())


def _answer_text(answer: Answer, simulated: Sequence[Simulated], width: int) -> Text:
    """Explain the best placement, and list the others."""
    best = answer.best
    lines = [Text.assemble((f"{seconds(best.step_time):.4g} s a step", "bold"), ", and no legal placement is quicker")]
    lines.append(Text(f"{best.critical_cycle} sets the pace"))
    idle = {name: share.idle for name, share in best.shares().items() if round(share.idle, 2)}
    lines += [Text(join_words([f"{name} idles {share * 100:.0f} %" for name, share in idle.items()]))] if idle else []
    lines += [Text(""), draw_bars(_bars(best), width=width), Text("")]
    lines.append(Text("component_placement:", style="bold"))
    lines += [Text(f"  {name}: {ranks}") for name, ranks in best.component_placement.items()]
    if best.interpolated:
        measure = f"measure {join_words(best.interpolated)} to decide"
        lines += [Text(""), Text(f"this rests on times that were not measured; {measure}", style="yellow")]
    if answer.others:
        lines += [Text(""), Text("alternatives", style="bold")]
        for other in answer.others:
            lines.append(Text(f"  {_said(other)}  {answer.loss(other)}"))
            lines.append(Text(f"    {_placed(other)}", style="dim"))
    if simulated:
        rows = [("simulated", "step", "mean", "p90")]
        for number, (option, found) in enumerate(zip((best, *answer.others), simulated, strict=True)):
            name = f"alternative {number}" if number else "the best"
            rows.append((name, f"{seconds(option.step_time):.4g} s", f"{found.mean:.4g} s", f"{found.p90:.4g} s"))
        lines += [Text(""), aligned(rows)]
    return Text("\n").join(lines)


def _doubts_text(setup: Setup, best: Option) -> Text:
    """Say which measurements decide."""
    if len(setup.problem.roles) > MOST_ROLES:
        return Text(f"with more than {MOST_ROLES} roles, which measurements decide is not looked for")
    said = [
        f"{setup.measurement(doubt.call, doubt.kind, doubt.devices)} if it is 10 % "
        + ("slower" if doubt.factor > 1 else "quicker")
        for doubt in deciding(setup.problem, Found(best.family, best.step_time))
    ]
    if not said:
        return Text("no measurement that is 10 % off changes the winner")
    title = Text("measurements that would change the winner", style="bold")
    return Text("\n").join([title, *(Text(f"  {line}") for line in at_most(said, _MOST_DOUBTS))])


def with_placement(text: str, name: str, placement: Mapping[str, str]) -> str:
    """Return the job's text with these placements; components that are not among them keep theirs."""
    section = parse_text(text, name=name).get("cluster", "component_placement")
    if section is None or section.kind != "mapping":
        raise ConfigError(f"{name} has no component_placement to write to")
    lines = text.splitlines()
    keys = [key for key, _ in section.items()]
    first = keys[0].where()
    start, indent = first.line - 1, first.offset
    if name.endswith(".json") or lines[start][:indent].strip() or any(key.where().offset != indent for key in keys):
        raise ConfigError(
            f"{name} has its component_placement on one line", hint="write one component per line, or paste the answer"
        )
    stop = start + 1
    while stop < len(lines) and (not lines[stop].strip() or len(lines[stop]) - len(lines[stop].lstrip()) >= indent):
        stop += 1
    while not lines[stop - 1].strip():
        stop -= 1
    starts = [key.where().line - 1 for key in keys]
    new: list[str] = []
    for (key, value), begin, end in zip(section.items(), starts, [*starts[1:], stop], strict=True):
        components = [part.strip() for part in str(key.scalar).split(",")]
        kept = yaml.safe_dump(value.plain(), default_flow_style=True, width=10**6).removesuffix("...\n").strip()
        if all(placement.get(component, str(value.scalar)) == str(value.scalar) for component in components):
            new += lines[begin:end]
            continue
        # What stands beside and below it is not about its place alone.
        comment = re.search(r"\s+#.*$", lines[begin])
        new += [f"{' ' * indent}{component}: {placement.get(component, kept)}" for component in components]
        new[-1] += comment.group() if comment else ""
        new += [line for line in lines[begin + 1 : end] if not line.strip() or line.lstrip().startswith("#")]
    return "\n".join([*lines[:start], *new, *lines[stop:]]) + "\n"
