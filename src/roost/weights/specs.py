"""Safetensors files: the shapes and types of a model from their headers, their content as weights, and a new file."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roost.errors import ClusterError, ConfigError
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
    found: dict[str, TensorSpec] = {}
    for file in _files(Path(path)):
        found |= {name: spec for name, (spec, _) in _read_header(file).items()}
    return found


def map_safetensors(path: str | Path) -> dict[str, Any]:
    """Return the tensors of such files without reading them: pages come when they are used. Offer them as weights."""
    from roost.weights.arrays import wrap

    found: dict[str, Any] = {}
    for file in _files(Path(path)):
        with file.open("rb") as opened:
            # Private: whatever writes to the tensors does not write to the file.
            content = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        view = memoryview(content)
        for name, (spec, (start, stop)) in _read_header(file).items():
            if stop > len(view):
                raise ConfigError(f"{file} is cut off: it ends before {name}")
            found[name] = wrap(view[start:stop], spec.dtype, spec.shape)
    return found


def save_safetensors(path: str | Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors or arrays into a file, which is there wholly or not at all; ClusterError if there is no room."""
    from roost.weights.arrays import dtype_of, raw_bytes

    names = {dtype: name for name, dtype in _TYPES.items()}
    header: dict[str, Any] = {}
    parts = []
    at = 0
    for name, one in tensors.items():
        parts.append(raw_bytes(one))
        places = [at, at + len(parts[-1])]
        header[name] = {"dtype": names[dtype_of(one)], "shape": list(one.shape), "data_offsets": places}
        at = places[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as error:
        raise ClusterError(f"{target} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _files(given: Path) -> list[Path]:
    if given.is_dir():
        indexes = sorted(given.glob("*.safetensors.index.json"))
        files = indexes[:1] or sorted(given.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{given} has no .safetensors file")
    else:
        files = [given]
    if files[0].suffix != ".json":
        return files
    try:
        names = json.loads(files[0].read_text(encoding="utf-8"))["weight_map"]
        # Next to the index, and nowhere else.
        return [files[0].parent / name for name in sorted(set(names.values())) if _is_plain(name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{files[0]} is not an index of safetensors files: {error}") from None


def _is_plain(name: str) -> bool:
    if Path(name).name != name:
        raise ValueError(f"{name} is not a file next to it")
    return True


def _read_header(path: Path) -> dict[str, tuple[TensorSpec, tuple[int, int]]]:
    """Return each tensor of a file, and where it begins and ends there."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= _MOST_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header: dict[str, Any] = json.loads(file.read(size))
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = (8 + size + int(place) for place in entry["data_offsets"])
                found[name] = TensorSpec(tuple(map(int, entry["shape"])), _TYPES[entry["dtype"]]), (start, stop)
        return found
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from None
