#!/bin/bash
# A slip: the mini batch is 32 x 5 / 4 = 40 samples for each GPU, which micro batches of 16 do not divide.
uv run -m examples.train.async.main_async \
  trainer.placement.colocate_all=false \
  trainer.placement.policy_num_gpus_per_node=4 \
  trainer.placement.ref_num_gpus_per_node=4 \
  trainer.placement.critic_num_gpus_per_node=2 \
  trainer.critic.model.path=m/critic \
  trainer.train_batch_size=64 trainer.policy_mini_batch_size=32 trainer.micro_train_batch_size_per_gpu=16 \
  generator.inference_engine.num_engines=4 generator.inference_engine.enable_pd=true \
  generator.inference_engine.num_prefill=1
