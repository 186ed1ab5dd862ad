"""`roost top`: a run on the terminal, as it runs."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from roost.cli.completion import Run
from roost.cli.limits import LOOK_SECONDS
from roost.cli.out import as_json, write_text
from roost.cli.terminal import print_text
from roost.render.terminal import to_printable
from roost.runtime.runs.index import find_run
from roost.watch.facts import run_facts
from roost.watch.live import LiveRun
from roost.watch.screen import draw_screen


def top(
    run: Run = "latest",
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end, as in a pipe.")] = False,
    as_data: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, once.")] = False,
) -> None:
    live = LiveRun(find_run(run))
    if as_data:
        view = live.refresh()
        name, what = (live.record.id, live.record.what) if live.record else (live.folder.name, None)
        about = {"version": 1, "run": name, "what": what, "folder": str(live.folder), "status": live.status}
        write_text(as_json({**about, **run_facts(view)}))
        return
    if once or not sys.stdout.isatty():
        print_text(_picture(live, 120 if not sys.stdout.isatty() else None))
        return
    try:
        with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as display:
            while True:
                display.update(to_printable(_picture(live)), refresh=True)
                time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        # The usual way to leave it.
        return


def _picture(live: LiveRun, width: int | None = None) -> Text:
    size = shutil.get_terminal_size()
    view = live.refresh()
    return draw_screen(
        view, title=live.title, status=live.status, width=min(width or size.columns, size.columns), height=size.lines
    )
