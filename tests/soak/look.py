"""Looks at a Ray cluster from outside until nothing of any job is left, or the time is over; prints what is left."""

from __future__ import annotations

import json
import sys
import time

import ray
from ray.util import list_named_actors, placement_group_table


def look() -> dict[str, list[str]]:
    """What is left: placement groups, named actors, and accelerators that are not free."""
    groups = [f"{item['name']} ({item['state']})" for item in placement_group_table().values()]
    total, free = ray.cluster_resources(), ray.available_resources()
    taken = total.get("GPU", 0) - free.get("GPU", 0)
    return {
        "placement group": [item for item in groups if not item.endswith("(REMOVED)")],
        "named actor": [f"{item['namespace']}/{item['name']}" for item in list_named_actors(all_namespaces=True)],
        "accelerator": [f"{taken:g} of {total.get('GPU', 0):g} are not free"] if taken else [],
    }


def main() -> None:
    """Look for as many seconds as the first argument says."""
    deadline = time.monotonic() + float(sys.argv[1])
    ray.init(namespace="soak-look", logging_level="error", log_to_driver=False)
    found = look()
    while any(found.values()) and time.monotonic() < deadline:
        time.sleep(0.3)
        found = look()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
