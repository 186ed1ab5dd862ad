"""`roost down`: stop the local cluster of `roost up`, and wait until it is gone."""

from __future__ import annotations

from roost.cli.limits import DOWN_SECONDS
from roost.cli.out import write_text
from roost.runtime.connect.local_cluster import end_local_cluster, one_at_a_time


def down() -> None:
    with one_at_a_time():
        ended = end_local_cluster(timeout=DOWN_SECONDS)
    write_text("no local cluster is up\n" if ended is None else f"the local cluster {ended.spec} is down\n")
