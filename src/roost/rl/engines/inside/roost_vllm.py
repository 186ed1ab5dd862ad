"""Runs inside vLLM, whose Python need not have Roost: how it takes weights.

vLLM imports this module by name, for `Extension`, in every worker of the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.platforms import current_platform

BACKEND = "roost"

_TYPES = {"F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16", "BOOL": "bool"}
_TYPES |= {
    f"{letter}{bits}": f"{word}{bits}" for letter, word in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}
_TYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


class Extension:
    """The extension that vLLM adds to its workers: importing this module is all that is needed."""


@dataclass
class Nothing(WeightTransferInitInfo):
    """This way needs nothing to begin."""


@dataclass
class Place(WeightTransferUpdateInfo):
    """Where all weights lie, by the names of the checkpoint: in a safetensors file, or in memory of a device."""

    path: str = ""
    memory: dict[str, Any] | None = None
    """The handle by which the driver maps the memory, and its size."""
    tensors: dict[str, Any] | None = None
    """Type, shape and place in that memory of each."""


class SharedTransfer(WeightTransferEngine[Nothing, Place]):
    """Takes weights from memory that it shares with another process; vLLM's own loader fuses and splits them."""

    init_info_cls = Nothing
    update_info_cls = Place

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Begin."""

    def start_weight_update(self) -> None:
        """Leave the model as it is: an update that does not come breaks nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load everything."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Place) -> None:
        """Load everything, and wait until the device has it: its memory is the sender's again after that."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with _open(update_info) as tensors:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(tensors)
            finalize_layerwise_reload(self.model, self.model_config)
            if current_platform.is_cpu():
                _repack_tied(self.model)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

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


@contextlib.contextmanager
def _open(place: Place) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    if place.memory is None:
        yield _read(Path(place.path))
        return
    with _mapped(**place.memory) as memory:
        yield _cut(memory, place.tensors or {})


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


def _cut(memory: torch.Tensor, tensors: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (dtype, shape, at) in tensors.items():
        kind = getattr(torch, dtype)
        part = memory[at : at + math.prod(shape) * kind.itemsize]
        yield name, part.view(kind).reshape(shape)


@contextlib.contextmanager
def _mapped(handle: str, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
    """Map memory that another process has of a CUDA device; torch has no public way to do so by the driver's handle."""
    # Makes the device's context the one of this thread.
    torch.cuda.current_stream().synchronize()
    driver, place = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    if code := driver.cuIpcOpenMemHandle_v2(ctypes.byref(place), _Handle.from_buffer_copy(bytes.fromhex(handle)), 1):
        raise RuntimeError(f"the memory of the weights cannot be mapped: CUDA error {code}")
    try:
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (place.value + offset, False), "version": 2}
        yield torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")
    finally:
        driver.cuIpcCloseMemHandle(place)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * 64),)


WeightTransferEngineFactory.register_engine(BACKEND, SharedTransfer)
