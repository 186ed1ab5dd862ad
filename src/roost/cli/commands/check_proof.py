"""`roost check-proof`: whether a proof of `roost search` holds."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from roost.cli.options import TextForm
from roost.cli.terminal import print_answer
from roost.config.yaml_file import PLAN_FILE_LIMIT, load_text
from roost.errors import ConfigError
from roost.search.check import check_proof as check
from roost.search.problem import seconds
from roost.text import plural, shorten


def check_proof(
    proof: Annotated[Path, typer.Argument(metavar="PROOF.json", help="The proof.")], form: TextForm = "text"
) -> None:
    try:
        data = json.loads(load_text(proof, limit=PLAN_FILE_LIMIT))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{proof}: not JSON: {shorten(str(error), 200)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{proof}: a proof is a mapping, as roost search --prove writes it")
    try:
        refuted = check(data)
    except ConfigError as error:
        raise ConfigError(f"{proof}: {error}") from None
    step = seconds(Fraction(*data["step_time"]))
    branches = plural(refuted, "branch", "branches")
    said = f"the proof holds: no placement takes less than {step:.4g} s a step ({branches} refuted)"
    print_answer(form, {"holds": True, "step_seconds": step, "refuted": refuted}, lambda: Text(said))
