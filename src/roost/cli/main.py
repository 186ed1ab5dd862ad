"""The command line: parsing, exit codes, and the one place where a RoostError becomes text.

Exit codes: 0 all is well, 1 two plans differ or lint was told to be strict, 2 a mistake by the user, 3 a failure of
the world, such as no Ray cluster.
"""

from __future__ import annotations

import os
import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from roost import __version__
from roost.errors import ClusterError, ConfigError, RoostError, counted

if TYPE_CHECKING:
    from rich.text import Text

    from roost.cli.load import Flags
    from roost.placement.plan import Plan
    from roost.render.grid import Grid

app = typer.Typer(
    name="roost",
    help="Say which worker process sits on which hardware, and see it before you pay for it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Format(StrEnum):
    """How a plan is shown."""

    MAP = "map"
    TABLE = "table"
    JSON = "json"
    SVG = "svg"
    HTML = "html"


class NodesFormat(StrEnum):
    """How nodes are shown."""

    TABLE = "table"
    MAP = "map"
    JSON = "json"
    INVENTORY = "inventory"


class TextFormat(StrEnum):
    """How a plain answer is shown."""

    TEXT = "text"
    JSON = "json"


class Kind(StrEnum):
    """Which rules place the components."""

    AUTO = "auto"
    HYBRID = "hybrid"
    MODEL_PARALLEL = "model-parallel"


Job = Annotated[
    Path, typer.Argument(metavar="JOB.yaml", help="The job's config, or a plan saved as JSON; - is standard input.")
]
Cluster = Annotated[
    str | None,
    typer.Option("--cluster", "-c", metavar="2x8", help="Nodes x accelerators [: model], as in 4x8:H100,2x4:4090,1x0."),
]
Inventory = Annotated[
    Path | None, typer.Option("--inventory", "-i", metavar="FILE", help="A file that describes the hardware.")
]
Live = Annotated[bool, typer.Option("--live", help="Take the hardware of the Ray cluster that is running.")]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="Where Ray is; else RAY_ADDRESS, or the one of this machine."),
]
Rules = Annotated[
    Kind,
    typer.Option("--placement", help="Place any component anywhere, or by parallel sizes; auto looks at the job."),
]
Shared = Annotated[bool, typer.Option("--no-isolate", help="Let every worker see all accelerators of its node.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command("plan")
def _plan(
    job: Job,
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    form: Annotated[Format, typer.Option("--format", "-f", help="How to show it.")] = Format.MAP,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to a file instead of the terminal.")] = None,
    component: Annotated[list[str] | None, typer.Option("--component", help="Show this one only; repeatable.")] = None,
    all_nodes: Annotated[bool, typer.Option("--all-nodes", help="Do not fold nodes that are alike.")] = False,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Show which worker sits on which hardware."""
    from roost.cli.load import load_live_plan
    from roost.render.grid import make_grid

    plan, hardware = load_live_plan(job, _flags(cluster, inventory, live, placement, no_isolate))
    names = component or plan.names
    if form is Format.JSON:
        _write(plan.to_json(only=component) + "\n", out)
    elif form is Format.TABLE:
        from roost.cli import show

        _print(show.table(plan.only(names)), out)
    else:
        taken = hardware.taken if hardware else ()
        grid = make_grid(plan, title=job.name, fold=not all_nodes, only=names, taken=taken)
        if form is Format.SVG:
            from roost.render.svg import draw_svg

            _write(draw_svg(plan, grid), out)
        elif form is Format.HTML:
            from roost.render.html import draw_html

            _write(draw_html(plan, grid), out)
        else:
            _draw(grid, out)
            if hardware is not None and out is None:
                from roost.cli.live import start_check

                _print(start_check(plan, hardware))
            _print_warnings(plan)


@app.command("diff")
def _diff(
    before: Annotated[Path, typer.Argument(metavar="A.yaml", help="A job, or a plan saved as JSON.")],
    after: Annotated[Path, typer.Argument(metavar="B.yaml", help="Another.")],
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    form: Annotated[TextFormat, typer.Option("--format", "-f", help="How to show it.")] = TextFormat.TEXT,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Compare two plans: exit 0 if they are alike, 1 if they differ."""
    from roost.cli import show
    from roost.cli.load import load_plans

    one, other = load_plans(before, after, _flags(cluster, inventory, live, placement, no_isolate))
    difference = one.diff(other)
    if form is TextFormat.JSON:
        _write(show.as_json(difference.to_dict()), None)
    else:
        _print(show.diff(difference))
    raise typer.Exit(1 if difference else 0)


@app.command("where")
def _where(
    job: Job,
    worker: Annotated[str, typer.Argument(metavar="actor:3", help="A worker: component and rank.")],
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    form: Annotated[TextFormat, typer.Option("--format", "-f", help="How to show it.")] = TextFormat.TEXT,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Tell where a worker sits and which environment it gets."""
    from roost.cli import show
    from roost.cli.load import load_plan

    plan = load_plan(job, _flags(cluster, inventory, live, placement, no_isolate))
    name, colon, rank = worker.rpartition(":")
    if not colon or not (rank.isascii() and rank.isdigit() and len(rank) < 10):
        raise ConfigError(f"{worker!r} is no worker", hint="write component:rank, as in actor:3")
    answer = show.where(plan, name, int(rank))
    _write(show.as_json(answer), None) if form is TextFormat.JSON else _print(show.where_text(plan, answer))


@app.command("who")
def _who(
    job: Job,
    hardware: Annotated[
        str, typer.Argument(metavar="1:4", help="Node and accelerator; 1:Franka:0 for other hardware, 1 for a node.")
    ],
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    form: Annotated[TextFormat, typer.Option("--format", "-f", help="How to show it.")] = TextFormat.TEXT,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Tell which workers sit on a piece of hardware."""
    from roost.cli import show
    from roost.cli.load import load_plan

    plan = load_plan(job, _flags(cluster, inventory, live, placement, no_isolate))
    answer = show.who(plan, hardware)
    node_rank = int(hardware.partition(":")[0])
    if form is TextFormat.JSON:
        _write(show.as_json(show.who_json(answer, node_rank)), None)
    else:
        _print(show.who_text(answer, node_rank))


@app.command("lint")
def _lint(
    job: Job,
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    form: Annotated[TextFormat, typer.Option("--format", "-f", help="How to show it.")] = TextFormat.TEXT,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there is a warning.")] = False,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Tell what a person would want to know of a plan that is legal."""
    from roost.cli import show
    from roost.cli.load import load_plan
    from roost.placement.lint import lint

    found = lint(load_plan(job, _flags(cluster, inventory, live, placement, no_isolate)))
    if form is TextFormat.JSON:
        _write(show.as_json([{"code": i.code, "level": i.level, "message": i.message} for i in found]), None)
    else:
        _print(show.findings(found))
    if strict and any(item.level == "warning" for item in found):
        raise typer.Exit(1)


@app.command("nodes")
def _nodes(
    form: Annotated[NodesFormat, typer.Option("--format", "-f", help="How to show them.")] = NodesFormat.TABLE,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to a file instead of the terminal.")] = None,
    address: Address = None,
) -> None:
    """Show the nodes of the live cluster, with the ranks that a job would give them."""
    from roost.cli import live, show
    from roost.runtime.discover import make_topology
    from roost.runtime.look import look_at_nodes

    nodes = look_at_nodes(address)
    if form is NodesFormat.JSON:
        _write(show.as_json([node.to_dict() for node in nodes]), out)
    elif form is NodesFormat.INVENTORY:
        from roost.placement.inventory import inventory_text

        _write(inventory_text(make_topology(nodes)), out)
    elif form is NodesFormat.MAP:
        from roost.placement.plan import Plan
        from roost.render.grid import make_grid

        grid = make_grid(Plan(topology=make_topology(nodes), components=()), title="the live cluster")
        _draw(grid, out)
    else:
        _print(live.nodes_table(nodes), out)


@app.command("status")
def _status(
    form: Annotated[TextFormat, typer.Option("--format", "-f", help="How to show it.")] = TextFormat.TEXT,
    address: Address = None,
) -> None:
    """Tell which jobs are on the live cluster, and what earlier ones left behind."""
    from roost.cli import live, show
    from roost.runtime.look import look_at_jobs

    status = look_at_jobs(address)
    if form is TextFormat.JSON:
        _write(show.as_json(status.to_dict()), None)
    else:
        _print(live.status_text(status))


@app.command("up")
def _up(
    spec: Annotated[str, typer.Argument(metavar="2x4", help="Nodes x accelerators [: model], as in 2x8:H100,1x0.")],
    cpus: Annotated[int, typer.Option("--cpus", help="How many CPUs each node claims to have.", min=1)] = 8,
) -> None:
    """Start a practice cluster on this machine: real Ray nodes, fake accelerators."""
    from roost.cli import live

    _print(live.start_practice(spec, cpus))


@app.command("down")
def _down() -> None:
    """Stop the practice cluster."""
    from roost.cli import live

    _print(live.stop_practice())


@app.command("run")
def _run(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job's config, with 'workers' and 'entry'.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan instead, as `roost plan` does.")] = False,
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    address: Address = None,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", metavar="DIR", help="The run's folder, for the workers' logs.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show what workers print.")] = False,
    no_reserve: Annotated[
        bool, typer.Option("--no-reserve", help="Do not tell Ray that the accelerators are taken.")
    ] = False,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Place a job, launch its workers and call its entry point."""
    if dry_run:
        _plan(job, cluster, inventory, live, placement=placement, no_isolate=no_isolate)
        return
    if cluster or inventory or live:
        raise ConfigError("a job runs on the Ray cluster that is there", hint="--cluster and the like plan a --dry-run")
    from roost.placement.config import read_job_draft
    from roost.runtime.job_run import run_job

    # As with `python -m`: what is in this folder can be imported, here and in the workers.
    sys.path.insert(0, str(Path.cwd()))
    run_job(
        read_job_draft(job),
        placement=placement.value,
        isolate_accelerator=not no_isolate,
        address=address,
        run_dir=run_dir,
        quiet=quiet or None,
        reserve=not no_reserve,
    )


@app.command("logs")
def _logs(
    worker: Annotated[
        str | None, typer.Argument(metavar="WORKER", help="actor:3, or actor for the whole group.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last lines.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="The folder of a run; else your newest one.")
    ] = None,
) -> None:
    """Show what the workers of a run printed; without WORKER, which logs there are."""
    from roost.cli import logs

    if worker is None:
        _write(logs.list_logs(run) + "\n", None)
        return
    logs.show_logs(worker, run, lines, follow, lambda line: _write(line + "\n", None))


def main() -> NoReturn:
    """Run the command line."""
    try:
        app()
    except ClusterError as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    except RoostError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        # A full disk behind `> FILE`.
        print(f"the answer could not be written: {error.strerror or error}", file=sys.stderr)
        _drop_output()
        sys.exit(2)
    sys.exit(0)


def _drop_output() -> None:
    """Let the interpreter flush what is left into nothing when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flags(cluster: str | None, inventory: Path | None, live: bool, placement: Kind, no_isolate: bool) -> Flags:
    from roost.cli.load import Flags

    return Flags(cluster=cluster, inventory=inventory, live=live, placement=placement.value, no_isolate=no_isolate)


def _draw(grid: Grid, out: Path | None) -> None:
    """Draw a map on the terminal, or for one into a file."""
    from roost.render.terminal import draw_terminal

    width = 120 if out is not None else shutil.get_terminal_size().columns
    _print(draw_terminal(grid, width=width, basic_colours=_has_basic_colours()), out)


def _print_warnings(plan: Plan) -> None:
    from roost.cli.load import tell
    from roost.placement.lint import lint

    found = [item for item in lint(plan) if item.level == "warning"]
    for item in found[:3]:
        tell(f"{item}")
    if len(found) > 3:
        tell(f"and {counted(len(found) - 3, 'more warning')}: see roost lint")


def _print(text: Text, out: Path | None = None) -> None:
    """Print styled text: colours on a terminal unless NO_COLOR is set, none into a pipe or a file."""
    from roost.render.terminal import to_ascii

    if out is not None:
        _write(text.plain + "\n", out)
        return
    shown = to_ascii(text) if _ascii() else text
    if not _is_coloured():
        # A pipe gets plain text, and the half of rich that knows terminals is not loaded for it.
        _write(shown.plain + "\n", None)
        return
    from rich.console import Console

    Console(highlight=False).print(shown, soft_wrap=True)


def _is_coloured() -> bool:
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def _has_basic_colours() -> bool:
    """Whether the terminal has only 16 colours."""
    if not _is_coloured():
        return False
    from rich.console import Console

    return Console().color_system == "standard"


def _ascii() -> bool:
    return "utf" not in (getattr(sys.stdout, "encoding", "") or "").lower()


def _write(text: str, out: Path | None) -> None:
    if out is None:
        try:
            # JSON, SVG and HTML are UTF-8 whatever the terminal speaks.
            sys.stdout.buffer.write(text.encode())
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader went away, as in `roost plan … | head`: nothing to say, and nobody to say it to.
            _drop_output()
            raise typer.Exit(141) from None
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror or error}") from None
    print(f"wrote {out}", file=sys.stderr)
