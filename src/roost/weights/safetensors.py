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
from roost.text import size_text
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


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, TensorSpec]:
    """Return the tensors of a `.safetensors` file, of an index of several, or of a folder that has one of them."""
    found: dict[str, TensorSpec] = {}
    for file in _files(Path(path)):
        found |= {name: spec for name, (spec, _) in _read_header(file).items()}
    return found


def map_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tensors of such files without reading them: pages come when they are used. Offer them as weights."""
    found: dict[str, Any] = {}
    for file in _files(Path(path)):
        try:
            with file.open("rb") as opened:
                # Private: whatever writes to the tensors does not write to the file.
                content = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        found |= _wrap_all(file, content)
    return found


def create_safetensors(path: str | os.PathLike[str], specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Make a file with room for tensors, and return them: what is written to them is written to the file.

    Only this user can read it. If it is there already, of this user and size, the tensors are those in it.
    """
    header = _header(specs)
    size = len(header) + sum(spec.nbytes for spec in specs.values())
    file = Path(path)
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or found.st_size not in (0, size):
                raise ClusterError(f"{file} is there, and is another file")
            # Writing to a mapping that there is no room for would end this process.
            os.posix_fallocate(descriptor, 0, size)
            os.pwrite(descriptor, header, 0)
            content = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ClusterError(f"{file} cannot be made with {size_text(size)}: {error.strerror}") from None
    return _wrap_all(file, content)


def save_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Any]) -> None:
    """Write tensors or arrays into a file, which is there wholly or not at all; ClusterError if there is no room."""
    import numpy as np

    from roost.comm.move.arrays import as_buffer, dtype_of

    # Of an array without dimensions, numpy's arithmetic makes a number.
    tensors = {name: np.asarray(one) if isinstance(one, np.generic) else one for name, one in tensors.items()}
    header = _header({name: TensorSpec(tuple(one.shape), dtype_of(one)) for name, one in tensors.items()})
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(header)
            for one in tensors.values():
                file.write(as_buffer(one, "save_safetensors").view)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as error:
        raise ClusterError(f"{target} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _header(specs: Mapping[str, TensorSpec]) -> bytes:
    """Return the beginning of a file with these tensors one after the other."""
    names = {dtype: name for name, dtype in _TYPES.items()}
    header: dict[str, Any] = {}
    at = 0
    for name, spec in specs.items():
        header[name] = {
            "dtype": names[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _wrap_all(file: Path, content: mmap.mmap) -> dict[str, Any]:
    from roost.comm.move.arrays import wrap

    found: dict[str, Any] = {}
    view = memoryview(content)
    for name, (spec, (start, stop)) in _read_header(file).items():
        if stop > len(view):
            raise ConfigError(f"{file} is cut off: it ends before {name}")
        found[name] = wrap(view[start:stop], spec.dtype, spec.shape)
    return found


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
        names = sorted(set(json.loads(files[0].read_text(encoding="utf-8"))["weight_map"].values()))
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{name} is not a file next to it")
        return [files[0].parent / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{files[0]} is not an index of safetensors files: {error}") from None


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
