"""The oldest Ray that Roost works with."""

from __future__ import annotations

from packaging.version import Version

from roost.errors import ClusterError

OLDEST_RAY = "2.55.0"


def check_ray_version(found: str) -> None:
    """Raise ClusterError where Ray is older; a pre-release counts as the release that it leads to.

    >>> check_ray_version("2.60.0")
    """
    if Version(Version(found).base_version) < Version(OLDEST_RAY):
        raise ClusterError(
            f"this is Ray {found}, and Roost needs Ray {OLDEST_RAY} or newer",
            hint=f"pip install 'ray>={OLDEST_RAY}', on every node of the cluster",
        )
