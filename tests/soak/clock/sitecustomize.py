"""Lets a round step the time of day of its processes: it is as many seconds off as the file SOAK_CLOCK says.

Python imports it at the start of each process of a round. Only what Python code asks is stepped: no user can set the
machine's clock for some processes and not for others.
"""

import os
import time

_offset_file = os.environ.get("SOAK_CLOCK", "")
_true_time = time.time


def _stepped() -> float:
    try:
        with open(_offset_file) as file:
            return _true_time() + float(file.read())
    except (OSError, ValueError):
        return _true_time()


if _offset_file:
    time.time = _stepped
