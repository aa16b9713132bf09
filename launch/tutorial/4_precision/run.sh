#!/bin/bash
# fp16, fp32 and mixed precision in torch: stopped after an epoch, gone on through 4 and 3 ranks; weights for inference.
#
#   launch/tutorial/4_precision/run.sh [FOLDER]
#
# needs: torch
# shellcheck source-path=SCRIPTDIR source=../work_folder.sh
. "$(dirname "${BASH_SOURCE[0]}")/../work_folder.sh"

echo "=== 3 epochs without a break, saved after each"
python "$STORY/train.py" fp16 fp32 mixed

for mode in fp16 fp32 mixed; do
    echo "=== $mode: after epoch 1, from one process to 4 ranks, to 3, and back"
    reshard-mpi transform "$mode/epoch_1.pt" "$mode/four" --dst-strategy "$STORY/four_ranks.toml" --verify
    reshard-mpi transform "$mode/four" "$mode/three" --src-strategy "$STORY/four_ranks.toml" \
        --dst-strategy "$STORY/three_ranks.toml" --verify
    reshard-mpi transform "$mode/three" "$mode/back" --src-strategy "$STORY/three_ranks.toml" --verify
    reshard-mpi diff "$mode/epoch_1.pt" "$mode/back"
done

echo "=== the two epochs that were left, from what came back"
python "$STORY/train.py" --resume back/rank_0/checkpoint_0.pt fp16 fp32 mixed

echo "=== weights for inference: those of mixed precision are fp32, and become bf16 and fp16"
for dtype in bf16 fp16; do
    reshard-mpi transform mixed/epoch_3.pt "weights_$dtype" --include 'model.*' --dtype "$dtype"
done
python "$STORY/evaluate.py" mixed/epoch_3.pt weights_bf16/rank_0/checkpoint_0.pt weights_fp16/rank_0/checkpoint_0.pt

python "$STORY/prove.py" fp16 fp32 mixed
