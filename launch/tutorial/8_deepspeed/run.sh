#!/bin/bash
# DeepSpeed: ZeRO-2 on 4 processes saves, ZeRO-3 on 2 goes on and saves, and torch without DeepSpeed goes on.
#
#   launch/tutorial/8_deepspeed/run.sh [FOLDER]
#
# needs: torch deepspeed
# shellcheck source-path=SCRIPTDIR source=../work_folder.sh
. "$(dirname "${BASH_SOURCE[0]}")/../work_folder.sh"
export OMP_NUM_THREADS=1 # else torchrun says that it does this
export DS_ACCELERATOR=cpu

echo "=== ZeRO-2 on 4 processes: 30 steps without a break, saved after 10"
torchrun --standalone --nproc-per-node 4 "$STORY/train_deepspeed.py" losses_zero2.json --stage 2 --save zero2 --after 10

echo "=== ZeRO-3 on 2 processes: 20 steps, saved after the first 10 of them"
reshard-mpi transform zero2 for_zero3 --to deepspeed --dp 2 --zero-stage 3 --verify
torchrun --standalone --nproc-per-node 2 "$STORY/train_deepspeed.py" losses_zero3.json --stage 3 --resume for_zero3 \
    --save zero3 --after 20

echo "=== torch alone: the last 10 steps"
reshard-mpi transform zero3 whole --verify
python "$STORY/train_torch.py" losses_torch.json whole/rank_0/checkpoint_0.pt

python "$STORY/prove.py"
