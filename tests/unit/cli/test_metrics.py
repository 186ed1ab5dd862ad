"""`roost metrics`: every value that a run logged, as a table, as CSV, for TensorBoard and for W&B."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from recordings import Recording
from roost.runtime.events.format import line_of


@pytest.fixture
def folder(tmp_path):
    recording = Recording(tmp_path / "first")
    for rank in range(2):
        recording.worker(rank, line_of("call", "train", t=1.0, d=1.0))
        values = [line_of("metric", 'loss, of "all"', t=float(t), value=t / 2 + rank, step=t) for t in range(3000)]
        several = line_of("metrics", "speed", t=1.0, after=[0.0, 0.5], value=[7, "nan"])
        recording.metrics(rank, *values, several, line_of("metric", "loss", t=1.0, value="no number"))
    return recording.folder


def test_the_table_and_json_have_the_last_values(folder, roost):
    code, out, err = roost("metrics", str(folder))
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split() == ["METRIC", "WORKERS", "LAST", "LEAST", "MOST"]
    assert out.splitlines()[1].split()[-4:] == ["2", "1500", "0", "1500.5"]
    code, out, _ = roost("metrics", str(folder), "--format", "json")
    assert json.loads(out) == {'loss, of "all"': 1500.0, "speed": 7.0}


def test_csv_has_every_value(folder, roost, tmp_path):
    out = tmp_path / "m.csv"
    assert roost("metrics", str(folder), "--csv", "--out", str(out))[0] == 0
    rows = [*csv.DictReader(io.StringIO(out.read_text()))]
    assert len(rows) == 2 * 3002
    assert rows[3] == {
        "worker": "actor:0",
        "name": 'loss, of "all"',
        "step": "3",
        "value": "1.5",
        "time": "2027-01-15T08:00:04.000+00:00",
    }
    assert [(row["step"], row["value"]) for row in rows[3000:3002]] == [("", "7.0"), ("", "nan")]


def test_tensorboard_reads_every_value_of_each_worker(folder, roost, tmp_path):
    pytest.importorskip("tensorboard", reason="needs roost[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code, _, err = roost("metrics", str(folder), "--tensorboard", str(tmp_path / "tb"))
    assert (code, err) == (0, f"wrote 6004 values to {tmp_path / 'tb'}\n")
    read = EventAccumulator(str(tmp_path / "tb" / "first" / "actor-1"), size_guidance={"scalars": 0})
    read.Reload()
    points = read.Scalars('loss, of "all"')
    assert [(point.step, point.value) for point in points] == [(t, t / 2 + 1) for t in range(3000)]


@pytest.mark.heavy
def test_wandb_keeps_an_offline_run(folder, tmp_path):
    if find_spec("wandb") is None:
        pytest.skip("needs roost[wandb]")
    # A process of its own: W&B puts its own `sys.exit` in place.
    command = [sys.executable, "-m", "roost", "metrics", str(folder), "--wandb", "mine", "--offline"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "wrote 6004 values to the project mine" in ran.stderr
    assert [*tmp_path.glob("wandb/offline-run-*/run-*.wandb")]


@pytest.mark.parametrize(
    "flags", [("--csv", "--wandb", "x"), ("--follow",), ("--offline",), ("--csv", "--tensorboard", "x")]
)
def test_options_that_do_not_go_together_are_one_message(folder, roost, flags):
    code, out, err = roost("metrics", str(folder), *flags)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) <= 3


def test_a_run_without_metrics_or_events_says_so(tmp_path, roost):
    recording = Recording(tmp_path / "quiet")
    recording.worker(0, line_of("call", "train", t=1.0, d=1.0))
    assert roost("metrics", str(recording.folder))[1] == "the run logged no metrics\n"
    (tmp_path / "empty").mkdir()
    assert roost("metrics", str(tmp_path / "empty"), "--csv")[0] == 2
