#!/bin/bash
# Everything on the same GPUs, with Megatron.
: "${NUM_GPUS:=8}"
uv run --isolated --extra mcore -m skyrl.train.entrypoints.main_base \
  trainer.strategy=megatron \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \
  trainer.placement.ref_num_gpus_per_node=$NUM_GPUS \
  trainer.policy.megatron_config.tensor_model_parallel_size=2 \
  trainer.policy.megatron_config.pipeline_model_parallel_size=2 \
  trainer.ref.megatron_config.tensor_model_parallel_size=4 \
  generator.inference_engine.num_engines=4 \
  generator.inference_engine.tensor_parallel_size=2 \
  "$@"
