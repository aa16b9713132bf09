#!/bin/bash
# A network and its optimizer move from torch to MindSpore in mid-training, over 4 ranks, and back.
#
#   launch/tutorial/5_migration/run.sh [FOLDER]
#
# needs: torch mindspore
# shellcheck source-path=SCRIPTDIR source=../work_folder.sh
. "$(dirname "${BASH_SOURCE[0]}")/../work_folder.sh"

echo "=== torch: 30 steps without a break, saved after 10"
python "$STORY/train_torch.py"

echo "=== MindSpore: the network and its optimizer as they begin, which tell names and shapes"
python "$STORY/train_mindspore.py" --begin like.ckpt

echo "=== from torch's file to MindSpore's names, cut over 4 ranks, in one pass; then to one rank"
reshard-mpi transform torch.pt four --map torch-mindspore --like like.ckpt --to ckpt \
    --dst-strategy "$STORY/four_ranks.toml" --verify
reshard-mpi transform four one --src-strategy "$STORY/four_ranks.toml" --verify

echo "=== MindSpore: steps 11 to 20"
python "$STORY/train_mindspore.py" --resume one/rank_0/checkpoint_0.ckpt --save mindspore.ckpt

echo "=== back to torch: steps 21 to 30"
reshard-mpi transform mindspore.ckpt back --map torch-mindspore --like torch.pt --to torch --verify
python "$STORY/train_torch.py" --resume back/rank_0/checkpoint_0.pt --part 2

python "$STORY/prove.py"
