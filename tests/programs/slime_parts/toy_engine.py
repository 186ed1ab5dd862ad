"""SGLang's place in the tests: a server whose tokens follow from its weights."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import ray
from slime.ray.ray_actor import RayActor
from tracing import FOLDER, note

TOKENS = 16


class SGLangEngine(RayActor):
    def __init__(self, args, rank, worker_type, base_gpu_id, sglang_overrides, num_gpus_per_engine):
        self.name, self.weights, self.version = f"engine-{rank}", np.zeros(4), -1
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        note(self.name, "made", type=worker_type, base=base_gpu_id, gpus=gpus, size=num_gpus_per_engine)

    def init(self, host, port, nccl_port, dist_init_addr, router_ip, router_port):
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                answer = json.dumps(engine.generate(int(self.path.strip("/")))).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer((host, port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (FOLDER / f"{self.name}.url").write_text(f"http://{host}:{server.server_port}")

    def generate(self, prompt):
        made = np.random.default_rng(prompt).normal(size=(3, 4)) + self.weights
        return {"tokens": [int(token) % TOKENS for token in np.abs(made).sum(axis=1) * 7], "version": self.version}

    def load(self, weights, version):
        self.weights, self.version = np.array(weights), version
        note(self.name, "weights", version=version, weights=self.weights.tolist())

    def release_memory_occupation(self):
        note(self.name, "offload")

    def resume_memory_occupation(self, tags=None):
        note(self.name, "onload", tags=tags)

    def check_weights(self, action):
        note(self.name, "check", action=action)
