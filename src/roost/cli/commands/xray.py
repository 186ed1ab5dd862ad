"""`roost xray`: who is where on any Ray cluster, what its jobs wait for, and where their processes stand."""

from __future__ import annotations

import sys
import time
import zipfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from roost.cli.live_cluster import ask
from roost.cli.options import TextForm, Timeout
from roost.cli.out import tell
from roost.cli.terminal import print_answer
from roost.errors import ConfigError
from roost.render.terminal import to_printable
from roost.xray.facts import Facts
from roost.xray.judge import judge
from roost.xray.limits import TIMEOUT_SECONDS, WATCH_SECONDS
from roost.xray.show import as_data, draw_xray, report_files


def xray(
    address: Annotated[
        str | None,
        typer.Argument(metavar="[ADDRESS]", help="Where Ray is; default: RAY_ADDRESS, or this machine's Ray."),
    ] = None,
    stacks: Annotated[
        bool, typer.Option("--stacks", "-s", help="Show where every worker stands, with py-spy: roost[xray].")
    ] = False,
    native: Annotated[
        bool, typer.Option("--native", help="The same, with native frames: stops each process for a moment.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every 5 seconds, until Ctrl-C.")] = False,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", "-b", metavar="FILE.zip", help="Write all of it for an issue, without secrets."),
    ] = None,
    form: TextForm = "text",
    timeout: Timeout = TIMEOUT_SECONDS,
) -> None:
    if watch and (bundle is not None or form == "json"):
        raise ConfigError("--watch shows on the terminal only", hint="leave out --bundle and --format json")

    def look() -> Facts:
        wants_stacks = stacks or native or bundle is not None
        found: Facts = ask(
            "roost.xray.gather.gather", timeout, "roost.xray.facts", address=address, stacks=wants_stacks, native=native
        )
        return found

    if watch and sys.stdout.isatty():
        try:
            with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as display:
                while True:
                    facts = look()
                    display.update(to_printable(draw_xray(facts, judge(facts))), refresh=True)
                    time.sleep(WATCH_SECONDS)
        except KeyboardInterrupt:
            # The usual way to leave it.
            return
    facts = look()
    findings = judge(facts)
    if bundle is not None:
        _write(bundle, report_files(facts, findings))
    print_answer(form, as_data(facts, findings), lambda: draw_xray(facts, findings))


def _write(path: Path, files: dict[str, str]) -> None:
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    tell(f"wrote {path}: look at it before you send it")
