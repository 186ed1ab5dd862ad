"""What every process of a run notes, one line for each event, in a file of its own."""

import json
import os
from pathlib import Path

FOLDER = Path(os.environ["SLIME_TRACE"])


def note(who, what, **values):
    with open(FOLDER / f"{who}.jsonl", "a") as file:
        file.write(json.dumps({"what": what, **values}) + "\n")
