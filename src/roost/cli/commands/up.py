"""`roost up`: start a local cluster that stays until `roost down`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from roost.cli.options import TextForm
from roost.cli.terminal import print_answer
from roost.errors import ConfigError
from roost.extras import need_ray
from roost.runtime.connect.local_cluster import (
    keep_local_cluster,
    one_at_a_time,
    read_local_cluster,
)
from roost.testing.local import LocalCluster, local_nodes


def up(
    spec: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="Nodes x accelerators [: model]: 2x4, or 2x8:H100,1x0.")
    ],
    cpus: Annotated[
        int, typer.Option("--cpus", metavar="N", help="How many CPUs each node claims to have.", min=1)
    ] = 8,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            "--preload", metavar="MODULE", help="Let all workers share one import of a module, such as torch."
        ),
    ] = None,
    form: TextForm = "text",
) -> None:
    need_ray("roost up")
    local = LocalCluster(local_nodes(spec, cpus=cpus), preload=preload or (), stays=True)
    with one_at_a_time():
        before = read_local_cluster()
        if before is not None:
            hint = "roost down ends it"
            raise ConfigError(f"a local cluster {before.spec} is up already, at {before.address}", hint=hint)
        local.start()
        try:
            kept = keep_local_cluster(spec, local.address, local.environment, local.keeper_pid)
            local.leave_running()
        except BaseException:
            local.stop()
            raise
    answer = {"cluster": kept.spec, "address": kept.address, "nodes": len(local.nodes), "environment": kept.environment}
    text = (
        f"local cluster {kept.spec} is up at {kept.address}\n"
        f"  Cluster(num_nodes={len(local.nodes)}) on this machine joins it; so do roost nodes, status and plan --live\n"
        "  other programs that use Ray join it with\n"
        + "".join(f"    export {name}={value}\n" for name, value in kept.environment.items())
        + "  roost down ends it"
    )
    print_answer(form, answer, lambda: Text(text))
