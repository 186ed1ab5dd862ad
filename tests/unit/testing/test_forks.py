"""What the process that forks the workers of a local cluster imports before it forks, and what it leaves out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys, sysconfig
from roost.testing import forks
forks._PRELOAD_SECONDS = 1
sys.path.insert(0, FOLDER)
paths = sysconfig.get_path
sysconfig.get_path = lambda kind: FOLDER if kind == "purelib" else paths(kind)
print(forks._preload("module", dict(os.environ)))
"""
WRONG = {
    "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()": "it starts a thread",
    "import os\nos.environ['OWN'] = '1'": "it changes the environment",
    "raise KeyError('x')": "KeyError: 'x'",
    "raise SystemExit(3)": "SystemExit: 3",
    "import time\nfor _ in range(600): time.sleep(0.1)": "TimeoutError: importing it takes more than 1 s",
    "import no_such": "ModuleNotFoundError: No module named 'no_such'",
}


def preload(code: str) -> str:
    """What a process says of a module that it is to import."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("text", WRONG)
def test_a_module_that_would_harm_those_that_are_forked_is_left_out(tmp_path, text):
    (tmp_path / "module.py").write_text(text, encoding="utf-8")
    assert WRONG[text] in preload(CODE.replace("FOLDER", repr(str(tmp_path))))


def test_an_installed_module_is_imported_and_one_that_may_be_edited_is_not(tmp_path):
    (tmp_path / "module.py").write_text("value = 1", encoding="utf-8")
    code = CODE.replace("FOLDER", repr(str(tmp_path)))
    assert preload(code) == ""
    elsewhere = code.replace("sysconfig.get_path =", "unused =")
    assert preload(elsewhere) == f"it is not an installed package, but {tmp_path}{os.sep}module.py"
