"""A small server with the routes of SGLang that an engine uses, in its place: its tokens are the mean of its weights.

It is as strict as SGLang 0.5.23: it clears its cache and frees its memory only after a pause that leaves no step
running. STAND_IN in its environment says how it misbehaves. It also tells how far it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

MODE = os.environ.get("STAND_IN", "")
# With "hold", a sample has so many tokens when it waits for the first pause.
HELD = 3


def read(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            first, last = (start + place for place in entry["data_offsets"])
            found[name] = np.frombuffer(content[first:last], np.float32).reshape(entry["shape"])
    return found


class Server:
    def __init__(self, given: argparse.Namespace) -> None:
        self.model = given.model_path
        self.weights = read(Path(given.model_path))
        self.version = given.weight_version
        self.pause_mode = ""
        self.is_freed = False
        self.pauses = 0
        self.aborts = 0
        self.active = 0
        self.waiting = 0
        self.held = 0

    async def generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        sampling = asked["sampling_params"]
        self.waiting += 1
        while self.pause_mode:
            await asyncio.sleep(0.005)
        self.waiting -= 1
        if self.is_freed:
            os._exit(7)
        self.active += 1
        try:
            made = await asyncio.gather(*(self.sample(sampling["max_new_tokens"]) for _ in range(sampling["n"])))
        finally:
            self.active -= 1
        return web.json_response(made[0] if sampling["n"] == 1 else made)

    async def sample(self, count: int) -> dict[str, Any]:
        tokens: list[int] = []
        spans: list[dict[str, Any]] = []
        aborts, finish = self.aborts, {"type": "length", "length": count}
        while len(tokens) < count:
            self.held += self.is_held(tokens)
            while self.is_held(tokens) or (self.pause_mode and aborts == self.aborts):
                await asyncio.sleep(0.005)
            if aborts != self.aborts:
                finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                break
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(tokens), "end": len(tokens)})
            tokens.append(int(np.concatenate([one.ravel() for one in self.weights.values()]).mean()))
            spans[-1]["end"] += 1
        found = {
            "id": "0",
            "finish_reason": finish,
            "prompt_tokens": 2,
            "completion_tokens": len(tokens),
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, one, None] for one in tokens],
        }
        if MODE != "old" and tokens:
            found["weight_versions"] = spans
        return {"text": "", "output_ids": tokens, "meta_info": found}

    def is_held(self, tokens: list[int]) -> bool:
        return MODE == "hold" and len(tokens) == HELD and not self.pauses

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await request.json())["mode"]
        if mode not in ("abort", "retract", "in_place"):
            return web.json_response({"error": mode}, status=422)
        self.pause_mode = mode
        self.aborts += mode == "abort"
        self.pauses += 1
        if mode == "abort":
            while self.active:
                await asyncio.sleep(0.005)
        return web.json_response({"message": "paused", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await request.json()
        self.pause_mode = ""
        return web.json_response({"message": "continued", "status": "ok"})

    async def update(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if MODE == "die-in-update":
            os._exit(9)
        if MODE == "hang-in-update":
            await asyncio.sleep(600)
        if MODE == "refuse-once" and asked["weight_version"] == "1":
            return self.updated("no such layer", is_done=False)
        self.weights = read(Path(asked["model_path"]))
        self.version = "7777" if MODE == "wrong-version" else asked["weight_version"]
        if asked["flush_cache"] and self.pause_mode != "retract":
            return self.updated("the cache was not flushed", is_done=False)
        return self.updated("updated", is_done=True)

    def updated(self, message: str, *, is_done: bool) -> web.Response:
        content = {"success": is_done, "message": message, "num_paused_requests": 0}
        return web.json_response(content, status=200 if is_done else 400)

    async def free(self, request: web.Request) -> web.Response:
        await request.json()
        assert self.pause_mode == "retract", "a step may still run"
        self.is_freed = True
        return web.json_response(None)

    async def take(self, request: web.Request) -> web.Response:
        await request.json()
        self.is_freed = False
        return web.json_response(None)

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model, "is_generation": True, "weight_version": self.version})

    async def progress(self, _: web.Request) -> web.Response:
        return web.json_response({"waiting": self.waiting, "held": self.held})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def step(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if MODE == "no-step" or self.pause_mode or self.is_freed else 200)


def checking(key: str) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        is_open = request.path.startswith("/health")
        if not is_open and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return check


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "dist-init-addr", "api-key", "weight-version", "log-level"):
        parser.add_argument(f"--{name}")
    for name in ("port", "nccl-port", "tp-size", "pp-size", "nnodes", "node-rank"):
        parser.add_argument(f"--{name}", type=int, default=0)
    for name in ("enable-memory-saver", "enable-weights-cpu-backup"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if MODE == "exit":
        print("RuntimeError: Not enough memory.", flush=True)
        sys.exit(3)
    if given.node_rank:
        asyncio.run(asyncio.sleep(600))

    async def make() -> web.Application:
        server = Server(given)
        app = web.Application(middlewares=[checking(given.api_key)])
        app.router.add_get("/health", server.health)
        app.router.add_get("/health_generate", server.step)
        app.router.add_get("/model_info", server.info)
        app.router.add_get("/progress", server.progress)
        for path, handler in {
            "/generate": server.generate,
            "/pause_generation": server.pause,
            "/continue_generation": server.resume,
            "/update_weights_from_disk": server.update,
            "/release_memory_occupation": server.free,
            "/resume_memory_occupation": server.take,
        }.items():
            app.router.add_post(path, handler)
        return app

    web.run_app(make(), host=given.host, port=given.port, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
