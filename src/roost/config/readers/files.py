"""Files beside a job: what it sources and includes, read from the project that it is in and from nowhere else."""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass, field
from pathlib import Path

from roost.config.yaml_file import JOB_FILE_LIMIT, load_text
from roost.errors import ConfigError, Where
from roost.text import shorten

_ROOTS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_MOST_FILES = 200


@dataclass(slots=True)
class Folder:
    """The folder of a job's file, up to the root of its project."""

    name: str
    """The job's file, as the user names it."""
    here: Path
    root: Path
    missing: list[tuple[str, Where | None]] = field(default_factory=list)
    """The files that are missing, and where a config asks for them."""
    opened: int = 0

    @classmethod
    def of(cls, path: str | Path) -> Folder:
        """Return the folder of a file; its project is the nearest folder above it that looks like one."""
        here = Path(os.path.realpath(path)).parent
        root = next((item for item in (here, *here.parents) if any((item / sign).exists() for sign in _ROOTS)), here)
        return cls(str(path), here, root)

    def open(
        self,
        target: str,
        beside: str | None = None,
        suffixes: tuple[str, ...] = ("",),
        where: Where | None = None,
    ) -> tuple[str, str] | None:
        """Read a file that a script or a config names; None if it is not in the project.

        A relative name is looked for where `beside` is, then from the job's folder upwards, since nobody knows in which
        folder the user starts it. With `where`, the place that names it, a file outside of the project is refused.
        """
        if re.search("[\0\ud800-\udfff]", target):
            raise ConfigError(f"{shorten(repr(target), 80)} cannot be the name of a file", where=where)
        starts = [Path(os.path.realpath(beside)).parent] if beside else []
        starts += [Path.cwd(), self.here, *(item for item in self.here.parents if item.is_relative_to(self.root))]
        for start in starts:
            for suffix in suffixes:
                path = os.path.realpath(start / (target + suffix))
                if Path(path).is_relative_to(self.root) and os.path.isfile(path):
                    return self._load(path)
        meant = Path(os.path.realpath(starts[0] / target))
        if where is not None and not meant.is_relative_to(self.root):
            message = f"{shorten(target, 80)} is outside of the project, {self.root.name or self.root}, and is not read"
            hint = "the project is the nearest folder above with a .git or pyproject.toml: put the file there"
            raise ConfigError(message, hint=hint, where=where)
        self.missing.append((target, where))
        return None

    def _load(self, path: str) -> tuple[str, str] | None:
        self.opened += 1
        if self.opened > _MOST_FILES:
            raise ConfigError(f"{self.name}: it includes more than {_MOST_FILES} files")
        shown = os.path.relpath(path)
        try:
            return shown, load_text(path, limit=JOB_FILE_LIMIT)
        except ConfigError:
            self.missing.append((shown, None))
            return None
