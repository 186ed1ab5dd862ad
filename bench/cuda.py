"""Times tensors between two workers on one device, against a copy on the device; needs a GPU and torch.

python bench/cuda.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from roost import Cluster, FlexiblePlacementStrategy
from roost.testing import local_cluster

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from cuda_workers import Holder

ROUNDS = 5
COUNT = 20
SIZES = {"1 MB": 1 << 20, "64 MB": 1 << 26, "1 GB": 1 << 30, "4 GB": 1 << 32}
LIMIT = 0.8
"""How fast 1 GB goes at least, of a copy on the device."""


def main() -> None:
    """Measure, and say whether the limit holds."""
    place = FlexiblePlacementStrategy([[0]])
    with local_cluster("1x1"), Cluster(num_nodes=1, quiet=True) as cluster:
        left = Holder.create_group().launch(cluster, place, name="left", share=0.5)
        right = Holder.create_group().launch(cluster, place, name="right", share=0.5)
        print(
            "tensor   copy on the device   one at a time: of the copy's speed   two on their way: of the copy's speed"
        )
        for name, nbytes in SIZES.items():
            rounds = []
            for _ in range(ROUNDS):
                times = [left.copy_often(nbytes, COUNT).wait(120)[0]]
                for ahead in (1, 2):
                    heard = right.hear_often(nbytes, COUNT, "left", 0)
                    times.append(left.send_often(nbytes, COUNT, ahead, "right", 0).wait(120)[0])
                    heard.wait(60)
                rounds.append(times)
            copied, one, two = (min(times) for times in zip(*rounds, strict=True))
            print(
                f"{name:>6}   {1e3 * copied:15.3f} ms   {1e3 * one:14.3f} ms {copied / one:17.2f}"
                f"   {1e3 * two:15.3f} ms {copied / two:17.2f}"
            )
            if name == "1 GB" and copied / two < LIMIT:
                sys.exit(f"too slow: the limit for {name} is {LIMIT}")


if __name__ == "__main__":
    main()
