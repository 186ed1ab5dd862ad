#!/usr/bin/env bash
# A colocated GRPO job as people write them for verl: Hydra overrides, variables with defaults, an array.
set -xeuo pipefail
pkill -9 python || true

NNODES=${NNODES:-2}
GPUS=${GPUS:-8}
TP=4
BATCH=$((GPUS * NNODES * 16))

ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=${TP}
)

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=${BATCH} \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    "${ROLLOUT[@]}" \
    trainer.n_gpus_per_node=${GPUS} \
    trainer.nnodes=${NNODES} "$@"
