#!/bin/bash
# A slip: engines of 4 GPUs begin behind 6 GPUs of training, so that one of them is cut by the node's edge.
NUM_TRAIN=${NUM_TRAIN:-6}
python3 /workspace/miles/train_async.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node $NUM_TRAIN \
   --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4
