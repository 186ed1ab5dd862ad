"""`roost new`: a folder with a small job that works, made whole or not at all."""

from __future__ import annotations

import json
import keyword
import re
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from roost.config.schema import job_schema
from roost.errors import ConfigError

SCHEMA_FILE = ".roost/job.schema.json"
_MAX_NAME = 64
_FILES = {
    "job.yaml": ("job.yaml.in", "where each component sits, and what runs there"),
    "{module}.py": ("module.py.in", "a learner and its rollouts"),
    "test_{module}.py": ("test_module.py.in", "tests, on a cluster that they start"),
    "README.md": ("README.md.in", "the commands to go on with"),
    "pyproject.toml": ("pyproject.toml.in", "settings of pytest"),
    ".gitignore": ("gitignore.in", "what git leaves alone"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project to be made: its folder, its name, and the module that its workers are in."""

    folder: Path
    name: str
    module: str

    def files(self) -> dict[str, tuple[str, str]]:
        """The files by path: what is in each, and what it is for."""
        found = {
            path.format(module=self.module): (self._filled(template), purpose)
            for path, (template, purpose) in _FILES.items()
        }
        found[SCHEMA_FILE] = (schema_text(job_schema()), "what editors complete and check job.yaml with")
        return found

    def _filled(self, template: str) -> str:
        text = files("roost.cli").joinpath("templates", template).read_text(encoding="utf-8")
        return text.replace("@NAME@", self.name).replace("@MODULE@", self.module)


def schema_text(schema: dict[str, object]) -> str:
    """A schema as a file has it."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def plan_project(path: Path) -> Project:
    """What `roost new PATH` would make; ConfigError where the name or the folder cannot be used."""
    try:
        folder = path.resolve()
        if any(part.is_symlink() for part in (folder, *folder.parents)):
            raise OSError("its links form a circle")
    except (OSError, RuntimeError) as error:
        # Up to 3.12 Python raises one of them for links in a circle; later it returns such a path as it is.
        raise ConfigError(f"{path}: {error}") from None
    name = folder.name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", name) or len(name) > _MAX_NAME:
        raise ConfigError(
            f"{(name or str(path))!r} is no name for a project",
            hint=f"it starts with a letter, and has letters, digits, '-', '_' and '.', {_MAX_NAME} at most: my-job",
        )
    module = re.sub(r"[.-]", "_", name)
    if keyword.iskeyword(module) or _is_installed(module):
        what = "a word of Python" if keyword.iskeyword(module) else "a module that is installed here"
        raise ConfigError(f"{module!r} is {what}: it cannot name the job's own module", hint=f"try my-{name}")
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{path} is a file", hint="give a folder that is not there yet")
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{path} is not empty", hint="give a folder that is not there yet, or an empty one")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    return Project(folder=folder, name=name, module=module)


def _is_installed(module: str) -> bool:
    found = find_spec(module)
    # A mere folder of that name can be imported as well.
    return found is not None and found.origin is not None


def write_project(project: Project) -> None:
    """Write all files, or none: what was begun is taken back if one cannot be written."""
    with ExitStack() as undo:
        try:
            _make_folder(project.folder, undo)
            for path, (text, _) in project.files().items():
                target = project.folder / path
                _make_folder(target.parent, undo)
                with target.open("x", encoding="utf-8") as file:
                    undo.callback(target.unlink, missing_ok=True)
                    file.write(text)
        except OSError as error:
            raise ConfigError(f"{error.filename or project.folder}: {error.strerror or error}") from None
        undo.pop_all()


def _make_folder(folder: Path, undo: ExitStack) -> None:
    for missing in reversed([item for item in (folder, *folder.parents) if not item.exists()]):
        missing.mkdir()
        undo.callback(missing.rmdir)
