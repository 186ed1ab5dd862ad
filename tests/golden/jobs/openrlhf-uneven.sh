#!/bin/bash
# Slips: actor and reference are to share GPUs and have different numbers of them, and the batch does not divide.
read -r -d '' COMMAND <<JOB
openrlhf.cli.train_ppo_ray \
   --actor_num_nodes ${NODES:-2} --actor_num_gpus_per_node 4 \
   --ref_num_nodes 1 --ref_num_gpus_per_node 4 \
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \
   --colocate_actor_ref --advantage_estimator rloo --remote_rm_url http://judge:5000 \
   --train_batch_size 100
JOB
python3 -m $COMMAND
