"""Walks through the calls that users make most, and counts through how many modules of Roost each one goes.

python bench/walk.py            # the table
python bench/walk.py put        # every function that a put enters, in order, with its depth

A hop is where the walk goes on in another module than before; a return is a hop into a module that it had left. What
other threads and processes do is not part of it. Each call is warm: it was made before in the same process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import roost
from roost import Channel, Cluster, NodePlacementStrategy, Worker
from roost.testing import local_cluster
from roost.weights.layout import Held, TensorSpec
from roost.weights.link import WeightLink
from roost.weights.worker import WeightWorker

HOME = str(Path(roost.__file__).parent)
SECONDS = 60.0
Walk = list[tuple[int, str, str]]
"""Depth, module and function of each call."""

LIMITS = {"put": (8, 26), "get": (8, 26)}
"""The most modules and hops."""
MOST_MODULES_OF_A_FIRST_PUT = 40


@contextlib.contextmanager
def walking() -> Iterator[Walk]:
    """Note each function of Roost that this thread enters inside."""
    found: Walk = []
    depth = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal depth
        path = frame.f_code.co_filename
        if not path.startswith(HOME):
            return
        if event == "call":
            module = path[len(HOME) + 1 :].removesuffix(".py").replace("/", ".")
            found.append((depth, module, frame.f_code.co_qualname))
            depth += 1
        elif event == "return":
            depth -= 1

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def count(walk: Walk) -> dict[str, int]:
    """Count the calls, the modules, the hops and the returns of a walk."""
    modules = [module for _, module, _ in walk]
    hops = sum(1 for before, after in zip([None, *modules], modules, strict=False) if before != after)
    return {"calls": len(walk), "modules": len({*modules}), "hops": hops, "returns": hops - len({*modules})}


class Walker(Worker):
    """Makes the calls of a worker."""

    def nothing(self) -> None: ...

    def fail(self) -> None:
        raise KeyError("on purpose")

    def first_put(self, channel: Channel) -> int:
        """How many modules of Roost run any code in the first put of a worker."""
        with walking() as walk:
            channel.put(1, timeout=SECONDS)
        return len({module for _, module, _ in walk})

    def put(self, channel: Channel, rounds: int) -> list[Walk]:
        return [self._walk(lambda: channel.put(b"x" * 100, timeout=SECONDS)) for _ in range(rounds)]

    def get(self, channel: Channel, rounds: int) -> list[Walk]:
        for _ in range(rounds):
            channel.put(b"x" * 100)
        return [self._walk(lambda: channel.get(timeout=SECONDS)) for _ in range(rounds)]

    def give_tensors(self, to: str, rounds: int) -> list[Walk]:
        array = np.zeros(1000)
        return [self._walk(lambda: self.send_tensor(array, to, 0, timeout=SECONDS)) for _ in range(rounds)]

    def take_tensors(self, source: str, rounds: int) -> None:
        target = np.zeros(1000)
        for _ in range(rounds):
            self.recv_tensor(target, source, 0, timeout=SECONDS)

    def _walk(self, do: Any) -> Walk:
        with walking() as found:
            do()
        return found


class Part(WeightWorker):
    """Holds one small tensor."""

    def __init__(self) -> None:
        self.parts = {"t": np.zeros((8, 8), np.float32)}

    def offer(self) -> Part:
        return self

    def accept(self) -> Part:
        return self

    def tensors(self) -> dict[str, Any]:
        return self.parts

    def held(self) -> list[Held]:
        return [Held(name="t", spec=TensorSpec((8, 8), "float32"), box=((0, 8), (0, 8)))]


def shortest(walks: list[Walk]) -> Walk:
    """Return the walk that nothing interrupted: the last few, of which threads that read meanwhile make some longer."""
    return min(walks[len(walks) // 2 :], key=len)


def walks() -> tuple[dict[str, Walk], int]:
    """Make all the calls on a local cluster."""
    found: dict[str, Walk] = {}
    with local_cluster("2x0", cpus=4), Cluster(num_nodes=2, quiet=True, record=False) as cluster:

        def launch(kind: type[Worker], name: str, node: int) -> Any:
            return kind.create_group().launch(cluster, NodePlacementStrategy([node]), name)

        launch(Walker, "warm", 0).close()
        with walking() as found["launch"]:
            one = launch(Walker, "one", 0)
        two = launch(Walker, "two", 1)
        channel = Channel.create("items", node_rank=1)
        first = two.first_put(channel).wait(SECONDS)[0]
        one.nothing().wait(SECONDS)
        with walking() as found["call"]:
            one.nothing().wait(SECONDS)
        for _ in range(2):
            with walking() as found["exception"], contextlib.suppress(KeyError):
                one.fail().wait(SECONDS)
        found["put"] = shortest(one.put(channel, 20).wait(SECONDS)[0])
        found["get"] = shortest(one.get(channel, 20).wait(SECONDS)[0])
        taken = two.take_tensors("one", 20)
        found["send_tensor"] = shortest(one.give_tensors("two", 20).wait(SECONDS)[0])
        taken.wait(SECONDS)
        source, target = launch(Part, "source", 0), launch(Part, "target", 1)
        link = WeightLink.between(source, target)
        for version in range(3):
            with walking() as found["link.update"]:
                link.update(version, timeout=SECONDS)
    return found, first


def main() -> None:
    found, first = walks()
    if len(sys.argv) > 1:
        for depth, module, function in found[sys.argv[1]]:
            print(f"{'  ' * depth}{module}: {function}")
        return
    over = []
    print("\n| call | calls | modules | hops | returns | limit |\n|---|---:|---:|---:|---:|---|")
    for name, walk in found.items():
        counted = count(walk)
        limit = ""
        if name in LIMITS:
            modules, hops = LIMITS[name]
            limit = f"{modules} modules, {hops} hops"
            if counted["modules"] > modules or counted["hops"] > hops:
                over.append(name)
        print(f"| `{name}` | {' | '.join(str(value) for value in counted.values())} | {limit} |")
    print(f"\nThe first put of a worker runs code of {first} modules (at most {MOST_MODULES_OF_A_FIRST_PUT}).")
    if first > MOST_MODULES_OF_A_FIRST_PUT:
        over.append("the first put")
    if over:
        sys.exit(f"over the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
