"""Which Ray this is, and what follows from it."""

from __future__ import annotations

import re

from roost.errors import ClusterError

OLDEST_RAY = "2.47.0"


def check_ray_version(found: str) -> None:
    """Raise ClusterError where Ray is older than Roost can use.

    >>> check_ray_version("2.60.0")
    """
    if _numbers(found) < _numbers(OLDEST_RAY):
        raise ClusterError(
            f"this is Ray {found}, and Roost needs Ray {OLDEST_RAY} or newer",
            hint=f"pip install 'ray>={OLDEST_RAY}', on every node of the cluster",
        )


def has_token_authentication(version: str) -> bool:
    """Whether this Ray can ask for a token from whoever connects."""
    return _numbers(version) >= (2, 52)


def has_bundle_labels(version: str) -> bool:
    """Whether a bundle of a placement group can be tied to a node by its label; older ones take no notice of it."""
    return _numbers(version) >= (2, 49)


def _numbers(version: str) -> tuple[int, ...]:
    """`2.47.0rc1` as (2, 47, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
