#!/bin/bash
# FSDP2 in torch: 4 processes save, the checkpoint becomes one of 2 processes and one file, and both go on.
#
#   launch/tutorial/6_fsdp/run.sh [FOLDER]
#
# needs: torch
# shellcheck source-path=SCRIPTDIR source=../work_folder.sh
. "$(dirname "${BASH_SOURCE[0]}")/../work_folder.sh"
export OMP_NUM_THREADS=1 # else torchrun says that it does this

echo "=== 4 processes: 20 steps without a break, saved after 10"
torchrun --standalone --nproc-per-node 4 "$STORY/train.py" losses_4.json --save four

echo "=== a checkpoint of 2 processes, and one file"
reshard-mpi transform four two --dst-strategy "$STORY/two_ranks.toml" --to dcp --verify
reshard-mpi transform four whole --to torch --verify
reshard-mpi diff two whole

echo "=== the 10 steps that were left: on 2 processes, and on one without FSDP"
torchrun --standalone --nproc-per-node 2 "$STORY/train.py" losses_2.json --resume two
python "$STORY/train.py" losses_1.json --resume whole/rank_0/checkpoint_0.pt

python "$STORY/prove.py"
