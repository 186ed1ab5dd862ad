#!/bin/bash
# miles, with engines of their own for evaluation.
python3 train_async.py --custom-rm-path miles.rollout.rm \
   --actor-num-nodes 1 --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 \
   --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4 \
   --eval-num-gpus 4
