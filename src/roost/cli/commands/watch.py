"""`roost watch`: a run on a page of its own, as it runs and afterwards."""

from __future__ import annotations

import contextlib
import webbrowser
from typing import Annotated

import typer

from roost.cli.completion import Run
from roost.cli.out import tell, write_text
from roost.runtime.runs.index import find_run
from roost.watch.live import LiveRun, PlayedRun


def watch(
    run: Run = "latest",
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="0 takes a free one.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    demo: Annotated[bool, typer.Option("--demo", help="Play a recorded run that comes with Roost.")] = False,
    otlp: Annotated[
        str | None,
        typer.Option("--otlp", metavar="URL", help="Also send the figures there: http://localhost:4318."),
    ] = None,
) -> None:
    shown = PlayedRun.shipped() if demo else LiveRun(find_run(run))
    # Only here: the packages of the extras `watch` and `otel`.
    from roost.watch.page import PageServer

    with contextlib.ExitStack() as stack:
        if otlp is not None:
            from roost.watch.otel import OtelExport, otlp_reader

            # A reader of its own: it reads in another thread than the page.
            other = PlayedRun.shipped() if demo else LiveRun(find_run(run))
            stack.enter_context(OtelExport(other, otlp_reader(otlp)))
        server = PageServer(shown, port)
        write_text(f"{server.url}\n")
        tell("the page changes nothing in the run; end it with Ctrl-C")
        if open_browser:
            webbrowser.open(server.url)
        server.serve()
