"""A small server with the routes of vLLM that an engine uses, in place of vLLM: its tokens are the mean of its weights.

STAND_IN in its environment says how it misbehaves; STAND_IN_SECONDS is how long a token takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from roost.rl.engines.inside import roost_proof

MODE = os.environ.get("STAND_IN", "")
SECONDS = float(os.environ.get("STAND_IN_SECONDS", "0"))


def read(path: Path) -> dict[str, np.ndarray]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8:start]).items():
        first, last = (start + place for place in entry["data_offsets"])
        found[name] = np.frombuffer(content[first:last], np.float32).reshape(entry["shape"])
    return found


def load(place: dict[str, Any]) -> dict[str, np.ndarray]:
    """Load weights as Roost's part inside vLLM does, into tensors on the device."""
    import roost_vllm
    import torch

    class Model:
        def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.own = {name: torch.empty_like(one).copy_(one, non_blocking=True) for name, one in tensors}

    model = Model()
    roost_vllm.SharedTransfer(model).update_weights(place)
    assert all(one.is_cuda for one in model.own.values())
    return {name: one.float().cpu().numpy() for name, one in model.own.items()}


class Server:
    def __init__(self, model: Path) -> None:
        self.weights = read(model / "model.safetensors")
        self.version = "none"
        self.running = asyncio.Event()
        self.running.set()
        self.aborts = 0
        self.active = 0
        self.is_updating = False
        self.updates = 0

    async def generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        sampling = asked["sampling_params"]
        self.active += 1
        try:
            choices = await asyncio.gather(*(self.sample(sampling["max_tokens"]) for _ in range(sampling.get("n", 1))))
        finally:
            self.active -= 1
        return web.json_response({"choices": choices})

    async def sample(self, count: int) -> dict[str, Any]:
        tokens: list[int] = []
        spans: list[dict[str, Any]] = []
        aborts, finish = self.aborts, "length"
        while len(tokens) < count:
            await asyncio.sleep(SECONDS)
            await self.running.wait()
            if aborts != self.aborts:
                finish = "abort"
                break
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(tokens), "end": len(tokens)})
            tokens.append(int(np.concatenate([one.ravel() for one in self.weights.values()]).mean()))
            spans[-1]["end"] += 1
        content = [{"token_id": one, "logprob": -0.5, "rank": 1} for one in tokens]
        return {
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": spans,
            "finish_reason": finish,
        }

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query["mode"]
        if mode == "wait":
            while self.active:
                await asyncio.sleep(0.01)
        elif mode == "abort":
            self.aborts += 1
        self.running.clear()
        while mode == "abort" and self.active:
            self.running.set()
            await asyncio.sleep(0.01)
            self.running.clear()
        return web.json_response({})

    async def resume(self, _: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({})

    async def start(self, _: web.Request) -> web.Response:
        if MODE == "refuse-start" or self.is_updating:
            return web.json_response({"error": "an update is active"}, status=500)
        self.is_updating = True
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        place = (await request.json())["update_info"]
        new = read(Path(place["path"])) if "path" in place else load(place)
        self.updates += 1
        if MODE == "die-in-update":
            os._exit(9)
        # Some are loaded by then.
        self.weights["embed"] = new["embed"]
        if MODE == "hang-once" and self.updates == 1:
            await asyncio.sleep(600)
        if MODE == "refuse-once" and self.updates == 1:
            self.is_updating = False
            return web.json_response({"error": "no such layer"}, status=500)
        self.weights = new
        return web.json_response({})

    async def progress(self, _: web.Request) -> web.Response:
        """Tell a test where it is."""
        return web.json_response({"active": self.active, "paused": not self.running.is_set()})

    async def finish(self, request: web.Request) -> web.Response:
        if not self.is_updating:
            return web.json_response({"error": "no update is active"}, status=500)
        self.is_updating = False
        return await self.label(request)

    async def label(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.version = "7777" if MODE == "wrong-version" else asked.get("weight_version", asked.get("new_version"))
        return web.json_response({})

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def nothing(self, _: web.Request) -> web.Response:
        return web.json_response({})


@web.middleware
async def check(request: web.Request, handler: Any) -> web.StreamResponse:
    if request.path == roost_proof.PATH:
        return web.json_response(roost_proof.prove(os.environ[roost_proof.SECRET], request.headers[roost_proof.NONCE]))
    if request.headers.get("Authorization") != f"Bearer {os.environ['ROOST_ENGINE_SECRET']}":
        return web.json_response({"error": "no secret"}, status=401)
    return await handler(request)


def main() -> None:
    words = sys.argv[1:]
    options = {words[at].removeprefix("--"): words[at + 1] for at in range(2, len(words) - 1)}
    print("loading", words[1], flush=True)
    if MODE == "exit":
        print("RuntimeError: not enough memory for the cache", flush=True)
        sys.exit(3)
    if MODE == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("child", child.pid, flush=True)
    if "headless" in " ".join(words):
        asyncio.run(asyncio.sleep(600))

    async def make() -> web.Application:
        server = Server(Path(words[1]))
        app = web.Application(middlewares=[check])
        app.router.add_get("/health", server.nothing)
        app.router.add_get("/weight_info", server.info)
        app.router.add_get("/progress", server.progress)
        for path, handler in {
            "/inference/v1/generate": server.generate,
            "/pause": server.pause,
            "/resume": server.resume,
            "/start_weight_update": server.start,
            "/update_weights": server.update,
            "/finish_weight_update": server.finish,
            "/update_weight_version": server.label,
            "/reset_prefix_cache": server.nothing,
            "/sleep": server.nothing,
            "/wake_up": server.nothing,
        }.items():
            app.router.add_post(path, handler)
        return app

    web.run_app(make(), host=options["host"], port=int(options["port"]), print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
