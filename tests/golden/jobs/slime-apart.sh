#!/bin/bash
# Training on one node, and engines of 16 GPUs with prefill and decode apart.
set -ex
CONFIG=$(mktemp /tmp/engines.XXXX)
cat > "${CONFIG}" <<EOF
sglang:
  - name: default
    server_groups:
      - {worker_type: prefill, num_gpus: 16, num_gpus_per_engine: 16}
      - {worker_type: decode, num_gpus: 16, num_gpus_per_engine: 8}
EOF
python3 train_async.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 \
   --advantage-estimator ppo \
   --rollout-num-gpus 32 --sglang-config "${CONFIG}"
