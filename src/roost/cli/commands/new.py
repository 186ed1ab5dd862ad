"""`roost new`: a folder with a small working job, created completely or not at all."""

from __future__ import annotations

import keyword
import re
import shlex
from contextlib import ExitStack
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.out import as_json, write_text
from roost.config.schema import job_schema
from roost.errors import ConfigError

_MAX_NAME = 64
_TEMPLATES = {
    "job.yaml": ("job.yaml.in", "where each component sits, and what runs there"),
    "{module}.py": ("module.py.in", "a learner and its rollouts"),
    "test_{module}.py": ("test_module.py.in", "tests, on a cluster that they start"),
    "README.md": ("README.md.in", "the next commands"),
    "pyproject.toml": ("pyproject.toml.in", "settings of pytest"),
    ".gitignore": ("gitignore.in", "what git ignores"),
}
_SCHEMA_FILE = ".roost/job.schema.json"
_NEXT = """\
  roost plan job.yaml --cluster 2x4
  pytest
  roost up 2x4
  roost run job.yaml
  roost logs learner
  roost down
"""


def new(
    path: Annotated[Path, typer.Argument(metavar="NAME", help="The new folder: my-job, or some/where/my-job.")],
) -> None:
    folder, module = _check_path(path)
    texts, purposes = {}, {}
    for name, (template, purpose) in _TEMPLATES.items():
        text = files("roost.cli").joinpath("templates", template).read_text(encoding="utf-8")
        name = name.format(module=module)
        texts[name] = text.replace("@NAME@", folder.name).replace("@MODULE@", module)
        purposes[name] = purpose
    texts[_SCHEMA_FILE] = as_json(job_schema())
    purposes[_SCHEMA_FILE] = "what editors complete and check job.yaml with"
    # All files, or none: if one cannot be written, the others are removed.
    with ExitStack() as undo:
        try:
            for name, text in texts.items():
                target = folder / name
                for missing in reversed([item for item in target.parents if not item.exists()]):
                    missing.mkdir()
                    undo.callback(missing.rmdir)
                with target.open("x", encoding="utf-8") as file:
                    undo.callback(target.unlink, missing_ok=True)
                    file.write(text)
        except OSError as error:
            raise ConfigError(f"{error.filename or folder}: {error.strerror or error}") from None
        undo.pop_all()
    width = max(map(len, purposes))
    lines = [f"created {path}", *(f"  {name:{width}}  {purpose}" for name, purpose in purposes.items()), "next"]
    lines += [] if folder == Path.cwd() else [f"  cd {shlex.quote(str(path))}"]
    # Roost does not need pytest, and the pytest that the shell finds may belong to another environment.
    lines += [] if find_spec("pytest") else ["  pip install pytest"]
    write_text("\n".join([*lines, _NEXT]))


def _check_path(path: Path) -> tuple[Path, str]:
    """Return the folder to create and the name of its module; ConfigError if either cannot be used."""
    try:
        folder = path.resolve()
        if any(part.is_symlink() for part in (folder, *folder.parents)):
            raise OSError("its links form a circle")
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
    # A plain folder of that name can be imported too, but has no origin.
    installed = None if keyword.iskeyword(module) else find_spec(module)
    if keyword.iskeyword(module) or (installed and installed.origin):
        what = "an installed module" if installed else "a keyword of Python"
        raise ConfigError(f"{module!r} is {what}: it cannot name the job's module", hint=f"try my-{name}")
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{path} is a file", hint="give a folder that does not exist yet")
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{path} is not empty", hint="give a folder that does not exist yet, or an empty one")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    return folder, module
