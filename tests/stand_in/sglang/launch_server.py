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
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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

    async def generate(self, request: Request) -> Response:
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
        return JSONResponse(made[0] if sampling["n"] == 1 else made)

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

    async def pause(self, request: Request) -> Response:
        mode = (await request.json())["mode"]
        if mode not in ("abort", "retract", "in_place"):
            return JSONResponse({"error": mode}, status_code=422)
        self.pause_mode = mode
        self.aborts += mode == "abort"
        self.pauses += 1
        if mode == "abort":
            while self.active:
                await asyncio.sleep(0.005)
        return JSONResponse({"message": "paused", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        await request.json()
        self.pause_mode = ""
        return JSONResponse({"message": "continued", "status": "ok"})

    async def update(self, request: Request) -> Response:
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

    def updated(self, message: str, *, is_done: bool) -> Response:
        content = {"success": is_done, "message": message, "num_paused_requests": 0}
        return JSONResponse(content, status_code=200 if is_done else 400)

    async def free(self, request: Request) -> Response:
        await request.json()
        assert self.pause_mode == "retract", "a step may still run"
        self.is_freed = True
        return JSONResponse(None)

    async def take(self, request: Request) -> Response:
        await request.json()
        self.is_freed = False
        return JSONResponse(None)

    async def info(self, _: Request) -> Response:
        return JSONResponse({"model_path": self.model, "is_generation": True, "weight_version": self.version})

    async def progress(self, _: Request) -> Response:
        return JSONResponse({"waiting": self.waiting, "held": self.held})

    async def health(self, _: Request) -> Response:
        return Response()

    async def step(self, _: Request) -> Response:
        return Response(status_code=503 if MODE == "no-step" or self.pause_mode or self.is_freed else 200)


class Checking:
    """SGLang's own key, which it asks for on all routes but some."""

    def __init__(self, app: Any, key: str) -> None:
        self.app, self.key = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_open = scope["type"] != "http" or scope["path"].startswith("/health")
        if is_open or dict(scope["headers"]).get(b"authorization") == self.key:
            await self.app(scope, receive, send)
        else:
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)


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

    server = Server(given)
    get = {"/health": server.health, "/health_generate": server.step, "/model_info": server.info}
    get |= {"/progress": server.progress}
    post = {
        "/generate": server.generate,
        "/pause_generation": server.pause,
        "/continue_generation": server.resume,
        "/update_weights_from_disk": server.update,
        "/release_memory_occupation": server.free,
        "/resume_memory_occupation": server.take,
    }
    routes = [Route(path, handler, methods=["GET"]) for path, handler in get.items()]
    routes += [Route(path, handler, methods=["POST"]) for path, handler in post.items()]
    # As SGLang does with one process for tokenizing; where it has several, it hands over a name.
    app = "sglang.launch_server:app" if MODE == "several" else Checking(Starlette(routes=routes), given.api_key)
    uvicorn.run(app, host=given.host, port=given.port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
