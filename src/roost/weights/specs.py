"""The shapes and types of a model's tensors, from its safetensors files: only their headers are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roost.errors import ConfigError
from roost.weights.layout import TensorSpec

_TYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
}
_MOST_BYTES = 100_000_000
"""How large a header may be, as the format says."""


def read_safetensors(path: str | Path) -> dict[str, TensorSpec]:
    """Return the tensors of a `.safetensors` file, of an index of several, or of a folder that has one of them."""
    given = Path(path)
    if given.is_dir():
        indexes = sorted(given.glob("*.safetensors.index.json"))
        files = indexes[:1] or sorted(given.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{given} has no .safetensors file")
    elif given.suffix == ".json":
        files = [given]
    else:
        return _read_header(given)
    if files[0].suffix == ".json":
        try:
            names = json.loads(files[0].read_text(encoding="utf-8"))["weight_map"]
            # Next to the index, and nowhere else.
            files = [files[0].parent / Path(name).name for name in sorted(set(names.values())) if _is_plain(name)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{files[0]} is not an index of safetensors files: {error}") from None
    found: dict[str, TensorSpec] = {}
    for file in files:
        found |= _read_header(file)
    return found


def _is_plain(name: str) -> bool:
    if Path(name).name != name:
        raise ValueError(f"{name} is not a file next to it")
    return True


def _read_header(path: Path) -> dict[str, TensorSpec]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= _MOST_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header: dict[str, Any] = json.loads(file.read(size))
        return {
            name: TensorSpec(tuple(map(int, entry["shape"])), _TYPES[entry["dtype"]])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from None
