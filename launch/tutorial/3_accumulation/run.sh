#!/bin/bash
# Gradient accumulation in MindSpore, stopped in the middle of an update, through 4 ranks and back, and gone on.
#
#   launch/tutorial/3_accumulation/run.sh [FOLDER]
#
# needs: mindspore
# shellcheck source-path=SCRIPTDIR source=../work_folder.sh
. "$(dirname "${BASH_SOURCE[0]}")/../work_folder.sh"
export GLOG_v=3 # MindSpore says errors only

echo "=== 40 batches, 10 updates, without a break; and stopped in the sixth update"
python "$STORY/train.py" unbroken
python "$STORY/train.py" first one/accumulation.ckpt

echo "=== through 4 ranks, and back"
reshard-mpi transform one/accumulation.ckpt four --dst-strategy "$STORY/four_ranks.toml" --verify
reshard-mpi transform four back --src-strategy "$STORY/four_ranks.toml" --verify
reshard-mpi diff one/accumulation.ckpt back

echo "=== gone on with what came back, and without the sums"
python "$STORY/train.py" rest back/rank_0/checkpoint_0.ckpt
python "$STORY/train.py" without back/rank_0/checkpoint_0.ckpt
python "$STORY/prove.py"
