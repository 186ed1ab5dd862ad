"""Workers that hold weights, for tests."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from roost.weights.layout import Held, TensorSpec
from roost.weights.safetensors import map_safetensors
from roost.weights.worker import WeightWorker

SHAPES = {"embed": (1000, 64), "up": (256, 64), "down": (64, 256), "scale": (), "empty": (0, 4)}


def value(name: str, version: int) -> np.ndarray:
    """The whole tensor of a version."""
    shape = SHAPES[name]
    return (np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) % 251) + 1000 * version


class _Boxes:
    """Arrays of a worker that has some rows or columns of each."""

    def __init__(self, arrays: dict[str, Any], boxes: dict[str, Any]) -> None:
        self.arrays, self.boxes = arrays, boxes

    def tensors(self) -> dict[str, Any]:
        return self.arrays

    def held(self) -> list[Held]:
        return [
            Held(name=name, spec=TensorSpec(SHAPES[name], str(one.dtype).removeprefix("torch.")), box=self.boxes[name])
            for name, one in self.arrays.items()
        ]


class _Part(WeightWorker):
    def __init__(self, kind: str = "torch", dtype: str = "float32") -> None:
        self.kind = kind
        self.boxes = {name: self.box(shape) for name, shape in SHAPES.items()}
        self.arrays = {name: self.make(name, dtype) for name in SHAPES}
        self.hook: Callable[[], None] | None = None

    def box(self, shape: tuple[int, ...]) -> Any:
        raise NotImplementedError

    def make(self, name: str, dtype: str) -> Any:
        array = np.array(self.cut(value(name, 0)))
        if self.kind == "numpy":
            return array.astype(dtype)
        import torch

        tensor = torch.from_numpy(array).to(getattr(torch, dtype))
        return tensor.cuda() if self.kind == "cuda" else tensor

    def cut(self, whole: np.ndarray) -> np.ndarray:
        name = next(name for name, shape in SHAPES.items() if shape == whole.shape)
        return whole[tuple(slice(*pair) for pair in self.boxes[name])]

    def pid(self) -> int:
        return os.getpid()

    def open_nothing_more(self) -> None:
        """Let this process have no descriptor left."""
        # The kernel gives the lowest number that is free.
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def weights(self) -> Any:
        if self.hook is not None:
            self.hook()
        return _Boxes(self.arrays, self.boxes)

    def set_version(self, version: int, *, anew: bool = False) -> None:
        """Train: change all weights in place, or in new memory."""
        for name, array in self.arrays.items():
            new = self.cut(value(name, version))
            if self.kind == "numpy":
                array[...] = new
            else:
                import torch

                array.copy_(torch.from_numpy(np.array(new)))
        if anew:
            self.arrays = {name: self._again(array) for name, array in self.arrays.items()}

    def _again(self, array: Any) -> Any:
        return array.copy() if self.kind == "numpy" else array.clone()

    def content(self) -> tuple[int, set[float]]:
        """The version that this worker says that it has, and all differences to version 0, in thousands."""
        found: set[float] = set()
        for name, array in self.arrays.items():
            plain = array if self.kind == "numpy" else array.float().cpu().numpy()
            found |= set(np.unique((plain - self.cut(value(name, 0))) / 1000).tolist())
        return self.weights_version, found

    def die_in(self, seconds: float, number: int = signal.SIGKILL) -> None:
        threading.Timer(seconds, os.kill, (os.getpid(), number)).start()

    def die_at_accept(self, times: int) -> None:
        """End in the middle of an update: when it is asked for the n-th time where the weights go."""
        left = [times]

        def hook() -> None:
            left[0] -= 1
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

        self.hook = hook

    def kill_now(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def lose(self, name: str) -> None:
        """Have a tensor no more."""
        del self.arrays[name]

    def retype(self, name: str, dtype: str) -> None:
        """Have a tensor in another type."""
        self.arrays[name] = self.arrays[name].astype(dtype)

    def transform(self, name: str, how: str) -> None:
        """Have a tensor in another form, as it lies in memory then; `restore` undoes it."""
        self.kept = dict(self.arrays)
        one = self.arrays[name]
        if how == "turned":
            # The same values, but the columns lie together.
            self.arrays[name] = np.asfortranarray(one)
        elif how == "short":
            # As an optimizer does that packs: the same object, and less of it.
            self.arrays[name] = one[: len(one) // 2].copy()
        elif how == "long":
            # All that is needed is there, and more.
            self.arrays[name] = np.concatenate([one, one])
        elif how == "flat":
            self.arrays[name] = one.reshape(-1)
        elif how == "reshaped in place":
            self.arrays[name] = again = one.copy()
            self.kept[name] = one
            again.shape = again.shape[::-1]
        else:
            self.arrays[name] = one.astype(how)

    def restore(self) -> None:
        self.arrays = self.kept


class Trainer(_Part):
    """Holds some rows of each, as with FSDP."""

    def offer(self) -> Any:
        return self.weights()

    def box(self, shape: tuple[int, ...]) -> Any:
        if not shape:
            return ()
        step = -(-shape[0] // self.world_size)
        low = min(shape[0], self.rank * step)
        return ((low, min(shape[0], low + step)), *((0, size) for size in shape[1:]))


class Server(_Part):
    """Holds some columns of each, as with tensor parallelism of two."""

    victim: int | None = None
    delay = 0.0

    def accept(self) -> Any:
        return self.weights()

    @contextmanager
    def weights_changing(self, version: int) -> Iterator[None]:
        if self.victim is not None:
            time.sleep(self.delay)
            os.kill(self.victim, signal.SIGKILL)
        changes = vars(self).setdefault("changes", [])
        changes.append((f"to {version}", self.content()[1]))
        try:
            yield
        except BaseException as error:
            changes.append((f"broken: {error}", set()))
            raise
        changes.append(("done", self.content()[1]))

    def seen_changes(self) -> list[tuple[str, set[float]]]:
        """What surrounded changes of the weights, and the weights at the time."""
        return vars(self).get("changes", [])

    def kill_at_change(self, pid: int, delay: float = 0.0) -> None:
        """End a process when the weights of this one are about to change."""
        self.victim, self.delay = pid, delay

    def box(self, shape: tuple[int, ...]) -> Any:
        if not shape:
            return ()
        half = self.rank % 2
        rest = tuple((0, size) for size in shape[:-1])
        middle = shape[-1] // 2
        return (*rest, (0, middle) if half == 0 else (middle, shape[-1]))


class Stored(WeightWorker):
    """Has its weights in a file."""

    def __init__(self, path: str) -> None:
        self.weights = map_safetensors(path)

    def offer(self) -> Any:
        return self.weights


class Both(Trainer):
    """Is a trainer and a server in one process, with weights of another type for each."""

    def __init__(self, kind: str, dtype: str, other: str) -> None:
        super().__init__(kind, dtype)
        self.mine, self.arrays = self.arrays, {name: self.make(name, other) for name in SHAPES}
        for one in self.arrays.values():
            one.zero_()

    def offer(self) -> Any:
        return _Boxes(self.mine, self.boxes)

    def accept(self) -> Any:
        return self.weights()

    def set_version(self, version: int, *, anew: bool = False) -> None:
        del version, anew

    def accepted(self) -> bool:
        """Whether what it serves is what it trained."""
        return all(bool((self.arrays[name].float() == one).all()) for name, one in self.mine.items())


class Odd(WeightWorker):
    """Has tensors of unusual types and strides, and a module with tied weights."""

    def __init__(self, value: int) -> None:
        import torch

        shape = (6, 4)
        plain = (torch.arange(24).reshape(shape) % 5) * value
        self.tensors = {
            **{name: plain.to(getattr(torch, name)) for name in ("bfloat16", "float8_e4m3fn", "int8", "bool")},
            # The same values, but the columns lie together.
            "turned": plain.t().contiguous().t().float(),
            "every other": (torch.arange(48).reshape(12, 4) * value).float()[::2],
            "one": torch.tensor(float(value)),
        }
        self.model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("embed", "head")})
        self.model["head"].weight = self.model["embed"].weight
        with torch.no_grad():
            self.model["embed"].weight.fill_(value)

    def offer(self) -> Any:
        return {**self.tensors, **dict(self.model.named_parameters())}

    accept = offer

    def widen(self) -> None:
        """Serve from memory with more than the weights: other tensors, and more rows."""
        import torch

        wide = torch.full((9, 4), -1.0)
        self.tensors = {**self.tensors, "turned": wide, "mine": torch.full((2,), -1.0)}

    def unwanted(self) -> list[float]:
        """What is there besides the weights."""
        return [*self.tensors["mine"].tolist(), *self.tensors["turned"][6:].flatten().unique().tolist()]

    def sums(self) -> list[float]:
        """The sum of each tensor, and that of the tied weights by their other name."""
        return [float(one.float().sum()) for one in (*self.tensors.values(), self.model["head"].weight)]
