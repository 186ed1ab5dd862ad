#!/bin/bash
# Colocated training with slime: arrays of flags, one of them from the folder of models.
pkill -9 sglang
set -ex
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/slime-model.sh"

PERF_ARGS=(
   --tensor-model-parallel-size 4
   --context-parallel-size 2
   --pipeline-model-parallel-size 1
   # --expert-model-parallel-size 8
)
ROLLOUT_ARGS=(--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-num-gpus-per-engine 2)

ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"env_vars": {}}' \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   --use-kl-loss \
   ${MODEL_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${PERF_ARGS[@]}
