"""`roost new`: a folder with a small working job, created completely or not at all."""

from __future__ import annotations

import keyword
import re
import shlex
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.out import as_json, write_text
from roost.config.schema import job_schema
from roost.errors import ConfigError

SCHEMA_FILE = ".roost/job.schema.json"
_MAX_NAME = 64
_FILES = {
    "job.yaml": ("job.yaml.in", "where each component sits, and what runs there"),
    "{module}.py": ("module.py.in", "a learner and its rollouts"),
    "test_{module}.py": ("test_module.py.in", "tests, on a cluster that they start"),
    "README.md": ("README.md.in", "the next commands"),
    "pyproject.toml": ("pyproject.toml.in", "settings of pytest"),
    ".gitignore": ("gitignore.in", "what git ignores"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project to create: its folder, its name, and the module of its workers."""

    folder: Path
    name: str
    module: str

    def files(self) -> dict[str, tuple[str, str]]:
        """Return the text and the purpose of each file, by path."""
        found = {
            path.format(module=self.module): (self._fill(template), purpose)
            for path, (template, purpose) in _FILES.items()
        }
        found[SCHEMA_FILE] = (as_json(job_schema()), "what editors complete and check job.yaml with")
        return found

    def _fill(self, template: str) -> str:
        text = files("roost.cli").joinpath("templates", template).read_text(encoding="utf-8")
        return text.replace("@NAME@", self.name).replace("@MODULE@", self.module)


def new(
    path: Annotated[Path, typer.Argument(metavar="NAME", help="The new folder: my-job, or some/where/my-job.")],
) -> None:
    project = plan_project(path)
    write_project(project)
    purposes = {name: purpose for name, (_, purpose) in project.files().items()}
    width = max(map(len, purposes))
    lines = [f"created {path}", *(f"  {name:{width}}  {purpose}" for name, purpose in purposes.items()), "next"]
    lines += [] if project.folder == Path.cwd() else [f"  cd {shlex.quote(str(path))}"]
    # Roost does not need pytest, and the one that the shell finds may belong to another environment.
    lines += [] if find_spec("pytest") else ["  pip install pytest"]
    lines += [
        "  roost plan job.yaml --cluster 2x4",
        "  pytest",
        "  roost up 2x4",
        "  roost run job.yaml",
        "  roost logs learner",
        "  roost down",
    ]
    write_text("\n".join(lines) + "\n")


def plan_project(path: Path) -> Project:
    """Check the name and the folder of a new project."""
    try:
        folder = path.resolve()
    except (OSError, RuntimeError) as error:
        # Links in a circle: Python raises either of them.
        raise ConfigError(f"{path}: {error}") from None
    name = folder.name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", name) or len(name) > _MAX_NAME:
        raise ConfigError(
            f"{(name or str(path))!r} cannot name a project",
            hint=f"start with a letter, then letters, digits, '-', '_' and '.', {_MAX_NAME} at most: my-job",
        )
    module = re.sub(r"[.-]", "_", name)
    if keyword.iskeyword(module) or _is_installed(module):
        what = "a keyword of Python" if keyword.iskeyword(module) else "an installed module"
        raise ConfigError(f"{module!r} is {what}: it cannot name the job's module", hint=f"try my-{name}")
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{path} is a file", hint="give a folder that does not exist yet")
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{path} is not empty", hint="give a folder that does not exist yet, or an empty one")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    return Project(folder=folder, name=name, module=module)


def _is_installed(module: str) -> bool:
    found = find_spec(module)
    # A plain folder of that name can be imported too, but has no origin.
    return found is not None and found.origin is not None


def write_project(project: Project) -> None:
    """Write all files, or none: if one cannot be written, remove the others."""
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
