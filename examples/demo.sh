# What `make demo` runs: plan the README's example and look at it from several sides.
set -eu
cd "$(dirname "$0")/.."
bold='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$(printf '\033[1m') plain=$(printf '\033[0m'); fi
say() { printf '\n%s$ %s%s\n' "$bold" "$*" "$plain"; }
run() { say "$@"; "$@"; }

echo "== Roost: which worker sits on which hardware, before anything is paid for"
run roost plan examples/job.yaml --cluster 2x8:H100,1x0
run roost where examples/job.yaml rollout:2 --cluster 2x8:H100,1x0
run roost who examples/job.yaml 0:1 --cluster 2x8:H100,1x0
run roost lint examples/job.yaml --cluster 2x8:H100,1x0

echo
echo "== A strided rollout on the actor's accelerators"
run roost plan examples/collocated.yaml --cluster 2x8:H100

echo
echo "== Mistakes are told all at once, with where and what to do"
say roost plan examples/broken.yaml --cluster 2x8
roost plan examples/broken.yaml --cluster 2x8 || echo "(exit code $?)"

echo
echo "== A walk through a live cluster on this machine: two Ray nodes with four fake accelerators each"
run python examples/cluster.py

echo
echo "== Ten lines of Python: a worker on every accelerator"
run python examples/hello.py

mkdir -p runs
run roost plan examples/job.yaml --cluster 2x8:H100,1x0 --format html --out runs/map.html
echo
echo "== Done. Open runs/map.html in a browser and point at the workers."
