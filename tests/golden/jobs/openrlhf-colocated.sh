#!/bin/bash
# PPO on one node: every model and the engines share its GPUs.
set -x
MODELS=(--actor.model_name_or_path m/base --reward.model_name_or_path m/reward)
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.num_nodes 1 --actor.num_gpus_per_node 8 \
   --ref.num_nodes 1 --ref.num_gpus_per_node 8 \
   --critic.num_nodes 1 --critic.num_gpus_per_node 8 \
   --reward.num_nodes 1 --reward.num_gpus_per_node 8 \
   --vllm.num_engines 2 --vllm.tensor_parallel_size 4 \
   --train.colocate_all --vllm.enable_sleep \
   --ds.ring_attn_size 2 --ds.packing_samples \
   "${MODELS[@]}"
