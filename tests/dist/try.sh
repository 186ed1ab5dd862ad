#!/bin/sh
# Install a wheel or an sdist into an empty virtual environment, outside the checkout: first without extras, to plan, and
# then with Ray, to plan, test and run a new job.
set -eu
made=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
if [ -n "${UV:-}" ]; then
    "$UV" venv --quiet --python "$PYTHON" venv
    install() { "$UV" pip install --quiet --python venv/bin/python "$@"; }
else
    "$PYTHON" -m venv venv
    install() { venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
fi
install "$made"
PATH="$folder/venv/bin:$PATH"
export PATH
unset PYTHONPATH
roost version
python -c 'import importlib.util as u; assert not any(map(u.find_spec, ("ray", "numpy"))), "a light install has no Ray"'
roost new light
roost plan light/job.yaml --cluster 2x4
roost check light/job.yaml --cluster 2x4
if said=$(roost nodes 2>&1); then exit 1; fi
test "$said" = "roost nodes needs Ray, which is not installed
  hint: pip install 'roost[ray]'"
install "$made[ray]" ${RAY:-} pytest
python -c 'import roost, pathlib; assert "venv" in roost.__file__; assert pathlib.Path(roost.__file__).with_name("py.typed").exists()'
roost new trial
cd trial
roost check job.yaml --cluster 2x4
roost plan job.yaml --cluster 2x4 --format json > /dev/null
roost schema > /dev/null
roost run job.yaml --local 2x4 --quiet
python -m pytest -q
roost runs
