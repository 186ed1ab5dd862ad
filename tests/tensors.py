"""Tensors of every kind that messages and channels carry."""

from __future__ import annotations

from typing import Any

import torch


def of_every_kind() -> list[Any]:
    """Tensors that differ in type, size, strides and class, alone and in other values."""
    plain = torch.arange(30_000, dtype=torch.float32).reshape(150, 200)
    return [
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.arange(6, dtype=torch.int64).reshape(2, 3),
        plain,
        plain.t(),
        plain[::3, ::2],
        plain.to(torch.bfloat16),
        plain > 7,
        plain.clone().requires_grad_(),
        torch.nn.Parameter(plain.clone()),
        torch.nn.Parameter(torch.arange(3), requires_grad=False),
        {"loss": torch.tensor(1.0), "batch": [plain, plain.numpy(), b"x" * 9000, None]},
    ]


def are_equal(one: Any, other: Any) -> bool:
    """Whether two such values are the same, in class and type too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad) and bool(
            torch.equal(one, other)
        )
    return bool((one == other).all()) if hasattr(one, "dtype") else bool(one == other)
