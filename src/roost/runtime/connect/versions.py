"""Which features the installed version of Ray has."""

from __future__ import annotations

from packaging.version import Version

from roost.errors import ClusterError

OLDEST_RAY = "2.47.0"


def check_ray_version(found: str) -> None:
    """Raise ClusterError where Ray is older than Roost supports.

    >>> check_ray_version("2.60.0")
    """
    if not _is_at_least(found, OLDEST_RAY):
        raise ClusterError(
            f"this is Ray {found}, and Roost needs Ray {OLDEST_RAY} or newer",
            hint=f"pip install 'ray>={OLDEST_RAY}', on every node of the cluster",
        )


def has_token_authentication(version: str) -> bool:
    """Return whether this Ray can require a token from every process that connects."""
    return _is_at_least(version, "2.52")


def has_bundle_labels(version: str) -> bool:
    """Return whether a label can tie a bundle of a placement group to a node; older versions ignore it."""
    return _is_at_least(version, "2.49")


def _is_at_least(version: str, oldest: str) -> bool:
    """A pre-release counts as the release that it leads to."""
    return Version(Version(version).base_version) >= Version(oldest)
