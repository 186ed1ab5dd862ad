"""`roost weights`: which bytes of the weights go from which worker to which."""

from __future__ import annotations

import json

from rich.text import Text

from roost.cli.options import Job, Out, TextForm
from roost.cli.out import write_text
from roost.cli.plans import Flags, load_plan, with_flags
from roost.cli.terminal import print_answer
from roost.config.weight_sync import read_weight_sync
from roost.config.yaml_file import read_file
from roost.weights.plan import describe
from roost.weights.section import plan_weights


@with_flags
def weights(job: Job, flags: Flags, form: TextForm = "text", out: Out = None) -> None:
    plan, _ = load_plan(job, flags)
    found = plan_weights(read_weight_sync(read_file(job)), plan, job.parent)
    if out is not None:
        write_text(found.to_json() + "\n" if form == "json" else describe(found) + "\n", out)
    else:
        print_answer(form, json.loads(found.to_json()), lambda: Text(describe(found)))
