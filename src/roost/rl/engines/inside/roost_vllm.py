"""Runs inside vLLM, whose Python need not have Roost: the server's lock, and how it takes weights.

vLLM imports this module by name: `Secret` in the server's process, `Extension` in every worker of the engine.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.platforms import current_platform

SECRET = "ROOST_ENGINE_SECRET"  # noqa: S105 - the name of the variable
BACKEND = "roost"

_TYPES = {"F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16", "BOOL": "bool"}
_TYPES |= {
    f"{letter}{bits}": f"{word}{bits}" for letter, word in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}
_TYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


class Secret:
    """Answers no request that does not show the engine's secret: vLLM's own key protects some of its routes only."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ[SECRET]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        shown = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "http" and hmac.compare_digest(shown, self._wanted):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "the request lacks the secret"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})


class Extension:
    """What vLLM wants to add to its workers: importing this module is all that is needed."""


@dataclass
class Nothing(WeightTransferInitInfo):
    """What the way by files needs to begin."""


@dataclass
class File(WeightTransferUpdateInfo):
    """A safetensors file with all weights, by the names of the checkpoint."""

    path: str


class FileTransfer(WeightTransferEngine[Nothing, File]):
    """Takes weights from a file, which lies in shared memory; vLLM's own loader fuses and splits them."""

    init_info_cls = Nothing
    update_info_cls = File

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Begin."""

    def start_weight_update(self) -> None:
        """Leave the model as it is: an update that does not come breaks nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load everything from a file."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: File) -> None:
        """Load everything from a file."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self.model.load_weights(_read(Path(update_info.path)))
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            _repack_tied(self.model)

    def finish_weight_update(self) -> None:
        """Everything is loaded."""

    def shutdown(self) -> None:
        """Nothing is open."""


def _repack_tied(model: torch.nn.Module) -> None:
    """Let a head that is tied to the embeddings use the new weights: on CPUs it has packed a copy of the old ones."""
    seen = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        method = getattr(module, "quant_method", None)
        if weight is None or method is None:
            continue
        if weight.data_ptr() in seen:
            method.process_weights_after_loading(module)
        seen.add(weight.data_ptr())


def _read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with path.open("rb") as file:
        # Private, and so writable without changing the file, as torch wants it.
        content = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = (start + place for place in entry["data_offsets"])
        dtype = getattr(torch, _TYPES[entry["dtype"]])
        if first == last:
            yield name, torch.empty(entry["shape"], dtype=dtype)
        else:
            whole = torch.frombuffer(content, dtype=torch.uint8, count=last - first, offset=first)
            yield name, whole.view(dtype).reshape(entry["shape"])


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
