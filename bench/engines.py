"""What an update of the weights of two vLLM engines costs, next to vLLM's own calls alone.

    .venv-llm/bin/python bench/engines.py

Needs vLLM: `make demo-llm` or `make test-engines` installs it. The model is the demo's: 1.6 M parameters in float32.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from roost import Cluster, NodePlacementStrategy
from roost.demo.llm.model import write_model
from roost.rl import RolloutManager, create_placement_groups
from roost.rl.engines import Prompt, VllmEngine
from roost.rl.json_request import ask
from roost.testing import local_cluster
from roost.weights import WeightLink, WeightWorker

ROUNDS = 21
OPTIONS = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": "64M", "max_model_len": 256}


class Holder(WeightWorker):
    """Has the weights of a model."""

    def __init__(self, model: str) -> None:
        super().__init__()
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def offer(self) -> Any:
        return self.model


def update_directly(url: str, secret: str, path: str, version: int) -> float:
    """Make the calls that change an engine's weights; returns the seconds of the one that loads them."""

    def post(path: str, body: Any) -> None:
        ask(url, path, body, secret=secret, timeout=60, who=url)

    post("/pause?mode=keep", {})
    post("/start_weight_update", {})
    began = time.perf_counter()
    post("/update_weights", {"update_info": {"path": path}})
    loaded = time.perf_counter() - began
    post("/finish_weight_update", {"weight_version": str(version)})
    post("/reset_prefix_cache", {})
    post("/resume", {})
    return loaded


def main() -> None:
    """Print the figures of one run."""
    flags = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 1, "debug_rollout_only": True}
    with (
        tempfile.TemporaryDirectory() as model,
        local_cluster("1x2"),
        Cluster(num_nodes=1, quiet=True) as cluster,
        create_placement_groups(flags) as groups,
    ):
        write_model(Path(model), 0)
        engine = {"engine_args": (model,), "engine_kwargs": {"options": OPTIONS}}
        began = time.perf_counter()
        with RolloutManager(flags, VllmEngine, groups["rollout"], health_timeout=300, **engine) as manager:
            print(f"two engines are healthy after {time.perf_counter() - began:.1f} s")
            holder = Holder.create_group(model).launch(cluster, NodePlacementStrategy([0]), name="actor")
            link = WeightLink.between(holder, manager.engines.group)
            urls, path = manager.engines.urls, f"{model}/model.safetensors"
            own = [spec.secret for spec in manager.engines.specs]
            linked, direct, loads, answers = [], [], [], []
            for number in range(ROUNDS):
                began = time.perf_counter()
                link.update(2 * number + 1)
                linked.append(time.perf_counter() - began)
                began = time.perf_counter()
                manager.engines.generate(Prompt(tokens=(1, 2), max_tokens=1).to_json(), number % 2).wait(60)
                answers.append(time.perf_counter() - began)
                began = time.perf_counter()
                with ThreadPoolExecutor(2) as pool:
                    loads += pool.map(update_directly, urls, own, [path] * 2, [2 * number + 2] * 2)
                direct.append(time.perf_counter() - began)
            ours, theirs = statistics.median(linked[1:]), statistics.median(direct[1:])
            print(f"update through a link: {1e3 * ours:.1f} ms (first {1e3 * linked[0]:.0f} ms)")
            print(f"vLLM's calls alone, both engines at once: {1e3 * theirs:.1f} ms; ratio {ours / theirs:.2f}")
            print(f"of these, the call that loads: {1e3 * statistics.median(loads):.1f} ms")
            print(f"a request right after an update: {1e3 * statistics.median(answers):.1f} ms")


if __name__ == "__main__":
    main()
