"""Which room of `src/roost` each test is about, so that `make test ROOM=comm` runs a room and what stands on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ON_RAY = {
    "comm": ("channels", "cuda", "messages", "wire"),
    "weights": ("weights",),
    "rl": ("engines", "rollout_manager", "train_rollout"),
    "testing": ("local_cluster", "soak"),
    "doctor": ("doctor",),
    "watch": ("page_live", "watch"),
    "xray": ("xray",),
    "demo": ("demo",),
    "compat": ("compat", "compat_rlinf"),
    "cli": ("clean", "commands", "docs_live", "examples", "logs", "new", "run", "runs", "search", "seeds"),
}
"""The files of `tests/ray` by room; the others are about `runtime`."""
ELSEWHERE = {
    "tests/alone": "runtime",
    "tests/conformance": "placement",
    "tests/docs": "cli",
    "tests/engines": "rl",
    "tests/programs": "compat",
    "tests/errors": "placement",
    "tests/golden": "render",
    "tests/property/test_properties.py": "placement",
    "tests/property/test_schema.py": "placement",
    "tests/property/test_search.py": "search",
    "tests/property/test_fit.py": "placement",
    "tests/property/test_near.py": "placement",
    "tests/property/test_weights.py": "weights",
    "tests/ray": "runtime",
    **{f"tests/ray/test_{name}.py": room for room, names in ON_RAY.items() for name in names},
}
"""By folder or file; `tests/unit` has a folder for each room."""


def room_of(nodeid: str) -> str:
    """Return the room of a test, or nothing for one that is about the whole house.

    >>> room_of("tests/unit/comm/test_queues.py::test_it"), room_of("tests/ray/test_cluster.py::test_it")
    ('comm', 'runtime')
    """
    file = nodeid.partition("::")[0]
    folder, _, rest = file.removeprefix("tests/unit/").partition("/")
    if file.startswith("tests/unit/"):
        return folder if rest else ""
    return ELSEWHERE.get(file) or ELSEWHERE["/".join(file.split("/")[:2])]


def stands_on(room: str, other: str, layers: Mapping[str, Sequence[str] | set[str]]) -> bool:
    """Return whether a room is another one, or imports it, directly or through others."""
    return room == other or any(stands_on(below, other, layers) for below in layers[room] if below)
