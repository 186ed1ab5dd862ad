"""The process that checks the cluster for `roost doctor`.

It is a separate process, since Ray ends every process that is connected to a cluster that dies. It sends each finding
as soon as it has it.
"""

from __future__ import annotations

import os
from typing import Any

from roost.doctor.findings import Finding, note, problem
from roost.errors import ClusterError, ConfigError, Problem
from roost.machine.child import Say, answer
from roost.text import error_text

_SAME = "Ray and Python must be the same there and here, and the token too (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH)"


def examine(address: str | None, run_dir: str | None, seconds: float, say: Say) -> None:
    """Check the cluster, and pass each finding to `say`."""

    def found(item: Finding) -> None:
        say({"finding": item})

    try:
        from roost.doctor.cluster_facts import collect_cluster
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "ray":
            # The check of this machine's packages says what to do.
            found(note("cluster", "could not be checked without Ray"))
        else:
            do = "reinstall Ray in this environment: pip install --force-reinstall ray"
            found(problem("ray", f"cannot be imported: {error_text(error)}", do))
        return
    from roost.doctor.cluster_rules import judge_cluster

    def lost(head: str) -> None:
        do = "check its machine, and gcs_server.out of its session; then run roost doctor again"
        found(problem("cluster", f"Ray's head at {head} went away during the check", do))
        say({"done": True})
        # The other threads wait for answers of Ray that never come.
        os._exit(0)

    say({"loaded": True})
    try:
        facts = collect_cluster(address, run_dir, seconds, lambda text: say({"waiting": text}), lost)
    except ConfigError as error:
        say({"mistake": [error.problems[0].message, error.problems[0].hint]})
        return
    except Exception as error:
        known = error.problems[0] if isinstance(error, ClusterError) else Problem(message=error_text(error))
        found(cannot_join(known.message, known.hint, bool(address)))
        return
    say({"address": facts.address, "hosts": [node.address for node in facts.nodes]})
    for item in judge_cluster(facts):
        found(item)


def cannot_join(message: str, hint: str, is_named: bool) -> Finding:
    """Return the finding where no cluster was joined; a missing one is a problem only if the user named it."""
    message = " ".join(message.split())
    if message.startswith("there is no Ray cluster") and not is_named:
        do = "`ray start --head` starts one, `roost up 2x4` a local one; RAY_ADDRESS or --address leads to another"
        return note("cluster", "no Ray cluster was found", do)
    return problem("cluster", message, hint or _SAME)


def work(say: Say, **task: Any) -> None:
    """Check the cluster, and say when that is done."""
    examine(**task, say=say)
    say({"done": True})


if __name__ == "__main__":
    answer(work)
