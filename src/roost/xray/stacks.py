"""Where processes stand, from the text that py-spy writes about their threads. Pure."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from roost.xray.facts import Stack

_THREAD = re.compile(r'Thread (?P<id>\S+)(?: \([^)]*\))?(?:: "(?P<name>.*)")?')
_FRAME = re.compile(r"\s+(?P<function>\S.*?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)")
_LIBRARIES = sys.stdlib_module_names | {
    "accelerate", "aiohttp", "datasets", "deepspeed", "fastapi", "grpc", "httpx", "numpy", "pandas", "pyarrow", "ray",
    "requests", "torch", "tqdm", "transformers", "urllib3", "uvicorn", "uvloop", "zmq",
}  # fmt: skip
_WITH_COLLECTIVES = {"accelerate", "deepspeed", "ray", "torch"}
_WRAPPERS = {
    "wrapper", "wrapped", "inner", "decorate_context", "auto_init_wrapper", "_fn", "_call_impl", "_wrapped_call_impl",
}  # fmt: skip
"""Functions that only call what is of interest."""
NO_CALL = "no call"
_EVENT_LOOP = "its event loop"
_COLLECTIVE = re.compile(
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|scatter|gather|reduce|(batch_)?i?send|i?recv"
    r"|(monitored_)?barrier|rendezvous|init_process_group|synchronize)(_\w+)?"
)
Frame = tuple[str, str, str]
"""Function, file and line."""


def read_threads(text: str) -> dict[str, list[Frame]]:
    """Return the frames of each thread by its name, the innermost first."""
    threads: dict[str, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            frames = threads.setdefault(found["name"] or found["id"], [])
        # Frames of native code have no file of Python.
        elif (found := _FRAME.fullmatch(line)) and found["file"].endswith((".py", ">")):
            frames.append((found["function"], found["file"], found["line"] or ""))
    return threads


def place_of(text: str) -> str:
    """Return where a process of Ray stands: what its own code calls, or the line that it is at.

    >>> place_of('''Thread 7 (idle): "MainThread"
    ...     all_reduce (torch/distributed/distributed_c10d.py:2806)
    ...     wrapper (torch/distributed/c10d_logger.py:81)
    ...     step (train.py:12)
    ...     main_loop (ray/_private/worker.py:953)''')
    'all_reduce'
    """
    threads = read_threads(text)
    # Methods run in the main thread, in the event loop, or in threads of Ray; other threads are helpers.
    runs = [frames for name, frames in threads.items() if name == "MainThread"]
    runs += [frames for name, frames in threads.items() if name.startswith("AsyncIO Thread")]
    runs += [frames for frames in threads.values() if any(file.startswith("ray/_private/") for _, file, _ in frames)]
    for frames in runs:
        own = next((index for index, (_, file, _) in enumerate(frames) if not _is_library(file)), None)
        if own is not None:
            return _place(frames, own)
    has_loop = any(name.startswith("AsyncIO Thread") for name in threads)
    return _EVENT_LOOP if has_loop else NO_CALL if threads else "unknown"


def _place(frames: list[Frame], own: int) -> str:
    for function, file, _ in reversed(frames[:own]):
        # With its class, where Python tells py-spy.
        *_, name = function.split(".")
        if name not in _WRAPPERS:
            if _COLLECTIVE.fullmatch(name) and _library(file) not in _WITH_COLLECTIVES:
                # As `recv` of a pipe: no other process of the group need be there.
                return f"{function} ({PurePosixPath(file).name})"
            module = "ray" if file.startswith("ray/") else PurePosixPath(file).stem
            return f"{module}.{function}" if module == "ray" or function.startswith("__") else function
    function, file, line = frames[own]
    return f"{function} ({PurePosixPath(file).name}{line and f':{line}'})"


def _library(file: str) -> str:
    return file.rpartition("site-packages/")[2].lstrip("<").partition("/")[0].partition(".")[0]


def _is_library(file: str) -> bool:
    return _library(file) in _LIBRARIES or file.startswith("<frozen")


def is_collective(place: str) -> bool:
    """Return whether a place waits for the other processes of a group, in `torch.distributed` and the like.

    >>> is_collective("all_reduce"), is_collective("Work.wait"), is_collective("send_mail (train.py:3)")
    (True, False, False)
    """
    return _COLLECTIVE.fullmatch(place.rpartition(".")[2]) is not None


def group_places(stacks: Iterable[Stack], kinds: Mapping[str, str]) -> dict[str, dict[str, list[str]]]:
    """Return by kind, such as the class, and by place which processes stand there; the place of most comes first."""
    found: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for stack in stacks:
        if stack.id in kinds:
            found[kinds[stack.id]][stack.place].append(stack.id)
    return {kind: dict(sorted(places.items(), key=lambda item: -len(item[1]))) for kind, places in found.items()}
