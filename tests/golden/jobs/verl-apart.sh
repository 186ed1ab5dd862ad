#!/usr/bin/env bash
# Rollout and training apart: an engine of 16 GPUs is on two nodes.
set -x
n_train=1
n_rollout=2
if [ "${PRECISION:-bf16}" = fp8 ]; then gen_tp=4; else gen_tp=16; fi

ray job submit --address "http://localhost:8265" -- python3 -m verl.experimental.fully_async_policy.fully_async_main \
    --config-path=config --config-name=fully_async_ppo_trainer.yaml \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${gen_tp} \
    critic.enable=True \
    trainer.nnodes=${n_train} trainer.n_gpus_per_node=8 \
    rollout.nnodes=${n_rollout} rollout.n_gpus_per_node=8
