"""Files of events, written as the processes of a run would."""

from __future__ import annotations

from pathlib import Path

from roost.runtime.events.format import header, line_of
from roost.watch.model import RunModel
from roost.watch.reading import EventReader
from roost.watch.views import RunView

BEGAN = 1_800_000_000.0


class Recording:
    """The events of a run in a folder, which a test adds to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("driver.jsonl", header("driver", run="abc", pid=1, host="head", wall=BEGAN))

    def write(self, name: str, *lines: str, end: str = "\n") -> None:
        path = self.folder / "events" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("\n".join(lines) + end)

    def worker(
        self, rank: int, *lines: str, wall: float = BEGAN + 1, host: str = "head", group: str = "actor", pid: int = 100
    ) -> None:
        first = header(
            f"{group}:{rank}", run="abc", pid=pid + rank, host=host, wall=wall, node=rank // 2, devices=(rank % 2,)
        )
        self.write(f"{group}/{rank}.jsonl", first, *lines)

    def metrics(self, rank: int, *lines: str, group: str = "actor") -> None:
        first = header(
            f"{group}:{rank}", run="abc", pid=100 + rank, host="head", wall=BEGAN + 1, node=0, devices=(rank % 2,)
        )
        self.write(f"{group}/{rank}.metrics.jsonl", first, *lines)

    def busy(self, workers: int = 8) -> None:
        """Record workers that do different things, for a minute."""
        self.write("driver.jsonl", line_of("launched", "actor", t=2.0, text=f"{workers} workers"))
        for rank in range(workers):
            calls = [line_of("call", "train", t=float(second), d=0.1 * (rank + 1)) for second in range(3, 60)]
            values = [(step, step * (8 - rank) / 100) for step in range(9)]
            metrics = [line_of("metric", "reward", t=float(step), value=value, step=step) for step, value in values]
            self.worker(rank, *calls, *metrics, line_of("usage", 0.5, t=59.9, memory=900))
        self.worker(0, line_of("began", "score", t=20.0), line_of("usage", 0.5, t=59.9, memory=900), group="judge")
        restarted = line_of("restarted", "actor:2", t=50.0, text="ok")
        self.write("driver.jsonl", line_of("died", "actor:3", t=40.0), restarted)
        self.write(
            "node-0.jsonl",
            header("node 0", run="abc", pid=9, host="head", wall=BEGAN, node=0),
            line_of("node", 0.5, t=60.0, memory=20000, of=64000, devices=[[0.9, 10, 20], [0.1, 10, 20]]),
        )

    def traffic(self) -> None:
        """Record what goes between the workers of a job: waits, a channel, a link of weights, engines."""
        waits = [line_of("wait", "channel 'samples'", t=second + 0.05, d=0.3) for second in range(3, 60)]
        self.worker(1, *waits, line_of("waiting", "channel 'samples'", t=59.5), group="reward")
        channel = [
            line_of("channel", "samples", t=float(t), depth=(7 * t) % 23, puts=40 * t, gets=39 * t, most=64)
            for t in range(60)
        ]
        self.worker(0, *channel, group="samples")
        updates = [
            line_of("weights", "actor -> rollout", t=10.0 * i, version=i, d=0.4 + 0.1 * (i % 3), pause=0.02, size=512)
            for i in range(1, 6)
        ]
        self.write("driver.jsonl", *updates, line_of("wait", "actor, train", t=1.0, d=50.0))
        requests = []
        for rank in range(2):
            url = f"http://head:{9000 + rank}"
            state = line_of(
                "engine", f"rollout:{rank}", t=50.5, url=url, version=5 - rank, asleep=True if rank else None
            )
            self.worker(rank, state, line_of("usage", 0.1, t=59.9), group="rollout")
            requests += [
                line_of("requests", url, t=float(t), served=(9 + rank) * t, failed=rank, busy=3, seconds=0.7 * t)
                for t in range(60)
            ]
        self.worker(0, *requests, group="manager")

    def view(self, now: float | None = None) -> RunView:
        """Read it all, as a watcher would."""
        reader, model = EventReader(self.folder), RunModel()
        model.take(reader.read())
        return model.view(now, reader.trouble.words())
