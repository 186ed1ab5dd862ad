#!/bin/sh
# Install a wheel or an sdist into an empty virtual environment, outside the checkout, and plan, test and run a new job.
set -eu
made=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
if [ -n "${UV:-}" ]; then
    "$UV" venv --quiet --python "$PYTHON" venv
    "$UV" pip install --quiet --python venv/bin/python "$made" ${RAY:-} pytest
else
    "$PYTHON" -m venv venv
    venv/bin/python -m pip install --quiet --disable-pip-version-check "$made" ${RAY:-} pytest
fi
PATH="$folder/venv/bin:$PATH"
export PATH
unset PYTHONPATH
roost version
python -c 'import roost, pathlib; assert "venv" in roost.__file__; assert pathlib.Path(roost.__file__).with_name("py.typed").exists()'
roost new trial
cd trial
roost check job.yaml --cluster 2x4
roost plan job.yaml --cluster 2x4 --format json > /dev/null
roost schema > /dev/null
roost run job.yaml --local 2x4 --quiet
python -m pytest -q
roost runs
