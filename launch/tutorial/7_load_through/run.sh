#!/bin/bash
# MindSpore's checkpoint of 8 ranks goes into torch's FSDP on 4 processes, by dcp.load alone.
#
#   launch/tutorial/7_load_through/run.sh [FOLDER]
#
# needs: torch mindspore
# shellcheck source-path=SCRIPTDIR source=../work_folder.sh
. "$(dirname "${BASH_SOURCE[0]}")/../work_folder.sh"
export OMP_NUM_THREADS=1 # else torchrun says that it does this

echo "=== MindSpore: 20 steps without a break, saved after 10 as 8 ranks hold it"
python "$STORY/train_mindspore.py"

echo "=== torch: model and optimizer as they begin, which tell names and shapes"
python "$STORY/train_torch.py" --begin like.pt

echo "=== torch: the 10 steps that were left, on 4 processes, from the shards where they lie"
torchrun --standalone --nproc-per-node 4 "$STORY/train_torch.py" losses_through.json --through eight

echo "=== the same from a checkpoint that was converted"
reshard-mpi transform eight converted --src-strategy "$STORY/eight_ranks.toml" --map torch-mindspore --like like.pt \
    --to dcp
torchrun --standalone --nproc-per-node 4 "$STORY/train_torch.py" losses_converted.json --resume converted

python "$STORY/prove.py"
