"""The process that looks at the cluster for `roost doctor`.

A process of its own: where a cluster dies while it is looked at, Ray ends whoever is connected. It reads what to do as
JSON, and answers with one JSON object a line, so that what it found out before it died is not lost.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from roost.doctor.facts import Finding, Level, note, problem
from roost.errors import ClusterError, ConfigError

_NO_CLUSTER = "there is no Ray cluster"
_SAME = "Ray and Python must be the same there and here, and the token too (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH)"

Say = Callable[[dict[str, Any]], None]


def examine(address: str | None, run_dir: str | None, seconds: float, say: Say) -> None:
    """Look at the cluster and say each finding."""
    try:
        from roost.doctor.cluster_look import look_at_cluster
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "ray":
            # The check of this machine's packages says what to do.
            _say(say, note("cluster", "could not be looked at without Ray"))
            return
        why = f"it cannot be loaded: {type(error).__name__}: {error}"
        _say(say, problem("ray", why, "install Ray anew in this environment: pip install --force-reinstall ray"))
        return
    from roost.doctor.cluster_rules import judge_cluster

    def lost(head: str) -> None:
        seen = f"Ray's head at {head} went away while it was looked at"
        _say(
            say, problem("cluster", seen, "look at its machine, and at gcs_server.out of its session; then look again")
        )
        say({"done": True})
        # Whatever the other threads wait for in Ray, it does not come.
        os._exit(0)

    say({"loaded": True})
    try:
        facts = look_at_cluster(address, run_dir, seconds, lambda text: say({"waiting": text}), lost)
    except ConfigError as error:
        say({"mistake": [error.problems[0].message, error.problems[0].hint]})
        return
    except ClusterError as error:
        _say(say, cannot_join(error.problems[0].message, error.problems[0].hint, bool(address)))
        return
    except Exception as error:
        _say(say, cannot_join(f"{type(error).__name__}: {error}", "", bool(address)))
        return
    say({"address": facts.address, "hosts": [node.address for node in facts.nodes]})
    for item in judge_cluster(facts):
        _say(say, item)


def cannot_join(message: str, hint: str, is_named: bool) -> Finding:
    """What to say where no cluster was joined: if nobody named one and there is none, that is no problem."""
    message = " ".join(message.split())
    if message.startswith(_NO_CLUSTER) and not is_named:
        return note(
            "cluster",
            "no Ray cluster was found",
            "`ray start --head` starts one, `roost up 2x4` one for practice; RAY_ADDRESS or --address leads to one",
        )
    return problem("cluster", message, hint or _SAME)


def finding_of(data: dict[str, Any]) -> Finding:
    """A finding as it was said."""
    return Finding(
        check=str(data["check"]),
        level=Level(data["level"]),
        seen=str(data["seen"]),
        do=str(data["do"]),
        nodes=tuple(map(str, data["nodes"])),
    )


def _say(say: Say, item: Finding) -> None:
    say({"finding": asdict(item)})


def main() -> None:
    """Read, look, answer."""
    # Ray prints to standard output what its nodes remark: the answers have a way of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    wanted = json.loads(sys.stdin.read())
    examine(wanted["address"], wanted["run_dir"], wanted["seconds"], say)
    say({"done": True})


if __name__ == "__main__":
    main()
